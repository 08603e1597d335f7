"""Start workers in a network of their own, so that the bytes that leave them can be counted."""

from __future__ import annotations

import functools
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from launching import results, run

MOST = 3  # workers of a launch
OWN = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"']


@functools.cache
def own_networks() -> bool:
    """Whether there can be such networks here: that needs root, as a rule."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*OWN, "true"], capture_output=True, timeout=10, check=False).returncode == 0


def launched(script: Path, folder: Path, *scenarios: str, workers: int = 2, timeout: float = 150) -> dict[str, Any]:
    """What the ranks wrote, by scenario: a list of what each found, and one of the warnings of each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workers}"]
    own = own_networks()
    ended = run(
        [*(OWN if own else []), *command, str(script), str(folder), *scenarios],
        timeout,
        AGMERGE_TEST_OWN_NETWORK=str(int(own)),
    )
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


def taken_over(script: Path, folder: Path, workers: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Let two save, and another number go on: by way, what has waited, and for each rank what it has found."""
    before = launched(script, folder, "saved")["saved"][0][0]
    found, said = launched(script, folder, "taken_over", workers=workers)["taken_over"]
    assert not any("beside" in text or "kept" in text or "dropped" in text for texts in said for text in texts), said
    return before, found
