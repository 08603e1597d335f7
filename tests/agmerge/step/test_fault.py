# SPDX-License-Identifier: Apache-2.0
"""What ends an exchange: where a rank is missing, what waits for it on a device ends, too."""

from __future__ import annotations

import pytest
from support import mlp, wrap

import agmerge
from agmerge import testing
from agmerge.backends import topology
from agmerge.backends.local import LocalBackend
from agmerge.step.gradient_exchange import Fault


@pytest.mark.parametrize("error, times", [(agmerge.PeerLost("gone"), 1), (ValueError("here"), 0), (None, 0)])
def test_only_a_missing_rank_aborts(error: Exception | None, times: int) -> None:
    aborted: list[bool] = []
    fault = Fault(lambda: aborted.append(True))
    fault.record(error)
    assert len(aborted) == times and bool(fault) == (error is not None)


@pytest.mark.parametrize("exchange, communicators", [("sparse", 1), ("two-level", 3)])
def test_every_communicator_of_an_optimizer_is_aborted(
    exchange: str, communicators: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")
    aborted: dict[int, int] = {}

    def body(rank: int) -> None:
        model = mlp()
        optimizer = wrap(model, compression="topk", exchange=exchange, timeout=1.0)
        if rank == 3:
            return
        here = [id(comm) for comm in optimizer._reducer.exchange.group._communicators()]
        with pytest.raises(agmerge.NoAnswer):
            optimizer.step()
        assert [aborted[one] for one in here] == [1] * communicators

    monkeypatch.setattr(LocalBackend, "abort", lambda self: aborted.update({id(self): aborted.get(id(self), 0) + 1}))
    testing.run(4, body)
