# SPDX-License-Identifier: Apache-2.0
"""Version of the library; ranks with different ones do not train together."""

from __future__ import annotations

__version__ = "0.1.0"
