"""Start workers in a network of their own, so that the bytes that leave them can be counted."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from launching import results, run

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
        name: ([rank["found"] for rank in ranks], [rank["warnings"] for rank in ranks])
        for name, ranks in results(folder, workers).items()
    }
