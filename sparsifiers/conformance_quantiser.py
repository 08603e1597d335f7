# SPDX-License-Identifier: Apache-2.0
"""Check that a quantiser keeps the contract: its attributes, the bytes it writes, and the values that are read.

`sparsifiers.conformance.check` calls this for the name, the class or a factory of a quantiser.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import torch
from torch import Tensor

from sparsifiers.base import Kind, canonical
from sparsifiers.catalogue import memory, quantiser
from sparsifiers.conformance_reading import (
    DRAWS,
    check_noise,
    check_reading,
    decoded,
    encoded,
    gaussian,
    generators,
    inputs,
    require,
    same_bits,
    where_of,
)
from sparsifiers.largest import bit_view
from sparsifiers.quantising.base import Quantiser
from sparsifiers.quantising.draws import Draws, key_of

SIZES = (64, 128, 256)  # of blocks
Maker = Callable[..., Quantiser]


def check_quantiser(made_by: str | Maker, **options: object) -> None:
    """Raise AssertionError, with what was wrong and on which input, unless the quantiser keeps the contract.

    made_by: a registered name, or a factory: factory(**options).
    options: hyper-parameters, passed on to the quantiser; its own exceptions pass through.
    """

    def make(**chosen: object) -> Quantiser:
        return quantiser(made_by, **chosen) if isinstance(made_by, str) else made_by(**chosen)

    made = make(**options)
    _properties(made)
    for size in SIZES:
        _records(made, size)
        for name, values in inputs(size):
            _encoding(made, size, name, values)
        _draws(made, size)
        _neighbours(made, size)
        check_reading(made, size)
    check_noise(made)
    _options(make, options)
    _has_no_state(made)


def _properties(made: Quantiser) -> None:
    """Check name, options, kind, memory and figures."""
    where = type(made).__name__  # its text may be what is broken
    require(isinstance(made, Quantiser), "the factory made no sparsifiers.Quantizer", where)
    require(isinstance(made.name, str) and bool(made.name), f"its name is {made.name!r}", where)
    try:
        where = canonical(made.name, made.options())
    except TypeError as error:
        raise AssertionError(f"options() holds what is no plain value: {error}: {where}") from error
    require(" at 0x" not in repr(made), "repr holds an address, so it differs between ranks", where)
    require(made.kind is Kind.QUANTISED and made.kinds == {Kind.QUANTISED}, f"its kind is {made.kind}", where)
    require(made.compresses and not made.selects, "it must compress, and select nothing", where)
    require(made.density == 1.0, f"its density is {made.density}, and it selects nothing", where)
    require(isinstance(made.unbiased, bool), f"unbiased is {made.unbiased!r}, neither True nor False", where)
    require(made.bits > 0 and made.noise >= 0.0, f"bits are {made.bits!r}, noise is {made.noise!r}", where)
    try:
        keeps = memory(made.memory).has_residual
    except (TypeError, ValueError) as error:
        raise AssertionError(f"no memory can be made by the name in `memory`: {error}: {where}") from error
    needs = made.needs_feedback
    require(needs == keeps, f"needs_feedback is {needs}, with memory {made.memory!r}", where)


def _options(make: Maker, options: dict[str, object]) -> None:
    """Check that its options, a copy and a pickle are the same quantiser again, and that others are refused."""
    made = make(**options)
    again = {
        "options()": make(**made.options()),
        "copy.deepcopy": copy.deepcopy(made),
        "pickle": pickle.loads(pickle.dumps(made)),
    }
    values = gaussian(256)
    for how, other in again.items():
        require(repr(other) == repr(made), f"{how} makes {other!r} of it", repr(made))
        same = torch.equal(encoded(other, values, 64), encoded(made, values, 64))
        require(same, f"{how} makes one that writes other bytes", repr(made))
    try:
        make(**options, no_such_option=1)
    except TypeError:
        return
    raise AssertionError(f"an unknown option is accepted, which must be a TypeError: {made!r}")


def _has_no_state(made: Quantiser) -> None:
    """Check that nothing is remembered between calls: records are read by themselves."""
    require(made.state_dict() == {} and made.snapshot() == {}, "it keeps state: ranks may differ", repr(made))
    made.load_state_dict({})
    made.retain(["a"])
    try:
        made.load_state_dict({"no such state": 1})
    except ValueError:
        return
    raise AssertionError(f"the state of something else is accepted, which must be a ValueError: {made!r}")


def _records(made: Quantiser, size: int) -> None:
    """Check that a record has room for its bits, and one length."""
    where = where_of(made, size)
    length = made.record_bytes(size)
    require(type(length) is int and length > 0, f"record_bytes is {length!r}, no number above 0", where)
    require(8 * length >= made.bits * size, f"{length} bytes do not hold {made.bits} bits a coordinate", where)
    encoded(made, gaussian(2 * size), size)
    require(made.record_bytes(size) == length, "record_bytes changed with a call", where)
    encoded(made, torch.empty(0), size)  # nothing is a vector too


def _encoding(made: Quantiser, size: int, name: str, values: Tensor) -> None:
    """Check everything that a single call promises, written and read again."""
    where = where_of(made, size, name)
    before, version, drawn = values.clone(), values._version, generators()
    records = encoded(made, values, size)
    same = values._version == version and torch.equal(bit_view(values), bit_view(before))
    require(same, "the values were changed", where)
    require(torch.equal(encoded(made, values, size), records), "the same draws give other bytes", where)
    filled = encoded(made, values, size, fill=0xA5)
    require(torch.equal(filled, records), "bytes of a record are not written, or read while writing", where)
    sent = records.clone()
    read = decoded(made, records, size)
    require(torch.equal(records, sent), "reading changes the bytes", where)
    require(same_bits(decoded(made, records, size), read), "the same bytes are read differently the second time", where)
    require(generators() == drawn, "a generator of the process was used", where)
    require(bool(read.isfinite().all()), "finite values are not read as finite ones", where)
    squares = torch.ones(1, dtype=torch.float64)
    made.encode(values, size, DRAWS, records.view(-1), squares)
    expected = 1.0 + values.double().square().sum()
    require(torch.allclose(squares, expected, rtol=2.0**-20), f"squares are {squares.item()}, not {expected}", where)


def _draws(made: Quantiser, size: int) -> None:
    """Check that an unbiased quantiser, which must be random, is so by its draws."""
    values = gaussian(4 * size)
    others = (Draws(key_of(2025), DRAWS.first), DRAWS.after(1))
    same = [torch.equal(encoded(made, values, size, draws), encoded(made, values, size)) for draws in others]
    random = not any(same) or not made.unbiased
    require(random, "it says that it is unbiased, but other draws give the same bytes", where_of(made, size, "normal"))


def _neighbours(made: Quantiser, size: int) -> None:
    """Check that the bytes of a block, and the values read, depend on that block and its number alone."""
    values = gaussian(1030 * 64)  # with blocks of 64 more than are quantised at once
    records = encoded(made, values, size)
    read = decoded(made, records, size)
    where = where_of(made, size, "normal")
    for start in (1, 3, len(records) - 2):
        alone = values[start * size : (start + 2) * size]
        draws = DRAWS.after(start)
        same = torch.equal(encoded(made, alone, size, draws), records[start : start + 2])
        require(same, f"blocks {start} and {start + 1} have other bytes by themselves", where)
        same = same_bits(decoded(made, records[start : start + 2], size, draws), read[start : start + 2])
        require(same, f"blocks {start} and {start + 1} are read otherwise by themselves", where)
    changed = values[: 4 * size].clone()
    changed[size : 2 * size] *= 1e6
    same = torch.equal(encoded(made, changed, size)[[0, 2, 3]], records[[0, 2, 3]])
    require(same, "a block of other values changes the bytes of its neighbours", where)
