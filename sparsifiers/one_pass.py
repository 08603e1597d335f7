"""Memories that kernels know: their rules, by which kernels add up many tensors in one pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sparsifiers.dgc_memory import DGCMemory
from sparsifiers.memories import Memory, NoMemory, Rate, Residual


class OnePass(NamedTuple):
    """Rule of `sparsifiers.gpu.compensate`, beside adding the gradient to the residual, where there is one."""

    momentum: Rate | None  # of gradients, in the form of deep gradient compression; None: there is none


def one_pass(memory: Memory, rates: Iterable[Rate | None]) -> OnePass | None:
    """Return the rule by which a kernel does a memory's `compensate`, for all of some tensors; None: no kernel can.

    rates: the optimizer's momentum of each.
    """
    rule = type(memory)._compensate
    if rule in (Residual._compensate, NoMemory._compensate):
        return OnePass(None)
    if isinstance(memory, DGCMemory) and rule is DGCMemory._compensate and memory.clipping is None:
        found = {memory.rate_of(rate) for rate in rates}
        if len(found) == 1:
            return OnePass(found.pop())
    return None


def clears_momentum(memory: Memory) -> bool | None:
    """Return whether a memory clears the momentum of sent coordinates, as kernels do; None: no kernel knows it."""
    if not memory.has_momentum or memory.averages:
        return False
    if isinstance(memory, DGCMemory) and type(memory).mask is DGCMemory.mask:
        return memory.masking
    return None
