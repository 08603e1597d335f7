"""All-reduce: every rank gets the sum, average, minimum, maximum or product of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agmerge.backends import Handle
from agmerge.errors import AGMergeError
from agmerge.ops import Average, Compression, Sum
from agmerge.runtime.collectives import arguments
from agmerge.runtime.collectives.arguments import Compressor
from agmerge.runtime.collectives.operation import Pending, run, run_all, start
from agmerge.runtime.collectives.reduction import TRAVELS, Reduction, flat, times

NONE = Compression.none


class Allreduce(Reduction):
    """Operation of :func:`allreduce`. ``in_place``: results are written over the tensors."""

    kind = "allreduce"

    def __init__(self, *given: Any, in_place: bool = False, **more: Any) -> None:
        super().__init__(*given, **more)
        self.in_place = in_place

    def begin(self) -> list[Handle]:
        """Collective. Start one message a tensor."""
        self._given = self.tensors if self.in_place else []
        self._dtypes = [tensor.dtype for tensor in self.tensors]
        self._totals = [self._sent(tensor) for tensor in self.tensors]
        op = Sum if self.op is Average else self.op
        return [
            self.comm.all_reduce(flat(total), f"{self.message}.{i}" if i else self.message, op.value)
            for i, total in enumerate(self._totals)
            if total.numel()
        ]

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that travels: the given one, scaled, where it may be overwritten, else a copy."""
        if self.in_place and tensor.dtype in TRAVELS and tensor.is_contiguous() and not tensor.is_neg():
            return times(tensor.detach(), self.prescale)
        return self.prepared(tensor)

    def end(self) -> list[torch.Tensor]:
        """Return new tensors, or the given ones, overwritten."""
        totals, self._totals = self._totals, []
        results = [self.finished(total, dtype) for total, dtype in zip(totals, self._dtypes, strict=True)]
        if not self.in_place:
            return results
        with torch.no_grad():
            for tensor, result in zip(self._given, results, strict=True):
                if result.data_ptr() != tensor.data_ptr():
                    tensor.copy_(result)
                else:
                    torch.autograd.graph.increment_version(tensor)
        return self._given

    def backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Collective. Return the same reduction of the gradients: of an average the average, of a sum the sum."""
        if self.op not in (Average, Sum):
            raise AGMergeError(f"{self.label}: op={self.op.value} has no gradient; give it tensor.detach()")
        given = (gradients, f"gradient of {self.label}", self.op, self.prescale, self.postscale)
        back = Allreduce(*given, where=self.group)
        return run_all(back)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = NONE,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Collective. Combine every rank's ``tensor`` into a new one of its shape and dtype.

    ``op``: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``; ``average``: True or False, its old
    form. An average of integers is cut towards zero, as in Horovod. ``compression``: a cast of the messages.
    ``prescale_factor``, ``postscale_factor``: factors before and after. ``process_set``: the ranks that
    take part, a :class:`agmerge.ProcessSet`, its ranks, or a set of Horovod's; None: all.

    Differentiable where ``op`` is an average or a sum: gradients are averaged or added likewise, in a collective of
    their own. Ranks with different calls get the same :class:`agmerge.RankMismatchError`; tensors
    that cannot be combined raise ``TypeError`` or ``ValueError``.
    """
    label = arguments.label(name, "allreduce")
    arguments.check_tensor(tensor, label)
    cast = arguments.compressor(compression, label)
    sent, context = cast.compress(tensor)
    made = _operation([sent], "allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    return cast.decompress(run(made), context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Collective. Combine as :func:`allreduce`, over ``tensor`` itself, which is returned. Without a gradient."""
    scales = (prescale_factor, postscale_factor)
    return run(_in_place([tensor], "allreduce_", average, name, op, *scales, process_set))  # type: ignore[no-any-return]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Pending:
    """Collective. Start :func:`allreduce`; return a handle for :func:`synchronize`. ``tensor`` is copied first."""
    call = "allreduce_async"
    return start(_operation([tensor], call, average, name, op, prescale_factor, postscale_factor, process_set))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Pending:
    """Collective. Start :func:`allreduce_`; return a handle for :func:`synchronize`.

    Leave ``tensor`` alone until then.
    """
    call = "allreduce_async_"
    return start(_in_place([tensor], call, average, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = NONE,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[torch.Tensor]:
    """Collective. Combine each of ``tensors`` as :func:`allreduce`, all of them agreed on at once; return a list."""
    label = arguments.label(name, "grouped_allreduce")
    cast = arguments.compressor(compression, label)
    packed = [cast.compress(tensor) for tensor in arguments.check_list(tensors, label)]
    sent, scales = [tensor for tensor, _ in packed], (prescale_factor, postscale_factor)
    totals = run(_operation(sent, "grouped_allreduce", average, name, op, *scales, process_set, single=False))
    return [cast.decompress(tensor, context) for tensor, (_, context) in zip(totals, packed, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[torch.Tensor]:
    """Collective. Combine as :func:`grouped_allreduce`, over the tensors themselves. Without a gradient."""
    given = (average, name, op, prescale_factor, postscale_factor, process_set)
    return list(run(_in_place(tensors, "grouped_allreduce_", *given, single=False)))


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Pending:
    """Collective. Start :func:`grouped_allreduce` of copies; return a handle for :func:`synchronize`."""
    given = (average, name, op, prescale_factor, postscale_factor, process_set)
    return start(_operation(tensors, "grouped_allreduce_async", *given, single=False))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Pending:
    """Collective. Start :func:`grouped_allreduce_`; return a handle for :func:`synchronize`.

    Leave the tensors alone until then.
    """
    given = (average, name, op, prescale_factor, postscale_factor, process_set)
    return start(_in_place(tensors, "grouped_allreduce_async_", *given, single=False))


def _operation(
    tensors: Any,
    call: str,
    average: Any,
    name: Any,
    op: Any,
    prescale: Any,
    postscale: Any,
    process_set: Any,
    *,
    single: bool = True,
    in_place: bool = False,
) -> Allreduce:
    """Return an all-reduce of checked arguments, which are those of :func:`allreduce`.

    ``call``: its name where the script gives none. ``single``: the script gave one tensor, and gets one.
    """
    label = arguments.label(name, call)
    checked = arguments.check_list(tensors, label)
    reduced = arguments.reduction(op, average, label)
    made = Allreduce(checked, name, reduced, prescale, postscale, process_set, in_place=in_place)
    made.single = single
    return made


def _in_place(tensors: Any, call: str, *given: Any, single: bool = True) -> Allreduce:
    """Return an all-reduce over the tensors themselves, or raise where that would make a gradient wrong."""
    made = _operation(tensors, call, *given, single=single, in_place=True)
    for tensor in made.tensors:
        arguments.check_overwritten(tensor, call)
    return made
