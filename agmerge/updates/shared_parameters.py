# SPDX-License-Identifier: Apache-2.0
"""Parameters that all workers share, and this worker's deltas beyond them.

``base`` is the same on every rank, to the bit. After the optimizer has stepped, a worker's own parameters differ from
it: the delta ``base - own``, a pseudo-gradient, is exchanged. What is not sent of it stays in the parameters
(:class:`UnsentInParameters`), or beside them in the exchange's residual (:class:`UnsentInResidual`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import ClassVar, NamedTuple

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from agmerge.exchanges.base import ArrivedPieces
from agmerge.step.config import Outer
from agmerge.step.flat_buffers import Received, Sent
from agmerge.step.gradient_exchange import Combined, GradientExchange
from agmerge.tensors.arena import Difference
from agmerge.tensors.layout import Segment, Slot
from sparsifiers import native
from sparsifiers.quantising.moving import Momentum, Moved

# Pieces of tensors that were sent, and combined updates applied to them: functions of flat tensors.

Pair = tuple[torch.Tensor, torch.Tensor]  # indices and values


class Piece(NamedTuple):
    """Sent elements among ``start`` to ``stop`` of a tensor, flat in C order."""

    start: int
    stop: int | None  # None: the end
    first: int  # the number of element `start`, as indices count
    # int32 or int64, of the sent elements; one may be repeated with value 0. None: all of them.
    indices: torch.Tensor | None
    values: torch.Tensor | None  # sent values; None: the elements' own


class Lists(NamedTuple):
    """Elements among ``start`` to ``stop`` of a tensor that all ranks have sent, flat in C order."""

    start: int
    stop: int
    first: int  # the number of element `start`, as indices count
    lists: list[Pair]  # of each rank: int32, ascending
    scale: float  # factor of the values


WHOLE = Piece(0, None, 0, None, None)  # all of a tensor


def pieces_by_name(sent: Iterable[Sent]) -> dict[str, list[Piece]]:
    """Return the sent pieces of each tensor, by its name. ``sent``: by segments."""
    pieces: dict[str, list[Piece]] = {}
    for segment, indices, values in sent:
        if indices is None or values is None:
            for slot, start, stop, first in _parts(segment):
                part = None if values is None else values[first : first + stop - start]
                pieces.setdefault(slot.name, []).append(Piece(start, stop, first, None, part))
        else:
            for (slot, start, stop, first), pair in zip(_parts(segment), _cut(segment, indices, values), strict=True):
                pieces.setdefault(slot.name, []).append(Piece(start, stop, first, *pair))
    return pieces


def lists_by_name(received: Iterable[Received]) -> dict[str, list[Lists]]:
    """Return the lists of each tensor, by its name. ``received``: by segments."""
    lists: dict[str, list[Lists]] = {}
    for segment, pairs, scale in received:
        by_rank = [_cut(segment, *pair) for pair in pairs]
        for (slot, start, stop, first), *of_slot in zip(_parts(segment), *by_rank, strict=True):
            lists.setdefault(slot.name, []).append(Lists(start, stop, first, of_slot, scale))
    return lists


def update_of(lists: Sequence[Lists], numel: int) -> torch.Tensor:
    """Return the update of a tensor of ``numel`` elements from its lists, 1-D: added up rank by rank."""
    update = lists[0].lists[0][1].new_zeros(numel)
    for part in lists:
        _add_up(update[part.start : part.stop], part)
    return update


def apply_update(base: torch.Tensor, own: torch.Tensor, update: torch.Tensor, pieces: Sequence[Piece]) -> None:
    """Subtract ``update`` from ``base`` and ``own``, all 1-D, and sent pieces from the delta between the two.

    At sent elements ``own = base - (delta - sent)`` afterwards, with ``delta = base - own`` before.
    """
    unsent = base - own
    subtract(unsent, pieces)
    base.sub_(update)
    own.sub_(update)
    for start, stop, first, indices, _ in pieces:
        shared, moved, left = base[start:stop], own[start:stop], unsent[start:stop]
        if indices is None:
            torch.sub(shared, left, out=moved)
        else:
            places = indices - first
            moved[places] = shared[places].sub_(left[places])


def apply_lists(base: torch.Tensor, own: torch.Tensor, lists: Sequence[Lists], pieces: Sequence[Piece]) -> None:
    """Apply the update of ``lists`` as :func:`apply_update` does, in one pass where that is possible."""
    for part, piece in zip(lists, pieces, strict=True):
        shared, moved = base[part.start : part.stop], own[part.start : part.stop]
        indices, values = piece.indices, piece.values
        if (
            indices is None
            or values is None
            or not native.take_in(shared, moved, part.first, part.lists, part.scale, (indices, values))
        ):
            update = _add_up(torch.zeros_like(shared), part)
            apply_update(shared, moved, update, [piece._replace(start=0, stop=None)])


def subtract(delta: torch.Tensor, pieces: Iterable[Piece]) -> None:
    """Subtract the sent pieces from ``delta``, 1-D, in place."""
    for start, stop, first, indices, values in pieces:
        part = delta[start:stop]
        if values is None:
            part.zero_()
        elif indices is None:
            part.sub_(values)
        else:
            part.index_add_(0, indices - first, values, alpha=-1)


def _add_up(update: torch.Tensor, part: Lists) -> torch.Tensor:
    """Add the lists of a slice, rank by rank, to its ``update``, 1-D, and return that."""
    for indices, values in part.lists:
        update.index_add_(0, indices - part.first, values * part.scale)
    return update


def _parts(segment: Segment) -> Iterator[tuple[Slot, int, int, int]]:
    """Yield each tensor in a segment, the start and stop of its elements there, and their offset in the segment."""
    for slot in segment.slots:
        start, stop = segment.inside(slot)
        yield slot, start, stop, slot.offset + start - segment.start


def _cut(segment: Segment, indices: torch.Tensor, values: torch.Tensor) -> list[Pair]:
    """Return the indices and values of each tensor in a segment, without those in the padding between tensors."""
    indices, values = _ascending(indices, values)
    if len(segment.slots) == 1 and segment.numel == segment.length:
        return [(indices, values)]
    edges = [edge for _, start, stop, first in _parts(segment) for edge in (first, first + stop - start)]
    marks = torch.tensor(edges, dtype=indices.dtype, device=indices.device)
    cuts = torch.searchsorted(indices, marks).tolist()
    return [(indices[low:high], values[low:high]) for low, high in zip(cuts[::2], cuts[1::2], strict=True)]


def _ascending(indices: torch.Tensor, values: torch.Tensor) -> Pair:
    """Return the indices, ascending, and their values.

    A padding of zero indices behind them, with value 0, is cut off on the host; on a device it is sorted to the front.
    """
    if indices.device.type == "cpu":
        held = indices.numpy()
        if len(held) > 1 and held[-1] == 0:
            zeros = int((held[::-1] != 0).argmax()) or len(held)  # at the end
            count = len(held) - zeros
            count += bool(values[count] != 0)  # the first zero is element 0 itself, if that was sent last
            indices, values, held = indices[:count], values[:count], held[:count]
        if (held[1:] > held[:-1]).all():
            return indices, values
    indices, order = indices.sort(stable=True)
    return indices, values[order]


# Shared parameters.

Tensors = dict[str, torch.Tensor]  # by name of the parameter
Follow = Callable[[torch.Tensor], Momentum | None]  # returns the momentum of a parameter; None: none follows


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which differences of parameters are computed: float32, or theirs if it is wider."""
    return torch.promote_types(dtype, torch.float32)


def place(base: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return ``base - residual``, rounded to ``dtype`` as a parameter of it would be, in the dtype of ``base``."""
    return (base if residual is None else base - residual).to(dtype).to(base.dtype)


class SharedParameters(ABC):
    """Shared parameters ``base``, and this worker's ``own``, which are moved together by the combined updates.

    ``in_parameters``: the class keeps unsent updates in the worker's own parameters. ``exchange``: of the deltas.
    ``outer``: makes the optimizer that moves ``base`` by the combined ones;
    None: ``base`` moves by exactly these. ``overlap``: the optimizer steps between sending and receiving a delta.
    """

    in_parameters: ClassVar[bool]

    def __init__(self, exchange: GradientExchange, outer: Outer | None, *, overlap: bool) -> None:
        self.base: Tensors = {}
        self.own: Tensors = {}  # the script's parameters, or this rank's shards of them
        self.is_shown = False  # the script's parameters are the shared ones, see shown()
        self._exchange, self._make_outer, self._overlap = exchange, outer, overlap
        self._outer: torch.optim.Optimizer | None = None  # of the tensors of `base`
        self._whole: Tensors = {}  # sent dense and not received; the parameters have moved on since

    def admit(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Use these parameters from now on, by name; return whether there are new ones.

        ``base`` gets the values of these, and loses those of parameters that are gone.
        """
        self.own = dict(parameters)
        new = [name for name in self.own if name not in self.base]
        gone = [name for name in self.base if name not in self.own]
        for name in new:
            parameter = self.own[name].detach()
            self.base[name] = parameter.to(wide(parameter.dtype), copy=True)
        state = {} if self._outer is None else dict(self._outer.state)
        for name in gone:
            state.pop(self.base.pop(name), None)
        if (new or gone) and self._make_outer is not None:
            bind = getattr(self._make_outer, "bind", None)  # the script's own one knows its parameters, no `base`
            values = list(self.base.values())
            self._outer = self._make_outer(values) if bind is None else bind(self.base, self.own)
            if not isinstance(self._outer, torch.optim.Optimizer):
                raise TypeError(
                    f"outer={self._make_outer!r} returned {self._outer!r}, expected a torch.optim.Optimizer"
                )
            self._outer.state.update(state)
        return bool(new)

    def adopt(self, before: SharedParameters) -> None:
        """Adopt the tensors and the outer optimizer of the object that this one replaces."""
        self.base, self.own, self._outer = before.base, before.own, before._outer

    @contextmanager
    def shown(self, but: Container[str] = ()) -> Iterator[None]:
        """Make the script's parameters, inside, the shared ones: ``own`` are copies meanwhile, and put back after.

        ``but``: the names of parameters that stay as they are. Afterwards all have the versions that they had, so that
        a backward pass which has saved them can be made: it finds the values that it had saved.
        """
        parameters, was_shown, self.is_shown = self.own, self.is_shown, True
        replaced = {name: parameter for name, parameter in parameters.items() if name not in but}
        copies = {name: parameter.detach().clone() for name, parameter in replaced.items()}
        self.own = {**parameters, **copies}
        with ExitStack() as versions:
            for parameter in replaced.values():
                versions.enter_context(_unsafe_preserve_version_counter(parameter))
            try:
                _copy_all(replaced, self.base)
                yield
            finally:
                self.own, self.is_shown = parameters, was_shown
                _copy_all(replaced, copies)

    def follow_own(self) -> None:
        """Make the shared parameters this worker's own: it is alone, and what it has is what all have."""
        for name, base in self.base.items():
            base.copy_(self.own[name].detach())

    def forget_sent(self) -> None:
        """Forget deltas that were sent and not received: they count as not sent."""
        self._whole = {}

    @abstractmethod
    def expected(self, name: str) -> torch.Tensor:
        """Return the parameter as it would be if the optimizer had not moved it since the last exchange."""

    def displacement(self, name: str) -> torch.Tensor:
        """Return ``expected - parameter``, in the dtype and strides of ``base``."""
        return self.expected(name) - self.own[name].detach()

    def delta(self, name: str) -> Difference:
        """Return :meth:`displacement` for the exchange, which computes it where it needs it."""
        return Difference(self.expected(name), self.own[name].detach())

    @abstractmethod
    def apply(self, combined: Combined, follow: Follow | None = None) -> None:
        """Move ``base`` and the parameters by the combined updates. The exchange has been committed.

        ``follow``: returns what follows the movement of a parameter towards the mean of all workers.
        """

    @abstractmethod
    def unsent(self, name: str) -> torch.Tensor:
        """Return the sum of this worker's deltas of a parameter that were not sent."""

    def restore(self, base: Mapping[str, torch.Tensor], own: Tensors, displacements: Tensors) -> None:
        """Restore a saved state: move the parameters to where they were.

        ``own``: this worker's saved parameters. ``displacements``: by name, ``expected - parameter`` for other
        parameters, where no worker of the present group had them so. Parameters in neither are set to :meth:`expected`.
        """
        for name in self.own.keys() & base.keys():
            self.base[name].copy_(base[name])
            if name in own:
                self.own[name].detach().copy_(own[name])
                continue
            expected = self.expected(name)
            moved = displacements.get(name)
            self.own[name].detach().copy_(expected if moved is None else expected - moved.to(expected.device))

    def put(self, displacements: Tensors) -> None:
        """Set parameters to :meth:`expected` less these displacements."""
        for name, moved in displacements.items():
            self.own[name].detach().copy_(self.expected(name) - moved)

    def take_back(self, owed: Tensors, workers: int) -> None:
        """Make what this worker owes to all of ``workers``, by name, a part of its own unsent updates.

        The mean over workers divides by their number, so that all of them get as much as it owes.
        """
        for name, tensor in owed.items():
            if name in self.own:
                self.own[name].detach().sub_(tensor, alpha=float(workers))

    def outer_state(self) -> dict[str, torch.Tensor] | None:
        """Return the ``state_dict()`` of the outer optimizer; None without one."""
        return None if self._outer is None else self._outer.state_dict()

    def load_outer_state(self, state: dict[str, torch.Tensor] | None) -> None:
        """Load the result of :meth:`outer_state`."""
        if self._outer is not None and state is not None:
            self._outer.load_state_dict(state)

    def _move_base(self, updates: Tensors) -> None:
        """Move ``base`` by the combined deltas, or by an outer step with them as gradients."""
        if not updates:
            return
        if self._outer is None:
            torch._foreach_sub_([self.base[name] for name in updates], list(updates.values()))
            return
        for name, tensor in self.base.items():
            tensor.grad = updates.get(name)  # a fragment: the others stay
        self._outer.step()
        for tensor in self.base.values():
            tensor.grad = None


class UnsentInParameters(SharedParameters):
    """Shared parameters with what is unsent in a worker's own: it computes with all its updates (step-ahead).

    The exchange has no residual: its memory is :class:`sparsifiers.memories.HandBack`.
    """

    in_parameters = True

    def expected(self, name: str) -> torch.Tensor:
        return self.base[name]

    def unsent(self, name: str) -> torch.Tensor:
        return self.displacement(name)

    def delta(self, name: str) -> Difference:
        delta = super().delta(name)
        buffers = self._exchange.agreed.buffers
        if self._overlap and buffers is not None and buffers.goes_dense(buffers.slot_of[name]):
            self._whole[name] = delta.tensor().reshape(-1)
        return delta

    def apply(self, combined: Combined, follow: Follow | None = None) -> None:
        # With overlap the script may have removed a parameter since its delta was sent.
        updates = {n: update for n, update in combined.updates.items() if update is not None and n in self.own}
        received = lists_by_name(combined.buffers.store.received)
        lists = {name: of_name for name, of_name in received.items() if name in self.own}
        sent = self._sent(combined, [*updates, *lists])
        if self._outer is None:
            self._move_by(combined.buffers.store.pieces, follow)
        else:
            self._collect(combined.buffers.store.pieces, updates, sent)
        for name, of_name in lists.items():  # they have no update
            if self._goes_along(name):
                apply_lists(*self._flat(name), of_name, sent[name])
            else:
                base = self.base[name]
                updates[name] = update_of(of_name, base.numel()).view(base.shape)
        whole: list[str] = []
        left: Tensors = {}
        for name in [*updates]:
            if sent[name] == [WHOLE]:
                whole.append(name)
            elif self._goes_along(name):
                apply_update(*self._flat(name), updates.pop(name).view(-1), sent[name])
            else:
                left[name] = self._left(name, sent[name])
        self._move_base(updates)
        for name, unsent in left.items():
            self.own[name].detach().copy_(self.base[name] - unsent)
        if whole:
            torch._foreach_copy_([self.own[n].detach() for n in whole], [self.base[n] for n in whole])

    def _move_by(self, messages: Sequence[ArrivedPieces], follow: Follow | None) -> None:
        """Apply the pieces of quantized tensors of all messages.

        ``base`` moves by what arrives, and a worker's own by as much less what it has sent of that.
        """
        strided: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by name: copies in C order

        def tensors(slot: Slot) -> Moved | None:
            if slot.name not in self.own:
                return None
            base, own = self.base[slot.name], self.own[slot.name].detach()
            if not (base.is_contiguous() and own.is_contiguous()):
                base, own = strided.setdefault(slot.name, (base.contiguous(), own.contiguous()))
            return Moved(base.view(-1), own.view(-1), None if follow is None else follow(self.own[slot.name]))

        for message in messages:
            message.move(tensors)
        for name, (base, own) in strided.items():
            self.base[name].copy_(base)
            self.own[name].detach().copy_(own)

    def _collect(self, messages: Sequence[ArrivedPieces], updates: Tensors, sent: dict[str, list[Piece]]) -> None:
        """Add the pieces of quantized tensors of all messages to ``updates`` and ``sent``, for an outer step."""
        for message in messages:
            for slot, elements, combined, own_sent in message.read():
                name = slot.name
                if name not in self.own:
                    continue
                if name not in updates:
                    updates[name] = torch.zeros_like(self.base[name], memory_format=torch.contiguous_format)
                    sent[name] = []
                updates[name].view(-1)[elements].copy_(combined)
                sent[name].append(Piece(elements.start, elements.stop, elements.start, None, own_sent.clone()))

    def _goes_along(self, name: str) -> bool:
        """Return whether a parameter moves by the same update as ``base``, and both are flat in memory."""
        return self._outer is None and self.own[name].is_contiguous()

    def _flat(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.base[name].view(-1), self.own[name].detach().view(-1)

    def _left(self, name: str, sent: list[Piece]) -> torch.Tensor:
        """Return this worker's delta of a parameter, less the sent pieces, in the strides of ``base``."""
        delta = self.displacement(name)
        flat = delta.reshape(-1)  # in C order: a view, or a copy
        subtract(flat, sent)
        return delta.copy_(flat.view(delta.shape))

    def _sent(self, combined: Combined, names: Iterable[str]) -> dict[str, list[Piece]]:
        """Return the pieces that this rank has sent of ``names``, by name of the parameter."""
        buffers, whole = combined.buffers, self._whole
        self._whole = {}
        sent = pieces_by_name(buffers.store.sent)
        for name in names:
            slot, pieces = buffers.slot_of[name], sent.setdefault(name, [])
            if buffers.goes_dense(slot) and all(piece.values is None for piece in pieces):
                # The parameter is `base` then, unless the optimizer has moved it since it was sent.
                sent[name] = [Piece(0, slot.numel, 0, None, whole[name])] if name in whole else [WHOLE]
        return sent


class UnsentInResidual(SharedParameters):
    """Shared parameters with what is unsent in the exchange's residual.

    ``applied``: a worker's own contain it all the same, rounded: 16 bits could not hold it exactly. Else all workers
    compute with ``base``. Steps that the optimizer makes while a message is under way become a part of the residual
    when this message arrives.
    """

    in_parameters = False

    def __init__(self, exchange: GradientExchange, outer: Outer | None, *, applied: bool, overlap: bool) -> None:
        super().__init__(exchange, outer, overlap=overlap)
        self._applied = applied
        self._sent_from: Tensors = {}  # with overlap: parameters as they were when their deltas were sent

    def forget_sent(self) -> None:
        super().forget_sent()
        self._sent_from = {}

    def delta(self, name: str) -> Difference:
        if self._overlap:
            self._sent_from[name] = self.own[name].detach().clone()
        return super().delta(name)

    def expected(self, name: str) -> torch.Tensor:
        residual = self._exchange.agreed.residual_of(name) if self._applied else None
        return place(self.base[name], residual, self.own[name].dtype)

    def unsent(self, name: str) -> torch.Tensor:
        residual = self._exchange.agreed.residual_of(name)
        if residual is None:
            return self.displacement(name)
        # A node's residual lies in shards on its ranks: this rank's own share of it cannot be separated.
        return residual if self._exchange.group.shard is not None else self.displacement(name) + residual

    def apply(self, combined: Combined, follow: Follow | None = None) -> None:
        # With overlap the script may have removed a parameter since its delta was sent.
        updates = {n: update for n, update in combined.updates.items() if update is not None and n in self.own}
        before, self._sent_from = self._sent_from, {}
        self._move_base(updates)
        for name in updates:
            own, residual = self.own[name].detach(), self._exchange.agreed.residual_of(name)
            moved = own.to(self.base[name].dtype) - before[name] if name in before else None
            if moved is not None and residual is not None:
                residual.sub_(moved)  # `expected` has it then
                moved = None
            expected = self.expected(name)
            own.copy_(expected if moved is None else expected + moved)


@torch.no_grad()
def _copy_all(parameters: Tensors, values: Tensors) -> None:
    """Copy ``values`` into ``parameters``, by name."""
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
