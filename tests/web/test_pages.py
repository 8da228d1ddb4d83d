"""The pages in Chromium, as people use them: `make test-ui`."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.web.planted import as_log, hostile, many, show, sign, write_run
from bench.web.planted_pool import planted_pool
from stoker.pool import events as on
from stoker.pool.client import PoolClient
from stoker.pool.events import CREDIT
from stoker.pool.keys import Key, own_key
from stoker.records import Event, Price, Report
from stoker.records.run import ExampleSet
from stoker.reporting.run_page import render_html
from stoker.tuning.space import parse_space
from stoker.units import MIB
from tests.optional import optional
from tests.pool.book import offer
from tests.pool.book import opened as opened_lease
from tests.pool.server import Killable, in_thread
from tests.reporting import story

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = optional("playwright.sync_api")
pytestmark = [pytest.mark.ui, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

TOKEN = "0123456789abcdef0123"  # noqa: S105 - of a server of these tests
PAGES = [
    "/",
    "/run/fashion-resnet-live",
    "/run/fashion-resnet-resumed",
    "/compare?run=fashion-resnet-seed1&run=fashion-resnet-seed2",
    "/studies",
    "/study/digits-search",
    "/plans",
    "/plan/devices.json",
    "/services",
    "/places",
    "/data",
    "/data/images-check",
]


HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


class Server:
    """`stoker ui` in a process of its own."""

    def __init__(self, root: Path, *options: str, port: int = 0) -> None:
        self.root, self.options = root, options
        self.start(port)

    def start(self, port: int = 0) -> None:
        command = [
            sys.executable,
            "-m",
            "stoker",
            "ui",
            str(self.root),
            "--port",
            str(port),
            "--token",
            TOKEN,
            *self.options,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        assert found is not None, line
        self.port = int(found[1])

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium without a window."""
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=options)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A page of one of everything."""
    root = tmp_path_factory.mktemp("runs") / "show"
    show(root)
    server = Server(root, "--control")
    yield server
    server.kill()


def opened(browser: Any, server: Server, path: str = "/", **options: Any) -> Any:
    """The page at a path, once it is drawn; errors of scripts are kept in `page.problems`."""
    page = browser.new_context(**options).new_page()
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("dialog", lambda dialog: page.problems.append(f"dialog {dialog.message}"))
    page.goto(f"{server.address}/?token={TOKEN}")
    page.wait_for_selector("main[data-ready]")
    if path != "/":
        page.goto(f"{server.address}{path}")
        page.wait_for_selector("main[data-ready]")
    return page


def until(page: Any, condition: str, within_s: float = 30.0) -> None:
    """Wait until an expression is true; asked from outside, since the page's policy lets nothing evaluate inside."""
    ends = time.monotonic() + within_s
    while not page.evaluate(condition):
        assert time.monotonic() < ends, condition
        page.wait_for_timeout(25)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_no_page_has_a_serious_finding(browser: Any, shown: Server, path: str, theme: str) -> None:
    """By axe-core, on every page and in both themes; and no script fails."""
    axe = optional("axe_playwright_python.sync_playwright")
    page = opened(browser, shown, path, color_scheme=theme, bypass_csp=True)
    found = axe.Axe().run(page).response["violations"]
    serious = [
        f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:200]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
    assert serious == []
    assert page.problems == []
    page.context.close()


def test_every_width_shows_what_belongs_together(browser: Any, shown: Server) -> None:
    """On a phone the interval of a forecast, and no empty lines; on a laptop tags; on 4K the bar on top is in line."""
    phone = opened(browser, shown, "/run/fashion-resnet-live", viewport={"width": 390, "height": 844})
    phone.locator(".forecast .strip .interval").first.wait_for()
    empty = """() => [...document.querySelectorAll('.forecast td')].filter((cell) =>
      !cell.textContent.trim() && !cell.querySelector('svg') && cell.checkVisibility()).length"""
    assert phone.evaluate(empty) == 0
    waiting = "[...document.querySelectorAll('.plot.live')].find((one) => one.chart.title === 'Waiting for data')"
    phone.evaluate(f"{waiting}.scrollIntoView()")
    until(phone, f"Boolean({waiting}.chart.plot)")
    assert phone.evaluate(f"{waiting}.chart.plot.scales.y.min") == 0, "a share begins at nothing"
    phone.goto(f"{shown.address}/")
    phone.locator(".body .row").first.wait_for()
    assert not phone.locator(".row .interval").first.is_visible()
    phone.context.close()
    laptop = opened(browser, shown, viewport={"width": 1280, "height": 800})
    cut = """() => [...document.querySelectorAll('.who .tag')].filter((tag) =>
      tag.getBoundingClientRect().right > tag.parentElement.getBoundingClientRect().right + 0.5).length"""
    assert laptop.locator(".who .tag").count() > 2
    assert laptop.evaluate(cut) == 0
    laptop.context.close()
    wide = opened(browser, shown, viewport={"width": 2560, "height": 1440})
    assert wide.locator(".brand").bounding_box()["x"] == wide.locator("h1").bounding_box()["x"]
    wide.context.close()


def report_of(browser: Any, path: Path, report: Report, examples: Sequence[ExampleSet] = (), **options: Any) -> Any:
    """A report opened as a file; requests but for it, and errors of scripts, are in `page.problems`."""
    path.write_text(render_html(report, examples), encoding="utf-8")
    page = browser.new_context(**options).new_page()
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda asked: None if asked.url == path.as_uri() else page.problems.append(asked.url))
    page.goto(path.as_uri())
    return page


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_report_is_drawn_from_itself_and_has_no_serious_finding(browser: Any, tmp_path: Path, theme: str) -> None:
    """Charts, confusion, and what happened by the clock, from one file that asks for nothing; checked by axe-core."""
    axe = optional("axe_playwright_python.sync_playwright")
    examples = [ExampleSet(split="test", num_samples=3, confusion=((2, 0), (1, 0)), classes=("cat", "dog"))]
    report = story.report(story.killed_and_resumed())
    page = report_of(browser, tmp_path / "report.html", report, examples, color_scheme=theme)
    titles = ["Loss", "Accuracy", "Throughput", "Memory", "Waiting for data", "Learning rate"]
    assert page.locator("#run figcaption b").all_text_contents() == titles
    accuracy = page.locator("#run figure", has_text="Accuracy")
    assert "best 93.26 % at 270,000 samples" in accuracy.locator(".plot").get_attribute("aria-label")
    accuracy.locator("canvas").wait_for()
    assert page.get_by_text("most often dog taken for cat, once").count() == 1
    assert page.locator("svg.clock").count() == 1
    assert page.problems == []
    assert "trusted-types" in page.content()
    checked = report_of(browser, tmp_path / "report.html", report, examples, color_scheme=theme, bypass_csp=True)
    found = axe.Axe().run(checked).response["violations"]
    assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []


@pytest.mark.parametrize(
    ("least", "most", "labelled"), [(0.00106, 2.3, "0.001"), (0.0095, 0.9, "0.01"), (1e-9, 1e4, "1e-8")]
)
def test_losses_over_decades_have_ticks(browser: Any, tmp_path: Path, least: float, most: float, labelled: str) -> None:
    """Also where the axis begins a little below a power of ten, and few of them where there are many decades."""
    events = [one for one in story.whole_run() if one.kind in ("planned", "started", "progress")][:40]
    shown = [one for one in events if one.kind == "progress"]
    losses = dict(zip(map(id, shown), itertools.cycle([most, least]), strict=False))
    events = [
        dataclasses.replace(one, fields=one.fields | {"loss": losses[id(one)]}) if id(one) in losses else one
        for one in events
    ]
    page = report_of(browser, tmp_path / "report.html", story.report(events))
    page.locator("#run figure", has_text="Loss").locator("canvas").wait_for()
    ticks = page.evaluate("document.querySelector('.plot.live').chart.plot.axes[1]._values")
    assert page.problems == []
    assert labelled in ticks
    assert 2 <= len(ticks) <= 12


def test_of_a_gpu_its_own_memory_is_beside_the_forecast(browser: Any, tmp_path: Path) -> None:
    """In the chart and the tile, in a report and live, also of events that arrive while the page is open."""
    events = [one for one in story.on_gpu(story.whole_run()) if one.kind in ("planned", "started", "progress")][:60]
    page = report_of(browser, tmp_path / "report.html", story.report(events))
    titles = ["Loss", "Throughput", "Memory of the device", "Waiting for data", "Learning rate"]
    assert page.locator("#run figcaption b").all_text_contents() == titles
    assert page.problems == []
    path = write_run(tmp_path / "runs", "run", as_log(events[:20]), status="unfinished")
    sign(path, os.getpid())
    server = Server(tmp_path / "runs")
    try:
        page = opened(browser, server, "/run/run")
        with (path / "events.jsonl").open("ab") as log:
            log.write(as_log(events[20:]))
        last = events[-1].fields["allocated_bytes"]
        drawn = "[...document.querySelectorAll('.plot.live')].find(one => one.chart.title === 'Memory of the device')"
        until(page, f"{drawn}?.chart.data[1].at(-1) === {last}")
        tile = page.locator(".tile", has_text="memory of the device")
        until(page, f"document.querySelector('.tiles').textContent.includes('{last / MIB:.0f} MiB')")
        assert "forecast peak 905 MiB" in tile.inner_text()
        assert page.problems == []
    finally:
        server.kill()


def test_a_report_is_read_by_keyboard_and_printed_light(browser: Any, tmp_path: Path) -> None:
    """Charts are zoomed together; on paper every one is drawn in the light colours, whatever was on the screen."""
    price = Price(
        device="h100", provider="x", usd_per_hour=3600.0, market="spot", source="a test", seen_on="2026-01-01"
    )
    (chosen, *others), report = story.decision().candidates, story.report(story.whole_run())
    decision = dataclasses.replace(story.decision(), candidates=(dataclasses.replace(chosen, price=price), *others))
    report = dataclasses.replace(report, decision=decision)
    page = report_of(browser, tmp_path / "report.html", report, color_scheme="dark")
    plot = page.locator(".plot.live").first
    plot.locator("canvas").wait_for()
    plot.focus()
    page.keyboard.press("+")
    low, high = plot.evaluate("element => element.chart.axis.shown")
    assert high - low < 0.7 * 324_000
    page.get_by_role("button", name="time").click()
    until(page, "document.querySelector('.plot.live').chart.axis.name === 'wall_s'")
    seconds = plot.evaluate("element => element.chart.data[0].at(-1)")
    page.get_by_role("button", name="money").click()
    until(page, "document.querySelector('.plot.live').chart.axis.name === 'cost'")
    assert plot.evaluate("element => element.chart.data[0].at(-1)") == pytest.approx(seconds), "a dollar a second"
    drawn = "[...document.querySelectorAll('.plot.live')].filter(one => one.querySelector('canvas')).length"
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(drawn) == page.locator(".plot.live").count() == 6
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(250, 248, 245)"
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 23)"
    assert page.pdf().startswith(b"%PDF")
    assert page.problems == []


def test_no_script_of_a_hostile_report_is_run(browser: Any, tmp_path: Path) -> None:
    """Names, texts and labels that hold scripts are shown as what they are."""
    evil = "</script><img src=x onerror=window.hacked=1><script>window.hacked=2</script>"
    events = story.whole_run()
    for event in events:
        if event.kind == "evaluated":
            event.fields.update(split=f"valid{evil[:40]}", metrics={evil: 0.5, "loss": 1.0, f"{evil}[0]": 1.0})
    texts = [{"name": evil, "samples": 5, "text": evil}]
    logged = {"samples": 5, "scalars": {evil: [[1, 2.0]]}, "images": [], "texts": texts}
    for kind, fields in (("warned", {"message": evil}), ("logged", logged)):
        events.append(Event(kind=kind, at=events[-1].at, fields=fields))
    examples = [ExampleSet(split=evil, num_samples=3, confusion=((2, 0), (1, 0)), classes=(evil, "dog"))]
    page = report_of(browser, tmp_path / "report.html", story.report(events, name=evil), examples)
    page.locator(".plot.live canvas").first.wait_for()
    page.get_by_text("<img src=x onerror").first.wait_for()
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert page.problems == []


def test_the_token_leaves_the_address_and_others_stay_out(browser: Any, shown: Server) -> None:
    """The address that was printed opens the page; the same address without its token does not."""
    page = opened(browser, shown)
    assert "token" not in page.url
    assert page.evaluate("document.cookie") == ""
    stranger = browser.new_context().new_page()
    assert stranger.goto(shown.address).status == 401


def test_runs_are_found_by_name_and_by_condition(browser: Any, shown: Server) -> None:
    """A word filters at once, a condition asks the server, and a wrong one says what is wrong."""
    page = opened(browser, shown)
    field = page.get_by_label("Filter runs")
    field.fill("seed2")
    until(page, "document.documentElement.dataset.rows === '1'")
    field.fill("status=failed")
    until(page, "document.querySelectorAll('.body .state.failed').length === 5")
    field.fill("lrr<1")
    page.get_by_text("no run has 'lrr'").wait_for()
    page.keyboard.press("Escape")
    field.fill("")
    page.get_by_label("Choose fashion-resnet-seed1").check()
    page.get_by_label("Choose fashion-resnet-seed2").check()
    page.get_by_role("button", name="Compare 2").click()
    page.get_by_text("differ in nothing but the seed").wait_for()


def test_zoom_by_keyboard_shows_more_points_of_less(browser: Any, shown: Server) -> None:
    """Charts are zoomed and panned without a mouse, all of a run's together."""
    page = opened(browser, shown, "/run/fashion-resnet-live")
    plot = page.locator(".plot.live").first
    plot.locator("canvas").wait_for()
    whole = plot.evaluate("element => element.chart.axis.shown")
    plot.focus()
    page.keyboard.press("+")
    page.keyboard.press("+")
    near = plot.evaluate("element => element.chart.axis.shown")
    assert near[1] - near[0] < 0.6 * (whole[1] - whole[0])
    page.keyboard.press("0")
    assert plot.evaluate("element => element.chart.axis.shown") == whole


def test_events_arrive_once_across_a_killed_server_and_a_sleeping_page(browser: Any, tmp_path: Path) -> None:
    """Whatever was away in between, the page has every progress of the log, in order, once."""
    events = [one for one in story.whole_run() if one.kind in ("planned", "started", "progress")][:200]
    path = write_run(tmp_path, "run", as_log(events[:20]), status="unfinished")
    sign(path, os.getpid())
    server = Server(tmp_path)

    def append(part: list[Any]) -> None:
        with (path / "events.jsonl").open("ab") as log:
            for event in part:
                log.write(as_log([event]))

    try:
        page = opened(browser, server, "/run/run")
        drawn = "document.querySelector('.plot.live').chart.data[0]"
        until(page, f"{drawn}.length === 18")
        append(events[20:60])
        until(page, f"{drawn}.length === 58")
        port = server.port
        server.kill()
        append(events[60:110])
        page.get_by_text("reconnecting").wait_for()
        server.start(port)
        until(page, f"{drawn}.length === 108")
        page.evaluate(HIDE, True)
        append(events[110:150])
        page.evaluate(HIDE, False)
        until(page, f"{drawn}.length === 148")
        page.context.set_offline(True)
        append(events[150:])
        page.context.set_offline(False)
        until(page, f"{drawn}.length === 198")
        assert page.evaluate(drawn) == [one.fields["samples"] for one in events if one.kind == "progress"]
        assert page.problems == []
    finally:
        server.kill()


class Held:
    """Answers of a document, each kept back as it was until `release`."""

    def __init__(self, page: Any, pattern: str) -> None:
        self._page, self._pattern = page, pattern
        self.answers = list[tuple[Any, Any]]()
        page.route(pattern, lambda route: self.answers.append((route, route.fetch())))

    def wait(self) -> None:
        """Until the server has answered."""
        ends = time.monotonic() + 60
        while not self.answers:
            assert time.monotonic() < ends, self._pattern
            self._page.wait_for_timeout(25)

    def release(self) -> None:
        """Hand over what is kept, and keep nothing more."""
        for route, answer in self.answers:  # also those that come meanwhile
            route.fulfill(response=answer)
        self._page.unroute(self._pattern)


def test_events_that_come_while_documents_are_fetched_are_shown_once(browser: Any, tmp_path: Path) -> None:
    """A document may lack an event that has come meanwhile, or have one that comes yet; both on a slow line."""
    story_events = [one for one in story.whole_run() if one.kind in ("planned", "started", "progress", "evaluated")]
    events, rest = story_events[:12], iter(story_events[12:])
    path = write_run(tmp_path, "run", as_log(events), status="unfinished")
    sign(path, os.getpid())
    server = Server(tmp_path)
    added = list[Event]()

    def append(number: int, *others: Event) -> None:
        added.extend([*(next(rest) for _ in range(number)), *others])
        with (path / "events.jsonl").open("ab") as log:
            log.write(as_log(added[-number - len(others) :]))

    def is_shown() -> None:
        size = (path / "events.jsonl").stat().st_size
        until(page, f"document.querySelector('main').dataset.offset === '{size}'")

    try:
        page = opened(browser, server)
        state = Held(page, "**/api/run?*")
        page.goto(f"{server.address}/run/run", wait_until="commit")
        state.wait()
        append(8)  # the series will have them, the state not, and the stream brings them
        state.release()
        page.locator(".plot.live canvas").first.wait_for()
        is_shown()
        state, series = Held(page, "**/api/run?*"), Held(page, "**/api/series?*")
        append(1, Event(kind="logged", at=added[-1].at, fields={"scalars": {"gate": [[1.0, 0.5]]}}))
        state.wait()  # a new scalar lets the page fetch all of it
        append(12)
        is_shown()
        state.release()
        series.wait()
        append(12)
        is_shown()
        series.release()
        page.get_by_text("Gate").or_(page.get_by_text("gate")).first.wait_for()
        until(page, "document.querySelector('main').dataset.drawn > 20")
        page.wait_for_timeout(300)  # whatever is drawn late
        every = [*events, *added]
        drawn = page.evaluate("document.querySelector('.plot.live').chart.data[0]")
        positions = {one.fields["samples"] for one in every if one.kind in ("progress", "evaluated")}
        assert drawn == sorted(positions)
        texts = page.locator(".log .evaluated span").all_text_contents()
        assert len(texts) == len([one for one in every if one.kind == "evaluated"])
        assert page.problems == []
    finally:
        server.kill()


def test_a_folder_that_vanishes_is_said_on_an_open_page(browser: Any, tmp_path: Path) -> None:
    """Not that nothing was ever trained there; when it is back, so are its runs."""
    write_run(tmp_path / "runs", "run", as_log(story.young_run()))
    server = Server(tmp_path / "runs")
    try:
        page = opened(browser, server)
        page.locator(".body .row").wait_for()
        (tmp_path / "runs").rename(tmp_path / "away")
        page.get_by_text("cannot be listed").wait_for()
        assert not page.get_by_text("No runs yet").is_visible()
        (tmp_path / "away").rename(tmp_path / "runs")
        page.locator(".body .row").wait_for()
        assert page.get_by_text("cannot be listed").count() == 0
    finally:
        server.kill()


def test_the_time_to_go_does_not_depend_on_clocks(browser: Any, tmp_path: Path) -> None:
    """The machine that trains may have another time than this one, or its clock be set while it trains."""
    events = [dataclasses.replace(one, at=one.at - 86_400) for one in story.young_run()]
    path = write_run(tmp_path, "run", as_log(events), status="unfinished")
    sign(path, os.getpid())
    server = Server(tmp_path)
    try:
        page = opened(browser, server, "/run/run")

        def value(label: str) -> str:
            return str(page.locator(".tile", has=page.get_by_text(label, exact=True)).locator(".value").inner_text())

        assert re.fullmatch(r"[1-9]\d* min( \d+ s)?|[1-9][\d.]* s", value("time")), value("time")
        assert not value("time to go").startswith("0"), value("time to go")
        in_table = opened(browser, server).locator(".body .c-eta").inner_text()
        assert not in_table.startswith("0"), in_table
    finally:
        server.kill()


def test_a_run_that_was_killed_says_where_it_goes_on(browser: Any, tmp_path: Path) -> None:
    """Nothing in its log tells of its end."""
    write_run(tmp_path, "run", as_log(story.young_run()), status="unfinished")
    server = Server(tmp_path)
    try:
        page = opened(browser, server, "/run/run")
        assert "Its process is gone" in page.locator("aside.notice").inner_text()
        assert page.get_by_text("What happened").count() == 0
    finally:
        server.kill()


def test_the_axis_changes_while_events_come(browser: Any, tmp_path: Path) -> None:
    """An event that comes before the columns of the other axis are there is in them."""
    events = [one for one in story.whole_run() if one.kind in ("planned", "started", "progress")][:40]
    path = write_run(tmp_path, "run", as_log(events[:20]), status="unfinished")
    sign(path, os.getpid())
    server = Server(tmp_path)
    try:
        page = opened(browser, server, "/run/run")
        series = Held(page, "**/api/series?*")
        page.get_by_role("button", name="time", exact=True).click()
        series.wait()
        with (path / "events.jsonl").open("ab") as log:
            log.write(as_log(events[20:]))
        size = (path / "events.jsonl").stat().st_size
        until(page, f"document.querySelector('main').dataset.offset === '{size}'")
        series.release()
        until(page, "document.querySelector('main').dataset.drawn === '38'")
        drawn = page.evaluate("document.querySelector('.plot.live').chart.data[0]")
        assert drawn == [one.fields["wall_s"] for one in events if one.kind == "progress"]
        assert page.problems == []
    finally:
        server.kill()


def test_an_evaluation_before_the_first_progress_is_on_the_time_axis(browser: Any, tmp_path: Path) -> None:
    """As of an untrained model: its place by time is known when the first progress is."""
    events = story.whole_run()
    first, *more = [one for one in events if one.kind == "progress"][:3]
    first = dataclasses.replace(first, fields={**first.fields, "grad_norm": 0.9})
    start = [one for one in events if one.kind in ("planned", "started")]
    tried = next(one for one in events if one.kind == "evaluated")
    tried = dataclasses.replace(tried, fields={**tried.fields, "samples": 0})
    path = write_run(tmp_path, "run", as_log(start), status="unfinished")
    sign(path, os.getpid())
    server = Server(tmp_path)

    def append(*events: Event) -> None:
        with (path / "events.jsonl").open("ab") as log:
            log.write(as_log(events))
        size = (path / "events.jsonl").stat().st_size
        until(page, f"document.querySelector('main').dataset.offset === '{size}'")

    try:
        page = opened(browser, server, "/run/run")
        append(tried)
        accuracy = page.locator("figure", has_text="Accuracy")
        accuracy.wait_for()
        page.get_by_role("button", name="time", exact=True).click()
        accuracy.wait_for(state="hidden")
        append(first)
        append(*more)
        accuracy.wait_for()
        places = accuracy.locator(".plot").evaluate("element => element.chart.data[0]")
        assert places == [first.fields["wall_s"]]
        norm = "[...document.querySelectorAll('.plot')].find((one) => one.chart.title === 'Gradient norm')"
        page.evaluate(f"{norm}.scrollIntoView()")
        until(page, f"{norm}.chart.plot?.series[1].points.show({norm}.chart.plot, 1)")  # no line has one point
        assert page.problems == []
    finally:
        server.kill()


def test_a_server_that_is_away_is_asked_more_and_more_rarely(browser: Any, tmp_path: Path) -> None:
    """The documents of a run's page that could not be fetched are fetched when it answers again."""
    path = write_run(tmp_path, "run", as_log(story.young_run()), status="unfinished")
    sign(path, os.getpid())
    server = Server(tmp_path)
    try:
        page = opened(browser, server, "/run/run")
        page.locator(".plot.live canvas").first.wait_for()
        asked = list[str]()

        def lost(route: Any) -> None:
            asked.append(route.request.url)
            route.abort()

        page.route("**/api/run?*", lost)
        gate = Event(kind="logged", at=time.time(), fields={"scalars": {"gate": [[1.0, 0.5]]}})
        with (path / "events.jsonl").open("ab") as log:
            log.write(as_log([gate]))
        until(page, "document.querySelector('main').dataset.offset > 0")
        page.wait_for_timeout(6000)
        assert 2 <= len(asked) <= 6, "one every quarter of a second were more than 20"
        page.unroute("**/api/run?*")
        page.locator(".figures.live b", has_text="gate").wait_for()
        assert page.problems == []
    finally:
        server.kill()


def test_no_script_of_a_hostile_run_is_run(browser: Any, tmp_path: Path) -> None:
    """Names, labels, texts and files that hold scripts are shown as what they are."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("the-secret-of-another-folder")
    hostile(tmp_path / "runs", outside / "secret.txt")
    server = Server(tmp_path / "runs", "--control")
    try:
        page = opened(browser, server)
        runs = page.evaluate(
            "fetch('/api/runs').then(answer => answer.json()).then(found => found.rows.map(row => row.id))"
        )
        assert len(runs) > 90
        for run in [
            one
            for one in runs
            if one.startswith(("script-0", "giant-0", "torn-1", "numbers-7", "link-0", "\u202eevil", "odd-6", "&lt"))
        ]:
            page.goto(f"{server.address}/run/{'/'.join(map(_quoted, run.split('/')))}")
            page.wait_for_selector("main[data-ready]")
            page.wait_for_timeout(300)
            assert page.evaluate("window.hacked") is None, run
            assert "the-secret" not in page.content(), run
        assert page.problems == []
        with pytest.raises(playwright.Error, match="TrustedHTML"):
            page.evaluate("() => { document.createElement('div').innerHTML = '<img src=x onerror=window.hacked=1>'; }")
        assert page.evaluate("window.hacked") is None
    finally:
        server.kill()


def _quoted(part: str) -> str:
    from urllib.parse import quote

    return quote(part, safe="")


def test_commands_in_texts_are_shown_as_code(browser: Any, tmp_path: Path) -> None:
    """Not with the backticks of a terminal; of a name they are a part."""
    warning = Event(kind="warned", at=time.time(), fields={"message": "`nproc` says <b>4</b>"})
    write_run(tmp_path / "runs", "a`b`c", as_log([*story.young_run(), warning]))
    server = Server(tmp_path / "runs")
    try:
        page = opened(browser, server, "/run/a%60b%60c")
        until(page, "document.querySelectorAll('main li code').length > 0")
        assert page.locator("main li code").first.inner_text() == "nproc"
        assert "nproc says <b>4</b>" in page.locator("main").inner_text()
        assert page.locator("h1").inner_text() == "a`b`c"
        assert page.problems == []
    finally:
        server.kill()


def test_tags_are_kept_where_changes_are_allowed(browser: Any, shown: Server) -> None:
    """A tag that is given on the page is in the run's directory and in the table."""
    page = opened(browser, shown)
    page.get_by_label("Choose fashion-resnet-seed3").check()
    page.get_by_role("button", name="Tag").click()
    page.get_by_label("Tags, separated by spaces").fill("good final")
    page.get_by_role("button", name="Keep").click()
    page.locator(".body .tag", has_text="final").first.wait_for()
    assert '"final"' in (shown.root / "fashion-resnet-seed3" / "annotations.json").read_text()
    page = opened(browser, shown, "/run/fashion-resnet-seed3")
    page.get_by_role("button", name="Tags, note").click()
    page.get_by_label("Note").fill("the one of the paper")
    page.get_by_role("button", name="Keep").click()
    page.locator(".run-head", has_text="the one of the paper").wait_for()
    assert page.locator(".run-head .tag").all_text_contents() == ["good", "final"]
    assert page.problems == []


def test_a_thousand_runs_are_as_few_elements_as_thirty(browser: Any, tmp_path: Path) -> None:
    """Only rows on the screen exist, wherever one scrolls."""
    many(tmp_path, 1000)
    server = Server(tmp_path)
    try:
        page = opened(browser, server)
        until(page, "document.documentElement.dataset.rows === '1000'")
        for share in (0, 0.5, 1):
            page.evaluate(f"window.scrollTo(0, {share} * document.body.scrollHeight)")
            until(page, "document.querySelectorAll('.body .row').length > 10")
            assert page.locator(".body .row").count() < 60
    finally:
        server.kill()


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, PoolClient, str]]:
    """A page of runs and of a pool with a month behind it, its operator's client, and the lease that goes on."""
    folder = tmp_path_factory.mktemp("pooled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        with planted_pool(folder / "pool", own_key()) as (operator, lease):
            show(folder / "runs")
            server = Server(folder / "runs", "--pool", str(operator.address))
            yield server, operator, lease
            server.kill()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_pool_is_shown_without_a_serious_finding(browser: Any, pooled: Any, theme: str, width: int) -> None:
    """Offers with their evidence, leases with their meter, the wallet, and a log that was checked."""
    axe = optional("axe_playwright_python.sync_playwright")
    size = {"width": width, "height": 900}
    page = opened(browser, pooled[0], "/places", color_scheme=theme, viewport=size, bypass_csp=True)
    page.get_by_text("The log holds").wait_for()
    page.get_by_label("taken, lapsed and absent ones too").check()
    assert page.locator(".offers tbody tr").count() == 6
    bargain = page.locator(".offers tr", has_text="bargain")
    assert "1 bond cut" in bargain.inner_text()
    live = page.locator(".leases tr", has_text="fashion-resnet-live")
    assert "of 0.63 at most" in live.inner_text()
    assert "2 unequal" in page.locator(".leases tr", has_text="fashion-resnet-seed1").inner_text()
    found = axe.Axe().run(page).response["violations"]
    assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page itself does not scroll aside"
    assert page.problems == []
    page.context.close()


def test_the_pool_is_followed_while_the_page_is_open(browser: Any, pooled: Any) -> None:
    """A new event is there without a reload, and what was scrolled and chosen stays; no other page asks for it."""
    server, operator, _ = pooled
    page = opened(browser, server, "/places")
    page.locator(".ledger li").first.wait_for()
    page.get_by_label("taken, lapsed and absent ones too").check()
    log = page.locator(".pool .log")
    log.focus()
    log.evaluate("one => { one.scrollTop = 90; }")
    operator.post(on.Deposited(account=Key.made().public, amount=3 * CREDIT))
    page.locator(".ledger li", has_text="amount 3.00 credits").wait_for()
    assert page.locator(".pool .log").evaluate("one => [one.scrollTop, one === document.activeElement]") == [90, True]
    assert page.get_by_label("taken, lapsed and absent ones too").is_checked()
    requests: list[str] = []
    page.on("request", lambda asked: requests.append(asked.url))
    page.get_by_role("link", name="Runs", exact=True).click()
    page.wait_for_selector(".body .row")
    requests.clear()
    page.wait_for_timeout(6000)
    assert not [one for one in requests if "/api/pool" in one]
    assert page.problems == []


def test_no_script_of_a_hostile_pool_is_run(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name, reasons and teams are shown as what they are."""
    evil = "<img src=x onerror=window.hacked=1><script>window.hacked=2</script>"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with in_thread(tmp_path / "pool", is_open=True) as (plane, operator):
        plane.state.rules = dataclasses.replace(plane.state.rules, name=f"{evil}\u202e")
        renter, agent = PoolClient(operator.address, own_key()), PoolClient(operator.address, Key.made())
        for client in (renter, agent):
            operator.post(on.Deposited(account=client.key.public, amount=10 * CREDIT))
        agent.post(on.Offered(offer=offer(now_s=time.time(), max_s=2**53, reclaim_s=2**53, upload_bytes_per_s=9e15)))
        renter.post(opened_lease())
        renter.post(on.Closed(lease_id="job", reason=evil))
        server = Server(tmp_path, "--pool", str(operator.address))
        try:
            page = opened(browser, server, "/places")
            page.get_by_text("onerror=window.hacked").first.wait_for()
            assert page.get_by_role("heading", name="onerror").count() == 1
            page.wait_for_timeout(300)
            assert page.evaluate("window.hacked") is None
            assert page.locator("main img").count() == 0
            assert page.problems == []
        finally:
            server.kill()


def test_a_pool_that_is_away_or_none_is_a_sentence(
    browser: Any, shown: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the remedy; what it said before stays, and the rest of the page does not wait for it."""
    page = opened(browser, shown, "/places")
    page.get_by_text("No pool is configured").wait_for()
    assert "stoker ui --pool URL#KEY" in page.locator(".pool").inner_text()
    page.context.close()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "pool").mkdir()
    pool = Killable(tmp_path / "pool")
    pool.start()
    server = Server(tmp_path, "--pool", str(pool.client().address))
    try:
        page = opened(browser, server, "/places")
        page.get_by_text("Nothing is offered").wait_for()
        assert "You have no key yet" in page.locator(".pool").inner_text()
        pool.kill()
        page.get_by_text("The pool cannot be asked now").wait_for()
        assert "does not answer" in page.locator(".pool .notice").inner_text()
        assert page.get_by_text("Nothing is offered").count() == 1
        pool.start()
        until(page, "!document.querySelector('.pool .notice')")
        assert page.problems == []
    finally:
        server.kill()
        if pool.process is not None:
            pool.kill()


def test_a_service_that_was_away_is_shown_again(browser: Any, tmp_path: Path) -> None:
    """Either its charts or why there are none; of a version that was unloaded nothing stays."""
    versions, is_away = ["1", "2"], True

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ready = "".join(f'stoker_model_ready{{model="digits",version="{one}"}} 1\n' for one in versions)
            self.send_response(503 if is_away else 200)
            self.send_header("Content-Length", str(len(ready)))
            self.end_headers()
            self.wfile.write(ready.encode())

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    metrics = ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    threading.Thread(target=metrics.serve_forever, daemon=True).start()
    server = Server(tmp_path, "--service", f"127.0.0.1:{metrics.server_port}")
    try:
        page = opened(browser, server, "/services")
        away, first = page.get_by_text("does not answer"), page.get_by_role("heading", name="digits, version 1")
        for is_away in (True, False, True, False):
            (away if is_away else first).wait_for()
            (first if is_away else away).wait_for(state="hidden")
        versions.remove("1")
        first.wait_for(state="detached")
        assert page.get_by_role("heading", name="digits, version 2").is_visible()
        assert page.locator(".service .plot").count() == 3
        assert page.locator(".service .legend").inner_text().split() == ["p50", "p99"]
        requests = "[...document.querySelectorAll('.plot')].find((one) => one.chart.title === 'Requests').chart"
        until(page, f"{requests}.plot && {requests}.axis.whole[1] - {requests}.axis.whole[0] > 1.5")
        page.evaluate(f"(({{ axis }}) => axis.set([axis.whole[0], axis.whole[0] + 1]))({requests})")
        until(page, f"{requests}.plot.scales.x.max - {requests}.plot.scales.x.min < 1.1")
        ticks = [one for one in page.evaluate(f"{requests}.plot.axes[0]._values") if one]
        assert len(set(ticks)) == len(ticks), "of seconds between two of which there are several ticks"
        assert page.problems == []
    finally:
        server.kill()
        metrics.shutdown()
        metrics.server_close()


def test_no_runs_at_all_says_how_to_make_one(browser: Any, tmp_path: Path) -> None:
    """An empty folder is no error."""
    server = Server(tmp_path)
    try:
        page = opened(browser, server)
        page.get_by_text("stoker train examples/digits.py").wait_for()
        page.get_by_role("link", name="Studies").click()
        command = shlex.split(page.get_by_text("stoker tune").inner_text())
        assert command[:3] == ["stoker", "tune", "examples/digits.py"]
        assert [one.name for one in parse_space([command[command.index("--space") + 1]])] == ["lr"]
        page.get_by_role("link", name="Runs", exact=True).click()
        started = time.monotonic()
        write_run(tmp_path, "first", as_log(story.young_run()))
        page.get_by_role("link", name="first").wait_for()
        assert time.monotonic() - started < 60
    finally:
        server.kill()
