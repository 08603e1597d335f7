# SPDX-License-Identifier: Apache-2.0
"""Look at every page of the site in a browser: ``python tests/support/site_pictures.py SITE PICTURES``.

Pages are shown at the widths of a phone, of half a screen and of a laptop, light and dark. Reported are a page that is
wider than the window, something that sticks out of it or is cut off, a picture that is missing, a navigation without
sections or pages, and an error of a script. The status is 1 then.
Pictures of the pages that newcomers meet are written into the folder PICTURES. The browser is Chromium, from the
system's packages; where there is none, one line says so, and nothing is looked at.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

WIDTHS, HEIGHT, SCHEMES = (390, 830, 1300), 1000, ("light", "dark")
SHOWN = ("index", "tutorial", "use_with", "with_ddp", "will_it_help", "benchmarks", "troubleshooting")
SECTIONS = ["Get started", "Use it with", "Guides", "Concepts", "Reference", "Benchmarks"]
ALONE = ("index", "benchmarks", "search", "genindex")  # pages without pages below or beside them
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Elements that stick out to the right, but for what scrolls by itself, and headings with a word that is too long.
OUTSIDE = """
() => [...document.querySelectorAll(".bd-article *, .bd-header *, .prev-next-area *")].filter(one => {
    const scrolls = one.closest("pre, .pst-scrollable-table-container, [aria-hidden=true], .headerlink");
    const right = one.getBoundingClientRect().right;
    const long = /^H\\d$/.test(one.tagName) && one.scrollWidth > one.clientWidth;
    return !scrolls && one.getClientRects().length && (right > innerWidth + 1 || long);
}).map(one => one.textContent.trim().slice(0, 40))
"""
# Sections in the header, and pages of the section in the sidebar, as far as they are visible in a wide window.
HEADER = "() => [...document.querySelectorAll('.bd-header .navbar-nav .nav-link')].filter(one => one.offsetWidth)"
SIDEBAR = "() => document.querySelectorAll('.bd-sidebar-primary .bd-links__title ~ .bd-toc-item a').length"
# Tables that have to be scrolled, though the window is wide.
CUT_OFF = """
() => [...document.querySelectorAll(".bd-article .pst-scrollable-table-container")]
    .filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.textContent.trim().slice(0, 40))
"""
MISSING = "() => [...document.images].filter(one => !one.naturalWidth).map(one => one.src)"


def looked_at(page: Page, file: Path) -> list[str]:
    """Return what is wrong with a page as the window shows it."""
    wrong: list[str] = []

    def noted(error: object) -> None:
        wrong.append(f"error of a script: {error}")

    page.on("pageerror", noted)
    page.goto(file.resolve().as_uri())
    page.remove_listener("pageerror", noted)
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    wrong += [f"{wide} pixels wider than the window"] if wide > 0 else []
    wrong += [f"sticks out: {text!r}" for text in dict.fromkeys(page.evaluate(OUTSIDE))]
    if page.viewport_size and page.viewport_size["width"] == max(WIDTHS):
        header = page.evaluate(HEADER + ".map(one => one.textContent.trim())")
        wrong += [f"the header has {header}"] if header != SECTIONS else []
        wrong += [f"table cut off: {text!r}" for text in page.evaluate(CUT_OFF)]
        wrong += ["the sidebar is empty"] if file.stem not in ALONE and not page.evaluate(SIDEBAR) else []
    return wrong + [f"no picture: {source}" for source in page.evaluate(MISSING)]


def main(site: Path, pictures: Path) -> int:
    """Look at all pages; return 1 if something is wrong."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"pictures: not looked at, for there is no {BROWSERS[0]}: install that package for it")
        return 0
    pictures.mkdir(parents=True, exist_ok=True)
    files, wrong = sorted(site.glob("*.html")), 0
    with sync_playwright() as playwright:
        window = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for scheme in SCHEMES:
            for width in WIDTHS:
                page = window.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
                for file in files:
                    for what in looked_at(page, file):
                        wrong += 1
                        print(f"{file.stem}, {width} pixels, {scheme}: {what}")
                    if file.stem in SHOWN:
                        page.screenshot(path=pictures / f"{file.stem}-{width}-{scheme}.png")
                page.close()
        window.close()
    print(f"pictures: {len(files)} pages, {len(WIDTHS)} widths, {' and '.join(SCHEMES)}: {wrong} faults")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
