# SPDX-License-Identifier: Apache-2.0
"""What a step asks of a device: a table of limits that only falls. And it computes what the host would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pretend.books import ELSEWHERE, HOOK, SYNCHRONIZE, Books
from support.device_training import SHAPES, Trained, gradient, same_residuals, train

from agmerge.backends import topology

# Of two merge buffers on two ranks (two-level: four), the most of steps 1 to 3: host waits in hooks and behind them,
# and launches. Whoever makes it less lowers the figure here; nothing raises one.
LIMITS: dict[tuple[str, str], tuple[int, int, int]] = {
    ("sparse", "topk"): (0, 1, 168),
    ("sparse", "randomk"): (2, 1, 132),
    ("sparse", "threshold"): (0, 1, 690),
    ("sparse", "dgc"): (0, 1, 1029),
    ("sparse", "gaussiank"): (0, 1, 1296),
    ("sparse", "redsync"): (0, 1, 1184),
    ("sparse", "redsync-trim"): (0, 1, 790),
    ("sparse", "sidco-e"): (0, 1, 1630),
    ("sparse", "sidco-gp"): (0, 1, 2230),
    ("sparse", "sidco-gamma"): (0, 1, 2820),
    ("sparse", "adtopk"): (0, 1, 176),
    ("sparse", "adtopk-row"): (0, 1, 176),
    ("sparse", "adtopk-fill"): (0, 1, 234),
    ("sparse", "none"): (0, 1, 18),
    ("sparse", "fp16"): (0, 1, 26),
    ("sparse", "powersgd"): (0, 8, 524),
    ("sparse", "acpsgd"): (0, 6, 291),
    ("oktopk", "topk"): (0, 81, 785),
    ("oktopk", "randomk"): (2, 71, 583),
    ("oktopk", "threshold"): (0, 81, 1307),
    ("oktopk", "dgc"): (0, 81, 1669),
    ("oktopk", "gaussiank"): (0, 81, 1913),
    ("oktopk", "redsync"): (0, 81, 1801),
    ("oktopk", "redsync-trim"): (0, 81, 1407),
    ("oktopk", "sidco-e"): (0, 81, 2247),
    ("oktopk", "sidco-gp"): (0, 81, 2847),
    ("oktopk", "sidco-gamma"): (0, 81, 3437),
    ("oktopk", "adtopk"): (0, 78, 705),
    ("oktopk", "adtopk-row"): (0, 78, 710),
    ("oktopk", "adtopk-fill"): (0, 81, 851),
    ("masked", "topk"): (6, 16, 300),
    ("masked", "randomk"): (2, 8, 94),
    ("masked", "threshold"): (6, 16, 822),
    ("masked", "dgc"): (6, 16, 1159),
    ("masked", "gaussiank"): (6, 16, 1428),
    ("masked", "redsync"): (6, 16, 1316),
    ("masked", "redsync-trim"): (6, 16, 922),
    ("masked", "sidco-e"): (6, 16, 1762),
    ("masked", "sidco-gp"): (6, 16, 2362),
    ("masked", "sidco-gamma"): (6, 16, 2952),
    ("masked", "adtopk"): (6, 16, 303),
    ("masked", "adtopk-row"): (6, 16, 303),
    ("masked", "adtopk-fill"): (6, 16, 366),
    ("two-level", "topk"): (0, 7, 191),
    ("two-level", "randomk"): (0, 9, 155),
    ("two-level", "threshold"): (0, 7, 713),
    ("two-level", "dgc"): (0, 7, 1056),
    ("two-level", "gaussiank"): (0, 7, 1319),
    ("two-level", "redsync"): (0, 7, 1207),
    ("two-level", "redsync-trim"): (0, 7, 813),
    ("two-level", "sidco-e"): (0, 7, 1653),
    ("two-level", "sidco-gp"): (0, 7, 2253),
    ("two-level", "sidco-gamma"): (0, 7, 2843),
    ("two-level", "adtopk"): (0, 7, 199),
    ("two-level", "adtopk-row"): (0, 7, 199),
    ("two-level", "adtopk-fill"): (0, 7, 257),
}
# The same with the kernels of sparsifiers.gpu, each counted as the launches that it says, exchange="sparse".
KERNELS: dict[str, tuple[int, int, int]] = {
    "topk": (0, 1, 46),
    "threshold": (0, 1, 36),
    "dgc": (0, 1, 49),
    "gaussiank": (0, 1, 36),
    "redsync": (0, 1, 36),
    "redsync-trim": (0, 1, 36),
    "sidco-e": (0, 1, 36),
    "sidco-gp": (0, 1, 36),
    "sidco-gamma": (0, 1, 36),
    "adtopk": (0, 1, 46),
    "adtopk-row": (0, 1, 40),
    "none": (0, 1, 18),
    "fp16": (0, 1, 24),
}
EXACT = ("topk", "dgc", "adtopk", "adtopk-row", "adtopk-fill", "none", "fp16")  # the same bits as on the host
ROUNDED = ("fp16",)  # what is lost on the way is not kept


def trained(exchange: str, compression: str, **options: Any) -> list[Trained]:
    """What the ranks of a row of the table have after four steps."""
    size = 4 if exchange == "two-level" else 2
    return train(size, exchange=exchange, compression=compression, **options)


def asked(books: list[Books]) -> tuple[int, int, int]:
    """The row of the table that these steps need."""
    return (
        max(len(one.waits_in(HOOK)) for one in books[1:]),
        max(len(one.waits_in(SYNCHRONIZE, ELSEWHERE)) for one in books[1:]),
        max(one.count() for one in books[1:]),
    )


@pytest.fixture(autouse=True)
def two_ranks_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """For two-level."""
    monkeypatch.setenv(topology.VARIABLE, "2")


# What differs from another row by how it selects alone, in thousands of launches, is for `make test-all`.
ESTIMATED = ("threshold", "gaussiank", "sidco-e", "sidco-gp", "sidco-gamma", "redsync", "redsync-trim")
ALIKE = (*ESTIMATED, "adtopk-row", "adtopk-fill")
ROWS = [pytest.param(*row, marks=pytest.mark.long if row[1] in ALIKE else ()) for row in LIMITS]


@pytest.mark.parametrize("exchange, compression", ROWS)
def test_a_step_asks_for_no_more_than_it_did(exchange: str, compression: str) -> None:
    check(exchange, compression, trained(exchange, compression), LIMITS[exchange, compression])


@pytest.mark.parametrize("compression", KERNELS)
def test_kernels_ask_for_less_and_give_the_same_bits(compression: str) -> None:
    found = trained("sparse", compression, kernels=True)
    check("sparse", compression, found, KERNELS[compression])


def check(exchange: str, compression: str, found: list[Trained], limits: tuple[int, int, int]) -> None:
    """It asks for no more than ``limits``, loses nothing, has no race, and replicas are equal, some to the host's."""
    row = asked(found[0].books)
    assert all(one <= limit for one, limit in zip(row, limits, strict=True)), f"{row}, where {limits} was enough"
    assert [race for one in found[0].books for race in one.races] == []

    for rank in found[1:]:
        assert all(torch.equal(p, q) for p, q in zip(rank.parameters, found[0].parameters, strict=True))
    # In two-level a rank keeps its shard of the node's residual, and dgc adds a momentum.
    if exchange != "two-level" and compression != "dgc":
        for number in range(len(SHAPES)):
            given = sum(gradient(rank, step, number) for rank in range(len(found)) for step in range(4))
            kept = sum(rank.residuals.get(f"given.{number}", torch.zeros(())) for rank in found)
            sent = -len(found) * found[0].parameters[number]
            assert torch.allclose(sent + kept, given, rtol=0, atol=5e-2 if compression in ROUNDED else 1e-4)
    if compression in EXACT:
        for ours, theirs in zip(found, trained(exchange, compression, place="cpu"), strict=True):
            assert all(torch.equal(p, q) for p, q in zip(ours.parameters, theirs.parameters, strict=True))
            assert same_residuals(ours, theirs)
