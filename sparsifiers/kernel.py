# SPDX-License-Identifier: Apache-2.0
"""Call the compiled loops of kernel.c, if they were built: one pass, where numpy and torch need several.

All of it is optional. Without a compiler at installation, with AGMERGE_KERNEL=off in the environment, or for a tensor
that the loops cannot read, callers take their numpy or torch code, with the same bits.
AGMERGE_KERNEL=baseline, avx2 or avx512 (on arm64 baseline or neon) names the best instruction set that they may use,
where a processor has it.
ctypes releases the GIL during each call, so other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import platform
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

VARIABLE = "AGMERGE_KERNEL"
OFF = "off"
ARM = platform.machine().lower() in ("aarch64", "arm64")
LEVELS = ("baseline", "neon") if ARM else ("baseline", "avx2", "avx512")  # the instruction sets, by number
INTERFACE = 13  # of kernel.c; a library that was built from another version is not used
ROOM = 1 << 17  # slots of scratch that `rows_top` may take at any size
PANEL = 64  # columns that are searched together at least: four cache lines of each row
BLOCK = 1024  # elements that `scan` reads between two looks at the room that is left
STREAMED = 1 << 16  # elements from which `add` is faster than torch (measured)
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # dtypes of gradients, by their number in kernel.c
TAKEN_OFF = 3  # likewise, float32 that is subtracted

Keys = NDArray[np.int32]

_SIGNATURES: dict[str, tuple[Any, str]] = {  # result and arguments: p a pointer, l an int64_t, i an int, f a float
    "kernel_set_level": (ctypes.c_int, "i"),
    "kernel_scan": (ctypes.c_int64, "plliipplp"),
    "kernel_cut": (ctypes.c_int32, "ppllp"),
    "kernel_nth": (ctypes.c_int32, "pllp"),
    "kernel_sample": (None, "pllip"),
    "kernel_commit": (ctypes.c_int, "plppl"),
    "kernel_take": (ctypes.c_int, "pplppl"),
    "kernel_mask": (ctypes.c_int, "plppl"),
    "kernel_checksum": (ctypes.c_uint64, "pl"),
    "kernel_fit": (ctypes.c_int, "plll"),
    "kernel_add": (ctypes.c_int, "pppplfipl"),
    "kernel_momentum": (ctypes.c_int, "pppppplfiipl"),
    "kernel_write_sum": (ctypes.c_int, "plpppplf"),
    "kernel_take_in": (ctypes.c_int, "ppllpppplfppl"),
    "kernel_blocks_encode": (ctypes.c_int, "pllilp"),
    "kernel_blocks_decode": (ctypes.c_int, "pllilp"),
    "kernel_scatter": (ctypes.c_int, "plpplf"),
    "kernel_values_encode": (None, "pllippp"),
    "kernel_values_decode": (None, "pplip"),
    "kernel_quantise": (None, "pliilllpp"),
    "kernel_add_quantised": (None, "ppplilfpli"),
    "kernel_quantise_sum": (None, "ppplilfillpl"),
    "kernel_rows": (None, "pllippp"),
    "kernel_columns_scratch": (ctypes.c_int64, "lllll"),
    "kernel_columns": (ctypes.c_int, "plllipllpp"),
    "kernel_product": (None, "plpllfp"),
    "kernel_project_on_right": (ctypes.c_int, "pppillplpip"),
    "kernel_project_on_left": (ctypes.c_int, "pppillplpp"),
    "kernel_take_off": (None, "pllppl"),
    "kernel_orthonormalize": (None, "pplp"),
    "kernel_squares": (ctypes.c_double, "pli"),
}
_ARGUMENTS = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}


def load(folder: Path) -> ctypes.CDLL | None:
    """Return the library that was built into `folder`; None if there is none, or none of this version."""
    for suffix in sorted(EXTENSION_SUFFIXES, key=len):  # one for all Pythons before one, left by an earlier version
        path = folder / f"_kernel{suffix}"
        if not path.exists():
            continue
        try:
            library = ctypes.CDLL(str(path))
            if library.kernel_init() != INTERFACE:
                continue
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(library, name)
                function.restype = result
                function.argtypes = [_ARGUMENTS[kind] for kind in arguments]
        except (OSError, AttributeError):  # built for another machine, or no library of ours
            continue
        return library
    return None


def chosen(setting: str, folder: Path) -> ctypes.CDLL | None:
    """Return the library in `folder`, at the level that `setting` names at most ("": any); None if "off" or not built.

    Raises ``ValueError`` for a setting that is none of these.
    """
    if setting not in ("", OFF, *LEVELS):
        raise ValueError(f"{VARIABLE}={setting!r}: expected one of {', '.join((OFF, *LEVELS))}, or unset it")
    found = None if setting == OFF else load(folder)
    if found is not None and setting:
        found.kernel_set_level(LEVELS.index(setting))
    return found


library = chosen(os.environ.get(VARIABLE, ""), Path(__file__).parent)


def available() -> bool:
    """Return whether the compiled loops are in use."""
    return library is not None


def level() -> int:
    """Return the number of the instruction set in use; 0 without the library."""
    return 0 if library is None else ctypes.c_int.in_dll(library, "kernel_level").value


def names() -> tuple[str, ...]:
    """Return the names of the instruction sets that this machine has for the loops, the best last; () without these."""
    if library is None:
        return ()
    before = level()
    highest = set_level(len(LEVELS) - 1)
    set_level(before)
    return LEVELS[: highest + 1]


def set_level(level: int) -> int:
    """Use at most the instruction set of this number, for tests; return that now in use."""
    return 0 if library is None else int(library.kernel_set_level(level))


# -- lists of keys ------------------------------------------------------------------------------------------------


def reads(bits: NDArray[Any]) -> TypeGuard[Keys]:
    """Return whether the loops can read this array: plain numpy, int32 in C order. False without a library."""
    return (
        library is not None
        and type(bits) is np.ndarray
        and bits.dtype == np.int32
        and bits.flags.c_contiguous
        and bits.flags.aligned
    )


def scan(bits: Keys, start: int, mask: int, floor: int, positions: Keys, keys: Keys, held: int) -> tuple[int, int]:
    """Append positions and keys of the elements of `bits` from `start` on that have a key above the floor.

    bits: see `reads`; positions and keys: int32 of one length. Returns where it stopped and how many are held
    then: at len(bits), or where the next BLOCK of elements might not fit.
    """
    count = ctypes.c_int64(held)
    stop = loaded().kernel_scan(
        address(bits), start, len(bits), mask, floor, address(positions), address(keys), len(keys),
        ctypes.byref(count),
    )  # fmt: skip
    return int(stop), count.value


def cut(positions: Keys, keys: Keys, held: int, k: int, scratch: Keys) -> int:
    """Keep the k largest of the first `held` keys with their positions, in order, of equals the first.

    1 <= k <= held <= len(keys); scratch: as long. Returns the smallest key kept.
    """
    return int(loaded().kernel_cut(address(positions), address(keys), held, k, address(scratch)))


def nth_largest(keys: Keys, k: int) -> int:
    """Return the k-th largest of keys >= 0, see `reads`; 1 <= k <= len(keys)."""
    scratch = np.empty(len(keys), dtype=np.int32)
    return int(loaded().kernel_nth(address(keys), len(keys), k, address(scratch)))


def sample(bits: Keys, mask: int, m: int) -> Keys:
    """Return bits[topk_floor.places(len(bits), m)] & mask, int32[m]; bits: see `reads`, 1 <= m <= len(bits)."""
    keys = np.empty(m, dtype=np.int32)
    loaded().kernel_sample(address(bits), len(bits), m, mask, address(keys))
    return keys


def rows_top(table: Keys, mask: int, quotas: NDArray[np.int64], transposed: bool = False) -> Keys | None:
    """Return the indices in the flattened table of the quotas[r] largest keys `table & mask` of each row r, ascending.

    table: int32 [rows, length] that `reads` allows; if transposed [length, rows], of which column r is row r.
    quotas: int64[rows], each in [0, length]; ValueError for others.

    int32[quotas.sum()]; of equal keys in a row the first are taken. None for so few rows that one is better searched
    as a vector, and where columns have too many candidates, because the largest of most of them stand close
    together.
    """
    length, rows = table.shape if transposed else table.shape[::-1]
    quotas = np.ascontiguousarray(quotas, dtype=np.int64)
    if quotas.shape != (rows,) or (rows and not 0 <= quotas.min() <= quotas.max() <= length):
        raise ValueError(f"quotas of shape {quotas.shape} must be {rows} counts in [0, {length}]")
    room = max(ROOM, table.size // 4)
    if transposed:
        return _columns_top(table, mask, quotas, room)
    if 3 * length > room:
        return None
    indices = np.empty(int(quotas.sum()), dtype=np.int32)
    if len(indices):
        scratch = np.empty(3 * length, dtype=np.int32)
        loaded().kernel_rows(address(table), rows, length, mask, address(quotas), address(scratch), address(indices))
    return indices


def _columns_top(table: Keys, mask: int, quotas: NDArray[np.int64], room: int) -> Keys | None:
    # All columns together where there is room, otherwise in panels, with a sort of the results.
    length, columns = table.shape
    total, most = int(quotas.sum()), int(quotas.max(initial=0))
    indices = np.empty(total, dtype=np.int32)
    if total == 0:
        return indices
    needed = loaded().kernel_columns_scratch(length, columns, columns, total, most)
    panels = min(-(-needed // room), -(-columns // PANEL))
    width = -(-columns // panels // 16) * 16 if panels > 1 else columns
    held = 0
    for first in range(0, columns, width):
        part = quotas[first : first + width]
        count = int(part.sum())
        if count:
            scratch = np.empty(loaded().kernel_columns_scratch(length, len(part), columns, count, most), dtype=np.int32)
            status = loaded().kernel_columns(
                address(table) + 4 * first, length, len(part), columns, mask, address(part), count, most,
                address(scratch), address(indices) + 4 * held,
            )  # fmt: skip
            if status:
                return None
            indices[held : held + count] += first
            held += count
    if panels > 1:
        indices.sort()
    return indices


class Noting(Protocol):
    """Object that takes note of the largest elements that a loop writes."""

    def begin(self) -> tuple[int, int]:
        """Return the address and number of `struct notes` of kernel_memory.c; (0, 0): there is nothing to note."""

    def end(self) -> None:
        """Keep the notes taken since :meth:`begin`."""

    def forget(self) -> None:
        """Forget the notes: the elements are written again, and not by a loop."""


# -- tensors --------------------------------------------------------------------------------------------------------


def add(
    work: Tensor, residual: Tensor, gradient: Tensor, factor: float = 1.0, copy: Tensor | None = None,
    noting: Noting | None = None,
) -> bool | None:  # fmt: skip
    """Write work = factor * residual + gradient past the caches, and return whether all is finite.

    Bit for bit as torch.mul and torch.add. ``copy``: fp32, becomes the gradient, an fp32 one, in the same pass.
    ``noting``: takes note of the largest of work, likewise.
    None, with nothing done: torch must do it; several of its threads are faster than this one. The check of all of work
    costs nothing in the same pass. Shapes are equal, and outputs share no storage with the others.
    """
    if not _streams(gradient, work, residual, copy=copy):
        return None
    pointers = work.data_ptr(), 0 if copy is None else copy.data_ptr(), residual.data_ptr(), gradient.data_ptr()
    return _noted(noting, loaded().kernel_add, *pointers, work.numel(), factor, KINDS[gradient.dtype])


def subtract(work: Tensor, end: Tensor, begin: Tensor, noting: Noting | None = None) -> bool | None:
    """Write work = end - begin past the caches, bit for bit as torch.sub, and return whether all is finite.

    None: torch must do it. Shapes are equal, and work shares no storage with the others. ``noting``: see `add`.
    """
    if begin.dtype != torch.float32 or not _streams(begin, work, end):
        return None
    pointers = work.data_ptr(), 0, end.data_ptr(), begin.data_ptr()
    return _noted(noting, loaded().kernel_add, *pointers, work.numel(), 1.0, TAKEN_OFF)


def momentum(
    work: Tensor, residual: Tensor, gradient: Tensor, before: Tensor, after: Tensor, factor: float, nesterov: bool,
    copy: Tensor | None = None, noting: Noting | None = None,
) -> bool | None:  # fmt: skip
    """Write after = factor * before + gradient and work = residual + after; return whether all of work is finite.

    In Nesterov's form after = factor * (before + gradient) and work = (gradient + after) + residual. ``copy``,
    ``noting`` and None: see `add`. Shapes are equal, and outputs share no storage with the others.
    """
    if not _streams(gradient, work, residual, before, after, copy=copy):
        return None
    return _noted(
        noting, loaded().kernel_momentum,
        work.data_ptr(), 0 if copy is None else copy.data_ptr(), residual.data_ptr(), gradient.data_ptr(),
        before.data_ptr(), after.data_ptr(), work.numel(), factor, nesterov, KINDS[gradient.dtype],
    )  # fmt: skip


def _noted(noting: Noting | None, loop: Any, *arguments: float) -> bool:
    """Call a loop of kernel_memory.c, and return whether all that it has written is finite."""
    notes, parts = (0, 0) if noting is None else noting.begin()
    endless = loop(*arguments, notes, parts)
    if noting is not None:
        noting.end()
    return not endless


def _streams(gradient: Tensor, *kept: Tensor, copy: Tensor | None = None) -> bool:
    """Return whether these, and copy, are better read and written past the caches by one thread, which can do it."""
    if gradient.dtype not in KINDS or gradient.numel() < STREAMED or torch.get_num_threads() > 1:
        return False
    if copy is not None:
        return plain(gradient, copy, *kept)
    return plain(gradient, dtype=gradient.dtype) and plain(*kept)


def blocks_encode(indices: Tensor, count: int, capacity: int, low: int, last: int, out: Tensor) -> bool:
    """Write the first `count` of indices, int32, to `out`, uint8, as the codec Blocks does; False: the codec must.

    capacity: slots of the message; low: bits of an index inside its block; last: number of the last block.
    """
    fits = 0 <= count <= min(indices.numel(), capacity)
    if not (fits and plain(indices, dtype=torch.int32) and plain(out, dtype=torch.uint8)):
        return False
    return not loaded().kernel_blocks_encode(indices.data_ptr(), count, capacity, low, last, out.data_ptr())


def blocks_decode(data: Tensor, count: int, capacity: int, low: int, last: int) -> tuple[Tensor, bool] | None:
    """Read the first `count` indices that the codec Blocks wrote, int32[count], and return whether they can be right.

    None if Blocks must read them itself. For the arguments see `blocks_encode`.
    """
    if not (0 <= count <= capacity and plain(data, dtype=torch.uint8)):
        return None
    indices = torch.empty(count, dtype=torch.int32)
    good = loaded().kernel_blocks_decode(data.data_ptr(), count, capacity, low, last, indices.data_ptr())
    return indices, bool(good)


def scatter(total: Tensor, indices: Tensor, values: Tensor, scale: float) -> bool:
    """Add: total[indices] += values * scale, all 1-D; False, with nothing done, if torch must do it.

    total: fp32 [n]; indices: int32[m]; values: fp32 [m].

    IndexError, with nothing done, for an index outside [0, len(total)).
    """
    count = indices.numel()
    if values.numel() != count or not (plain(total, values) and plain(indices, dtype=torch.int32)):
        return False
    if loaded().kernel_scatter(total.data_ptr(), total.numel(), indices.data_ptr(), values.data_ptr(), count, scale):
        raise IndexError(f"an index to add at is outside [0, {total.numel()})")
    return True


def plain(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether the loops can read these tensors: of that dtype, contiguous and in CPU memory."""
    for tensor in tensors:
        if not (
            tensor.dtype == dtype
            and tensor.is_cpu  # device.type takes several times as long
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and tensor.data_ptr() % dtype.itemsize == 0
        ):
            return False
    return library is not None


def loaded() -> ctypes.CDLL:
    """Return the library, which there must be."""
    assert library is not None, "ask available(), reads() or the result first"
    return library


def address(array: NDArray[Any]) -> int:
    """Return where the elements of an array begin."""
    return array.ctypes.data
