"""Pictures of every page of `stoker ui` at 390, 1,280 and 2,560 pixels in both themes: one sheet for each page.

    python -m bench.web.pictures [--out docs/images/pages]

To be looked at after each change of a style sheet; docs/ui.md links to them.
"""

from __future__ import annotations

import argparse
import base64
import shutil
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from bench.web.measure import enter, served
from bench.web.planted import show

PAGES = {
    "runs": "/",
    "run-live": "/run/fashion-resnet-live",
    "run-resumed": "/run/fashion-resnet-resumed",
    "compare": "/compare?run=fashion-resnet-seed1&run=fashion-resnet-seed2",
    "studies": "/studies",
    "study": "/study/digits-search",
    "plans": "/plans",
    "plan": "/plan/devices.json",
    "services": "/services",
    "places": "/places",
    "data": "/data",
    "data-check": "/data/images-check",
}
SIZES = ((2560, 1440, 800), (1280, 800, 540), (390, 844, 208))
"""Width and height of the window, and width in the sheet [pixels]."""


def shots(browser: Any, port: int, path: str, theme: str) -> list[str]:
    """The page at each size, as `data:` addresses."""
    taken = []
    for width, height, _ in SIZES:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        page = context.new_page()
        enter(page, port)
        page.goto(f"http://127.0.0.1:{port}{path}")
        page.wait_for_selector("main[data-ready]")
        page.wait_for_timeout(600)  # charts of a page are drawn when they come into sight
        taken.append("data:image/png;base64," + base64.b64encode(page.screenshot()).decode())
        context.close()
    return taken


def sheet(browser: Any, rows: list[list[str]], path: Path) -> None:
    """All shots of a page in one picture: a row for each theme."""
    images = (
        f'<img src="{shot}" width="{width}">' for row in rows for shot, (_, _, width) in zip(row, SIZES, strict=True)
    )
    page = browser.new_page(viewport={"width": 1600, "height": 960})
    page.set_content(
        "<style>body{margin:12px;display:grid;grid-template-columns:repeat(3,max-content);gap:14px;background:#888}"
        f"img{{display:block;border-radius:4px}}</style>{''.join(images)}"
    )
    page.locator("body").screenshot(path=path, type="jpeg", quality=72)
    page.close()


def main() -> None:
    """Take and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images/pages"))
    parser.add_argument("--only", default="", help="names of pages, with commas")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started, tempfile.TemporaryDirectory() as folder:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        show(Path(folder) / "runs")
        process, port, _ = served(str(Path(folder) / "runs"), "--control", cache=Path(folder) / "cache")
        for name in options.only.split(",") if options.only else PAGES:
            rows = [shots(browser, port, PAGES[name], theme) for theme in ("light", "dark")]
            sheet(browser, rows, options.out / f"{name}.jpg")
        browser.close()
        process.kill()


if __name__ == "__main__":
    main()
