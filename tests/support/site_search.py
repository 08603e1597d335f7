# SPDX-License-Identifier: Apache-2.0
"""Whether the site's search finds the page first that a word is about: ``python tests/support/site_search.py FOLDER``.

By the rules of Sphinx's own search (searchtools.js): an entry of the index counts 100, a title 15, a word of a text 5,
an entry or a title in proportion to how much of it the query is.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

WORDS = Path(__file__).resolve().parents[2] / "docs" / "_data" / "search_words.json"
ENTRY, TITLE = 100, 15


def found(index: dict[str, Any], query: str) -> list[str]:
    """Return the pages that the search shows for a query, the best first, as far as titles and the index go."""
    words, scores = query.lower(), defaultdict[int, float](float)
    for entry, places in index["indexentries"].items():
        if words in entry and len(words) >= len(entry) / 2:
            for page, _, is_main in places:
                scores[page] = max(scores[page], ENTRY * len(words) / len(entry) if is_main else 0)
    for title, places in index["alltitles"].items():
        if words in title.lower() and len(words) >= len(title) / 2:
            for page, _ in places:
                scores[page] = max(scores[page], TITLE * len(words) / len(title))
    ordered = sorted(scores, key=lambda page: -scores[page])
    return [index["docnames"][page] for page in ordered]


def main(folder: str) -> int:
    """Print what is not found first; return how many of these there are."""
    text = (Path(folder) / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    wrong = 0
    for query, page in json.loads(WORDS.read_text(encoding="utf-8")).items():
        first = (found(index, query) or ["nothing"])[0]
        if first != page:
            wrong += 1
            sys.stderr.write(f"a search for {query!r} finds {first} first, not {page}\n")
    sys.stdout.write(f"search: {len(json.loads(WORDS.read_text()))} words, {wrong} lead to another page\n")
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
