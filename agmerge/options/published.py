# SPDX-License-Identifier: Apache-2.0
"""Answer names that papers and other projects use with ours, in arguments and command lines.

``sparsifiers.catalogue`` and ``merging.registry`` have the names of compressors and planners. Here are all other
names.
"""

from __future__ import annotations

import itertools
from typing import Any

import merging
import sparsifiers
from agmerge.exchanges.table import EXCHANGES
from merging.registry import NEAREST, find, folded, nearest
from sparsifiers import catalogue
from sparsifiers import catalogue as aliases
from sparsifiers.catalogue import spelling

COMPRESSION, MERGING, EXCHANGE = "compression", "merging", "exchange"
NONE = "none"
CASTS = (NONE, "fp16", "bf16")  # which send every element
ALIASES = {"ssgd": NONE}  # of casts, by spelling: accepted, not listed
_CAST = {  # names of casts elsewhere: refused, with ours
    **dict.fromkeys(("fp32", "float32", "float", "dense", "off", "nocompression", "noop", "sgd"), NONE),
    **dict.fromkeys(("allreduce", "allreducehook", "gradientallreduce"), NONE),
    **dict.fromkeys(("float16", "half", "fp16compress", "fp16compresshook"), "fp16"),
    **dict.fromkeys(("bfloat16", "bf16compress", "bf16compresshook"), "bf16"),
}
_OWN_OPTIMIZER = (
    "it is the name of an optimizer with built-in compression. Pass your plain optimizer and sync='updates', which "
    "exchanges its updates, or compression='eden-1'"
)
_LOCAL = "use agmerge.LocalOptimizer, whose every= sets the number of steps between exchanges"
_OKTOPK = "write compression='topk', exchange='oktopk'"
_SUMS = "write compression='topk', exchange='oktopk' or 'masked'"
_LAGS = "write compression='topk', merging='layerwise', sparsify='ahead'"
_SAID = {  # by spelling, answers of more than one word
    # Optimizers of DeepSpeed's and Bagua's.
    **dict.fromkeys(("onebitadam", "1bitadam", "onebitlamb", "1bitlamb", "zerooneadam"), _OWN_OPTIMIZER),
    **dict.fromkeys(("0/1adam", "01adam", "qadam"), _OWN_OPTIMIZER),
    **dict.fromkeys(("localsgd", "diloco", "postlocalsgd", "sparseloco"), _LOCAL),
    # Ok-Topk's, gTop-k's and SparCML's sums of selections.
    "oktopk": _OKTOPK,
    **dict.fromkeys(("gtopk", "gtopksgd", "topksa", "topkdsa"), _OKTOPK),
    "gaussianksa": "write compression='gaussiank', exchange='oktopk'",
    **dict.fromkeys(("lags", "lagssgd"), _LAGS),
    "sparseallreduce": _SUMS,
    "adaq": "write compression='topk', wire='sign'",
    "adasum": "not supported, because residuals would make it another update. Remove it",
}
_EXCHANGES = {  # names of communicators of GRACE, ADTopk and FGBuff, and of Ok-Topk
    **dict.fromkeys(("allgather", "allgatherfast", "broadcast"), "'sparse'"),
    "allreduce": "'masked' for sums of the selected values; compression='none' for uncompressed gradients",
    "dense": "compression='none', which sends every element",
    "ssgd": "compression='none', which sends every element",
    "oktopk": "'oktopk'",
    "hierarchical": "'two-level'",
    "twolevel": "'two-level'",
    **dict.fromkeys(("gtopk", "gtopksgd", "topksa", "topkdsa"), "'oktopk'"),
}


def cast(name: str) -> str:
    """Return the spelling of a cast, by its published name too; of anything else the spelling of the name."""
    spelled = spelling(name)
    return ALIASES.get(spelled, spelled)


def planner(name: str, **options: Any) -> merging.Planner:
    """Return the planner called ``name``, as ``merging.get`` does; its error also knows names of other options."""
    if find(name) is None:
        said = hint(MERGING, name)
        raise ValueError(f"merging={name!r} is unknown. Choose from: {', '.join(merging.names())}{said}")
    return merging.get(name, **options)


def hint(argument: str, name: object) -> str:
    """Return what to write instead of ``name``, which ``argument`` does not know, after "; "; "" for an unknown name.

    ``argument``: ``"compression"``, ``"merging"`` or ``"exchange"``.
    """
    text = _advice(argument, name) if isinstance(name, str) and name else ""
    return f"; {text}" if text else ""


def _advice(argument: str, name: str) -> str:
    """Return what to write, without "; ". Answers about the argument itself come before those about others."""
    spelled = spelling(name)
    if argument == EXCHANGE and spelled in _EXCHANGES:
        return f"did you mean {_EXCHANGES[spelled]}?"
    if spelled in _SAID:
        return _SAID[spelled]
    compressor = _CAST.get(spelled) or (NONE if spelled in ALIASES else None) or catalogue.canonical(name)
    planner = find(name) or (NEAREST.get(folded(name)) if argument == MERGING else None)
    if planner is not None and (argument == MERGING or compressor is None):
        return _written(argument, MERGING, str(planner))
    if compressor is not None:
        return _written(argument, COMPRESSION, repr(compressor))
    return _slip_of_the_pen(argument, name)


def _written(argument: str, meant: str, value: str) -> str:
    """Return "did you mean VALUE?", or what to write where another argument takes it."""
    return f"did you mean {value}?" if argument == meant else f"write {meant}={value}"


def _slip_of_the_pen(argument: str, name: str) -> str:
    """Return the most similar name that this argument takes; "" if none is similar."""
    if argument == MERGING:
        planner = nearest(name, merging.names())
        return "" if planner is None else f"did you mean {planner}?"
    if argument == COMPRESSION:
        kinds = (sparsifiers.names(), sparsifiers.low_rank_names(), sparsifiers.quantisers(), ("auto", *CASTS))
        alike = catalogue.alike(name, [*itertools.chain(*kinds), *aliases.SPARSIFIERS, *aliases.QUANTISERS])
        return "" if alike is None else f"did you mean {alike!r}?"
    exchange = catalogue.alike(name, EXCHANGES)
    return "" if exchange is None else f"did you mean {exchange!r}?"
