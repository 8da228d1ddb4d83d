"""What `stoker ui` holds: first paint and filter of 1,000 runs, a run of a million points, event to screen, its cost.

    python -m bench.web.measure --out bench/results/ui_DATE.json

Times are of Debian's Chromium on this machine, from the start of a navigation, or from a key, to the frame that shows
the result; the page's server is a process of its own. Each is repeated; the median, the least and the most are kept.
"""

from __future__ import annotations

import argparse
import atexit
import compileall
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from bench.web.planted import as_log, long_log, many, sign, write_run
from stoker.records import Event
from tests.reporting import story

TOKEN = "0123456789abcdef0123"  # noqa: S105 - of a server on this machine, for a minute


SOURCES = Path(__file__).parents[2] / "src"


def served(*arguments: str, cache: Path, sources: Path = SOURCES) -> tuple[subprocess.Popen[str], int, float]:
    """A server, its port, and how long it took until it named its address [s]."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "stoker", "ui", *arguments, "--port", "0", "--token", TOKEN]
    environment = {
        **os.environ,
        "STOKER_CACHE": str(cache),
        "PYTHONPATH": f"{sources}:{os.environ.get('PYTHONPATH', '')}",
    }
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    atexit.register(process.kill)
    assert process.stdout is not None
    port = int(re.search(r":(\d+)/", process.stdout.readline())[1])  # type: ignore[index]
    return process, port, time.perf_counter() - began


def cpu_s(pid: int) -> float:
    """CPU time that a process and its threads have used [s]."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def threads_cost(pid: int) -> tuple[float, int]:
    """CPU time that the living threads of a process have used, to the nanosecond [s], and how often they slept."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    used = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    slept = (re.search(r"\nvoluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text()) for task in tasks)
    return used, sum(int(found[1]) for found in slept if found)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "repeats": len(values)}


PAINTED = """(condition) => new Promise((resolve) => {
  const shown = () => requestAnimationFrame(() => requestAnimationFrame(() => resolve(performance.now())));
  const look = () => (condition() ? shown() : setTimeout(look, 4));
  look();
})"""


def enter(page: Any, port: int) -> None:
    """Give the page its cookie; its first page is then shown."""
    page.goto(f"http://127.0.0.1:{port}/?token={TOKEN}")
    page.wait_for_selector("main[data-ready]")


def painted(page: Any, condition: str) -> float:
    """Time from the navigation's start to the frame that shows what `condition` waits for [ms]."""
    return float(page.evaluate(f"({PAINTED})(() => {condition})"))


ALL_ROWS = "document.documentElement.dataset.rows === '1000' && document.querySelectorAll('.body .row').length > 5"


def cold_starts(browser: Any, folder: Path, repeats: int, versions: dict[str, Path]) -> dict[str, Any]:
    """From the start of a server to the first rows, and to all of them, of each version in turns.

    Modules are compiled beforehand, as those of an installed package are.
    """
    many(folder, 1000)
    times: dict[str, dict[str, list[float]]] = {}
    for sources in versions.values():
        compileall.compile_dir(sources, quiet=1)
    for number in range(repeats + 1):
        for name, sources in versions.items():
            began = time.perf_counter()
            process, port, named_s = served(str(folder), cache=folder.parent / "cache", sources=sources)
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{port}/?token={TOKEN}", wait_until="commit")
            page.wait_for_selector(".body .row")
            rows_s, used_s = time.perf_counter() - began, cpu_s(process.pid)
            painted(page, ALL_ROWS)
            all_s = time.perf_counter() - began
            process.kill()
            page.close()
            if number:  # the first time, files are read from the disk
                values = {
                    "address_s": named_s,
                    "first_rows_s": rows_s,
                    "all_rows_s": all_s,
                    "server_cpu_s_at_first_rows": used_s,
                }
                for what, value in values.items():
                    times.setdefault(name, {}).setdefault(what, []).append(value)
    return {"runs": 1000} | {
        name: {what: spread(values) for what, values in found.items()} for name, found in times.items()
    }


def thousand_runs(browser: Any, folder: Path, repeats: int) -> dict[str, Any]:
    """First paint of the table, with a server that is up; filters."""
    many(folder, 1000)
    first, words, conditions = [], [], []
    process, port, _ = served(str(folder), cache=folder.parent / "cache")
    page = browser.new_context().new_page()
    enter(page, port)
    for _ in range(repeats):
        page.goto(f"http://127.0.0.1:{port}/", wait_until="commit")
        first.append(painted(page, ALL_ROWS))
    typed = f"""async ([text, count]) => {{
      const field = document.querySelector('input[type=search]');
      const began = performance.now();
      field.value = text; field.dispatchEvent(new Event('input', {{ bubbles: true }}));
      return (await ({PAINTED})(() => count(document.documentElement.dataset.rows))) - began;
    }}"""
    for number in range(repeats):
        for text, kept in ((f"gpt-0000{number:x}", words), (f"lr<0.0{number + 2} status=finished", conditions)):
            changed = typed.replace(
                "count(document.documentElement.dataset.rows)", "document.documentElement.dataset.rows !== '1000'"
            )
            kept.append(page.evaluate(changed, [text, None]))
            page.evaluate(
                typed.replace(
                    "count(document.documentElement.dataset.rows)", "document.documentElement.dataset.rows === '1000'"
                ),
                ["", None],
            )
    used = cpu_s(process.pid)
    process.kill()
    return {
        "runs": 1000,
        "first_paint_ms": spread(first),
        "filter_by_word_ms": spread(words),
        "filter_by_condition_ms": spread(conditions),
        "server_cpu_s_in_all": used,
    }


def million_points(browser: Any, folder: Path, repeats: int) -> dict[str, Any]:
    """Opening a run of a million progress events, never seen before and again; frames while it is panned and zoomed."""
    write_run(folder, "long", long_log(1_000_000), status="finished")
    process, port, _ = served(str(folder), cache=folder.parent / "cache")
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    enter(page, port)
    drawn = "document.querySelector('.plot.live canvas') && +document.querySelector('main').dataset.drawn > 300"
    page.goto(f"http://127.0.0.1:{port}/run/long", wait_until="commit")
    preview = painted(page, drawn)
    began = time.perf_counter()
    whole = "fetch('/api/series?run=long&px=100').then(answer => answer.json()).then(found => found.is_whole)"
    while not page.evaluate(whole):
        page.wait_for_timeout(200)
    read_s = time.perf_counter() - began + preview / 1000
    opened = []
    for _ in range(repeats):
        page.goto(f"http://127.0.0.1:{port}/run/long", wait_until="commit")
        opened.append(painted(page, drawn))
    page.wait_for_timeout(1500)
    frames = """async (act) => {
      const axis = document.querySelector('.plot.live').chart.axis;
      axis.set([0.2 * axis.whole[1], 0.4 * axis.whole[1]]);
      await new Promise((resolve) => setTimeout(resolve, 800));
      const times = [];
      let last = performance.now();
      for (let number = 0; number < 150; number += 1) {
        act === 'pan' ? axis.pan(0.01) : axis.zoom(number < 75 ? 0.97 : 1 / 0.97);
        await new Promise(requestAnimationFrame);
        const now = performance.now();
        times.push(now - last);
        last = now;
      }
      times.sort((a, b) => a - b);
      axis.set(null);
      const whole = times.reduce((sum, one) => sum + one, 0), rate = 1000 * times.length / whole;
      return { frames_per_s: rate, median_ms: times[75], p95_ms: times[142], charts: axis.charts.size };
    }"""
    # The longest wait from a zoom until the finer points are there.
    found = {name: [page.evaluate(frames, name) for _ in range(3)] for name in ("pan", "zoom")}
    detail = []
    for number in range(repeats):
        page.wait_for_timeout(200)
        detail.append(
            page.evaluate(
                """async (at) => {
          const chart = document.querySelector('.plot.live').chart, axis = chart.axis;
          const began = performance.now();
          axis.set([at * axis.whole[1], (at + 0.001) * axis.whole[1]]);
          const inside = () => chart.data[0].filter((x) => x >= axis.shown[0] && x <= axis.shown[1]).length;
          while (inside() < 300) await new Promise((resolve) => setTimeout(resolve, 4));
          await new Promise(requestAnimationFrame);
          const took = performance.now() - began;
          axis.set(null);
          return took;
        }""",
                0.1 + 0.06 * number,
            )
        )
    size = (folder / "long" / "events.jsonl").stat().st_size
    status = Path(f"/proc/{process.pid}/status").read_text()
    memory = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]
    process.kill()
    return {
        "points": 1_000_000,
        "log_bytes": size,
        "open_first_time_preview_ms": preview,
        "whole_log_read_after_s": read_s,
        "open_again_ms": spread(opened),
        "pan": found["pan"],
        "zoom": found["zoom"],
        "zoom_to_finer_points_ms": spread(detail),
        "server_resident_bytes": memory,
    }


def event_to_screen(browser: Any, folder: Path, repeats: int) -> dict[str, Any]:
    """From the write of a progress event to the frame whose chart has it."""
    path = write_run(folder, "run", as_log(story.young_run()), status="unfinished")
    sign(path, os.getpid())
    process, port, _ = served(str(folder), cache=folder.parent / "cache")
    page = browser.new_context().new_page()
    enter(page, port)
    page.goto(f"http://127.0.0.1:{port}/run/run")
    page.wait_for_selector(".plot.live canvas")
    page.wait_for_timeout(1500)
    times = []
    template = next(event for event in story.young_run() if event.kind == "progress")
    pauses = random.Random(0)  # the server looks at intervals: an event may come at any time between two looks
    for number in range(2, 2 + 4 * repeats):
        page.wait_for_timeout(pauses.uniform(0, 1000))
        event = Event(
            kind="progress",
            at=time.time(),
            fields={**template.fields, "samples": 1536 * number, "wall_s": number * 1.0},
        )
        waiting = page.evaluate_handle(
            f"""() => {{ window.seen = ({PAINTED})(() => {{
              const x = document.querySelector('.plot.live').chart.plot.data[0];
              return x[x.length - 1] === {1536 * number};
            }}).then(() => Date.now()); }}"""
        )
        waiting.dispose()
        began = time.time()
        with (path / "events.jsonl").open("ab") as log:
            log.write(as_log([event]))
        times.append(page.evaluate("window.seen") / 1000 - began)
    process.kill()
    return {"event_to_frame_s": spread(times)}


def cost(browser: Any, folder: Path, seconds: float, threads: int) -> dict[str, Any]:
    """CPU time of the server while three pages watch a training on so many threads, over that of the training."""
    job = Path(__file__).parent / "watched_job.py"
    process, port, _ = served(str(folder), cache=folder.parent / "cache")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "STOKER_RUNS": str(folder),
        "STOKER_CACHE": str(folder.parent / "cache"),
    }
    training = subprocess.Popen(
        [sys.executable, "-m", "stoker", "train", str(job), "--json", "--set", f"seconds={seconds * 2 + 60}"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 180
    while not any(b'"progress"' in log.read_bytes() for log in folder.glob("*/events.jsonl")):
        if time.monotonic() > deadline or training.poll() is not None:
            raise SystemExit(
                f"the training did not begin: {training.stderr.read().decode() if training.stderr else ''}"
            )
        time.sleep(0.5)
    run = next(folder.glob("*/events.jsonl")).parent.name
    context = browser.new_context()
    pages = []
    for path in (f"/run/{run}", f"/run/{run}", "/"):
        page = context.new_page()
        enter(page, port)
        page.goto(f"http://127.0.0.1:{port}{path}")
        page.wait_for_selector(".plot.live canvas" if path != "/" else ".body .row")
        pages.append(page)
    time.sleep(8)  # what pages fetch when they are opened
    before = *threads_cost(process.pid), cpu_s(training.pid), time.monotonic()
    time.sleep(seconds)
    after = *threads_cost(process.pid), cpu_s(training.pid), time.monotonic()
    training.send_signal(signal.SIGTERM)
    training.wait(60)
    process.kill()
    server_s, wakes, training_s, watched_s = (after[index] - before[index] for index in range(4))
    return {
        "pages": 3,
        "training_threads": threads,
        "watched_s": watched_s,
        "server_cpu_s": server_s,
        "server_wakes_per_s": wakes / watched_s,
        "training_cpu_s": training_s,
        "server_over_training": server_s / training_s,
        "note": "the training process spends nothing on the page: it writes the same log watched or not",
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=60.0, help="for which the cost is measured")
    parser.add_argument("--only", default="")
    parser.add_argument(
        "--against", type=Path, help="`src` of another version, whose cold starts are measured in turns"
    )
    options = parser.parse_args()
    versions = {"before": options.against} if options.against else {}
    versions["now"] = SOURCES
    parts: dict[str, Callable[[Any, Path], dict[str, Any]]] = {
        "cold_starts": lambda browser, folder: cold_starts(browser, folder, options.repeats, versions),
        "thousand_runs": lambda browser, folder: thousand_runs(browser, folder, options.repeats),
        "million_points": lambda browser, folder: million_points(browser, folder, options.repeats),
        "event_to_screen": lambda browser, folder: event_to_screen(browser, folder, options.repeats),
        "cost": lambda browser, folder: cost(browser, folder, options.seconds, 1),
        "cost_all_cores": lambda browser, folder: cost(browser, folder, options.seconds, os.cpu_count() or 1),
    }
    document: dict[str, Any] = {"command": "python -m bench.web.measure", "cores": os.cpu_count()}
    if options.out is not None and options.out.exists():
        document = json.loads(options.out.read_text())
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    document["commit"] = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    document["machine"] = cpu[1] if cpu else "unknown"
    with sync_playwright() as started:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        document["chromium"] = browser.version
        for name in options.only.split(",") if options.only else parts:
            load = os.getloadavg()
            with tempfile.TemporaryDirectory(prefix="stoker-ui-") as folder:
                (Path(folder) / "runs").mkdir()
                document[name] = {
                    **parts[name](browser, Path(folder) / "runs"),
                    "load_before_and_after": [load, os.getloadavg()],
                }
            print(json.dumps({name: document[name]}, indent=1), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(document, indent=1) + "\n")
        browser.close()


if __name__ == "__main__":
    main()
