"""Keep what all workers have in common of the parameters, and what this one has done beyond it.

``base`` is the same on every rank, to the bit. After the optimizer has stepped, a worker's parameters lie elsewhere:
the way from there back to ``base`` is what is exchanged. What is not sent of it stays in the parameters
(:class:`Applied`), or beside them (:class:`Kept`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch

from agmerge.engine.sent_pieces import WHOLE, Piece, pieces_by_name, put, rests_of, take_off
from agmerge.options.updates import Outer
from agmerge.step.gradient_exchange import Combined, GradientExchange
from agmerge.tensors.parameters import ParameterInfo

Tensors = dict[str, torch.Tensor]  # by name of the parameter


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which differences of parameters are computed: float32, or theirs if it is wider."""
    return torch.promote_types(dtype, torch.float32)


class Carry(ABC):
    """Hold ``base``, and move it and this worker's parameters by what was combined.

    ``exchange``: of the ways. ``outer``: makes the optimizer that moves ``base`` by what was combined; None: ``base``
    moves by exactly that. ``overlap``: the optimizer steps between the sending and the receiving of a way.
    """

    def __init__(self, exchange: GradientExchange, outer: Outer | None, *, overlap: bool) -> None:
        self.base: Tensors = {}
        self.parameters: Tensors = {}  # the script's own
        self._exchange, self._make_outer, self._overlap = exchange, outer, overlap
        self._outer: torch.optim.Optimizer | None = None  # of the tensors of `base`

    def admit(self, members: Iterable[ParameterInfo]) -> None:
        """Follow these parameters from now on; those that are new are what all have in common."""
        self.parameters = {member.name: member.parameter for member in members}
        new = [name for name in self.parameters if name not in self.base]
        for name in new:
            parameter = self.parameters[name].detach()
            self.base[name] = parameter.to(wide(parameter.dtype), copy=True)
        if new and self._make_outer is not None:
            state = self._outer.state if self._outer is not None else {}
            self._outer = self._make_outer(list(self.base.values()))
            self._outer.state.update(state)

    @abstractmethod
    def expected(self, name: str) -> torch.Tensor:
        """Return where the parameter would be if the optimizer had not moved it since the last exchange."""

    def displacement(self, name: str) -> torch.Tensor:
        """Return how far the parameter is from where :meth:`expected` says, in the dtype and strides of ``base``."""
        return self.expected(name) - self.parameters[name].detach()

    def way(self, name: str) -> torch.Tensor:
        """Return :meth:`displacement`, where there is room for it: what the exchange is given."""
        room = self._exchange.room_for(name)
        if room is None:
            return self.displacement(name)
        torch.sub(self.expected(name), self.parameters[name].detach(), out=room)
        return room

    @abstractmethod
    def take_in(self, combined: Combined) -> None:
        """Move ``base`` and the parameters by what was combined. The exchange has been committed."""

    @abstractmethod
    def unsent(self, name: str) -> torch.Tensor:
        """Return all that this worker has done and not sent of a parameter."""

    def restore(self, base: Mapping[str, torch.Tensor], displacements: Mapping[str, torch.Tensor]) -> None:
        """Go on from what was saved: put the parameters where they were.

        Where a parameter is there already it keeps its bits, which a difference need not give back.
        """
        for name in self.parameters.keys() & base.keys():
            self.base[name].copy_(base[name])
        for name in self.parameters.keys() & base.keys():
            moved = displacements.get(name)
            moved = torch.zeros_like(self.base[name]) if moved is None else moved.to(self.base[name].device)
            if not torch.equal(self.displacement(name), moved):
                self.parameters[name].detach().copy_(self.expected(name) - moved)

    def rescale(self, factor: float) -> None:
        """Carry ``factor`` times as much: this worker is one of another number of them now."""
        for name in self.base:
            moved = self.displacement(name).mul_(factor)
            self.parameters[name].detach().copy_(self.expected(name) - moved)

    def outer_state(self) -> dict[str, torch.Tensor] | None:
        """Return what the outer optimizer remembers, as its ``state_dict()``; None without one."""
        return None if self._outer is None else self._outer.state_dict()

    def load_outer_state(self, state: dict[str, torch.Tensor] | None) -> None:
        """Take back what :meth:`outer_state` has returned."""
        if self._outer is not None and state is not None:
            self._outer.load_state_dict(state)

    def _move_base(self, updates: Tensors) -> None:
        """Move ``base`` by the combined ways, or as the outer optimizer does with them as gradients."""
        if not updates:  # a fragment without merge buffers: there are fewer of these
            return
        if self._outer is None:
            torch._foreach_sub_([self.base[name] for name in updates], list(updates.values()))
            return
        for name, tensor in self.base.items():
            tensor.grad = updates.get(name)  # a fragment: the others stay
        self._outer.step()
        for tensor in self.base.values():
            tensor.grad = None


class Applied(Carry):
    """Leave what is not sent in the parameters: a worker computes with all that it has done (step-ahead).

    The exchange keeps nothing: its memory is :class:`sparsifiers.memories.HandBack`.
    """

    def __init__(self, exchange: GradientExchange, outer: Outer | None, *, overlap: bool) -> None:
        super().__init__(exchange, outer, overlap=overlap)
        self._whole: Tensors = {}  # sent whole, as of then; the parameters have moved on since

    def expected(self, name: str) -> torch.Tensor:
        return self.base[name]

    def unsent(self, name: str) -> torch.Tensor:
        return self.displacement(name)

    def way(self, name: str) -> torch.Tensor:
        way = super().way(name)
        buffers = self._exchange.buffers
        if self._overlap and buffers is not None and buffers.goes_whole(buffers.slot_of[name]):
            self._whole[name] = way.reshape(-1).clone()
        return way

    def take_in(self, combined: Combined) -> None:
        updates = {name: update for name, update in combined.updates.items() if update is not None}
        sent = self._sent(combined)
        plain = {name for name in updates if self._outer is None and self.parameters[name].is_contiguous()}
        moving = [name for name in updates if name in plain and sent[name] != [WHOLE]]
        rests = {name: rests_of(self._flat_base(name), self._flat(name), sent[name]) for name in moving}
        carried = {name: self._carried(name, sent[name]) for name in updates if name not in plain}
        self._move_base(updates)
        for name in moving:  # as far as the base, but where something was sent
            self._flat(name).sub_(updates[name].view(-1))
            put(self._flat(name), self._flat_base(name), sent[name], rests[name])
        for name, rest in carried.items():
            self.parameters[name].detach().copy_(self.base[name] - rest)
        whole = [name for name in plain if sent[name] == [WHOLE]]
        if whole:
            torch._foreach_copy_([self.parameters[name].detach() for name in whole], [self.base[n] for n in whole])

    def _flat_base(self, name: str) -> torch.Tensor:
        return self.base[name].view(-1)

    def _flat(self, name: str) -> torch.Tensor:
        return self.parameters[name].detach().view(-1)

    def _carried(self, name: str, sent: list[Piece]) -> torch.Tensor:
        """Return what this worker carries of a parameter, less what was sent, in the strides of ``base``."""
        if sent == [WHOLE]:
            return torch.zeros_like(self.base[name])
        carried = self.displacement(name)
        flat = carried.reshape(-1)  # in C order: a view, or a copy
        take_off(flat, sent)
        return carried.copy_(flat.view(carried.shape))

    def _sent(self, combined: Combined) -> dict[str, list[Piece]]:
        """Return what this rank has sent, by name of the parameter."""
        buffers, whole = combined.buffers, self._whole
        self._whole = {}
        sent = pieces_by_name(buffers.sent)
        for name in combined.updates:
            slot, pieces = buffers.slot_of[name], sent.setdefault(name, [])
            if buffers.goes_whole(slot) and all(piece.values is None for piece in pieces):
                # It is `base` then; unless the optimizer has moved it since it was sent.
                sent[name] = [Piece(0, slot.numel, None, whole[name].view(-1))] if name in whole else [WHOLE]
        return sent


class Kept(Carry):
    """Leave what is not sent to the exchange's residual.

    ``applied``: parameters show it all the same, rounded: 16 bits could not hold it. Else all workers compute with
    ``base``.
    """

    def __init__(self, exchange: GradientExchange, outer: Outer | None, *, applied: bool) -> None:
        super().__init__(exchange, outer, overlap=False)
        self._applied = applied

    def expected(self, name: str) -> torch.Tensor:
        base, dtype = self.base[name], self.parameters[name].dtype
        residual = self._exchange.residual_of(name) if self._applied else None
        return (base if residual is None else base - residual).to(dtype).to(base.dtype)

    def unsent(self, name: str) -> torch.Tensor:
        residual = self._exchange.residual_of(name)
        if residual is None:
            return self.displacement(name)
        # A node's residual lies in shards on its ranks: what is its own part is not to be told from the others'.
        return residual if self._exchange.shard is not None else self.displacement(name) + residual

    def take_in(self, combined: Combined) -> None:
        updates = {name: update for name, update in combined.updates.items() if update is not None}
        self._move_base(updates)
        for name in updates:
            self.parameters[name].detach().copy_(self.expected(name))
