"""What a step asks of a device: a table of limits that only falls. And it computes what the host would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_harness import SHAPES, Trained, gradient, train
from pretend.books import ELSEWHERE, HOOK, SYNCHRONIZE, Books

from agmerge.backends import topology

# Of two merge buffers on two ranks (two-level: four), the most of steps 1 to 3: host waits in hooks and behind them,
# and launches. Whoever makes it less lowers the figure here; nothing raises one. Whether a node's sums arrive in a hook
# or behind them is up to the threads.
LIMITS: dict[tuple[str, str], tuple[int, int, int]] = {
    ("sparse", "topk"): (2, 8, 367),
    ("sparse", "randomk"): (4, 8, 331),
    ("sparse", "threshold"): (2, 8, 889),
    ("sparse", "dgc"): (2, 8, 1230),
    ("sparse", "gaussiank"): (2, 8, 1495),
    ("sparse", "redsync"): (2, 8, 1383),
    ("sparse", "redsync-trim"): (2, 8, 989),
    ("sparse", "sidco-e"): (2, 8, 1829),
    ("sparse", "sidco-gp"): (2, 8, 2429),
    ("sparse", "sidco-gamma"): (2, 8, 3019),
    ("sparse", "adtopk"): (2, 8, 375),
    ("sparse", "adtopk-row"): (2, 8, 375),
    ("sparse", "adtopk-fill"): (2, 8, 433),
    ("sparse", "none"): (2, 4, 47),
    ("sparse", "fp16"): (2, 4, 57),
    ("sparse", "powersgd"): (2, 8, 639),
    ("sparse", "acpsgd"): (2, 6, 356),
    ("oktopk", "topk"): (4, 81, 1130),
    ("oktopk", "randomk"): (6, 71, 842),
    ("oktopk", "threshold"): (4, 81, 1652),
    ("oktopk", "dgc"): (4, 81, 2024),
    ("oktopk", "gaussiank"): (4, 81, 2258),
    ("oktopk", "redsync"): (4, 81, 2146),
    ("oktopk", "redsync-trim"): (4, 81, 1752),
    ("oktopk", "sidco-e"): (4, 81, 2592),
    ("oktopk", "sidco-gp"): (4, 81, 3192),
    ("oktopk", "sidco-gamma"): (4, 81, 3782),
    ("oktopk", "adtopk"): (4, 78, 1007),
    ("oktopk", "adtopk-row"): (4, 78, 1012),
    ("oktopk", "adtopk-fill"): (4, 81, 1196),
    ("masked", "topk"): (10, 16, 435),
    ("masked", "randomk"): (6, 8, 125),
    ("masked", "threshold"): (10, 16, 957),
    ("masked", "dgc"): (10, 16, 1296),
    ("masked", "gaussiank"): (10, 16, 1563),
    ("masked", "redsync"): (10, 16, 1451),
    ("masked", "redsync-trim"): (10, 16, 1057),
    ("masked", "sidco-e"): (10, 16, 1897),
    ("masked", "sidco-gp"): (10, 16, 2497),
    ("masked", "sidco-gamma"): (10, 16, 3087),
    ("masked", "adtopk"): (10, 16, 438),
    ("masked", "adtopk-row"): (10, 16, 438),
    ("masked", "adtopk-fill"): (10, 16, 501),
    ("two-level", "topk"): (10, 18, 396),
    ("two-level", "randomk"): (10, 18, 360),
    ("two-level", "threshold"): (10, 18, 918),
    ("two-level", "dgc"): (10, 18, 1261),
    ("two-level", "gaussiank"): (10, 18, 1524),
    ("two-level", "redsync"): (10, 18, 1412),
    ("two-level", "redsync-trim"): (10, 18, 1018),
    ("two-level", "sidco-e"): (10, 18, 1858),
    ("two-level", "sidco-gp"): (10, 18, 2458),
    ("two-level", "sidco-gamma"): (10, 18, 3048),
    ("two-level", "adtopk"): (10, 18, 404),
    ("two-level", "adtopk-row"): (10, 18, 404),
    ("two-level", "adtopk-fill"): (10, 18, 462),
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


@pytest.mark.thin
@pytest.mark.parametrize("exchange, compression", LIMITS)
def test_a_step_asks_for_no_more_than_it_did(exchange: str, compression: str) -> None:
    found = trained(exchange, compression)
    row, limits = asked(found[0].books), LIMITS[exchange, compression]
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
            assert ours.residuals.keys() == theirs.residuals.keys()
            assert all(torch.equal(ours.residuals[name], theirs.residuals[name]) for name in ours.residuals)
