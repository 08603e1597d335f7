# SPDX-License-Identifier: Apache-2.0
"""Configuration of Sphinx for the site: ``make docs``. Pages are Markdown that can be read as they are, too."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agmerge.errors.catalogue import SITE, SOURCE  # noqa: E402
from agmerge.version import __version__  # noqa: E402

project, author, version, release = "agmerge", "agmerge developers", __version__, __version__
project_copyright = "agmerge developers, Apache License 2.0"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["kubernetes", "pictures", "_data", "dev"]
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
maximum_signature_line_length = 80
# Docstrings name private classes, parts of torch and parameters, too: these are no links.
suppress_warnings = ["ref.python", "misc.highlighting_failure"]
smartquotes = False  # it makes dashes of the -- of commands
copybutton_prompt_text = "$ "
html_theme = "pydata_sphinx_theme"
html_baseurl = SITE
html_title = "agmerge"
html_domain_indices = False
html_static_path = ["_static"]
html_css_files = ["theme.css"]
html_sidebars: dict[str, list[str]] = {"index": []}  # pages without pages below them
html_theme_options = {
    "navigation_depth": 2,
    "show_nav_level": 1,
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
    "use_edit_page_button": False,
    "footer_start": ["copyright"],
    "footer_end": [],
}
FIELD = re.compile(r"(\w+(?:, \w+)*): \S")  # in docstrings: the name of an argument or attribute, and what it is
PAGE = re.compile(r"\bdocs/(\w+)\.md\b")
OUTSIDE = re.compile(r"(\]\(|src=\"|srcset=\")(\.\./|dev/)([^)\"\s]+)")
# Words that people search for, and the page that they look for: entries of its index, which searches show first.
WORDS: dict[str, str] = json.loads((ROOT / "docs" / "_data" / "search_words.json").read_text(encoding="utf-8"))


def link_to_source(_: Sphinx, __: str, text: list[str]) -> None:
    """Rewrite links to files that are not on the site as links to the repository, at the version of the page."""
    base = f"{SOURCE}/blob/v{__version__}/"
    text[0] = OUTSIDE.sub(lambda m: m[1] + base + ("docs/dev/" if m[2] == "dev/" else "") + m[3], text[0])


def list_fields(_: Sphinx, __: str, ___: str, ____: object, _____: object, lines: list[str]) -> None:
    """Make a list of lines such as "name: what it is", and code of what stands between single backticks."""
    made: list[str] = []
    in_list = False
    for line in lines:
        line = re.sub(r"(?<![`:\w])`([^`]+)`(?![`_])", r"``\1``", line)
        starts = FIELD.match(line)
        if starts and (in_list or not made or not made[-1]):
            line, in_list = f"* ``{starts[1]}``{line[starts.end(1) :]}", True
        elif in_list and line.startswith("    "):
            line = f"  {line.lstrip()}"
        elif line and in_list:
            made.append("")
            in_list = False
        made.append(line)
    lines[:] = made


def link_to_pages(_: Sphinx, __: str, ___: str, ____: object, _____: object, lines: list[str]) -> None:
    """Make a link to the page, with its title, of a name such as docs/elastic.md in a docstring."""
    lines[:] = [PAGE.sub(r":doc:`\1`", line) for line in lines]


def enter_words(app: Sphinx, page: nodes.document) -> None:
    """Enter the words of a page into the index."""
    target = app.env.docname + "-words"
    entries = [("single", word, target, "main", None) for word, name in WORDS.items() if name == app.env.docname]
    if entries:
        page[0].insert(1, [addnodes.index(entries=entries), nodes.target("", "", ids=[target])])


def setup(app: Sphinx) -> None:
    """Register what changes pages before they are read."""
    app.connect("source-read", link_to_source)
    app.connect("doctree-read", enter_words)
    app.connect("autodoc-process-docstring", list_fields)
    app.connect("autodoc-process-docstring", link_to_pages)
