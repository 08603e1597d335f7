# SPDX-License-Identifier: Apache-2.0
"""One row of the table of mutants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """Change of one place in the library that a test has to notice.

    name: what breaks, in words. file: from the root of the checkout. before: text that is in the file once. after: the
    text in its place. tests: files or node ids; one of their tests fails.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Return ``text``, a file's, with the change."""
        return text.replace(self.before, self.after)

    @property
    def in_c(self) -> bool:
        """Return whether it changes a loop in C, which has to be built."""
        return not self.file.endswith(".py")
