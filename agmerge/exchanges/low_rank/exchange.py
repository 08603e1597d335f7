# SPDX-License-Identifier: Apache-2.0
"""Exchange of low-rank factors, added up over all ranks: PowerSGD in two rounds, ACP-SGD in one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch

from agmerge.exchanges import dense
from agmerge.exchanges.base import ExchangeContext, InFlight, SegmentBuffers
from agmerge.exchanges.dense import decode, largest_summand, place_of, tail_of
from agmerge.exchanges.low_rank import bases
from agmerge.exchanges.low_rank.bases import LEFT, RIGHT, Bases, Basis, Product
from agmerge.exchanges.message import bits
from agmerge.exchanges.message.format import Flag, RoundHeader
from agmerge.exchanges.multi_round import MultiRoundExchange, Phases, State
from agmerge.tensors.layout import Segment, Slot
from agmerge.tensors.nonfinite import is_finite
from sparsifiers import Kind, Selection


@dataclass
class Matrix:
    """Tensor as a matrix (n, m), with the basis it is projected on and the factor that this gives."""

    segment: Segment  # of this tensor alone
    work: torch.Tensor  # (n, m): residual and gradient, less what was sent; a view
    update: torch.Tensor  # (n, m): is written in the end; a view
    basis: Basis  # of the last step; in the second round the first round's sum, orthonormal
    factor: torch.Tensor  # (r, length): `work` projected on the basis, as receivers read it; then the sum of all ranks
    wire: torch.dtype  # in which the factor travels
    both: bool  # there is a second round
    # bool[length of the basis]: rows (of a basis of the RIGHT: columns) of `work` that are zero where the basis is not.
    # None: there are none; or the basis was made of this step's matrices, and is zero there; or it is not known yet.
    empty: torch.Tensor | None = None

    @property
    def slot(self) -> Slot:
        """Return the place of the tensor."""
        return self.segment.slots[0]

    def project(self) -> None:
        """Write the factor of ``work``."""
        bases.project(self.work, self.basis.side, self.basis.rows, self.factor)

    def find_empty(self, *terms: torch.Tensor) -> None:
        """Set :attr:`empty`, if the basis is one of the last step; ``terms``: add up to ``work``, each (n, m)."""
        if not self.both:
            self.empty = bases.empty_lanes(self.basis.side, self.basis.rows, *terms)

    def find_empty_behind(self) -> None:
        """Set :attr:`empty` of a matrix on the host that has its factor, and still all of its work.

        If the factor is zero, this rank sends nothing of any row, so all may be left out without a look at them.
        """
        if not self.both and not self.factor.any():
            self.empty = self.basis.rows.any(0)
        else:
            self.find_empty(self.work)

    def leave_out(self, lanes: torch.Tensor) -> None:
        """Make the product zero in some rows, or columns with a basis of the RIGHT. ``lanes``: bool[length]."""
        self.basis = Basis(self.basis.side, self.basis.rows.masked_fill(lanes, 0.0))

    def add_and_project(self, residual: torch.Tensor, gradient: torch.Tensor, *, moves: bool) -> bool | None:
        """Write ``work = residual + gradient`` and its factor, in one pass; see :func:`factors.add_and_project`.

        If :attr:`is_taken_off`, the sent product is subtracted in the same pass; if ``moves``, the gradient is copied
        to the update.
        """
        residual, gradient = residual.view_as(self.work), gradient.view_as(self.work)
        if self.basis.side == RIGHT:  # before the product is subtracted
            self.find_empty(residual, gradient)
        finite = bases.add_and_project(
            self.work,
            residual,
            gradient,
            self.basis.side,
            self.basis.rows,
            self.factor,
            off=self.is_taken_off,
            copy=self.update if moves else None,
        )
        if self.basis.side == LEFT and finite:
            self.find_empty_behind()
        return finite

    @property
    def is_taken_off(self) -> bool:
        """Return whether one pass can subtract the product: each number of a factor is of one row, and unrounded."""
        return self.is_known and self.basis.side == RIGHT and self.wire == self.work.dtype

    @property
    def is_known(self) -> bool:
        """Return whether the product is known before other ranks' factors are: no second round, no :attr:`empty`."""
        return not self.both and self.empty is None and self.work.device.type == "cpu"

    def round_factor(self, workers: int) -> None:
        """Round the factor as it will be read, in the dtype of the work; ``workers`` of them have a finite sum."""
        if self.wire != self.factor.dtype:
            limit = largest_summand(self.wire, workers)
            self.factor.copy_(self.factor.clamp_(-limit, limit).to(self.wire))

    def product(self) -> Product:
        """Return the product of basis and factor: of what this rank sends, or, once summed, of all ranks."""
        rows, factor = self.basis.rows, self.factor.to(self.work.dtype)
        return Product(rows, factor) if self.basis.side == LEFT else Product(factor, rows)

    def write_update(self, scale: float, scratch: torch.Tensor | None) -> None:
        """Write ``update = scale * product``. ``scratch``: (n, m), in the work's dtype, if the update's differs."""
        out = self.update if scratch is None else scratch
        bases.product(*self.product(), scale, out)
        if scratch is not None:
            self.update.copy_(scratch)


WIRES = {"auto": None, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class _State(State):
    """State of a message under way."""

    matrices: list[Matrix] = field(default_factory=list)
    # Matrices of which rows or columns may be left out, each with this rank's factor: they are committed in `wait`.
    uncommitted: list[tuple[Matrix, torch.Tensor]] = field(default_factory=list)
    is_full: bool = True  # a rank has set Flag.FULL, so nothing is left out
    riding: list[tuple[SegmentBuffers, torch.Tensor]] = field(default_factory=list)  # dense ones, with their sums
    tail: torch.Tensor | None = None  # numbers of the merged header, behind the first round's factors
    first: dense.Sum | None = None  # of the first round


class LowRankExchange(MultiRoundExchange):
    """All-reduce of thin factors of each matrix: of both, or of one in each step.

    1. Each rank projects its matrices on the bases that all ranks have in common, as soon as they are ready
       (:meth:`prepare`). One all-reduce adds up these factors, under backward, with control numbers behind them.
       Dense segments of the same dtype share the message, as they are.
    2. Where both factors are sent, the rows of the sum are made orthonormal, each rank projects its matrices on them,
       and a second all-reduce adds up these factors.
    3. The update is the product of the two factors: of the basis and the sum, or of the two that were sent. The last
       sum, made orthonormal, is the basis of the next step.

    A rank commits the product of the basis and its own factor, so that its residual is orthogonal to the basis, and
    does not drift. Factors travel in ``context.wire``: "auto" is the gradient's dtype. Their quantisation error stays
    in the residual, too.
    """

    sparse = False
    factorises = True
    prepares = Kind.LOW_RANK

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context)
        assert context.store.bases is not None
        self.bases: Bases = context.store.bases
        self.ordered, self.keeps = context.ordered, context.store.has_residual or context.feedback
        self.wire = WIRES[context.wire]
        # Else something is sent after the first handle.
        self.can_poll = self.bases.compressor.alternates and not self.ordered
        self.carries_dense = self.wire is None and context.predivide == 1.0
        self._projected: dict[str, Matrix] = {}  # by name, of tensors in messages that have not started
        self._alone: dict[Slot, Segment] = {}  # the segment of one tensor

    # -- 1. factors leave -----------------------------------------------------------------------------------------

    def prepare(self, slot: Slot, work: torch.Tensor | None, step: int) -> None:
        """Project one tensor of a message to come on its basis; commit the product if no second factor follows."""
        assert work is not None
        self._project(slot, work, self.store.update_of(slot))

    def _project(self, slot: Slot, work: torch.Tensor, update: torch.Tensor) -> None:
        """Project one tensor on its basis, for :meth:`prepare`. ``work``, ``update``: in the tensor's shape, or 1-D."""
        matrix = self._matrix(slot, work, update)
        matrix.project()
        if work.device.type == "cpu":
            matrix.find_empty_behind()
        self._keep_projected(matrix, taken_off=False)

    def add_and_prepare(
        self,
        slot: Slot,
        work: torch.Tensor,
        update: torch.Tensor,
        residual: torch.Tensor,
        gradient: torch.Tensor,
        *,
        moves: bool,
    ) -> bool | None:
        """Add up and project in one pass over memory, and commit in it where that is possible."""
        if gradient.layout is not torch.strided or gradient.shape != work.shape or not gradient.is_contiguous():
            return None  # the pass that only adds up raises the error
        if work.device.type != "cpu":
            return None
        matrix = self._matrix(slot, work, update)
        finite = matrix.add_and_project(residual, gradient, moves=moves)
        if finite:
            self._keep_projected(matrix, taken_off=matrix.is_taken_off)
        return finite

    def _matrix(self, slot: Slot, work: torch.Tensor, update: torch.Tensor) -> Matrix:
        """Return the matrix of a tensor, not projected yet. ``work``, ``update``: in its shape."""
        segment = self._alone.get(slot)
        if segment is None:
            segment = self._alone[slot] = Segment(slot.tensor_class, (slot,))
        shape, basis = bases.matrix_shape(slot.shape), self.bases.of(slot)
        room, both = self._room(slot, shape, basis), self.bases.sends_both(slot)
        return Matrix(segment, work.view(shape), update.view(shape), basis, room, self.wire_of(slot), both)

    def _room(self, slot: Slot, shape: Sequence[int], basis: Basis) -> torch.Tensor:
        """Return a buffer for the factor, (r, length), of a matrix of ``shape`` that a basis gives."""
        rank, length = len(basis.rows), shape[0 if basis.other_side == LEFT else 1]
        key = ("factor", slot.name, basis.side)
        return self.keep(key, rank * length, basis.rows.dtype, basis.rows.device).view(rank, length)

    def _keep_projected(self, matrix: Matrix, taken_off: bool) -> None:
        """Keep a projected tensor for its message; commit it if its product is known, unless ``taken_off``."""
        matrix.round_factor(self.comm.size)
        if matrix.is_known and not taken_off:
            self.store.subtract_sent(matrix.segment, None, matrix.product())
        self._projected[matrix.slot.name] = matrix

    def wire_of(self, slot: Slot) -> torch.dtype:
        """Return the dtype in which the tensor's factors travel."""
        return self.wire or slot.tensor_class.dtype

    def start(
        self, name: str, loads: Sequence[SegmentBuffers], offers: Sequence[Selection | None], control: RoundHeader
    ) -> InFlight:
        """Collective. Send the factors of the first round, and the dense segments that share the message."""
        state = _State()
        for load in loads:
            if load.segment.tensor_class.kind is Kind.LOW_RANK:
                for slot in load.segment.slots:
                    if slot.name not in self._projected:
                        self._project(slot, _part(load.work, load, slot), _part(load.update, load, slot))
                    state.matrices.append(self._projected.pop(slot.name))
        riding = [load for load in loads if load.segment.tensor_class.kind is not Kind.LOW_RANK]
        dtype, device = self.wire_of(loads[0].segment.slots[0]), loads[0].work.device
        empty = None  # rows on a device, of which it is not known whether there are any
        if device.type != "cpu":
            empty = _find_empty_on_device([matrix for matrix in state.matrices if not matrix.both])
        state.uncommitted = [(matrix, matrix.factor) for matrix in state.matrices if matrix.empty is not None]
        control, overflows = _with_overflows(control, state.matrices)
        if not state.uncommitted:
            control = replace(control, flags=control.flags | Flag.FULL)
        tail = tail_of(control, dtype, device)
        if empty is not None:
            torch.logical_not(empty.any(), out=tail[place_of(Flag.FULL)])
        parts = [*(matrix.factor.view(-1) for matrix in state.matrices), *(load.work for load in riding), tail]
        state.first, views = self._send(name, parts, dtype)
        for load in riding if self.keeps else ():  # once it is in the message
            self.store.subtract_sent(load.segment, None, load.work.to(load.segment.tensor_class.dtype))
        for matrix, view in zip(state.matrices, views, strict=False):
            matrix.factor = view.view_as(matrix.factor)
        state.riding = list(zip(riding, views[len(state.matrices) : -1], strict=True))
        state.tail = views[-1]
        sent = sum(matrix.factor.numel() for matrix in state.matrices) + sum(load.segment.numel for load in riding)
        message = state.first.message
        pending = InFlight(
            name, loads, control, state.first.handle, state.first.bytes, sent, message, message, state,
            overflows=overflows,
        )  # fmt: skip
        return self.schedule(pending) if any(matrix.both for matrix in state.matrices) else pending

    def _send(
        self, name: str, parts: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> tuple[dense.Sum, Sequence[torch.Tensor]]:
        """Collective. Start the sum of ``parts``, 1-D, in one message; return it, and a view of each part."""
        lengths = [part.numel() for part in parts]
        used = sum(lengths)
        length = used + (-used % self.comm.size if self.ordered else 0)  # whole shards
        message = self.keep(("message", name), length, dtype, parts[0].device)
        torch.cat([part.to(dtype) for part in parts], out=message[:used])
        received = self.keep(("received", name), length, dtype, message.device) if self.ordered else None
        views = torch.split(message[:used], lengths)
        return dense.start_sum(self.comm, message, received, name), views

    def arrived(self, pending: InFlight) -> bool:
        if pending.extra.phases is None:
            return not self.ordered and pending.handle.done()
        return super().arrived(pending)

    # -- 2. and are added up ----------------------------------------------------------------------------------------

    def wait(self, pending: InFlight) -> RoundHeader:
        """Collective. Wait for all sums; return the merged header, from the numbers behind the first ones."""
        state: _State = pending.extra
        if state.phases is not None:
            return super().wait(pending)
        control = self._wait_for_first(pending, state)
        for handle in self._commit_rest(pending):
            handle.wait(self.timeout)
        return control

    def _wait_for_first(self, pending: InFlight, state: _State) -> RoundHeader:
        """Collective. Wait for the sums of the first round, and return the merged header of all ranks."""
        assert state.first is not None and state.tail is not None
        dense.wait_for_sum(self.comm, state.first, self.timeout)
        control = decode(state.tail.tolist(), pending.control, pending.name)
        state.is_full = bool(control.flags & Flag.FULL)
        state.control = replace(control, flags=control.flags & ~Flag.FULL)
        return state.control

    def _commit_rest(self, pending: InFlight) -> Phases[None]:
        """Collective. Leave rows and columns that are zero on all ranks out of products, then commit the products.

        A basis of the last step need not be zero there. Ranks exchange which of theirs are zero only if each rank has
        some. Nothing is done in a round that will be repeated.
        """
        state: _State = pending.extra
        assert state.control is not None
        if state.control.flags & (Flag.REPLAN | Flag.NONFINITE):
            return
        if not state.is_full:
            matrices = [matrix for matrix in state.matrices if not matrix.both and bool(matrix.factor.any())]
            yield from self._leave_out_empty(pending, matrices)
        for matrix, own in state.uncommitted:
            self.store.subtract_sent(matrix.segment, None, replace(matrix, factor=own).product())

    def _leave_out_empty(self, pending: InFlight, matrices: Sequence[Matrix]) -> Phases[None]:
        """Collective. Leave out of each product the rows, or columns, that are empty on all ranks."""
        if not matrices:
            return
        lengths = [matrix.basis.rows.shape[1] for matrix in matrices]
        empty = [
            torch.zeros(length, dtype=torch.bool, device=matrix.work.device) if matrix.empty is None else matrix.empty
            for matrix, length in zip(matrices, lengths, strict=True)
        ]
        own = torch.empty(bits.bytes_of(sum(lengths), 1), dtype=torch.uint8, device=pending.message.device)
        bits.pack(torch.cat(empty).to(torch.uint8), 1, own)
        rows = own.new_empty(self.comm.size * own.numel())
        pending.count({"header": own.nbytes})
        yield self.comm.all_gather(rows, own, f"{pending.name}/empty rows")
        common = torch.stack([bits.unpack(row, 1, sum(lengths)) for row in rows.view(self.comm.size, -1)]).all(0)
        for matrix, lanes in zip(matrices, torch.split(common, lengths), strict=True):
            matrix.leave_out(lanes)

    def phases(self, pending: InFlight) -> Phases[None]:
        """Collective. Send the second factors, projected on the first ones; nothing, if the round will be repeated."""
        state: _State = pending.extra
        if self._wait_for_first(pending, state).flags & (Flag.REPLAN | Flag.NONFINITE):
            return
        yield from self._commit_rest(pending)
        matrices = [matrix for matrix in state.matrices if matrix.both]
        firsts = [matrix.factor.to(matrix.work.dtype, copy=True) for matrix in matrices]
        bases.orthonormalize(firsts)
        for matrix, rows in zip(matrices, firsts, strict=True):
            matrix.basis = Basis(matrix.basis.other_side, rows)
            matrix.factor = self._room(matrix.slot, matrix.work.shape, matrix.basis)
            matrix.project()
            matrix.round_factor(self.comm.size)
        dtype = pending.message.dtype
        total, views = self._send(f"{pending.name}/second", [matrix.factor.view(-1) for matrix in matrices], dtype)
        for matrix, view in zip(matrices, views, strict=True):
            # While it travels: the message is summed in place, not the factor.
            self.store.subtract_sent(matrix.segment, None, matrix.product())
            matrix.factor = view.view_as(matrix.factor)
        pending.count({"plain": total.bytes})
        pending.elements += sum(view.numel() for view in views)
        yield total.handle
        dense.wait_for_sum(self.comm, total, self.timeout)

    # -- 3. into an update ------------------------------------------------------------------------------------------

    def finish(self, pending: InFlight) -> None:
        state: _State = pending.extra
        for load, total in state.riding:
            torch.mul(total, self.scale, out=load.update)
        for matrix in state.matrices:
            scratch = None
            if matrix.update.dtype != matrix.work.dtype:
                scratch = self.keep(("product",), matrix.work.numel(), matrix.work.dtype, matrix.work.device)
                scratch = scratch.view_as(matrix.work)
            matrix.write_update(self.scale, scratch)
        assert state.control is not None
        slots = [slot for load in pending.loads for slot in load.segment.slots]
        self._stage(state.matrices, {slot for slot, used in zip(slots, state.control.used, strict=True) if used})

    def _stage(self, matrices: Sequence[Matrix], used: Collection[Slot]) -> None:
        """Stage the bases of the next step. Where the sum was zero, the old basis is dropped: it may miss the matrix.

        Where it overflowed, and where it was zero because no rank ``used`` the tensor, the old basis stays.
        """
        largest = torch.stack(torch._foreach_norm([matrix.factor for matrix in matrices], torch.inf)).tolist()
        staged = []
        for matrix, most in zip(matrices, largest, strict=True):
            if most == 0.0 and matrix.slot in used:
                self.bases.drop(matrix.slot)
            elif 0.0 < most < torch.inf and matrix.both and self.bases.keeps_first(matrix.slot):
                self.bases.stage(matrix.slot, matrix.basis)
            elif 0.0 < most < torch.inf:
                staged.append(matrix.factor.to(matrix.work.dtype, copy=True))
                self.bases.stage(matrix.slot, Basis(matrix.basis.other_side, staged[-1]))
        bases.orthonormalize(staged)


def _with_overflows(control: RoundHeader, matrices: Sequence[Matrix]) -> tuple[RoundHeader, list[str]]:
    """Return ``control``, flagged if a factor is not finite, and the names of the tensors of such factors.

    A device is not waited for: there `finite` has the flag, and no names are known.
    """
    if matrices[0].factor.device.type != "cpu":
        whole = torch.cat([matrix.factor.view(-1) for matrix in matrices])
        good = torch.linalg.vector_norm(whole, torch.inf) < torch.inf
        return replace(control, finite=good if control.finite is None else control.finite & good), []
    names = [matrix.slot.name for matrix in matrices if not is_finite(matrix.factor)]
    return replace(control, flags=control.flags | Flag.NONFINITE) if names else control, names


def _find_empty_on_device(matrices: Sequence[Matrix]) -> torch.Tensor | None:
    """Set what is empty of matrices on a device, and return it of all of them, 1-D; None: there are no matrices."""
    if not matrices:
        return None
    basis_rows = [matrix.basis.rows for matrix in matrices]
    sides, works = [matrix.basis.side for matrix in matrices], [matrix.work for matrix in matrices]
    empty = bases.empty_lanes_on_device(sides, basis_rows, works)
    for matrix, lanes in zip(matrices, torch.split(empty, [basis.shape[1] for basis in basis_rows]), strict=True):
        matrix.empty = lanes
    return empty


def _part(flat: torch.Tensor, load: SegmentBuffers, slot: Slot) -> torch.Tensor:
    """Return one tensor's slice of a segment's buffer, 1-D: a view."""
    start = slot.offset - load.segment.start
    return flat[start : start + slot.numel]
