# SPDX-License-Identifier: Apache-2.0
"""Import path of the benchmarks: packages of this checkout come before installed ones.

Every command imports it first. The rooms beside it are found because Python puts a command's own folder on the path.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "tests")]
