# SPDX-License-Identifier: Apache-2.0
"""Look at every page of the site in a browser: ``python tests/support/site_pictures.py SITE PICTURES``.

Pages are shown at the widths of a phone and of half a screen, light and dark. A page that is wider than the window,
something that sticks out of it, a picture that is not there and an error of a script are told, and the status is 1.
Pictures of the pages that newcomers meet are written into the folder PICTURES. The browser is Chromium, from the
system's packages; where there is none, one line says so, and nothing is looked at.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

WIDTHS, HEIGHT, SCHEMES = (390, 830), 1000, ("light", "dark")
SHOWN = ("index", "tutorial", "with_ddp", "will_it_help", "troubleshooting")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Elements that stick out to the right, but for what scrolls by itself.
OUTSIDE = """
() => [...document.querySelectorAll(".bd-article *, .bd-header *, .prev-next-area *")].filter(one => {
    const scrolls = one.closest("pre, .pst-scrollable-table-container, [aria-hidden=true], .headerlink");
    return !scrolls && one.getClientRects().length && one.getBoundingClientRect().right > innerWidth + 1;
}).map(one => one.textContent.trim().slice(0, 40))
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
