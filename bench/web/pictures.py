"""Pictures of every page of `stoker ui` at 390, 1,280 and 2,560 pixels in both themes: one sheet for each page.

    python -m bench.web.pictures [--out docs/images]

To be looked at after each change of a style sheet; docs/ui.md links to the sheets and shows some pages as they are.
"""

from __future__ import annotations

import argparse
import base64
import io
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from bench.web.measure import enter, served
from bench.web.planted import show
from bench.web.planted_pool import planted_pool
from stoker.pool.keys import own_key

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
    "pool": "/places",
    "data": "/data",
    "data-check": "/data/images-check",
}
READY = {"services": ".service", "places": ".ledger li", "pool": ".ledger li"}
"""What a page shows once what it asks others for is there."""
SIZES = ((2560, 1440, 800), (1280, 800, 540), (390, 844, 208))
"""Width and height of the window, and width in the sheet [pixels]."""


SHOWN = {
    "ui-runs": ("runs", 1000),
    "ui-run": ("run-live", 1000),
    "ui-plan": ("plan", 1000),
    "ui-compare": ("compare", 750),
    "ui-pool": ("pool", 800),
}
"""Pages that docs/ui.md shows, 1,280 pixels wide, and their height [pixels]."""
PHONE = (("runs", "light"), ("run-live", "dark"), ("study", "light"), ("plan", "dark"))


@contextmanager
def service(qps: float = 180.0) -> Iterator[str]:
    """The admin port of a service that has answered for a while, and goes on."""
    began, bounds = time.time() - 600, [0.001 * 2**power for power in range(10)]

    def metrics() -> str:
        lines = ['stoker_model_info{model="fashion",version="3",engine="openvino",precision="int8"} 1']
        for version, share in (("2", 0.1), ("3", 0.9)):
            labels, t = f'model="fashion",version="{version}"', time.time() - began
            count = share * qps * (t + 4 * math.sin(t / 7))
            lines += [
                f"stoker_model_ready{{{labels}}} 1",
                f"stoker_queue_rows{{{labels}}} {3 + 2 * math.sin(t / 3):.0f}",
            ]
            for name, middle, top in (
                ("total_seconds", 0.006, bounds),
                ("queue_seconds", 0.002, bounds),
                ("batch_rows", 6.0, [1, 2, 4, 8, 16]),
            ):
                for bound in [*top, math.inf]:
                    below = count / (1 + (middle / bound) ** 3)
                    word = "+Inf" if math.isinf(bound) else f"{bound:g}"
                    lines.append(f'stoker_{name}_bucket{{{labels},outcome="ok",le="{word}"}} {below:.0f}')
                lines += [
                    f'stoker_{name}_{part}{{{labels},outcome="ok"}} {value:.3f}'
                    for part, value in (("count", count), ("sum", count * middle))
                ]
        return "\n".join([*lines, 'stoker_rejected_total{model="fashion",reason="queue full"} 12'])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = metrics().encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def shot(browser: Any, port: int, name: str, theme: str, width: int, height: int) -> bytes:
    """A page in a window of that size [pixels], as a PNG."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
    page = context.new_page()
    enter(page, port)
    page.goto(f"http://127.0.0.1:{port}{PAGES[name]}")
    page.wait_for_selector("main[data-ready]")
    page.wait_for_selector(READY.get(name, "main"))
    if name == "pool":
        page.locator(".pool").evaluate("one => one.scrollIntoView()")
    if name == "services":
        page.wait_for_timeout(6000)  # rates are of the time between two looks
    page.wait_for_timeout(600)  # charts of a page are drawn when they come into sight
    content: bytes = page.screenshot()
    context.close()
    return content


def write_png(shots: Sequence[bytes], path: Path) -> None:
    """Shots side by side in 256 colours, which pages of few colours do not miss."""
    images = [Image.open(io.BytesIO(content)).convert("RGB") for content in shots]
    gap = 20
    whole = Image.new("RGB", (sum(one.width + gap for one in images) - gap, images[0].height), "white")
    for number, image in enumerate(images):
        whole.paste(image, (number * (image.width + gap), 0))
    whole.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def sheet(browser: Any, rows: list[list[bytes]], path: Path) -> None:
    """All shots of a page in one picture: a row for each theme."""
    images = (
        f'<img src="data:image/png;base64,{base64.b64encode(content).decode()}" width="{width}">'
        for row in rows
        for content, (_, _, width) in zip(row, SIZES, strict=True)
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
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--only", default="", help="names of pages, with commas")
    options = parser.parse_args()
    (options.out / "pages").mkdir(parents=True, exist_ok=True)
    names = options.only.split(",") if options.only else list(PAGES)
    with sync_playwright() as started, tempfile.TemporaryDirectory() as folder, service() as admin:
        os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"  # of keys
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        with planted_pool(Path(folder) / "pool", own_key()) as (operator, _):
            show(Path(folder) / "runs")
            arguments = ("--control", "--service", admin, "--pool", str(operator.address))
            process, port, _ = served(str(Path(folder) / "runs"), *arguments, cache=Path(folder) / "cache")
            # First: the planted run is called stalled after two minutes.
            for file, (name, height) in SHOWN.items():
                if name in names:
                    write_png([shot(browser, port, name, "light", 1280, height)], options.out / f"{file}.png")
            if not options.only:
                phone = [shot(browser, port, name, theme, 390, 844) for name, theme in PHONE]
                write_png(phone, options.out / "ui-phone.png")
            for name in names:
                rows = [
                    [shot(browser, port, name, theme, width, height) for width, height, _ in SIZES]
                    for theme in ("light", "dark")
                ]
                sheet(browser, rows, options.out / "pages" / f"{name}.jpg")
            browser.close()
            process.kill()


if __name__ == "__main__":
    main()
