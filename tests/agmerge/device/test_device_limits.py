"""What a step asks of a device: a table of limits that only falls. And it computes what the host would."""

from __future__ import annotations

import pytest
import torch
from device_harness import SHAPES, gradient, train
from pretend.books import ELSEWHERE, HOOK, SYNCHRONIZE

from agmerge.backends import topology

# Of two merge buffers on two ranks (two-level: four), the most of steps 1 to 3: host waits in hooks and behind them,
# and launches. Whoever makes it less lowers the figure here; nothing raises one. Whether a node's sums arrive in a hook
# or behind them is up to the threads.
LIMITS: dict[tuple[str, str], tuple[int, int, int]] = {
    ("sparse", "topk"): (2, 8, 365),
    ("sparse", "randomk"): (4, 8, 329),
    ("sparse", "threshold"): (2, 8, 887),
    ("sparse", "dgc"): (2, 8, 1228),
    ("sparse", "gaussiank"): (2, 8, 1493),
    ("sparse", "redsync"): (2, 8, 1381),
    ("sparse", "redsync-trim"): (2, 8, 987),
    ("sparse", "sidco-e"): (2, 8, 1827),
    ("sparse", "sidco-gp"): (2, 8, 2427),
    ("sparse", "sidco-gamma"): (2, 8, 3017),
    ("sparse", "adtopk"): (2, 8, 373),
    ("sparse", "adtopk-row"): (2, 8, 373),
    ("sparse", "adtopk-fill"): (2, 8, 431),
    ("sparse", "none"): (2, 4, 47),
    ("sparse", "fp16"): (2, 4, 53),
    ("sparse", "powersgd"): (2, 8, 637),
    ("sparse", "acpsgd"): (2, 6, 354),
    ("oktopk", "topk"): (4, 81, 1128),
    ("oktopk", "randomk"): (6, 71, 840),
    ("oktopk", "threshold"): (4, 81, 1650),
    ("oktopk", "dgc"): (4, 81, 2022),
    ("oktopk", "gaussiank"): (4, 81, 2256),
    ("oktopk", "redsync"): (4, 81, 2144),
    ("oktopk", "redsync-trim"): (4, 81, 1750),
    ("oktopk", "sidco-e"): (4, 81, 2590),
    ("oktopk", "sidco-gp"): (4, 81, 3190),
    ("oktopk", "sidco-gamma"): (4, 81, 3780),
    ("oktopk", "adtopk"): (4, 78, 1005),
    ("oktopk", "adtopk-row"): (4, 78, 1010),
    ("oktopk", "adtopk-fill"): (4, 81, 1194),
    ("masked", "topk"): (10, 16, 433),
    ("masked", "randomk"): (6, 8, 123),
    ("masked", "threshold"): (10, 16, 955),
    ("masked", "dgc"): (10, 16, 1294),
    ("masked", "gaussiank"): (10, 16, 1561),
    ("masked", "redsync"): (10, 16, 1449),
    ("masked", "redsync-trim"): (10, 16, 1055),
    ("masked", "sidco-e"): (10, 16, 1895),
    ("masked", "sidco-gp"): (10, 16, 2495),
    ("masked", "sidco-gamma"): (10, 16, 3085),
    ("masked", "adtopk"): (10, 16, 436),
    ("masked", "adtopk-row"): (10, 16, 436),
    ("masked", "adtopk-fill"): (10, 16, 499),
    ("two-level", "topk"): (10, 18, 392),
    ("two-level", "randomk"): (10, 18, 356),
    ("two-level", "threshold"): (10, 18, 914),
    ("two-level", "dgc"): (10, 18, 1257),
    ("two-level", "gaussiank"): (10, 18, 1520),
    ("two-level", "redsync"): (10, 18, 1408),
    ("two-level", "redsync-trim"): (10, 18, 1014),
    ("two-level", "sidco-e"): (10, 18, 1854),
    ("two-level", "sidco-gp"): (10, 18, 2454),
    ("two-level", "sidco-gamma"): (10, 18, 3044),
    ("two-level", "adtopk"): (10, 18, 400),
    ("two-level", "adtopk-row"): (10, 18, 400),
    ("two-level", "adtopk-fill"): (10, 18, 458),
}
EXACT = ("topk", "dgc", "adtopk", "adtopk-row", "adtopk-fill", "none", "fp16")  # the same bits as on the host
ROUNDED = ("fp16",)  # what is lost on the way is not kept


@pytest.mark.thin
@pytest.mark.parametrize("exchange, compression", LIMITS)
def test_a_step_asks_for_no_more_than_it_did(exchange: str, compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")
    size = 4 if exchange == "two-level" else 2
    options = {"exchange": exchange, "compression": compression}
    found = train(size, **options)

    books = found[0].books[1:]
    asked = (
        max(len(one.waits_in(HOOK)) for one in books),
        max(len(one.waits_in(SYNCHRONIZE, ELSEWHERE)) for one in books),
        max(one.count() for one in books),
    )
    assert all(one <= limit for one, limit in zip(asked, LIMITS[exchange, compression], strict=True)), asked
    assert [race for one in found[0].books for race in one.races] == []

    for rank in found[1:]:
        assert all(torch.equal(p, q) for p, q in zip(rank.parameters, found[0].parameters, strict=True))
    # In two-level a rank keeps its shard of the node's residual, and dgc adds a momentum.
    if exchange != "two-level" and compression != "dgc":
        for number in range(len(SHAPES)):
            given = sum(gradient(rank, step, number) for rank in range(size) for step in range(4))
            kept = sum(rank.residuals.get(str(number), torch.zeros(())) for rank in found)
            sent = -size * found[0].parameters[number]
            assert torch.allclose(sent + kept, given, rtol=0, atol=5e-2 if compression in ROUNDED else 1e-4)
    if compression in EXACT:
        for ours, theirs in zip(found, train(size, "cpu", **options), strict=True):
            assert all(torch.equal(p, q) for p, q in zip(ours.parameters, theirs.parameters, strict=True))
            assert ours.residuals.keys() == theirs.residuals.keys()
            assert all(torch.equal(ours.residuals[name], theirs.residuals[name]) for name in ours.residuals)
