# SPDX-License-Identifier: Apache-2.0
"""What a quantised all-reduce must come to, done by hand in one thread, and a model to train by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from references.two_phase import gathered as in_one_phase
from references.two_phase import two_phase
from torch import Tensor, nn
from torch.nn import functional as F

import sparsifiers
from agmerge.exchanges.quantised.exchange import SEED, number_of
from agmerge.step.config import is_small
from sparsifiers.quantising.base import block_size, blocks_in
from sparsifiers.quantising.draws import Draws, key_of, mixed
from support import digest, gradients

ROW, WORDS, CLASSES = 64, 40, 10


# -- by hand --------------------------------------------------------------------------------------------------------


def draws(name: str, step: int, phase: int, sender: int) -> Draws:
    return Draws(mixed(key_of(SEED, step, phase, sender) ^ number_of(name)))


def by_hand(
    name: str,
    tensors: Sequence[Tensor | None],
    step: int,
    quantiser: sparsifiers.Quantiser,
    *,
    summed: bool = False,
    gathered: bool = False,
    factor: float = 1.0,
) -> Tensor:
    """The update of one tensor by references/two_phase.py, from those of all ranks; None: a rank has none.

    ``summed``: no mean. ``gathered``: each rank reads all messages, as two do in any case. ``factor``: of values read,
    where the error is kept.
    """
    like = next(tensor for tensor in tensors if tensor is not None)
    if len(tensors) == 1:
        return like
    size, scale = block_size(like.shape), factor * (1.0 if summed else 1 / len(tensors))
    # Zeros fill up the last block. What is read of them may not be zero, and is quantised again with the rest.
    padding = -like.numel() % size
    whole = [F.pad((torch.zeros_like(like) if each is None else each).reshape(-1), (0, padding)) for each in tensors]
    zeros = torch.ones(len(whole[0]) // size, size, dtype=torch.bool)  # blocks' coordinates of which nobody has a value

    def quantise(values: Tensor, phase: int, sender: int, start: int) -> Tensor:
        own, blocks = draws(name, step, phase, sender).after(start // size), blocks_in(values.numel(), size)
        records = torch.zeros(blocks, quantiser.record_bytes(size), dtype=torch.uint8)
        of_all = zeros[start // size : start // size + blocks]
        read = torch.empty(values.numel())
        if phase:  # a sum that is 0 by chance is as any other value
            quantiser._encode_known(values.clone().view(-1, size), of_all & (values.view(-1, size) == 0), own, records)
        else:
            quantiser.encode(values[: like.numel() - start], size, own, records.view(-1))
            known = quantiser._zeros(records, own, size)
            of_all &= True if known is None else known
        quantiser.decode_sum([records.view(-1)], [own], size, 1.0, read)
        return read

    one_phase = gathered or len(tensors) == 2
    update = in_one_phase(whole, quantise, scale) if one_phase else two_phase(whole, quantise, scale, size)
    return update[: like.numel()].to(like.dtype).view(like.shape)


def plain(tensors: Sequence[Tensor | None], *, summed: bool = False) -> Tensor:
    """The mean of what travels as it is: added in rank order, in float32 or more, then multiplied."""
    like = next(tensor for tensor in tensors if tensor is not None)
    total = torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32))
    for tensor in tensors:
        total += torch.zeros_like(like) if tensor is None else tensor
    return total.mul_(1.0 if summed else 1 / len(tensors)).to(like.dtype)


# -- of an optimizer ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step of one rank: what backward passes have left in ``p.grad``, and what the exchange made of it, by name."""

    number: int  # committed exchanges before it
    gradients: Mapping[str, Tensor | None]
    updates: Mapping[str, Tensor | None]


def exchanged(model: nn.Module, optimizer: Any, passes: Callable[[], object], clip: float | None = None) -> Step:
    """A step: backward passes, the exchange, and the optimizer's own. ``clip``: to this norm, in between."""
    passes()
    before = gradients(model)
    optimizer.synchronize()
    number, after = optimizer._reducer.exchange.agreed.step, gradients(model)  # rank 0's, once ranks have agreed
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    with optimizer.skip_synchronize():
        optimizer.step()
    return Step(number, before, after)


def with_rest(step: Step, rest: Mapping[str, Tensor]) -> Step:
    """The same, where what was kept from before went with the gradients."""
    there = {name: kept for name, kept in rest.items() if kept.any()}
    sent = {n: there.get(n) if own is None else own + there.get(n, 0.0) for n, own in step.gradients.items()}
    return replace(step, gradients=sent)


def assert_by_hand(
    ranks: Sequence[Sequence[Step]], compression: str, whole: Callable[[str, Tensor], bool] = is_small, **options: bool
) -> int:
    """See that updates are those made by hand from what all ranks had; return how many tensors were quantised.

    ``whole``: which of them travel as they are, beside those of wide dtypes. ``options``: of :func:`by_hand`.
    """
    quantiser, quantised = sparsifiers.quantiser(compression), 0
    for steps in zip(*ranks, strict=True):
        assert len({step.number for step in steps}) == 1
        for name, update in steps[0].updates.items():
            given = [step.gradients[name] for step in steps]
            if all(gradient is None for gradient in given):
                assert all(step.updates[name] is None or not step.updates[name].any() for step in steps), name
                continue
            assert update is not None and len({digest([step.updates[name]]) for step in steps}) == 1, name
            if whole(name, update) or not quantiser.is_for(update.dtype):
                wanted = plain(given, summed=options.get("summed", False))
                rough = 1e-2 if update.dtype in (torch.bfloat16, torch.float16) else 1e-5
                torch.testing.assert_close(update, wanted, rtol=rough, atol=rough * float(wanted.abs().amax()))
            else:
                wanted = by_hand(name, given, steps[0].number, quantiser, **options)
                assert torch.equal(update, wanted), (steps[0].number, name)
                quantised += 1
    return quantised


# -- a model --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Rows of 64, 96 and 144 elements, in C order and channels_last, tied, unused and small ones.

    ``loss`` uses ``only_rank_1`` on rank 1 alone, and few rows of ``words``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, ROW)
        self.up, self.down = nn.Linear(ROW, 96), nn.Linear(96, ROW)
        self.tied = nn.Linear(96, ROW, bias=False)
        self.tied.weight = self.down.weight
        self.conv = nn.Conv2d(16, 8, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.only_rank_1, self.unused = nn.Linear(ROW, ROW, bias=False), nn.Linear(ROW, ROW)
        self.ten = nn.Parameter(torch.zeros(CLASSES))
        self.head = nn.Linear(ROW + 8, CLASSES, bias=False)  # 720 elements: small

    def loss(self, rank: int, step: int, n: int = 6) -> Tensor:
        """The loss on a batch that rank and step decide."""
        source = torch.Generator().manual_seed(1000 * step + rank)
        x = self.words(torch.randint(0, WORDS // 2, (n,), generator=source))
        wide = torch.tanh(self.up(x + torch.randn(n, ROW, generator=source)))
        images = x.view(n, 16, 2, 2).contiguous(memory_format=torch.channels_last)
        x = torch.tanh(self.down(wide) + self.tied(wide * wide))
        if rank == 1:
            x = x + torch.tanh(self.only_rank_1(x))
        logits = self.head(torch.cat([x, self.conv(images).mean(dim=(2, 3))], dim=1)) + self.ten
        return F.cross_entropy(logits, torch.randint(0, CLASSES, (n,), generator=source))
