from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np
import pytest

from bench.web.planted import as_log, hostile, long_log, show, sign, write_pictures, write_run
from stoker.records import Event, LaunchState, dumps
from stoker.reporting.pages import compact_json
from stoker.web import run_index, run_view, server
from stoker.web.alerts import alerts_of
from stoker.web.run_index import RunIndex, remaining_s
from stoker.web.run_log import RunLog
from stoker.web.server import Ui, UiOptions
from stoker.web.services import Service, parse_metrics, quantile
from tests.reporting import story
from tests.web.browser import PORT, TOKEN, ask, asked, streamed, ui_of


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of everything."""
    root = tmp_path_factory.mktemp("runs") / "show"
    show(root)
    return root


def test_rows_say_what_a_user_asks_first(shown: Path) -> None:
    """State, result, time to go with an interval, money, waiting."""
    rows = {row["id"]: row for row in ask(ui_of(shown), "/api/runs").json()["rows"]}
    live, queued = rows["fashion-resnet-live"], rows["llama-shards"]
    assert live["state"] == "running"
    assert live["tags"] == ["paper", "sweep-3"]
    value, low, high, basis = live["eta_s"]
    assert low <= value <= high
    assert basis == "this run's rates"
    assert live["cost_usd"] == pytest.approx(live["wall_s"] / 3600 * 1.89)
    assert 0 < live["waiting"] < 0.1
    assert (queued["state"], queued["launch"]["starts_in_s"]) == ("queued", 5400)
    assert rows["llama-shards-2"]["state"] == "preempted"
    assert rows["digits-search/trials/0003"]["study"] == "digits-search"


def test_every_document_of_every_page_is_answered(shown: Path) -> None:
    """All that the pages ask for, of one folder with one of everything."""
    addresses = [
        "run?run=fashion-resnet-live",
        "series?run=fashion-resnet-live&px=50&scalar=gate",
        "sections?run=fashion-resnet-resumed",
        "series?run=fashion-resnet-resumed&over=wall_s",
        "series?run=fashion-resnet-resumed&over=cost&from=0&to=0.01",
        "confusion?run=fashion-resnet-resumed",
        "picture?run=fashion-resnet-live&file=3.png",
        "study?study=digits-search",
        "compare?run=fashion-resnet-seed1&run=fashion-resnet-seed2",
        "plan?plan=devices.json",
        "plan?plan=fashion-resnet-live",
        "plans",
        "places",
        "check?check=images-check",
        "services",
        "select?where=lr<0.1&sort=-test/accuracy",
    ]

    async def answers() -> list[Any]:
        application = ui_of(shown).application()
        return [await asked(application, f"/api/{address}") for address in addresses]

    for address, answer in zip(addresses, asyncio.run(answers()), strict=True):
        assert answer.status == 200, (address, answer.body)
        assert answer.body, address


def test_the_sections_are_those_of_the_report(shown: Path) -> None:
    """One renderer: the page shows the report's own HTML of forecast, plan, timeline and machine."""
    from stoker.reporting.run_page import render_html
    from stoker.store import RunDirectory

    directory = RunDirectory(shown / "fashion-resnet-resumed")
    report = render_html(directory.read_report(), directory.read_examples())
    sections = ask(ui_of(shown), "/api/sections?run=fashion-resnet-resumed").body.decode()
    assert sections.strip() in report


def test_a_report_holds_what_the_page_is_sent(shown: Path) -> None:
    """One renderer: series over each axis, evaluations, spans and confusion of the report are the live page's own."""
    from stoker.reporting.run_page import render_html
    from stoker.store import RunDirectory
    from tests.reporting.test_html import documents

    directory = RunDirectory(shown / "fashion-resnet-resumed")
    found = documents(render_html(directory.read_report(), directory.read_examples()))
    ui = ui_of(shown)

    def sent(what: str, **query: str) -> Any:
        asked = ask(ui, f"/api/{what}?{urlencode({'run': directory.name, **query})}").json()
        return json.loads(compact_json(asked, figures=6 if what == "series" else 17))

    for over in ("samples", "wall_s"):
        live = sent("series", over=over, px="700")
        assert {name: live[name] for name in found["series"][over]} == found["series"][over]
    live = sent("run")
    assert {"evaluations", "best", "spans", "plans", "forecast"} < set(found["state"])
    for name in ("evaluations", "best", "spans", "plans", "forecast", "superseded_s", "scalars"):
        assert live[name] == found["state"][name], name
    assert sent("confusion") == found["confusion"]


def test_runs_are_chosen_as_on_the_command_line(shown: Path) -> None:
    """The same conditions, with the same complaints."""
    ui = ui_of(shown)
    found = ask(ui, "/api/select?where=status%3Dfailed").json()
    assert found
    assert all(ui.index.rows[run].document["status"] == "failed" for run in found)
    wrong = ask(ui, "/api/select?where=lrr%3C0.1")
    assert (wrong.status, wrong.json()["error"]) == (422, "no run has 'lrr'")


def _has_events(count: int, got: list[tuple[str, Any, int]]) -> bool:
    return sum(one[0] == "event" for one in got) >= count


def test_a_stream_goes_on_where_it_ended(tmp_path: Path) -> None:
    """Cut off anywhere and resumed by the id of its last event, it has every event once, in order."""
    events = story.killed_and_resumed()[:200]
    write_run(tmp_path, "run", as_log(events[:150]), status="unfinished")

    async def follow() -> list[tuple[str, Any, int]]:
        found: list[tuple[str, Any, int]] = []
        for part, wanted in ((events[150:], 40), ([], 120), ([], 200)):
            with (tmp_path / "run" / "events.jsonl").open("ab") as log:
                log.write(as_log(part))
            ui = ui_of(tmp_path)  # a server that was restarted
            offset, missing = found[-1][2] if found else 0, wanted - len(found)
            received = await streamed(ui, "run", offset, functools.partial(_has_events, missing))
            found += [one for one in received if one[0] == "event"][:missing]
        return found

    found = asyncio.run(follow())
    assert [one[1]["at"] for one in found] == [event.at for event in events]
    assert [one[1]["kind"] for one in found] == [event.kind for event in events]


def test_what_is_appended_arrives(tmp_path: Path) -> None:
    """An event that is written while a page watches is sent; half a line waits for its other half."""
    path = write_run(tmp_path, "run", as_log(story.young_run()), status="unfinished")
    size = (path / "events.jsonl").stat().st_size
    line = as_log([Event(kind="warned", at=5.0, fields={"message": "later"})])

    async def follow() -> list[tuple[str, Any, int]]:
        async def write() -> None:
            for part in (line[:20], line[20:]):
                await asyncio.sleep(0)
                with (path / "events.jsonl").open("ab") as log:
                    log.write(part)

        task = asyncio.create_task(write())
        found = await streamed(ui_of(tmp_path), "run", size, lambda got: any(one[0] == "event" for one in got))
        await task
        return found

    [(_, event, offset)] = [one for one in asyncio.run(follow()) if one[0] == "event"]
    assert event["text"] == "warning: later"
    assert offset == size + len(line)


def test_a_page_that_is_far_behind_fetches_anew(tmp_path: Path) -> None:
    """After a long sleep, and where the log is another file than before."""
    path = write_run(tmp_path, "run", long_log(1500), status="unfinished")
    found = asyncio.run(streamed(ui_of(tmp_path), "run", 0, lambda got: any(one[0] != "rows" for one in got)))
    assert [one[0] for one in found if one[0] != "rows"] == ["refetch"]
    assert found[-1][2] == (path / "events.jsonl").stat().st_size


def test_what_a_page_fetched_ahead_of_the_looks_is_not_sent_again(tmp_path: Path) -> None:
    """Its document may have more of the log than the last look; a log that was cut is another matter."""
    path = write_run(tmp_path, "run", as_log(story.young_run()), status="unfinished")
    ui, log = ui_of(tmp_path), path / "events.jsonl"
    first, later = (as_log([Event(kind="warned", at=5.0, fields={"message": one})]) for one in ("first", "later"))
    with log.open("ab") as file:
        file.write(first)
    fetched = ask(ui, "/api/run?run=run").json()
    tail = ui.index.rows["run"].tail
    assert fetched["offset"] == tail.end + len(first)

    async def follow() -> list[bytes]:
        stream = ui._stream(ui.index.rows["run"], fetched["log"], fetched["offset"], ui.index.version)
        pieces = [await anext(stream)]
        for change in (lambda: log.write_bytes(log.read_bytes() + later), lambda: os.truncate(log, 0)):
            waits = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            change()
            ui._look()
            pieces.append(await waits)
        await stream.aclose()
        return pieces

    _, appended, cut = asyncio.run(asyncio.wait_for(follow(), 60))
    assert b"later" in appended
    assert b"first" not in appended
    assert b"refetch" not in appended
    assert b"event: refetch" in cut


def test_a_long_log_is_shown_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First its shape by some of its lines, then all of it."""
    monkeypatch.setattr(server, "_AT_ONCE_BYTES", 100_000)
    write_run(tmp_path, "run", long_log(3000), status="unfinished")

    async def series() -> tuple[Any, Any]:
        ui = ui_of(tmp_path)
        application = ui.application()
        first = (await asked(application, "/api/series?run=run&px=100")).json()
        await ui._reading["run"]
        return first, (await asked(application, "/api/series?run=run&px=100")).json()

    first, later = asyncio.run(series())
    assert (first["is_whole"], later["is_whole"]) == (False, True)
    assert later["num_points"] == 3000
    assert max(first["progress"]["x"]) > 0.99 * max(later["progress"]["x"])


def test_hostile_directories_harm_nothing(tmp_path: Path) -> None:
    """A hundred of them: every document is an answer or an error, and none holds the file outside."""
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = outside / "secret.txt"
    secret.write_text("the-secret-of-another-folder")
    (outside / "run.json").write_text("the-secret-of-another-folder")
    (outside / "0.json").write_text("the-secret-of-another-folder")
    assert hostile(tmp_path / "runs", secret) >= 100

    ui = ui_of(tmp_path / "runs", allows_changes=True)
    addresses = [
        "runs",
        "places",
        "plans",
        "select?where=name~x",
        "study?study=..",
        "check?check=../..",
        "run?run=../out",
    ]
    for run in ui.index.rows:
        name = quote(run)
        addresses += [f"{what}?run={name}" for what in ("run", "series", "confusion")]
        addresses += [
            f"plan?plan={name}",
            f"picture?run={name}&file=../../../secret.txt",
            f"compare?run={name}&run={name}",
        ]
        if not run.startswith(("numbers", "torn", "pid")):  # the same sections again
            addresses.append(f"sections?run={name}")

    async def answers() -> list[tuple[str, Any]]:
        application = ui.application()
        return [(address, await asked(application, f"/api/{address}")) for address in addresses]

    found = asyncio.run(answers())
    assert len(found) > 500
    for address, answer in found:
        assert answer.status in (200, 404, 409, 422), (address, answer.status, answer.body[:300])
        assert b"the-secret" not in answer.body, address
        assert len(answer.body) < 5_000_000, address
        if "sections" in address and answer.status == 200:
            assert b"<script" not in answer.body, address
            assert b"<img src=x" not in answer.body, address


def test_a_second_folder_that_vanishes_is_news(tmp_path: Path) -> None:
    """It takes no row along, and open pages hear of it once all the same."""
    write_run(tmp_path / "runs", "run", as_log(story.young_run()))
    (tmp_path / "more").mkdir()
    page = ui_of(tmp_path / "runs", tmp_path / "more")
    page.index.scan()
    version = page.index.version
    assert page._news_of_rows(None, version)[0] == []
    (tmp_path / "more").rmdir()
    page.index.scan()
    (news,), at = page._news_of_rows(None, version)
    assert b"cannot be listed" in news
    assert not page.index.scan()
    assert page._news_of_rows(None, at)[0] == []


def test_no_folder_and_no_runs_are_said(tmp_path: Path) -> None:
    """A folder that is not there is a sentence, and one that vanishes takes its rows along."""
    missing = ask(ui_of(tmp_path / "none"), "/api/runs").json()
    assert missing["rows"] == []
    assert "cannot be listed" in missing["problems"][0]
    path = write_run(tmp_path / "runs", "run", as_log(story.young_run()))
    index = RunIndex([tmp_path / "runs"])
    assert index.scan()
    version = index.version
    path.rename(tmp_path / "moved")
    assert index.scan()
    assert index.changed_since(version) == ([], ["run"])


def test_a_run_is_shown_as_soon_as_it_is_there(tmp_path: Path) -> None:
    """Its page may be opened before the folders are looked at again."""
    ui = ui_of(tmp_path)
    assert ask(ui, "/api/run?run=new").status == 409
    write_run(tmp_path, "new", as_log(story.young_run()))
    assert ask(ui, "/api/run?run=new").json()["row"]["id"] == "new"


def test_several_folders_and_a_run_alone(tmp_path: Path) -> None:
    """Runs of one name in two folders are two; a run itself may be named."""
    for folder in ("a", "b"):
        write_run(tmp_path / folder, "run", as_log(story.young_run()))
    assert set(ui_of(tmp_path / "a", tmp_path / "b").index.rows) == {"0~run", "1~run"}
    alone = ui_of(tmp_path / "a" / "run").index.rows
    assert {name: row.document["status"] for name, row in alone.items()} == {"run": "finished"}


def test_a_process_that_is_gone_trains_nothing(tmp_path: Path) -> None:
    """A run whose process was killed is stopped; one that says nothing for long is stalled, whatever the clocks say."""
    path = write_run(tmp_path, "run", as_log(story.young_run()), status="unfinished")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    sign(path, gone.pid)
    now = 1000.0
    index = RunIndex([tmp_path], clock=lambda: now)
    index.scan()
    assert index.rows["run"].document["state"] == "stopped"
    sign(path, os.getpid())
    os.utime(path / "events.jsonl", (10, 10))
    index.scan()
    assert index.rows["run"].document["state"] == "running"
    now += 500
    index.look_at_live()
    assert index.rows["run"].document["state"] == "stalled"


def test_between_two_progress_events_only_the_log_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is open as long as its run trains; its row is made anew every few seconds, or with any other event."""
    progress = next(event for event in story.young_run() if event.kind == "progress")
    path = write_run(tmp_path, "run", as_log([progress]), status="unfinished")
    sign(path, os.getpid())
    now, seen = 1000.0, list[str]()
    index = RunIndex([tmp_path], clock=lambda: now)
    index.scan()
    index.look_at_live()
    row = index.rows["run"]

    def noted(original: Callable[..., Any], path: Any, *more: Any, **options: Any) -> Any:
        seen.append(Path(path).name)
        return original(path, *more, **options)

    for name in ("lstat", "open"):
        monkeypatch.setattr(os, name, functools.partial(noted, getattr(os, name)))

    def append(**fields: Any) -> set[str]:
        event = dataclasses.replace(progress, **fields)
        with (path / "events.jsonl").open("ab") as log:
            log.write(as_log([event]))
        seen.clear()
        return index.look_at_live()

    assert not index.look_at_live()
    assert append(fields={**progress.fields, "samples": 999_424}) == {"run"}
    assert seen == []
    assert b"999424" in row.tail.lines
    (path / run_index.ANNOTATIONS).write_text('{"tags": ["new"]}')
    assert not index.look_at_live()
    assert row.document["samples"] < 999_424
    now += 4
    index.look_at_live()
    assert (row.document["samples"], row.document["tags"], row.document["state"]) == (999_424, ["new"], "running")
    (path / "run.json").write_bytes((path / "run.json").read_bytes().replace(b'"unfinished"', b'"finished"'))
    assert append(kind="finished", fields={})
    assert row.document["state"] == "finished"
    assert row.open_log is None


def test_only_so_many_logs_stay_open_and_none_on_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more runs that train than may be open, and on NFS, each look opens a log and closes it."""
    monkeypatch.setattr(run_index, "_MOST_OPEN_LOGS", 2)
    logs = []
    for name in ("a", "b", "c"):
        path = write_run(tmp_path, name, as_log(story.young_run()), status="unfinished")
        sign(path, os.getpid())
        logs.append(path / "events.jsonl")
    progress = story.young_run()[-1]

    def look(index: RunIndex) -> set[str]:
        for log in logs:
            with log.open("ab") as file:
                file.write(as_log([progress]))
        return index.look_at_live()

    def open_logs(index: RunIndex) -> list[str]:
        return [row.name for row in index.rows.values() if row.open_log is not None]

    index = RunIndex([tmp_path])
    index.scan()
    for _ in range(2):
        assert look(index) == {"a", "b", "c"}
        assert open_logs(index) == []
    (logs[2].parent / "lock").unlink()
    for _ in range(2):  # the lines that it has written, and then that its process is gone
        index.rows["c"].looked_at = -math.inf
        index.look_at_live()
    assert not index.rows["c"].is_live
    logs.pop()
    for _ in range(2):
        assert look(index) == {"a", "b"}
        assert sorted(open_logs(index)) == ["a", "b"]
    monkeypatch.setattr(run_index, "is_on_network", lambda folder: folder == tmp_path)
    index.scan()
    for _ in range(2):
        assert look(index) == {"a", "b"}
        assert open_logs(index) == []


def test_a_log_that_is_replaced_or_cut_while_its_run_trains_is_read_anew(tmp_path: Path) -> None:
    """Though it was kept open: what is shown is what is there under its name."""
    events = [event for event in story.whole_run() if event.kind == "progress"][:8]
    path = write_run(tmp_path, "run", as_log(events), status="unfinished")
    sign(path, os.getpid())
    now = 1000.0
    index = RunIndex([tmp_path], clock=lambda: now)
    index.scan()
    row, log = index.rows["run"], path / "events.jsonl"
    assert row.open_log is not None
    for number, content in enumerate((as_log(events[:5]), as_log(events[:3]))):
        if number == 0:
            log.rename(path / "old")
        log.write_bytes(content)  # the second in place
        now += 4
        assert index.look_at_live() == {"run"}
        assert row.tail.end == len(content)
        assert row.last["samples"] == events[5 - 2 * number - 1].fields["samples"]


def test_folders_tell_where_a_run_may_have_begun(tmp_path: Path) -> None:
    """A new run, one in a folder that was empty, a trial, a run that goes on, one that went; not a log that grows."""
    write_run(tmp_path, "done", b"")
    stopped = write_run(tmp_path, "stopped", b"", status="unfinished")
    (tmp_path / "study" / "trials").mkdir(parents=True)
    (tmp_path / "study" / "study.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    index = RunIndex([tmp_path])
    index.scan()
    assert not index.has_new_folders()
    with (stopped / "events.jsonl").open("ab") as log:
        log.write(as_log(story.young_run()))
    assert not index.has_new_folders()
    for change in (
        lambda: write_run(tmp_path, "new", b""),
        lambda: shutil.copy(tmp_path / "done" / "run.json", tmp_path / "empty"),
        lambda: write_run(tmp_path / "study" / "trials", "0000", b""),
        lambda: sign(stopped, os.getpid()),
        lambda: shutil.rmtree(tmp_path / "done"),
    ):
        change()
        assert index.has_new_folders()
        index.scan()
        assert not index.has_new_folders()


def test_a_run_that_was_killed_and_goes_on_is_noticed(tmp_path: Path) -> None:
    """Its lock is written again in its place, which its folder does not show, and no page has to follow it."""
    now, log = 1000.0, as_log(story.young_run())
    path = write_run(tmp_path, "run", log, status="unfinished")
    index = RunIndex([tmp_path], clock=lambda: now)
    with subprocess.Popen(["sleep", "60"]) as process:
        sign(path, process.pid)
        index.scan()
        assert index.rows["run"].document["state"] == "running"
        process.kill()
    now += 5
    index.look_at_live()
    assert index.rows["run"].document["state"] == "stopped"
    assert index.has_new_folders()
    index.scan()
    assert not index.has_new_folders()
    folder_ns = path.stat().st_mtime_ns
    sign(path, os.getpid())
    with (path / "events.jsonl").open("ab") as file:
        file.write(log)
    assert path.stat().st_mtime_ns == folder_ns
    assert index.has_new_folders()
    index.scan()
    assert index.rows["run"].document["state"] == "running"
    assert not index.has_new_folders()


def test_lines_that_a_scan_reads_reach_pages_at_once(tmp_path: Path) -> None:
    """Though they change no row: the next look finds nothing new any more."""
    path = write_run(tmp_path, "run", as_log(story.young_run()), status="unfinished")
    sign(path, os.getpid())
    ui, log = ui_of(tmp_path), path / "events.jsonl"
    ui._look()

    async def follow() -> bytes:
        ui._look()
        stream = ui._stream(ui.index.rows["run"], "", log.stat().st_size, ui.index.version)
        await anext(stream)
        waits = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with log.open("ab") as file:
            file.write(as_log([Event(kind="logged", at=5.0, fields={"samples": 1, "scalars": {"gate": 0.5}})]))
        version = ui.index.version
        await ui._rescan()
        assert ui.index.version == version
        piece = await asyncio.wait_for(waits, 60)
        await stream.aclose()
        return piece

    assert b"event: event" in asyncio.run(follow())


def test_a_run_elsewhere_is_a_row_before_it_is_fetched(tmp_path: Path) -> None:
    """launch.json makes the row and says the state; without a lock here; and one that was fetched midway runs on."""
    state = LaunchState(phase="running", why="training", at="2026-01-01T01:30:00+00:00")
    launch = story.launched(submitted_at="2026-01-01T00:00:00+00:00", states=(state,))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "launch.json").write_text(dumps(launch))
    events = as_log(story.young_run())
    write_run(tmp_path, "fetched", events, status="unfinished", launch=launch)
    ui = ui_of(tmp_path)
    rows = {row["id"]: row for row in ask(ui, "/api/runs").json()["rows"]}
    assert {name: (row["status"], row["state"]) for name, row in rows.items()} == {
        "there": ("unfinished", "running"),
        "fetched": ("unfinished", "running"),
    }
    (tmp_path / "there" / "events.jsonl").write_bytes(events)
    ui.index.scan()
    assert ui.index.rows["there"].document["samples"] > 0
    assert ask(ui, "/api/run?run=there").status == 200
    assert ask(ui, "/api/series?run=there&px=50").status == 200
    ended = dataclasses.replace(launch, states=(state, dataclasses.replace(state, phase="finished")))
    (tmp_path / "there" / "launch.json").write_text(dumps(ended))
    ui.index.scan()
    assert ui.index.rows["there"].document["state"] == "finished"
    assert set(ui_of(tmp_path / "there").index.rows) == {"there"}


def test_a_run_elsewhere_whose_record_is_of_another_schema_says_so(tmp_path: Path) -> None:
    """And not that it has no run.json, which none has before it is fetched; a fetched one is shown without it."""
    (tmp_path / "there").mkdir()
    write_run(tmp_path, "fetched", as_log(story.young_run()), status="unfinished")
    for name in ("there", "fetched"):
        (tmp_path / name / "launch.json").write_text('{"record": "Launch", "schema": 99}')
    rows = {row["id"]: row for row in ask(ui_of(tmp_path), "/api/runs").json()["rows"]}
    assert "launch.json cannot be used: Launch: schema version 99" in rows["there"]["problem"]
    assert (rows["fetched"]["status"], rows["fetched"]["launch"]) == ("unfinished", None)


def test_a_run_elsewhere_costs_all_the_time_it_held_devices(tmp_path: Path) -> None:
    """Starts and lost work count, as for `--max-cost`; the queue does not; what was recorded at the end holds."""

    def state(phase: Any, minute: int) -> LaunchState:
        return LaunchState(phase=phase, why="", at=f"2026-01-01T{10 + minute // 60}:{minute % 60:02}:00+00:00")

    launch = story.launched(
        place="sky:spot",
        kind="sky",
        submitted_at="2026-01-01T10:00:00+00:00",
        price_per_h=6.0,
        max_cost=12.0,
        states=(state("starting", 0), state("preempted", 70), state("starting", 90), state("running", 96)),
    )
    path = write_run(tmp_path, "run", b"", status="unfinished", launch=launch, wall_s=600.0)
    index = RunIndex((tmp_path,))
    index.scan()
    assert index.rows["run"].document["cost_usd"] == pytest.approx(7.6)
    last_s = state("running", 150).at_s
    assert last_s is not None
    before = index.rows["run"].document
    event = Event(kind="progress", at=last_s, fields={"samples": 8, "wall_s": 600.0, "loss": 0.5})
    (path / "events.jsonl").write_bytes(as_log([event]))
    index.scan()
    row = index.rows["run"].document
    assert row["cost_usd"] == pytest.approx(13.0)
    assert [alert.kind for alert in alerts_of(before, row)] == ["over budget"]
    ended = dataclasses.replace(launch, spent=13.5, states=(*launch.states, state("stopped", 155)))
    (path / "launch.json").write_text(dumps(ended))
    index.scan()
    assert index.rows["run"].document["cost_usd"] == 13.5


def test_stop_signals_the_process_that_trains(tmp_path: Path) -> None:
    """And no other: not a number that a dead run left, nor one of another user's."""
    path = write_run(tmp_path, "run", as_log(story.young_run()), status="unfinished")
    ui = ui_of(tmp_path, allows_changes=True)
    post = {"method": "POST", "content_type": "application/json"}
    assert ask(ui, "/api/do/stop?run=run", **post).status == 409
    waits = (
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True)\nsignal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", waits], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    sign(path, process.pid)
    assert ask(ui, "/api/do/stop?run=run", **post).status == 200
    assert process.wait(timeout=60) == 7
    process.stdout.close()
    other = subprocess.Popen(["sleep", "60"])
    try:
        sign(path, other.pid)
        assert "is not Stoker's" in ask(ui, "/api/do/stop?run=run", **post).json()["error"]
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()


def test_a_run_that_cannot_be_shown_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers beyond any count, a name that is not UTF-8, a disk that fails: the table has all rows."""
    write_run(tmp_path, "good", as_log(story.young_run()))
    vast = Event(kind="progress", at=1.0, fields={"samples": 1e30, "total_samples": "inf", "wall_s": 1.0, "loss": 1.0})
    write_run(tmp_path, "vast", dumps(vast, indent=None).encode() + b"\n", status="unfinished")
    odd = write_run(tmp_path, "odd", as_log(story.young_run()))
    odd.rename(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff"))
    write_run(tmp_path, "broken", as_log(story.young_run()))
    original = run_index._read_log

    def read_log(row: Any) -> None:
        if row.name == "broken":
            raise OSError(5, "Input/output error")
        original(row)

    monkeypatch.setattr(run_index, "_read_log", read_log)
    answer = ask(ui_of(tmp_path), "/api/runs")
    assert answer.status == 200
    rows = {row["id"]: row for row in answer.json()["rows"]}
    assert set(rows) == {"good", "vast", r"r\xff", "broken"}
    assert rows["vast"]["samples"] < 1e30
    assert "Input/output error" in rows["broken"]["problem"]
    assert rows["good"]["state"] == "finished"


def test_a_look_that_fails_ends_neither_the_looks_nor_a_stream_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next look shows the runs again; a stream that cannot go on ends, so that the page asks for another."""
    write_run(tmp_path, "run", as_log(story.young_run()))
    ui = ui_of(tmp_path)
    scans, is_going_on = list[int](), threading.Event()
    original = RunIndex.scanning

    def scanning(self: RunIndex) -> Iterator[None]:
        scans.append(1)
        if len(scans) == 1:
            raise OSError(116, "Stale file handle")
        is_going_on.set()
        return original(self)

    monkeypatch.setattr(RunIndex, "scanning", scanning)
    monkeypatch.setattr(server, "_SCAN_S", 0.01)
    monkeypatch.setattr(server, "_LIVE_S", 0.01)
    monkeypatch.setattr(server, "_IDLE_S", 0.01)
    monkeypatch.setattr(ui.index, "changed_since", lambda _: 1 / 0)

    async def work() -> None:
        task = asyncio.create_task(ui._keep_looking())
        assert await asyncio.to_thread(is_going_on.wait, 10)
        task.cancel()
        pieces = [piece async for piece in ui._stream(None, "", 0, -1)]
        assert pieces == [b"retry: 1000\n\n"]

    asyncio.run(asyncio.wait_for(work(), 60))
    assert not ui._pages


def test_runs_that_train_do_not_wait_for_a_look_at_all_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes, what they write is sent, and other documents answer as before."""
    show(tmp_path)
    path = write_run(tmp_path, "run", as_log(story.young_run()), status="unfinished")
    sign(path, os.getpid())
    ui, is_sent = ui_of(tmp_path), threading.Event()
    original = RunIndex.scanning

    def scanning(self: RunIndex) -> Iterator[None]:
        steps = original(self)
        next(steps)
        while not is_sent.wait(0.01):  # as of thousands of runs
            yield
        yield from steps

    monkeypatch.setattr(RunIndex, "scanning", scanning)
    monkeypatch.setattr(server, "_SCAN_PART_S", 0.0)
    monkeypatch.setattr(server, "_LIVE_S", 0.01)

    async def work() -> None:
        size, application = (path / "events.jsonl").stat().st_size, ui.application()

        async def write() -> None:
            while ui._scan is None:  # noqa: ASYNC110 - it is set by a task that nothing tells of
                await asyncio.sleep(0)
            with (path / "events.jsonl").open("ab") as log:
                log.write(as_log([story.young_run()[-1]]))

        following = streamed(ui, "run", size, lambda found: any(kind == "event" for kind, *_ in found))
        found, _ = await asyncio.gather(following, write())
        assert [kind for kind, *_ in found if kind == "event"] == ["event"]
        assert ui._scan is not None
        assert not ui._scan.done()
        assert set(ui.index.studies) == {"digits-search"}
        assert set(ui.index.checks) == {"images-check"}
        is_sent.set()
        await ui._scan
        assert (await asked(application, "/api/study?study=digits-search")).status == 200

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_run_of_a_newer_version_says_so(tmp_path: Path) -> None:
    """Alone, whichever record it is; the others are shown."""
    for name, file in (("run", "run.json"), ("plan", "plan.json"), ("well", "")):
        path = write_run(tmp_path, name, as_log(story.whole_run()))
        if file:
            (path / file).write_text(re.sub(r'"schema": ?\d+', '"schema": 99', (path / file).read_text()))
    ui = ui_of(tmp_path)
    assert ui.index.rows["run"].document["state"] == "unreadable"
    assert "a newer Stoker wrote it: update this one" in ui.index.rows["run"].document["problem"]
    assert ui.index.rows["plan"].document["state"] == "finished"
    assert ask(ui, "/api/series?run=plan").status == 200
    assert "a newer Stoker wrote it" in ask(ui, "/api/plan?plan=plan").json()["error"]
    assert ask(ui, "/api/sections?run=well").status == 200


@pytest.mark.parametrize("scale", [1, 3, 40])
def test_of_a_long_log_as_much_is_taken_of_its_end_as_of_the_rest(tmp_path: Path, scale: int) -> None:
    """The last progress and all other events are, and the share of waiting is that of the whole run."""
    events = []
    for number in range(60 * scale):
        early = number < 30 * scale
        fields = {
            "samples": number + 1,
            "wall_s": number * 1.0,
            "loss": 1.0,
            "split_s": {"data": 0.2 * early, "update": 0.8},
        }
        events.append(Event(kind="progress", at=float(number), fields=fields))
    events.insert(-3, Event(kind="evaluated", at=1.0, fields={"split": "valid", "metrics": {"accuracy": 0.5}}))
    write_run(tmp_path, "run", as_log(events), status="unfinished")
    row = ui_of(tmp_path).index.rows["run"]
    assert row.document["samples"] == 60 * scale
    assert row.document["metrics"] == {"valid/accuracy": 0.5}
    assert row.document["waiting"] == pytest.approx(6 / 54, abs=1e-9 if scale == 1 else 0.02)
    assert len(row.curve) == 60 if scale == 1 else len(row.curve) < 80


def test_data_checks_are_listed_with_what_they_found(tmp_path: Path) -> None:
    """Of one that cannot be read, why."""
    show(tmp_path)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "check.json").write_text("{")
    found = {one["id"]: one for one in ask(ui_of(tmp_path), "/api/checks").json()}
    assert found["images-check"] | {"made_at": ""} == {
        "id": "images-check",
        "source": "images",
        "samples": 4400,
        "faults": 3,
        "suspects": 0,
        "made_at": "",
    }
    assert "cannot be used" in found["torn"]["problem"]


def test_a_trial_that_its_study_ended_is_pruned_until_it_trains_again(tmp_path: Path) -> None:
    """In the table and in the study, with the reason; a stop of the user's stays a stop."""
    show(tmp_path)
    ui, trial = ui_of(tmp_path), "digits-search/trials/0018"
    row = ui.index.rows[trial]
    assert (row.document["state"], row.document["status"], row.document["eta_s"]) == ("pruned", "unfinished", None)
    assert row.document["trial"]["reason"] == "asha at 54,000 samples"
    assert ui.index.rows["digits-search/trials/0023"].document["state"] == "stopped"
    of_study = ask(ui, "/api/study?study=digits-search").json()["trials"]
    assert sorted(one["state"] for one in of_study) == ["finished"] * 17 + ["pruned"] * 5 + ["stopped"] * 2
    sign(tmp_path / trial, os.getpid())
    with (tmp_path / trial / "events.jsonl").open("ab") as log:
        log.write(as_log([story.young_run()[-1]]))
    ui.index.scan()
    assert ui.index.rows[trial].document["state"] == "running"


def test_the_address_is_open_before_the_server_is_imported(tmp_path: Path) -> None:
    """A browser that connects then waits for its answer; the table's server needs neither NumPy nor templates."""
    code = (
        "import socket, sys\n"
        "from stoker.web.ui import serve_ui\n"
        "class Announced(Exception): pass\n"
        "def announce(address):\n"
        "    socket.create_connection(('127.0.0.1', int(address.split(':')[2].split('/')[0])), 5).close()\n"
        "    print([name in sys.modules for name in ('stoker.web.server', 'uvicorn')])\n"
        "    import stoker.web.server\n"
        "    print([name in sys.modules for name in ('numpy', 'jinja2', 'stoker.devices')])\n"
        "    raise Announced\n"
        "try: serve_ui([], port=0, announce=announce)\n"
        "except Announced: pass\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert said.stdout.splitlines() == ["[False, False]", "[False, False, False]"]


def test_a_page_that_is_opened_comes_before_the_folders_that_were_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the request for the page to that for its rows the look at folders pauses, and then goes on."""
    for number in range(50):
        write_run(tmp_path, f"run-{number}", b"", lr=0.1 + number)
    ui, original, is_opened = Ui(UiOptions(roots=[tmp_path], token=TOKEN, port=PORT)), RunIndex.scanning, []

    def scanning(self: RunIndex) -> Iterator[None]:
        for number, step in enumerate(original(self)):
            while number == 2 and not is_opened:
                yield
            yield step

    monkeypatch.setattr(RunIndex, "scanning", scanning)
    monkeypatch.setattr(server, "_SCAN_PART_S", 0.0)
    monkeypatch.setattr(server, "_OPENING_S", 1e6)

    async def work() -> None:
        application = ui.application()
        async with ui._lifespan(application):
            await asked(application, "/api/runs?part=1")
            await asked(application, "/")
            is_opened.append(True)
            await asyncio.sleep(0.2)
            assert len(ui.index.rows) <= 5
            assert (await asked(application, "/api/runs?part=1")).status == 200
            assert len((await asked(application, "/api/runs")).json()["rows"]) == 50

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_page_that_is_hidden_holds_the_folders_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for nothing more: after the longest wait no other part of the look waits for it."""
    for number in range(5):
        write_run(tmp_path, f"run-{number}", b"", lr=0.1 + number)
    ui, waits, wait_for = Ui(UiOptions(roots=[tmp_path], token=TOKEN, port=PORT)), [], asyncio.wait_for

    async def counted(waiting: Any, longest_s: float | None) -> Any:
        if longest_s == 0.01 and not ui._is_opened.is_set():
            waits.append(longest_s)
        return await wait_for(waiting, longest_s)

    monkeypatch.setattr(server, "_SCAN_PART_S", 0.0)
    monkeypatch.setattr(server, "_OPENING_S", 0.01)
    monkeypatch.setattr(server.asyncio, "wait_for", counted)

    async def work() -> None:
        application = ui.application()
        async with ui._lifespan(application):
            ui._is_opened.clear()
            await ui._is_scanned.wait()

    asyncio.run(work())
    assert len(waits) == 1


def test_rows_are_sent_while_the_folders_are_looked_at_for_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest first, to a page that asks for what is there; others wait, and are answered when all is known."""
    show(tmp_path)
    for number, name in enumerate(("old", "new")):
        path = write_run(tmp_path, name, as_log(story.young_run()), lr=0.1 + number)
        os.utime(path, (2e9 + number, 2e9 + number))
    ui, original = Ui(UiOptions(roots=[tmp_path], token=TOKEN, port=PORT)), RunIndex.scanning
    may_go_on = [threading.Event(), threading.Event()]

    def scanning(self: RunIndex) -> Iterator[None]:
        steps = original(self)
        for is_released in may_go_on:
            yield next(steps)
            while not is_released.wait(0.01):  # as of thousands of runs
                yield
        yield from steps

    monkeypatch.setattr(RunIndex, "scanning", scanning)
    monkeypatch.setattr(server, "_SCAN_PART_S", 0.0)

    async def work() -> None:
        application = ui.application()
        async with ui._lifespan(application):
            known = (await asked(application, "/api/runs?part=1")).json()
            assert ([row["id"] for row in known["rows"]], known["is_whole"]) == (["new"], False)
            assert (await asked(application, "/api/run?run=new")).status == 200
            old = asyncio.create_task(asked(application, "/api/run?run=old"))
            every = asyncio.create_task(asked(application, "/api/runs"))
            compared = asyncio.create_task(asked(application, "/api/compare?run=new&run=old"))
            stream = ui._stream(None, "", 0, known["version"])
            await anext(stream)
            news = asyncio.ensure_future(anext(stream))
            done, _ = await asyncio.wait({old, every, compared, news}, timeout=0.2)
            assert not done
            may_go_on[0].set()
            assert (await old).status == 200
            assert not every.done()
            may_go_on[1].set()
            assert {"new", "old"} < {row["id"] for row in (await every).json()["rows"]}
            learned = (await compared).json()["differences"]["learned"]
            assert learned == [{"name": "parameters.lr", "values": ["1.1", "0.1"]}]
            pieces = await news
            while b'"is_whole":true' not in pieces:
                pieces = await anext(stream)
            await stream.aclose()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_row_counts_each_line_of_its_log_once(tmp_path: Path) -> None:
    """Of a log a little longer than its end that is read: the share of time waited for data is that of all of it."""
    events = [event for event in story.whole_run() if event.kind in ("planned", "progress")][:56]
    for number, event in enumerate(events):
        event.fields["split_s"] = {"data": 1.0 if number < 20 else 0.0, "update": 1.0}
    write_run(tmp_path, "run", as_log(events))
    assert 1 < len(as_log(events)) / run_index._TAIL_BYTES < 1.6
    index = RunIndex([tmp_path])
    index.scan()
    row = index.rows["run"]
    assert row.split_s == {"data": 19.0, "other": 55.0}
    positions = [point[0] for point in row.curve]
    assert positions == sorted(set(positions))
    assert len(positions) == 55


def test_no_row_is_there_before_it_is_described(tmp_path: Path) -> None:
    """Rows are read while the folders are looked at in a thread: an empty one would be a run without a name."""

    class Described(dict[str, Any]):
        def __setitem__(self, run: str, row: Any) -> None:
            assert row.document["id"] == run
            assert row.document["state"] == "finished"
            super().__setitem__(run, row)

    write_run(tmp_path, "run", as_log(story.young_run()))
    index = RunIndex([tmp_path])
    index.rows = Described()
    index.scan()
    assert list(index.rows) == ["run"]


def test_a_page_hears_that_there_are_no_runs(tmp_path: Path) -> None:
    """The end of the first look is news of its own: until then a page says that the folders are being read."""
    index = RunIndex([tmp_path])
    assert not index.is_whole
    assert index.scan()
    assert (index.is_whole, index.problems_version) == (True, index.version)
    assert not index.scan()


def test_looks_do_not_wait_for_the_threads_of_requests(tmp_path: Path) -> None:
    """However many of them are stuck, as with a folder that does not answer: what a run writes is seen."""
    write_run(tmp_path, "run", as_log(story.young_run()))
    ui, is_released = Ui(UiOptions(roots=[tmp_path], token=TOKEN, port=PORT)), threading.Event()

    async def work() -> None:
        stuck = [asyncio.create_task(asyncio.to_thread(is_released.wait)) for _ in range(64)]
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(ui._rescan(), 60)
        finally:
            is_released.set()
        await asyncio.gather(*stuck)

    asyncio.run(work())
    assert set(ui.index.rows) == {"run"}


def test_documents_are_of_the_log_up_to_their_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another page's request reads on in another thread: else an event would be lost, or shown twice."""
    events = [one for one in story.whole_run() if one.kind == "progress"][:20]
    path = write_run(tmp_path, "run", as_log(events[:10]), status="unfinished")
    ui = ui_of(tmp_path)
    row, log = ui.index.rows["run"], RunLog(tmp_path, "run")
    log.read()
    with (path / "events.jsonl").open("ab") as file:
        file.write(as_log(events[10:]))
    original, is_midway, may_go_on = RunLog._take, threading.Event(), threading.Event()

    def take(self: RunLog, content: bytes) -> None:
        original(self, content)
        is_midway.set()
        assert may_go_on.wait(60)

    monkeypatch.setattr(RunLog, "_take", take)

    def read() -> None:
        with log.lock:
            log.read()

    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(read)
        assert is_midway.wait(60)
        asked_for = {"over": "samples", "px": 100, "scalars": (), "preview": None}
        made = threads.submit(run_view.series_document, row, log, **asked_for)
        threading.Timer(0.1, may_go_on.set).start()
        reading.result(60)
        document = made.result(60)
    sizes = dict(zip(np.cumsum([len(as_log([one])) for one in events]).tolist(), range(1, 21), strict=True))
    assert len(document["progress"]["x"]) == sizes[document["offset"]]


def test_ctrl_c_ends_the_page_in_silence(tmp_path: Path) -> None:
    """Its streams, which pages keep open, end before the server gives up on them and says so."""
    command = [sys.executable, "-m", "stoker", "ui", str(tmp_path), "--port", "0", "--token", TOKEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port)) as page:
            page.sendall(
                f"GET /api/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
            )
            received = b""
            while b"retry: 1000" not in received:
                received += page.recv(4096)
            process.send_signal(signal.SIGINT)
            while page.recv(4096):
                pass
        _, said = process.communicate(timeout=60)
    assert "Traceback" not in said
    assert "ERROR" not in said


def test_a_page_that_opens_is_not_kept_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The long pause of a server without viewers ends with the first page, and only that one."""
    ui, looks = ui_of(tmp_path), asyncio.Queue[int]()
    monkeypatch.setattr(server, "_LIVE_S", 1e6)
    monkeypatch.setattr(ui, "_look", lambda: looks.put_nowait(len(ui._pages)))

    async def work() -> None:
        task = asyncio.create_task(ui._keep_looking())
        assert await looks.get() == 0
        stream = ui._stream(None, "", 0, -1)
        await anext(stream)
        assert await looks.get() == 1
        await stream.aclose()
        for _ in range(20):
            await asyncio.sleep(0)
        assert looks.empty()
        task.cancel()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_slow_page_gets_a_runs_last_change(tmp_path: Path) -> None:
    """What changes, and what is announced, while the page does not read is sent when it reads again."""
    path = write_run(tmp_path, "run", b"", status="unfinished", wall_s=0.0)
    ui = ui_of(tmp_path)
    ui._raise_alerts()

    async def tag(name: str) -> None:
        (path / run_index.ANNOTATIONS).write_text(json.dumps({"tags": [name]}))
        await ui._rescan()

    async def work() -> None:
        stream = ui._stream(None, "", 0, -1)
        pieces = [await anext(stream), await anext(stream)]
        await tag("first")
        (path / "run.json").write_bytes((path / "run.json").read_bytes().replace(b'"unfinished"', b'"failed"'))
        pieces.append(await anext(stream))
        await tag("last")
        pieces.append(await anext(stream))
        assert [b"first" in piece for piece in pieces] == [False, False, True, False]
        assert [b"event: alert" in piece for piece in pieces] == [False, False, False, True]
        assert [b'"last"' in piece for piece in pieces] == [False, False, False, True]
        await stream.aclose()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_whoever_sees_a_new_version_finds_what_changed(tmp_path: Path) -> None:
    """Folders are looked at in a thread, while pages ask: a change that came after its version would not be sent."""

    class Watched(RunIndex):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "version" and value:
                assert self.changed_since(value - 1) != ([], []) or self.problems_version == value

    path = write_run(tmp_path, "run", b"", status="unfinished")
    index = Watched((tmp_path,))
    index.scan()
    shutil.rmtree(path)
    index.scan()
    assert index.version == 3  # with the end of the first look


def test_tags_and_notes_stay_with_the_run(tmp_path: Path) -> None:
    """They are shown again after a restart; what is no tag is refused and changes nothing."""
    write_run(tmp_path, "run", as_log(story.young_run()))
    ui = ui_of(tmp_path, allows_changes=True)
    post = {"method": "POST", "content_type": "application/json"}
    body = json.dumps({"tags": ["paper", "paper", "v2"], "note": "the good one", "is_archived": True}).encode()
    assert ask(ui, "/api/do/annotate?run=run", body=body, **post).status == 200
    row = ui_of(tmp_path).index.rows["run"].document
    assert (row["tags"], row["note"], row["is_archived"]) == (["paper", "v2"], "the good one", True)
    assert ask(ui, "/api/do/annotate?run=run", body=b'{"tags": ["two words"]}', **post).status == 409
    assert ui_of(tmp_path).index.rows["run"].document["tags"] == ["paper", "v2"]
    long = json.dumps({"note": "n" * 9_000}).encode()
    assert ask(ui, "/api/do/annotate?run=run", body=long, **post).status == 200
    assert ask(ui, "/api/do/annotate?run=run", body=b'{"is_archived": false}', **post).status == 200
    kept = json.loads((tmp_path / "run" / run_index.ANNOTATIONS).read_text())
    assert (len(kept["note"]), kept["tags"], kept["is_archived"]) == (9_000, ["paper", "v2"], False)


def test_resume_starts_what_the_user_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same job file with the same settings, from the same folder; without the file it says so."""
    path = write_run(tmp_path / "runs", "run", as_log(story.young_run()), status="unfinished", lr=0.05)
    ui = ui_of(tmp_path / "runs", allows_changes=True)
    post = {"method": "POST", "content_type": "application/json"}
    assert ask(ui, "/api/do/resume?run=run", **post).status == 409
    job = tmp_path / "job.py"
    job.write_text("")
    started = {"record": "Started", "schema": 1, "folder": str(tmp_path), "job_file": str(job)}
    (path / "started.json").write_text(json.dumps(started))
    calls: list[Any] = []
    is_waited_for = threading.Event()

    class Process:
        pid = 1

        def __init__(self, command: list[str], **options: Any) -> None:
            calls.append((command, options))

        wait = staticmethod(is_waited_for.set)

    monkeypatch.setattr("stoker.web.control.subprocess.Popen", Process)
    assert ask(ui, "/api/do/resume?run=run", **post).status == 200
    command, options = calls[0]
    assert command[1:5] == ["-m", "stoker", "train", str(job)]
    assert "lr=0.05" in command
    assert command[-2:] == ["--resume", str(path.resolve())]
    assert options["cwd"] == str(tmp_path)
    assert is_waited_for.wait(60), "once ended it would stay as a zombie, which counts as alive"


def test_time_to_go_comes_with_an_interval() -> None:
    """Of the run's own rates once there are some, of the forecast before; never a bare number where more is known."""
    steady = [(float(x), x / 100, 1.0) for x in range(0, 5000, 50)]
    value, low, high, basis = remaining_s(steady, 5000, 10_000, 50.0, None, 50.0) or ()
    assert (value, basis) == (50.0, "this run's rates")
    assert low == pytest.approx(50) == high
    assert remaining_s([], 0, 10_000, None, [100.0, 80.0, 140.0], 10.0) == [90.0, 70.0, 130.0, "forecast"]
    assert remaining_s([], 0, 10_000, None, None, 0.0) is None


def test_alerts_are_of_changes() -> None:
    """A run is announced once, when it changes; what was so already is not news."""
    row = {"id": "a", "name": "a", "state": "running", "cost_usd": 4.0}
    assert [one.kind for one in alerts_of(row, row | {"state": "failed", "failure": "nan"})] == ["failed"]
    assert [one.kind for one in alerts_of(row, row | {"has_nan": True})] == ["nan"]
    assert [one.kind for one in alerts_of(row, row | {"cost_usd": 6.0}, 5.0)] == ["over budget"]
    assert alerts_of(row | {"cost_usd": 6.0}, row | {"cost_usd": 7.0}, 5.0) == []
    assert alerts_of({}, row | {"state": "finished", "has_nan": True, "cost_usd": 9.0}, 5.0) == []


def test_a_service_is_read_by_its_own_metrics() -> None:
    """The page reads what `stoker serve` writes, histograms included."""
    pytest.importorskip("prometheus_client")
    from stoker.serving.metrics import Metrics

    metrics = Metrics()
    version = metrics.version("digits", "3")
    for number in range(100):
        version.request("ok", 0.001 * (number + 1))
    series = parse_metrics(metrics.document()[0].decode())
    buckets = {
        float(dict(labels)["le"].replace("+Inf", "inf")): value
        for labels, value in series[("stoker_total_seconds_bucket", "digits", "3")].items()
    }
    assert quantile(buckets, 0.5) == pytest.approx(0.05, rel=0.1)
    assert quantile(buckets, 0.99) == pytest.approx(0.1, rel=0.05)


def test_latencies_of_a_service_are_of_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the requests refused at once: they count as requests, and the median stays that of the answers."""
    pytest.importorskip("prometheus_client")
    from stoker.serving.metrics import Metrics

    metrics = Metrics()
    version, service = metrics.version("digits", "3"), Service("127.0.0.1:8002")
    version.request("ok", 0.3)
    monkeypatch.setattr("stoker.web.services._OPENER.open", lambda *_, **__: BytesIO(metrics.document()[0]))
    service.ask()
    for _ in range(100):
        version.request("ok", 0.3)
        version.request("queue_full", 0.0001)
    metrics.rejected.labels("digits", "queue_full").inc(100)  # of the model: no version of its own
    service.ask()
    (found,) = service.document()["versions"]
    assert found["rejected"] == {"queue_full": 100}
    assert found["p50_s"] == pytest.approx(0.3, rel=0.1)
    (at,) = found["history"]
    assert at[2] == found["p50_s"]


def test_pictures_are_png_files_that_the_run_logged(tmp_path: Path) -> None:
    """Any other name, and any other content, is refused."""
    path = write_run(
        tmp_path,
        "run",
        as_log(
            [
                Event(
                    kind="logged",
                    at=1.0,
                    fields={
                        "samples": 1,
                        "images": [
                            {"name": "a", "samples": 1, "file": "1.png"},
                            {"name": "b", "samples": 1, "file": "2.png"},
                        ],
                    },
                )
            ]
        ),
    )
    write_pictures(path)
    (path / "logged" / "2.png").write_bytes(b"<html>")
    ui = ui_of(tmp_path)
    assert ask(ui, "/api/picture?run=run&file=1.png").headers["content-type"] == "image/png"
    for name in ("2.png", "3.png", "../run.json"):
        assert ask(ui, f"/api/picture?run=run&file={name}").status == 409
