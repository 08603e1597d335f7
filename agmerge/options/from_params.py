# SPDX-License-Identifier: Apache-2.0
"""Read the dictionaries with which ADTopk, GRACE and FGBuff choose a compressor, as arguments of ours.

``ADTopklib.DistributedOptimizer(comm_params=...)``, GRACE's ``grace_from_params(...)`` and FGBuff's
``get_communicator(...)`` take dictionaries of one family: a compressor, a memory and a communicator, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sparsifiers
from agmerge.options import published
from agmerge.options.compressors import unknown
from sparsifiers import catalogue
from sparsifiers.catalogue import spelling
from sparsifiers.custom import Custom

WAYS = ("comm_mode", "communicator")  # ADTopk's name of it, and that of GRACE and FGBuff
RATIOS = ("compress_ratio", "density")  # that of ADTopk and GRACE, and FGBuff's
READ_WITH = {  # by key: the value of which other key it is read with
    "momentum": ("memory", "dgc"),
    "gradient_clipping": ("memory", "dgc"),
    "compress_rank": ("memory", "powersgd"),
    "threshold": ("compressor", "threshold"),
}
# Sizes and ranks are agreed on here, names come with named_parameters, and selection has one kernel for each device.
DROPPED = ("send_size_aresame", "model_named_parameters", "world_size", "rank", "cur_epoch", "kernel")
KNOWN = ("compressor", "memory", *WAYS, *RATIOS, *READ_WITH, *DROPPED)

SPARSIFIER = "sparsifier"
MEMORIES = {  # by kind of compressor
    "none": ("none", "residual", "residualgtopk"),
    "fp16": ("none", "residual", "residualgtopk"),
    "powersgd": ("none", "residual", "residualgtopk", "powersgd"),
    SPARSIFIER: ("none", "residual", "residualgtopk", "dgc"),
}
WHOLE = ("none", "fp16")  # compressors that send every element
SENDERS = ("allgather", "allgather_fast", "broadcast")  # every rank gets every rank's selection

_QUANTISER = (
    "every value is quantized, and quantizers use an exchange of their own. Remove the dictionary and pass "
    "compression={!r}, without a memory or a communicator (docs/compressors.md)"
)


def from_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a settings dictionary of ADTopk, GRACE or FGBuff into arguments of
    :class:`agmerge.DistributedOptimizer`.

    Example: ``agmerge.DistributedOptimizer(optimizer, named, **agmerge.from_params(comm_params))``. The translation
    (docs/from_grace.md):

    * ``compressor`` and ``compress_ratio`` (or ``density``) become ``compression`` and ``density``
    * ``memory``, ``momentum`` and ``gradient_clipping`` become ``memory``
    * ``comm_mode`` (or ``communicator``) becomes ``exchange``
    * ``compress_rank`` becomes ``rank``, and GRACE's ``threshold`` becomes the sparsifier's ``tau``

    Missing keys get the default of their project. These keys are dropped, because they have no meaning in agmerge:
    ``send_size_aresame``, ``model_named_parameters`` (pass ``named_parameters``), ``world_size``, ``rank``,
    ``cur_epoch`` and ``kernel``.

    Args:
        params (dict): ADTopk's ``comm_params``, or the dictionary for GRACE's ``grace_from_params`` or FGBuff's
            ``get_communicator``. It is not changed.

    Returns:
        A dictionary of keyword arguments.

    Raises:
        TypeError: If ``params`` is not a mapping.
        ValueError: For a key, a name or a combination that agmerge does not support, with advice.
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            f"params={params!r}: expected a dictionary, such as comm_params of ADTopk or the argument of "
            "grace_from_params"
        )
    name, memory = str(params.get("compressor", "none")), str(params.get("memory", "none"))
    kind = _kind(name)
    _check_keys(params)
    _check_memory(memory, name, kind)
    found: dict[str, Any] = {"compression": name, **_exchange(params, name, kind)}
    if kind != "none":  # without a compressor there is no residual
        found["memory"] = _memory(params, memory)
    if kind == "powersgd":
        found["rank"] = params.get("compress_rank", 1)
    elif kind == SPARSIFIER and spelling(name) == "threshold" and "comm_mode" not in params:
        found["compression"] = _fixed_threshold(params)
    elif kind == SPARSIFIER:
        found["density"] = _density(params, name)
    return found


def _kind(name: str) -> str:
    """Return which row of ``MEMORIES`` this compressor has; ``ValueError`` for one that is not here."""
    cast, known = published.cast(name), catalogue.canonical(name)
    if cast in WHOLE:
        return cast
    if known is not None and sparsifiers.is_quantiser(known):
        raise ValueError(f"compressor={name!r}: {_QUANTISER.format(known)}")
    if sparsifiers.is_low_rank(name):
        return "powersgd"
    if not catalogue.is_sparsifier(name):
        raise ValueError(unknown("compressor", name))
    return SPARSIFIER


def _check_keys(params: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a key that no project reads, or none with these values."""
    unknown = [key for key in params if key not in KNOWN]
    if unknown:
        raise ValueError(f"params: unknown key {', '.join(map(repr, unknown))}. Choose from: {', '.join(KNOWN)}")
    for one, other in (WAYS, RATIOS):
        if one in params and other in params:
            raise ValueError(f"params: {one!r} and {other!r} mean the same. Set one of them.")
    for key, (of, reader) in READ_WITH.items():
        if key in params and spelling(str(params.get(of, "none"))) != reader:
            raise ValueError(f"{key}={params[key]!r} has an effect with {of}={reader!r} only. Remove it.")
    if "threshold" in params and "comm_mode" in params:
        raise ValueError(
            f"threshold={params['threshold']!r} has no effect: ADTopk's compressor='threshold' uses compress_ratio. "
            "Remove threshold."
        )


def _check_memory(memory: str, name: str, kind: str) -> None:
    """Raise ``ValueError`` unless this memory is here, and means something with this kind of compressor."""
    if memory in MEMORIES[kind]:
        return
    why = {
        "dgc": "it applies momentum to the values that a sparsifier selects. Use 'residual', and SGD's own momentum",
        "powersgd": "it requires compressor='powersgd'. Use 'residual'",
        "efsignsgd": f"it is for signs: {_QUANTISER.format('onebit')}",
    }.get(memory, f"it is unknown. Choose from: {', '.join(MEMORIES[kind])}")
    raise ValueError(f"memory={memory!r} is not supported with compressor={name!r}: {why}")


def _exchange(params: Mapping[str, Any], name: str, kind: str) -> dict[str, str]:
    """Return ``exchange`` for a compressor, and nothing for dense gradients."""
    key = next((key for key in WAYS if key in params), WAYS[1])
    communicator = params.get(key, "allreduce")
    if communicator == "alltoall":
        raise ValueError(
            "communicator='alltoall' is not supported, because it rounds sums a second time. Use 'allgather'."
        )
    if communicator not in ("allreduce", *SENDERS):
        raise ValueError(f"{key}={communicator!r} is unknown. Choose from: allreduce, {', '.join(SENDERS)}")
    if kind in WHOLE:
        return {}
    if kind != SPARSIFIER or communicator != "allreduce":
        return {"exchange": "sparse"}
    if sparsifiers.get(name).same_on_all_ranks:
        return {"exchange": "masked"}
    raise ValueError(
        f"{key}='allreduce' (the default) is not supported with compressor={name!r}, because it adds up values of "
        f"different positions. Set {key}='allgather'. For sums at positions that all ranks share, use agmerge's "
        "exchange='masked' (docs/exchanges.md)."
    )


def _memory(params: Mapping[str, Any], name: str) -> Any:
    """Return the memory by name, or as an object where the dictionary has options of it."""
    clipping = params.get("gradient_clipping") or None
    if clipping is True:
        raise ValueError(
            "gradient_clipping=True has almost no effect: it limits each element to the norm of its tensor. Set "
            "gradient_clipping=NORM to limit the norm of each tensor's gradient, or False."
        )
    options = {"momentum": params.get("momentum"), "clipping": clipping}
    if any(value is not None for value in options.values()):
        return sparsifiers.memory("dgc", **options)
    return "residual" if name == "powersgd" else name


def _fixed_threshold(params: Mapping[str, Any]) -> sparsifiers.Sparsifier:
    """Return GRACE's ``threshold``, which may send all or none, with the bound that messages need here."""
    ratio = next((params[key] for key in RATIOS if key in params), None)
    tau = params.get("threshold", 0.01)
    if ratio is None:
        raise ValueError(
            f"compressor='threshold' sends all values above threshold={tau!r}, but agmerge's messages have a fixed "
            "size. Set the largest share of values to send, compress_ratio=ELEMENTS / ALL."
        )
    return sparsifiers.get("threshold", density=ratio, tau=tau)


def _density(params: Mapping[str, Any], name: str) -> float:
    """Return the density, elements sent / elements: the given one, else the default of ADTopk, FGBuff or GRACE."""
    for key in RATIOS:
        if key in params:
            return float(params[key])
    if "comm_mode" in params:
        return 0.01
    by_name = {"topkef": 0.1, "dgc": 0.3}
    if "model_named_parameters" not in params:  # not FGBuff's
        by_name |= {"topk": 0.3, "randomk": 0.3}
    return by_name.get(spelling(name), 0.01)


def grace(compressor: Any, memory: Any = None, *, sums: bool = False) -> Custom:
    """Return a compressor for ``compression=`` that is made of objects with GRACE's interface.

    Args:
        compressor (object): With ``compress(tensor, name)`` and ``decompress(tensors, ctx)``.
        memory (object): With ``compensate`` and ``update``; None: nothing is kept.
        sums (bool): Add up the tensors of all ranks, as GRACE's ``Allreduce`` does. Otherwise they are gathered.

    Raises:
        TypeError: For an object without these methods.
    """
    return Custom(compressor, memory, sums=sums)
