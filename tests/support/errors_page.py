# SPDX-License-Identifier: Apache-2.0
"""Write docs/errors.md from the catalogue of errors: ``python tests/support/errors_page.py``."""

from __future__ import annotations

import sys
from pathlib import Path

from agmerge.errors.catalogue import catalogue, page

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"


def written() -> str:
    """Return the page as it should be."""
    from support.raised import examples, sources

    return page(catalogue(), examples(sources()))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    PAGE.write_text(written(), encoding="utf-8")
