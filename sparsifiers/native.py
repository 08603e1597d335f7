# SPDX-License-Identifier: Apache-2.0
"""Compiled loops of csrc/*.c, if they were built: one pass over memory, where numpy and torch need several.

All of it is optional. Without a compiler at installation, with AGMERGE_KERNEL=off in the environment, or for a tensor
that the loops cannot read, a function says that it has done nothing: it returns False or None. Its caller then takes
numpy or torch, with the same bits. AGMERGE_KERNEL=baseline, avx2 or avx512 (on arm64 baseline or neon) names the best
instruction set that the loops may use. ctypes releases the GIL during each call, so other threads run meanwhile.

In order: the table of loops, the library, and functions that call the loops, by subject. Those of quantizers
are called in `sparsifiers.quantising.base`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The table: each loop with its arguments, in the order that C has.

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # dtypes of gradients, by their number in C
TAKEN_OFF, ALONE = 3, -1  # in place of such a number: float32 that is subtracted; no gradient at all
LONG, INT, FLOAT, POINTER = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p
# Kinds of tensors, as bytes of an element by dtype.
F32, F64, I32, U8 = ({one: one.itemsize} for one in (torch.float32, torch.float64, torch.int32, torch.uint8))
GRADIENT = {one: one.itemsize for one in KINDS}


class Loop:
    """Function of the library, with the kinds of its arguments. A tensor may be None, which C receives as 0."""

    table: ClassVar[list[Loop]] = []

    def __init__(self, name: str, returns: Any = INT, **arguments: Any) -> None:
        self.name, self._returns, kinds = f"kernel_{name}", returns, list(arguments.values())
        self._types = [POINTER if isinstance(kind, dict) else kind for kind in kinds]
        self._tensors = [(place, kind) for place, kind in enumerate(kinds) if isinstance(kind, dict)]
        Loop.table.append(self)

    def declare(self, found: ctypes.CDLL) -> None:
        """Tell ctypes about the function in a library; AttributeError if there is none of this name."""
        function = getattr(found, self.name)
        function.restype, function.argtypes = self._returns, self._types

    def checked(self, *arguments: Tensor | float | None) -> list[Any] | None:
        """Return the arguments as C reads them; None if it cannot read a tensor, or there is no library."""
        given: list[Any] = list(arguments)
        for place, sizes in self._tensors:
            tensor = given[place]
            if tensor is None:
                continue
            size = sizes.get(tensor.dtype)
            # device.type takes several times as long as is_cpu
            if size is None or not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg():
                return None
            given[place] = address = tensor.data_ptr()
            if address % size:
                return None
        return given if library is not None else None

    def run(self, given: Sequence[Any]) -> int:
        """Call the function with arguments that are `checked`; return its result, 0 if it has none."""
        return getattr(library, self.name)(*given) or 0

    def __call__(self, *arguments: Tensor | float | None) -> int | None:
        """Check the arguments and run; None, with nothing done, where `checked` returns None."""
        given = self.checked(*arguments)
        return None if given is None else self.run(given)


NOTES = {"notes": POINTER, "parts": LONG}  # groups of arguments that several have
LISTS = {"indices": POINTER, "values": POINTER, "counts": POINTER, "at": POINTER, "lists": LONG, "scale": FLOAT}
SENDERS = {"messages": POINTER, "keys": POINTER, "firsts": POINTER, "senders": LONG}
SUM = {"sum": F32, "residual": F32, "gradient": GRADIENT, "kind": INT, "n": LONG, "m": LONG}
SCANNED = {"positions": POINTER, "keys": POINTER, "room": LONG, "held": POINTER}

SET_LEVEL = Loop("set_level", level=INT)
# lists of keys
SCAN = Loop("scan", LONG, bits=POINTER, start=LONG, n=LONG, mask=INT, floor=INT, **SCANNED)
CUT = Loop("cut", positions=POINTER, keys=POINTER, held=LONG, k=LONG, scratch=POINTER)
NTH = Loop("nth", keys=POINTER, n=LONG, k=LONG, scratch=POINTER)
SAMPLE = Loop("sample", None, bits=POINTER, n=LONG, m=LONG, mask=INT, keys=POINTER)
ROWS = Loop(
    "rows", None, table=POINTER, rows=LONG, length=LONG, mask=INT, quotas=POINTER, scratch=POINTER, indices=POINTER
)
COLUMNS_SCRATCH = Loop("columns_scratch", LONG, length=LONG, columns=LONG, stride=LONG, count=LONG, most=LONG)
COLUMNS = Loop(
    "columns", table=POINTER, length=LONG, columns=LONG, stride=LONG, mask=INT, quotas=POINTER, count=LONG, most=LONG,
    scratch=POINTER, indices=POINTER,
)  # fmt: skip
# work
ADD = Loop("add", work=F32, copy=F32, residual=F32, gradient=GRADIENT, n=LONG, factor=FLOAT, kind=INT, **NOTES)
MOMENTUM = Loop(
    "momentum", work=F32, copy=F32, residual=F32, gradient=GRADIENT, before=F32, after=F32, n=LONG, factor=FLOAT,
    nesterov=INT, kind=INT, **NOTES,
)  # fmt: skip
SQUARES = Loop("squares", ctypes.c_double, values=GRADIENT, n=LONG, kind=INT)
# entries of messages
COMMIT = Loop("commit", work=F32, n=LONG, indices=I32, sent=F32, count=LONG)
TAKE = Loop("take", work=F32, momentum=F32, n=LONG, indices=I32, values=F32, count=LONG)
MASK = Loop("mask", momentum=F32, n=LONG, indices=I32, sent=F32, count=LONG)
SCATTER = Loop("scatter", total=F32, n=LONG, indices=I32, values=F32, count=LONG, scale=FLOAT)
FIT = Loop("fit", indices=POINTER, count=LONG, least=LONG, length=LONG)
CHECKSUM = Loop("checksum", ctypes.c_uint64, data=U8, n=LONG)
BLOCKS_ENCODE = Loop("blocks_encode", indices=I32, count=LONG, capacity=LONG, low=INT, last=LONG, out=U8)
BLOCKS_DECODE = Loop("blocks_decode", data=U8, count=LONG, capacity=LONG, low=INT, last=LONG, indices=I32)
VALUES_ENCODE = Loop("values_encode", None, values=F32, n=LONG, used=LONG, width=INT, scales=F32, codes=U8, read=F32)
VALUES_DECODE = Loop("values_decode", None, scales=F32, codes=U8, n=LONG, width=INT, read=F32)
# updates
WRITE_SUM = Loop("write_sum", total=F32, n=LONG, **LISTS)
TAKE_IN = Loop("take_in", base=F32, parameter=F32, n=LONG, first=LONG, **LISTS, own=I32, sent=F32, count=LONG)
# records of quantizers
QUANTIZE = Loop(
    "quantise", None, values=GRADIENT, less=F32, n=LONG, kind=INT, number=INT, size=LONG, key=LONG, first=LONG, out=U8,
    squares=F64,
)  # fmt: skip
ADD_QUANTIZED = Loop(
    "add_quantised", None, **SENDERS, number=INT, size=LONG, scale=FLOAT, out=GRADIENT, n=LONG, kind=INT
)
QUANTIZE_SUM = Loop(
    "quantise_sum", None, **SENDERS, number=INT, size=LONG, scale=FLOAT, second=INT, key=LONG, first=LONG, out=U8,
    blocks=LONG,
)  # fmt: skip
MOVE = Loop(  # of `sparsifiers.quantising.moving`
    "move", None, number=INT, runs=POINTER, sent=POINTER, count=LONG, rows=U8, row_bytes=LONG, keys=POINTER,
    senders=LONG, scale=FLOAT, message=U8, key=LONG, factor=FLOAT, own=LONG, addresses=POINTER, factors=POINTER,
)  # fmt: skip
# thin factors, for `sparsifiers.thin_factors`
PRODUCT = Loop("product", None, left=F32, n=LONG, right=F32, m=LONG, r=LONG, scale=FLOAT, out=F32)
PROJECT_ON_RIGHT = Loop("project_on_right", **SUM, right=F32, r=LONG, out=F32, off=INT, copy=F32)
PROJECT_ON_LEFT = Loop("project_on_left", **SUM, left=F32, r=LONG, out=F32, copy=F32)
TAKE_OFF = Loop("take_off", None, matrix=F32, n=LONG, m=LONG, left=F32, right=F32, r=LONG)
ORTHONORMALIZE = Loop("orthonormalize", None, factors=POINTER, sizes=POINTER, count=LONG, scratch=POINTER)


# The library.

VARIABLE = "AGMERGE_KERNEL"
OFF = "off"
ARM = platform.machine().lower() in ("aarch64", "arm64")
LEVELS = ("baseline", "neon") if ARM else ("baseline", "avx2", "avx512")  # the instruction sets, by number
INTERFACE = 14  # of kernel.c; a library that was built from another version is not used


def load(folder: Path) -> ctypes.CDLL | None:
    """Return the library that was built into `folder`; None if there is none, or none of this version."""
    for suffix in sorted(EXTENSION_SUFFIXES, key=len):  # one for all Pythons before one, left by an earlier version
        path = folder / f"_kernel{suffix}"
        if not path.exists():
            continue
        try:
            found = ctypes.CDLL(str(path))
            if found.kernel_init() != INTERFACE:
                continue
            for loop in Loop.table:
                loop.declare(found)
        except (OSError, AttributeError):  # built for another machine, or no library of ours
            continue
        return found
    return None


def chosen(setting: str, folder: Path) -> ctypes.CDLL | None:
    """Return the library in `folder`, at most at the level that is named ("": any); None if "off" or not built."""
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
    return SET_LEVEL(level) or 0


def reads(bits: NDArray[Any]) -> TypeGuard[Keys]:
    """Return whether the loops can read this array: plain numpy, int32 in C order. False without a library."""
    return (
        library is not None
        and type(bits) is np.ndarray
        and bits.dtype == np.int32
        and bits.flags.c_contiguous
        and bits.flags.aligned
    )


def plain(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether the loops can read these tensors: of that dtype, contiguous and in CPU memory."""
    for tensor in tensors:
        good = tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()
        if not good or tensor.data_ptr() % dtype.itemsize:
            return False
    return library is not None


def address(array: NDArray[Any]) -> int:
    """Return where the elements of an array begin."""
    return array.ctypes.data


# Lists of keys: magnitudes as integers, see `sparsifiers.largest`.

Keys = NDArray[np.int32]
BLOCK = 1024  # elements that `scan` reads between two looks at the room that is left
KEPT = 1 << 20  # slots of scratch that a thread keeps for its next search, 12 MB at most
_thread = threading.local()


def largest(bits: NDArray[Any], mask: int, k: int, samples: int, rank: int) -> Keys | None:
    """Return the positions of the k largest keys `bits & mask`, ascending, of equals the lowest; None: numpy must.

    A floor below the rank-th largest of so many samples, or none if rank exceeds these, says only how fast that is.
    """
    found = largest_above(bits, mask, k, sampled_floor(bits, mask, samples, rank) if reads(bits) else -1, k)
    if found is not None and len(found[0]) < k:  # the sample was unlucky; every key is above -1
        found = largest_above(bits, mask, k, -1, k)
    return None if found is None else found[0]


def sampled_floor(bits: Keys, mask: int, samples: int, rank: int) -> int:
    """Return a key just below the rank-th largest of so many samples; -1, which all exceed, if there are too few."""
    return -1 if rank > samples else nth_largest(sample(bits, mask, samples), rank) - 1


def largest_above(bits: NDArray[Any], mask: int, k: int, floor: int, most: int) -> tuple[Keys, int] | None:
    """Return the positions of the k largest above the floor, as `largest`, and how many are: at most `most` + 1."""
    if not reads(bits):
        return None
    n = len(bits)
    # Where the loop stops early, more than `most` >= k are held. After a cut a block fits, so every turn gets on.
    positions, keys, scratch = workspace(min(n, most + max(k, 8 * BLOCK)))
    held = stop = count = 0
    while stop < n:
        stop, held = scan(bits, stop, mask, floor, positions, keys, held)
        count = max(count, held)
        if held > k:
            floor, held = cut(positions, keys, held, k, scratch), k
    return positions[:held].copy(), min(count, most + 1)


def workspace(slots: int) -> Keys:
    """Return scratch of this thread, int32[3, slots], with anything in it."""
    # Memory fresh from the system costs a fault a page, a tenth of the scan; so a thread keeps its last scratch.
    kept: Keys | None = None if slots > KEPT else getattr(_thread, "workspace", None)
    if kept is None or kept.shape[1] < slots:
        kept = np.empty((3, slots), dtype=np.int32)
        if slots <= KEPT:
            _thread.workspace = kept
    return kept[:, :slots]


def scan(bits: Keys, start: int, mask: int, floor: int, positions: Keys, keys: Keys, held: int) -> tuple[int, int]:
    """Append positions and keys of the elements of `bits` from `start` on that have a key above the floor.

    Returns where it stopped, at len(bits) or where the next BLOCK of elements might not fit, and how many are held.
    """
    count = ctypes.c_int64(held)
    found = address(positions), address(keys), len(keys), ctypes.byref(count)
    return SCAN.run((address(bits), start, len(bits), mask, floor, *found)), count.value


def cut(positions: Keys, keys: Keys, held: int, k: int, scratch: Keys) -> int:
    """Keep the k largest of the first `held` keys with their positions, in order, of equals the first.

    1 <= k <= held <= len(keys), as long as scratch. Returns the smallest key kept.
    """
    return CUT.run((address(positions), address(keys), held, k, address(scratch)))


def nth_largest(keys: Keys, k: int) -> int:
    """Return the k-th largest of keys >= 0, see `reads`; 1 <= k <= len(keys)."""
    scratch = np.empty(len(keys), dtype=np.int32)
    return NTH.run((address(keys), len(keys), k, address(scratch)))


def sample(bits: Keys, mask: int, m: int) -> Keys:
    """Return bits[largest.places(len(bits), m)] & mask, int32[m]; bits: see `reads`, 1 <= m <= len(bits)."""
    keys = np.empty(m, dtype=np.int32)
    SAMPLE.run((address(bits), len(bits), m, mask, address(keys)))
    return keys


# Work, and what is noted of it. Sums are written past the caches, by one thread; several of torch's are faster.

STREAMED = 1 << 16  # elements from which `add` is faster than torch (measured)


class Noting(Protocol):
    """Object that takes note of the largest elements that a loop writes."""

    def begin(self) -> tuple[int, int]:
        """Return the address and number of `struct notes` of kernel_memory.c; (0, 0): there is nothing to note."""

    def end(self) -> None:
        """Keep the notes taken since :meth:`begin`."""

    def forget(self) -> None:
        """Forget the notes: the elements are written again, and not by a loop."""


def add(
    work: Tensor, residual: Tensor, gradient: Tensor, factor: float = 1.0, copy: Tensor | None = None,
    noting: Noting | None = None,
) -> bool | None:  # fmt: skip
    """Write work = factor * residual + gradient past the caches, and return whether all is finite.

    Bit for bit as torch.mul and torch.add. ``copy``: fp32, becomes the gradient, an fp32 one, in the same pass.
    ``noting``: takes note of the largest of work, likewise. None: torch must do it. Shapes are equal, and outputs share
    no storage with the others.
    """
    if not _streams(gradient, copy):
        return None
    return _noted(noting, ADD, work, copy, residual, gradient, work.numel(), factor, KINDS[gradient.dtype])


def difference(work: Tensor, end: Tensor, begin: Tensor, noting: Noting | None = None) -> bool | None:
    """Write work = end - begin past the caches, bit for bit as torch.sub, and return whether all is finite.

    None: torch must do it. Shapes are equal, and work shares no storage with the others. ``noting``: see `add`.
    """
    if begin.dtype != torch.float32 or not _streams(begin, None):
        return None
    return _noted(noting, ADD, work, None, end, begin, work.numel(), 1.0, TAKEN_OFF)


def momentum(
    work: Tensor, residual: Tensor, gradient: Tensor, before: Tensor, after: Tensor, factor: float, nesterov: bool,
    copy: Tensor | None = None, noting: Noting | None = None,
) -> bool | None:  # fmt: skip
    """Write after = factor * before + gradient and work = residual + after; return whether all of work is finite.

    In Nesterov's form after = factor * (before + gradient) and work = (gradient + after) + residual. ``copy``,
    ``noting`` and None: see `add`. Shapes are equal, and outputs share no storage with the others.
    """
    if not _streams(gradient, copy):
        return None
    sizes = work.numel(), factor, nesterov, KINDS[gradient.dtype]
    return _noted(noting, MOMENTUM, work, copy, residual, gradient, before, after, *sizes)


def _streams(gradient: Tensor, copy: Tensor | None) -> bool:
    """Return whether a gradient of this dtype and size is better read past the caches; only float32 is copied."""
    fits = gradient.dtype in KINDS and (copy is None or gradient.dtype == torch.float32)
    return fits and gradient.numel() >= STREAMED and torch.get_num_threads() == 1


def _noted(noting: Noting | None, loop: Loop, *arguments: Tensor | float | None) -> bool | None:
    """Run a loop, and return whether all that it has written is finite; None, with nothing done, if it cannot."""
    given = loop.checked(*arguments)
    if given is None:
        return None
    endless = getattr(library, loop.name)(*given, *((0, 0) if noting is None else noting.begin()))
    if noting is not None:
        noting.end()
    return not endless


def squares(values: Tensor) -> float | None:
    """Return the sum of the squares of values, in float64 and in a fixed order; None: torch must do it."""
    return SQUARES(values, values.numel(), KINDS.get(values.dtype))


# Entries of messages: indices, int32[m], and values there, fp32[m], of a vector, fp32[n]. An index outside of it raises
# IndexError, with nothing done.

SCATTERED = 1 << 13  # indices from which `subtract` is faster than torch (measured)


def subtract(work: Tensor, indices: Tensor, sent: Tensor) -> bool:
    """Subtract: work[indices] -= sent, an index that occurs again included; False: torch must do it."""
    count = indices.numel()
    fits = count >= SCATTERED and _are_entries(indices, sent, work)
    return fits and _is_done(COMMIT(work, work.numel(), indices, sent, count), "commit", work)


def write_and_subtract(work: Tensor, indices: Tensor, values: Tensor, momentum: Tensor | None = None) -> bool:
    """Write values = work[indices] and subtract them: work[indices] -= values, and momentum[indices] *= values == 0.

    Each index occurs once. False: torch must do it.
    """
    fits = _are_entries(indices, values, work) and (momentum is None or momentum.shape == work.shape)
    return fits and _is_done(TAKE(work, momentum, work.numel(), indices, values, indices.numel()), "take", work)


def mask(momentum: Tensor, indices: Tensor, sent: Tensor) -> bool:
    """Write momentum[indices] *= sent == 0, an index that occurs again included; False: torch must do it."""
    fits = _are_entries(indices, sent, momentum)
    return fits and _is_done(MASK(momentum, momentum.numel(), indices, sent, indices.numel()), "clear", momentum)


def scatter(total: Tensor, indices: Tensor, values: Tensor, scale: float) -> bool:
    """Add: total[indices] += values * scale, all 1-D; False: torch must do it."""
    count = indices.numel()
    fits = values.numel() == count
    return fits and _is_done(SCATTER(total, total.numel(), indices, values, count, scale), "add at", total)


def _are_entries(indices: Tensor, values: Tensor, vector: Tensor) -> bool:
    """Return whether there are as many values as indices, of a vector."""
    return indices.dim() == vector.dim() == 1 and values.shape == indices.shape


def _is_done(outside: int | None, what: str, vector: Tensor) -> bool:
    """Return whether a loop has done its work; IndexError if it found an index outside."""
    if outside:
        raise IndexError(f"an index to {what} is outside [0, {vector.numel()})")
    return outside is not None


def ascends(indices: Keys, length: int) -> bool | None:
    """Return whether indices, int32[m], are ascending, unique and within [0, length); None: numpy must."""
    return bool(FIT(address(indices), len(indices), 0, length)) if reads(indices) else None


def checksum(data: Tensor) -> int:
    """Return the sum modulo 2**64, over the words w_i of 64 bits of `data`, uint8 on the host, of (2i+1) w_i."""
    compiled = CHECKSUM(data, data.numel())
    if compiled is not None:
        return compiled
    padded = np.zeros(-(-data.numel() // 8) * 8, dtype=np.uint8)
    padded[: data.numel()] = data.numpy()
    words = padded.view("<u8")
    with np.errstate(over="ignore"):
        return int((words * (2 * np.arange(len(words), dtype=np.uint64) + np.uint64(1))).sum(dtype=np.uint64))


def blocks_encode(indices: Tensor, count: int, capacity: int, low: int, last: int, out: Tensor) -> bool:
    """Write the first `count` of indices, int32, to `out`, uint8, as the codec Blocks does; False: the codec must.

    capacity: slots of the message; low: bits of an index inside its block; last: number of the last block.
    """
    fits = 0 <= count <= min(indices.numel(), capacity)
    return fits and BLOCKS_ENCODE(indices, count, capacity, low, last, out) == 0


def blocks_decode(data: Tensor, count: int, capacity: int, low: int, last: int) -> tuple[Tensor, bool] | None:
    """Read the first `count` indices that the codec Blocks wrote, int32[count], and return whether they can be right.

    None if Blocks must read them itself. For the arguments see `blocks_encode`.
    """
    if not 0 <= count <= capacity:
        return None
    indices = torch.empty(count, dtype=torch.int32)
    good = BLOCKS_DECODE(data, count, capacity, low, last, indices)
    return None if good is None else (indices, bool(good))


def values_encode(values: Tensor, used: int, width: int, scales: Tensor, codes: Tensor, read: Tensor) -> bool:
    """Write `scales`, `codes` and the values to be `read`, as `Steps` and `Signs` of agmerge do; False: these must.

    values: fp32 [m], 0 behind the first `used`. width: bits a value, 8, 4, 2 or 1. scales: fp32, one for each block of
    256 values, with a width of 2 two; codes: uint8[ceil(m * width / 8)]; read: fp32, of which the first m are written.
    """
    count = values.numel()
    fits = _have_room(count, width, scales, codes, read) and codes.numel() == -(-count * width // 8)
    return fits and VALUES_ENCODE(values, count, used, width, scales, codes, read) is not None


def values_decode(scales: Tensor, codes: Tensor, count: int, width: int, read: Tensor) -> bool:
    """Read the first `count` values that `values_encode` has written; False, with nothing done: torch must do it."""
    fits = _have_room(count, width, scales, codes, read)
    return fits and VALUES_DECODE(scales, codes, count, width, read) is not None


def _have_room(count: int, width: int, scales: Tensor, codes: Tensor, read: Tensor) -> bool:
    """Return whether there is room for so many values."""
    scaled, coded = -(-count // 256) * (1 + (width == 2)), -(-count * width // 8)
    return scales.numel() >= scaled and codes.numel() >= coded and read.numel() >= count


# Updates: sums of lists, each of indices, int32[m], ascending, and of values, fp32[m].

List = tuple[Tensor, Tensor]


def write_sum(total: Tensor, lists: Sequence[List], scale: float) -> bool:
    """Write total, fp32[n] = the sum of values * scale, list by list, 0 elsewhere, in one pass past the caches.

    False, with nothing done, for an index outside of [0, n) and for tensors of few elements, too.
    """
    if total.numel() < STREAMED or torch.get_num_threads() > 1 or not _are_lists(lists):
        return False
    given = _pointers(lists)
    return WRITE_SUM(total, total.numel(), *map(address, given), len(lists), scale) == 0


def takes_in(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `take_in` can handle tensors of this dtype and device."""
    return available() and dtype == torch.float32 and device.type == "cpu" and torch.get_num_threads() == 1


def take_in(base: Tensor, parameter: Tensor, first: int, lists: Sequence[List], scale: float, own: List) -> bool:
    """Subtract an update from base and parameter, 1-D fp32, in one pass: False, with nothing done, if torch must do it.

    The update is the sum of values * scale, list by list. own: indices and the values sent there: at these parameter =
    base - residual, where the residual is the old base - parameter, less these. Indices count from first.
    """
    if base.numel() != parameter.numel() or not _are_lists((*lists, own)):
        return False
    given = _pointers(lists)
    sizes = base.numel(), first, *map(address, given), len(lists), scale
    return TAKE_IN(base, parameter, *sizes, *own, own[0].numel()) == 0


def _are_lists(lists: Sequence[List]) -> bool:
    """Return whether the loops can read these lists."""
    return all([plain(i, dtype=torch.int32) and plain(v) and i.numel() == v.numel() for i, v in lists])


def _pointers(lists: Sequence[List]) -> tuple[NDArray[Any], ...]:
    """Return where indices and values of the lists begin, how many there are, and scratch: how far each was read."""
    indices, values = (np.array([pair[i].data_ptr() for pair in lists], dtype=np.uintp) for i in (0, 1))
    counts = np.array([pair[0].numel() for pair in lists], dtype=np.int64)
    return indices, values, counts, np.empty(len(lists), dtype=np.int64)
