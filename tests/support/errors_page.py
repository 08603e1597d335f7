# SPDX-License-Identifier: Apache-2.0
"""Write docs/errors.md from the catalogue of errors: ``python tests/support/errors_page.py``."""

from __future__ import annotations

from pathlib import Path

from agmerge.errors.catalogue import catalogue, page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"

if __name__ == "__main__":
    PAGE.write_text(page(catalogue()), encoding="utf-8")
