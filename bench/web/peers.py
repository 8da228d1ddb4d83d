"""Time to see 300 runs: Stoker's page against Aim, TensorBoard, MLflow and Trackio, with the same data.

    python -m bench.web.peers --peers VENV --out bench/results/ui_peers_DATE.json

`VENV` is an environment with `aim mlflow trackio tensorboard tensorboardX`. Each tool's server is started beforehand on
the same 300 runs of 200 points of two measures, and left alone until it is idle. What is timed is a fresh page in
Chromium from the start of the navigation until the names of runs are on the screen, five times, tools in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Error, sync_playwright

from bench.web.measure import enter, served
from bench.web.planted import as_log, write_run
from stoker.records import Event
from tests.reporting import story

RUNS, POINTS = 300, 200

WRITE = """
import random, sys
tool, folder, runs, points = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
noise = random.Random(0)
def curve():
    return [(step * 512, 2 * 0.98 ** step + noise.gauss(0, .02), 1 - 0.5 * 0.98 ** step) for step in range(points)]
for number in range(runs):
    name = f"run-{number:04d}"
    if tool == "tensorboard":
        from tensorboardX import SummaryWriter
        with SummaryWriter(f"{folder}/{name}") as writer:
            for step, loss, accuracy in curve():
                writer.add_scalar("train/loss", loss, step); writer.add_scalar("valid/accuracy", accuracy, step)
    elif tool == "mlflow":
        import mlflow, time
        from mlflow.entities import Metric, Param
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        client = mlflow.MlflowClient()
        if number == 0:
            experiment = client.create_experiment("bench")
        run = client.create_run(experiment, run_name=name)
        now = int(time.time() * 1000)
        client.log_batch(run.info.run_id, metrics=[Metric(key, value, now, step) for step, loss, accuracy in curve()
            for key, value in (("loss", loss), ("accuracy", accuracy))], params=[Param("lr", str(noise.random()))])
        client.set_terminated(run.info.run_id)
    elif tool == "aim":
        import aim
        run = aim.Run(repo=folder, experiment="bench", system_tracking_interval=None, capture_terminal_logs=False,
                      log_system_params=False)
        run.name = name
        run["lr"] = noise.random()
        for step, loss, accuracy in curve():
            run.track(loss, name="loss", step=step); run.track(accuracy, name="accuracy", step=step)
        run.close()
    elif tool == "trackio":
        import trackio
        trackio.init(project="bench", name=name, config={"lr": noise.random()})
        for step, loss, accuracy in curve():
            trackio.log({"loss": loss, "accuracy": accuracy}, step=step)
        trackio.finish()
"""


def stoker_runs(folder: Path) -> None:
    """The same amount as runs of Stoker."""
    for number in range(RUNS):
        events = []
        for step in range(1, POINTS + 1):
            fields = {
                "samples": step * 512,
                "total_samples": POINTS * 512,
                "updates": step,
                "epoch": 0,
                "wall_s": 1.0 * step,
                "loss": 2 * 0.98**step,
                "lr": 0.1,
                "samples_per_s": 512.0,
                "split_s": {"data": 0.0, "update": 1.0},
            }
            events.append(Event(kind="progress", at=float(step), fields=fields))
        write_run(folder, f"run-{number:04d}", as_log(events), spec=story.spec(), lr=number / 1000)


def port_of(address: str) -> int:
    """The port of an address."""
    return int(re.search(r":(\d+)", address)[1])  # type: ignore[index]


def main() -> None:  # noqa: C901 - five tools, one after the other
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--tools", default="stoker,tensorboard,mlflow,aim,trackio")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patience", type=float, default=90.0, help="after which a page counts as not shown [s]")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    binaries = options.peers / "bin"
    with tempfile.TemporaryDirectory(prefix="stoker-peers-") as temporary, sync_playwright() as started:
        folders = {tool: Path(temporary) / tool for tool in options.tools.split(",")}
        environment = {
            **os.environ,
            "TRACKIO_DIR": str(Path(temporary) / "trackio"),
            "AIM_UI_TELEMETRY_ENABLED": "0",
            "DO_NOT_TRACK": "1",
            "no_proxy": "*",
        }
        environment.pop("PYTHONPATH", None)
        servers: dict[str, subprocess.Popen[Any]] = {}
        addresses: dict[str, str] = {}
        written: dict[str, float] = {}
        commands = {
            "tensorboard": ["tensorboard", "--logdir", "{folder}", "--port", "18501", "--host", "127.0.0.1"],
            "mlflow": [
                "mlflow",
                "server",
                "--backend-store-uri",
                "sqlite:///{folder}/mlflow.db",
                "--port",
                "18502",
                "--workers",
                "1",
            ],
            "aim": ["aim", "up", "--repo", "{folder}", "--port", "18503", "--host", "127.0.0.1"],
            "trackio": ["trackio", "show", "--project", "bench", "--no-footer"],
        }
        for tool, folder in folders.items():
            folder.mkdir()
            began = time.perf_counter()
            if tool == "stoker":
                stoker_runs(folder / "runs")
                servers[tool], port, _ = served(str(folder / "runs"), cache=folder / "cache")
                addresses[tool] = f"http://127.0.0.1:{port}/"
                continue
            if tool == "aim":
                subprocess.run(
                    [str(binaries / "aim"), "init", "--repo", str(folder)],
                    env=environment,
                    check=True,
                    input=b"y\n",
                    capture_output=True,
                )
            subprocess.run(
                [str(binaries / "python"), "-c", WRITE, tool, str(folder), str(RUNS), str(POINTS)],
                env=environment,
                check=True,
                capture_output=True,
            )
            written[tool] = time.perf_counter() - began
            command = [part.format(folder=folder) for part in commands[tool]]
            servers[tool] = subprocess.Popen(
                [str(binaries / command[0]), *command[1:]],
                env={**environment, "GRADIO_SERVER_PORT": "18504"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            number = {"tensorboard": 18501, "mlflow": 18502, "aim": 18503, "trackio": 18504}[tool]
            page = {
                "tensorboard": "#timeseries",
                "mlflow": "#/experiments/1/runs",
                "aim": "runs",
                "trackio": "?project=bench",
            }[tool]
            addresses[tool] = f"http://127.0.0.1:{number}/{page}"
            for _ in range(120):
                try:
                    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                        f"http://127.0.0.1:{number}/", timeout=5
                    ).close()
                    break
                except OSError:
                    time.sleep(1)
        time.sleep(10)
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        found: dict[str, list[float | None]] = {tool: [] for tool in folders}
        for _ in range(options.repeats):
            for tool in folders:
                page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
                if tool == "stoker":
                    enter(page, port_of(addresses[tool]))
                began = time.perf_counter()
                try:
                    page.goto(addresses[tool], wait_until="commit")
                    page.get_by_text(re.compile(r"run-0\d\d\d")).first.wait_for(timeout=options.patience * 1000)
                    found[tool].append(time.perf_counter() - began)
                except Error:
                    found[tool].append(None)
                page.context.close()
        browser.close()
        for process in servers.values():
            process.kill()
        listed = [str(binaries / "pip"), "list", "--format=freeze"]
        versions = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
        seconds: dict[str, Any] = {}
        for tool, times in found.items():
            seen = [one for one in times if one is not None]
            seconds[tool] = {"median": statistics.median(seen) if seen else None, "all": times}
        document = {
            "command": " ".join(["python -m bench.web.peers", *sys.argv[1:]]),
            "runs": RUNS,
            "points": POINTS,
            "load": os.getloadavg(),
            "seconds": seconds,
            "versions": [one for one in versions if one.partition("==")[0] in commands],
        }
        print(json.dumps(document, indent=1))
        if options.out is not None:
            options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
