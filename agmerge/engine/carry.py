"""Keep what all workers have in common of the parameters, and what this one has done beyond it.

``base`` is the same on every rank, to the bit. After the optimizer has stepped, a worker's parameters lie elsewhere:
the way from there back to ``base`` is what is exchanged. What is not sent of it stays in the parameters
(:class:`Applied`), or beside them (:class:`Kept`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch

from agmerge.engine.sent_pieces import (
    WHOLE,
    Piece,
    lists_by_name,
    pieces_by_name,
    take_in,
    take_in_lists,
    take_off,
    update_of,
)
from agmerge.options.updates import Outer
from agmerge.step.gradient_exchange import Combined, GradientExchange
from agmerge.tensors.difference import Difference

Tensors = dict[str, torch.Tensor]  # by name of the parameter


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which differences of parameters are computed: float32, or theirs if it is wider."""
    return torch.promote_types(dtype, torch.float32)


def place(base: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return ``base`` less what is kept beside a parameter, as one of ``dtype`` shows it, in the dtype of ``base``."""
    return (base if residual is None else base - residual).to(dtype).to(base.dtype)


class Carry(ABC):
    """Hold ``base``, and move it and this worker's parameters by what was combined.

    ``exchange``: of the ways. ``outer``: makes the optimizer that moves ``base`` by what was combined; None: ``base``
    moves by exactly that. ``overlap``: the optimizer steps between the sending and the receiving of a way.
    """

    def __init__(self, exchange: GradientExchange, outer: Outer | None, *, overlap: bool) -> None:
        self.base: Tensors = {}
        self.parameters: Tensors = {}  # the script's own, or what this rank holds of them
        self._exchange, self._make_outer, self._overlap = exchange, outer, overlap
        self._outer: torch.optim.Optimizer | None = None  # of the tensors of `base`
        self._whole: Tensors = {}  # sent whole and not received, as of then; the parameters have moved on since

    def admit(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Follow these parameters from now on, by name; those that are new are what all have in common."""
        self.parameters = dict(parameters)
        new = [name for name in self.parameters if name not in self.base]
        for name in new:
            parameter = self.parameters[name].detach()
            self.base[name] = parameter.to(wide(parameter.dtype), copy=True)
        if new and self._make_outer is not None:
            state = self._outer.state if self._outer is not None else {}
            bind = getattr(self._make_outer, "bind", None)  # the script's own one knows its parameters, not `base`
            values = list(self.base.values())
            self._outer = self._make_outer(values) if bind is None else bind(self.base, self.parameters)
            if not isinstance(self._outer, torch.optim.Optimizer):
                raise TypeError(
                    f"outer={self._make_outer!r} has returned {self._outer!r}, which is no torch.optim.Optimizer"
                )
            self._outer.state.update(state)

    def take_over(self, before: Carry) -> None:
        """Go on with all that another carry has, in its place."""
        self.base, self.parameters, self._outer = before.base, before.parameters, before._outer

    def forget_sent(self) -> None:
        """Forget what was sent and not received: it counts as not sent."""
        self._whole = {}

    @abstractmethod
    def expected(self, name: str) -> torch.Tensor:
        """Return where the parameter would be if the optimizer had not moved it since the last exchange."""

    def displacement(self, name: str) -> torch.Tensor:
        """Return how far the parameter is from where :meth:`expected` says, in the dtype and strides of ``base``."""
        return self.expected(name) - self.parameters[name].detach()

    def way(self, name: str) -> Difference:
        """Return :meth:`displacement` for the exchange, which writes it where it needs it."""
        return Difference(self.expected(name), self.parameters[name].detach())

    @abstractmethod
    def take_in(self, combined: Combined) -> None:
        """Move ``base`` and the parameters by what was combined. The exchange has been committed."""

    @abstractmethod
    def unsent(self, name: str) -> torch.Tensor:
        """Return all that this worker has done and not sent of a parameter."""

    def restore(self, base: Mapping[str, torch.Tensor], own: Tensors, displacements: Tensors) -> None:
        """Go on from what was saved: put the parameters where they were.

        ``own``: this worker's parameters, as they were. ``displacements``: how far from :meth:`expected` those are that
        nobody had so, among another number of workers. Parameters that are in neither are where they are expected.
        """
        for name in self.parameters.keys() & base.keys():
            self.base[name].copy_(base[name])
            if name in own:
                self.parameters[name].detach().copy_(own[name])
                continue
            expected = self.expected(name)
            moved = displacements.get(name)
            self.parameters[name].detach().copy_(expected if moved is None else expected - moved.to(expected.device))

    def put(self, displacements: Tensors) -> None:
        """Put parameters at these distances from where they are expected."""
        for name, moved in displacements.items():
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


class Applied(Carry):
    """Leave what is not sent in the parameters: a worker computes with all that it has done (step-ahead).

    The exchange keeps nothing: its memory is :class:`sparsifiers.memories.HandBack`.
    """

    def expected(self, name: str) -> torch.Tensor:
        return self.base[name]

    def unsent(self, name: str) -> torch.Tensor:
        return self.displacement(name)

    def way(self, name: str) -> Difference:
        way = super().way(name)
        buffers = self._exchange.buffers
        if self._overlap and buffers is not None and buffers.goes_whole(buffers.slot_of[name]):
            self._whole[name] = way.tensor().reshape(-1)
        return way

    def take_in(self, combined: Combined) -> None:
        updates = {name: update for name, update in combined.updates.items() if update is not None}
        lists = lists_by_name(combined.buffers.received)
        sent = self._sent(combined, [*updates, *lists])
        for name, of_name in lists.items():  # of these there is no update
            if self._goes_along(name):
                take_in_lists(*self._flat(name), of_name, sent[name])
            else:
                base = self.base[name]
                updates[name] = update_of(of_name, base.numel()).view(base.shape)
        whole = [name for name in updates if sent[name] == [WHOLE]]
        for name in [name for name in updates if sent[name] != [WHOLE] and self._goes_along(name)]:
            take_in(*self._flat(name), updates.pop(name).view(-1), sent[name])
        rests = {name: self._rest(name, sent[name]) for name in updates if sent[name] != [WHOLE]}
        self._move_base(updates)
        for name, rest in rests.items():
            self.parameters[name].detach().copy_(self.base[name] - rest)
        if whole:
            torch._foreach_copy_([self.parameters[n].detach() for n in whole], [self.base[n] for n in whole])

    def _goes_along(self, name: str) -> bool:
        """Return whether a parameter moves by the same as ``base``, and both can be read as flat."""
        return self._outer is None and self.parameters[name].is_contiguous()

    def _flat(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.base[name].view(-1), self.parameters[name].detach().view(-1)

    def _rest(self, name: str, sent: list[Piece]) -> torch.Tensor:
        """Return what this worker carries of a parameter, less what was sent, in the strides of ``base``."""
        rest = self.displacement(name)
        flat = rest.reshape(-1)  # in C order: a view, or a copy
        take_off(flat, sent)
        return rest.copy_(flat.view(rest.shape))

    def _sent(self, combined: Combined, names: Iterable[str]) -> dict[str, list[Piece]]:
        """Return what this rank has sent of ``names``, by name of the parameter."""
        buffers, whole = combined.buffers, self._whole
        self._whole = {}
        sent = pieces_by_name(buffers.sent)
        for name in names:
            slot, pieces = buffers.slot_of[name], sent.setdefault(name, [])
            if buffers.goes_whole(slot) and all(piece.values is None for piece in pieces):
                # It is `base` then; unless the optimizer has moved it since it was sent.
                sent[name] = [Piece(0, slot.numel, 0, None, whole[name])] if name in whole else [WHOLE]
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
        residual = self._exchange.residual_of(name) if self._applied else None
        return place(self.base[name], residual, self.parameters[name].dtype)

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
