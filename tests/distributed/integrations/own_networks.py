# SPDX-License-Identifier: Apache-2.0
"""Start workers; `make test-all` in a network of their own, so that the bytes that leave them can be counted."""

from __future__ import annotations

import functools
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from launching import launch, results, run
from run_tests import WHOLE

MOST = 3  # workers of a launch
OWN = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"']


@functools.cache
def own_networks() -> bool:
    """Whether there are such networks: `make test-all` makes them where it can, which needs root, as a rule."""
    if not os.environ.get(WHOLE) or shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*OWN, "true"], capture_output=True, timeout=10, check=False).returncode == 0


def launched(script: Path, folder: Path, *scenarios: str, workers: int = 2, timeout: float = 300) -> dict[str, Any]:
    """What the ranks wrote, by scenario: a list of what each found, and one of the warnings of each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workers}"]
    if own_networks():
        command = [*OWN, *command, str(script), str(folder), *scenarios]
        ended = run(command, timeout, AGMERGE_TEST_OWN_NETWORK="1")
    else:
        ended = launch("torchrun", workers, script, str(folder), *scenarios, timeout=timeout)
    assert ended.code == 0, ended.output[-6000:]
    return {
        name: ([rank["found"] for rank in ranks if rank], [rank["warnings"] for rank in ranks if rank])
        for name, ranks in results(folder, MOST).items()
    }


def close(found: dict[str, list[float]], expected: dict[str, list[float]]) -> bool:
    """Whether what waits is the same, to rounding, and is something."""
    return (
        found.keys() == expected.keys()
        and any(norm > 1e-3 for _, norm in expected.values())
        and all(
            math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-5)
            for name in found
            for one, other in zip(found[name], expected[name], strict=True)
        )
    )


def check_taken_over(script: Path, folder: Path, workers: int) -> None:
    """Let two save, and another number of workers go on: nothing that was not sent is lost, and all have the same."""
    before = launched(script, folder, "saved")["saved"][0][0]
    ranks, said = launched(script, folder, "taken_over", workers=workers)["taken_over"]
    assert not any("beside" in text or "kept" in text or "dropped" in text for texts in said for text in texts), said
    for way, expected in before.items():
        assert all(close(rank[way][0], expected) for rank in ranks), way
        assert len({rank[way][2] for rank in ranks}) == 1, way


def check_refused(found: dict[str, Any], case: str, words: str) -> None:
    """Every rank was refused in this case, by an error with these words."""
    ranks, _ = found["refusals"]
    assert all(words in said[case] and "Error" in said[case] for said in ranks), ranks[0][case]


def check_logged(lines: list[dict[str, Any]]) -> None:
    """The framework's log has how much less was sent than by DDP: of one in ten, at a density of a tenth or less."""
    assert lines
    for line in lines:
        assert (
            line["agmerge/traffic_reduction"] > 5 and 0 < line["agmerge/bits"] == 32 / line["agmerge/traffic_reduction"]
        )
        assert 0 < line["agmerge/density"] < 0.2 and line["agmerge/bytes_sent"] > 0


def check_few_bytes_left(seen: dict[str, Any]) -> None:
    """A rank has sent under a tenth of dense by its figures, and under a fifth on the wire where that is counted."""
    assert seen["stats"]["bytes_sent"] * 10 < seen["stats"]["bytes_dense"]
    if None not in seen["bytes"]:
        dense, sparse = seen["bytes"]
        assert 0 < sparse * 5 < dense
