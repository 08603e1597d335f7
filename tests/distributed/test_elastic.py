# SPDX-License-Identifier: Apache-2.0
"""Workers that are lost and workers that come: Horovod's elastic launcher, and torchrun's restarts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import HERE, missing, results, run


def by_step(folder: Path) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        for one in json.loads(path.read_text()):
            found.setdefault(one["step"], []).append(one)
    return found


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("sync", ["gradients", "updates"])
def test_survivors_keep_what_they_have_not_sent_and_a_newcomer_starts_from_nothing(tmp_path: Path, sync: str) -> None:
    """Of three workers one is killed; two go on, then there are three again. Nothing of the survivors' is lost."""
    why = missing("horovodrun, Gloo")
    if why and os.environ.get("AGMERGE_TEST_ALL_LAUNCHERS") != "1":
        pytest.skip(why)
    assert not why, why
    hosts = tmp_path / "hosts.sh"
    # Horovod never again starts a worker on a host that lost one, so that one comes on another name.
    grown = f"if test -e {tmp_path}/grown; then echo $(hostname):1; fi"
    hosts.write_text(f"#!/bin/sh\necho localhost:2\necho 127.0.0.1:1\n{grown}\n")
    hosts.chmod(0o755)
    command = f"horovodrun -np 3 --min-np 2 --max-np 3 --gloo --host-discovery-script {hosts}".split()
    script = [sys.executable, str(HERE / "elastic.py"), str(tmp_path)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    settings = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "10", "AGMERGE_TEST_VICTIM": "127.0.0.1", "AGMERGE_TEST_SYNC": sync}
    ended = run([*command, *script], timeout=200, PATH=path, **settings)
    assert ended.code == 0, ended.output[-4000:]

    found = by_step(tmp_path)
    sizes = [found[step][0]["size"] for step in sorted(found)]
    assert sorted(found) == list(range(len(found)))
    assert sizes[:5] == [3] * 5 and sizes[5:9] == [2] * 4 and sizes[-4:] == [3] * 4
    for step, ranks in sorted(found.items()):
        size = ranks[0]["size"]
        assert len({one["digest"] for one in ranks}) == 1
        if step < 5 or len(ranks) < size:  # the lost one has told nothing
            assert len(ranks) == 2
            continue
        if sync == "updates":  # what each worker's optimizer has done is its own: memory's tests add that up
            continue
        kept = sum(total / before for total, before in (one["kept"] for one in ranks))
        mean = sum(one["gradient"] for one in ranks) / size
        left = sum(one["left"] for one in ranks) / size
        assert abs(kept + mean - left - ranks[0]["update"]) < 1e-6, step
    first = {step: [one["kept"] for one in found[step]] for step in found}
    assert [before for _, before in first[5]] == [3, 3] and all(total for total, _ in first[5])
    there = first[sizes.index(3, 5)]
    assert sorted(before for _, before in there) == [2, 2, 3] and sorted(total == 0 for total, _ in there) == [0, 0, 1]


@pytest.mark.timeout(400)
def test_after_a_restart_by_torchrun_training_goes_on_from_the_last_checkpoints_to_the_bit(tmp_path: Path) -> None:
    """Rank 1 is killed; everybody starts again and loads what it has saved by itself."""
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2 --max-restarts 1".split()
    digests = []
    for name, deadly in (("through", "-1"), ("restarted", "8")):
        folder = tmp_path / name
        folder.mkdir()
        ended = run([sys.executable, *torchrun, str(HERE / "restarting.py"), str(folder), deadly], timeout=300)
        assert ended.code == 0, ended.output[-4000:]
        digests.append(results(folder, 2)["seen"])
    through, restarted = digests
    assert through[0] == through[1] and len(set(through[0])) == 14
    assert restarted[0] == restarted[1] == through[0][6:]  # the last checkpoint was after six steps
