# SPDX-License-Identifier: Apache-2.0
"""What workers tell the process that has launched them: a line of JSON on the standard output for each thing found."""

from __future__ import annotations

import json
from typing import Any

MARK = "FOUND "


def send_result(found: dict[str, Any]) -> None:
    """Called by one worker."""
    print(MARK + json.dumps(found), flush=True)


def received_results(output: str) -> list[dict[str, Any]]:
    """All that a worker with this output has told. ``RuntimeError`` where that is nothing."""
    found = [json.loads(line[len(MARK) :]) for line in output.splitlines() if line.startswith(MARK)]
    if not found:
        raise RuntimeError(f"a worker ended without a result:\n{output[-3000:]}")
    return found
