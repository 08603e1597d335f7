# SPDX-License-Identifier: Apache-2.0
"""Put the folder above on the path: tests here use its launching.py, too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
