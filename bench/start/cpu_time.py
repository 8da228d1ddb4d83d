"""CPU seconds of small runs, almost all of which are start: in a new process, and of a second call in one process.

    python -m bench.start.cpu_time [--jobs cnn,gpt] [--ways cold,kept] [--pairs 5] [--against SRC] [--out FILE]

A run has eight updates and evaluates 1 % of its samples: a ResNet-9, a network for a table with a loss of the user's
own, a GPT. `cold` is `stoker train JOB` with an empty cache, `kept` with a plan that `stoker plan JOB` left: user and
system time of the whole process. `second` is the second `stoker.train` of a job in a process, of another learning rate,
and `second_first` that up to its first update. `SRC` is the `src` folder of another revision, measured in turns:

    git archive REVISION src | tar -x -C build/before

Printed are lowest, median and highest, and of the ratio here over there, pair by pair. What is in `FILE` of other jobs
and ways stays.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.forecast.registration import dated
from bench.train import results

JOB = """
import torch
import torch.nn.functional as F
from torch import nn

import stoker

draw = torch.Generator().manual_seed(0)


def cnn():
    data = torch.randn(6_000, 1, 28, 28, generator=draw), torch.randint(0, 10, (6_000,), generator=draw)
    return lambda: stoker.zoo.ResNet9(width=16), data, "cross_entropy", 128


def table():
    data = torch.randn(20_000, 64, generator=draw), torch.randint(0, 10, (20_000,), generator=draw)
    layers = lambda width: (nn.Linear(width, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1))
    return lambda: nn.Sequential(*layers(64), *layers(256), nn.Linear(256, 10)), data, own_loss, 256


def own_loss(output, target):
    return F.cross_entropy(output, target, reduction="none")


def gpt():
    tokens = torch.randint(0, 256, (2_000, 65), generator=draw)
    model = lambda: stoker.zoo.GPT(layers=2, width=96, heads=3, context=64)
    return model, (tokens[:, :-1], tokens[:, 1:]), "token_cross_entropy", 16


def job(name="NAME", updates=8, lr=1e-3):
    model, data, loss, batch = globals()[name]()
    return stoker.Job(model=model, data=data, valid=stoker.holdout(0.01), loss=loss, batch=batch,
                      optimizer=stoker.AdamW(lr=lr), until=stoker.updates(updates))
"""
"""A job file; NAME is the job."""

SECOND = """
import json, runpy, sys, time

import stoker

for path in sys.argv[1:]:
    job = runpy.run_path(path)["job"]
    for lr in (1e-3, 2e-3):
        first = []
        began = time.process_time()
        hook = stoker.on("updated", lambda _, moments=first: moments.append(time.process_time()))
        stoker.train(job(lr=lr), new=True, sink=lambda _: None, hooks=[hook])
    print(json.dumps([time.process_time() - began, first[0] - began]))
"""
"""A process with two calls for each job file, the second of another learning rate."""

Spent = dict[str, dict[str, float]]
"""CPU seconds by way and job."""


def cpu_s(source: Path, command: list[str], folder: Path, cache: Path) -> tuple[float, str]:
    """CPU time of a process of Python with its children [s], and what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {
        "PYTHONPATH": str(source),
        "STOKER_CACHE": str(cache),
        "STOKER_RUNS": str(folder / "runs"),
    }
    with (folder / "output").open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *command],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{command} under {source} ended with {process.returncode}")
        output.seek(0)
        return usage.ru_utime + usage.ru_stime, output.read()


def measured(source: Path, ways: list[str], jobs: list[str], folder: Path, cache: Path) -> Spent:
    """CPU seconds of one round; `cache` keeps the plans of the jobs, the same ones for all sources."""
    files = {name: folder / f"{name}.py" for name in jobs}
    if "kept" in ways and not cache.exists():
        for file in files.values():
            cpu_s(source, ["-m", "stoker", "plan", str(file)], folder, cache)
    spent: Spent = {}
    for way in ways:
        if way == "second":
            printed = cpu_s(source, ["-c", SECOND, *map(str, files.values())], folder, cache)[1].splitlines()
            calls: list[list[float]] = list(map(json.loads, printed[-len(files) :]))
            spent["second"], spent["second_first"] = (
                dict(zip(jobs, of, strict=True)) for of in zip(*calls, strict=True)
            )
            continue
        for name, file in files.items():
            with tempfile.TemporaryDirectory() as empty:
                command = ["-m", "stoker", "train", str(file), "--new"]
                took = cpu_s(source, command, folder, cache if way == "kept" else Path(empty))[0]
            spent.setdefault(way, {})[name] = took
    return spent


def main() -> int:
    """Measure in turns, print medians and ratios, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="cnn,table,gpt")
    parser.add_argument("--ways", default="cold,kept,second")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    path, jobs = given.out or dated("start_cpu_time"), given.jobs.split(",")
    sources = {"here": Path(__file__).resolve().parents[2] / "src"}
    sources |= {"there": given.against.resolve()} if given.against else {}
    head = results.document("CPU seconds of small runs", "python -m bench.start.cpu_time --against SRC", {})
    content = {"runs": {}, "summary": {}} | results.read(path) | head
    with tempfile.TemporaryDirectory(prefix="bench-cpu-time-") as made:
        folder, rounds = Path(made), dict[str, list[Spent]]()
        for name in jobs:
            (folder / f"{name}.py").write_text(JOB.replace("NAME", name), encoding="utf-8")
        for source in sources.values():  # what is not compiled yet
            cpu_s(source, ["-m", "stoker", "train", str(folder / f"{name}.py"), "--new"], folder, folder / "none")
        for number in range(given.pairs):
            for source in sorted(sources, reverse=number % 2 > 0):
                spent = measured(sources[source], given.ways.split(","), jobs, folder, folder / "kept")
                rounds.setdefault(source, []).append(spent)
            for way, name in ((way, name) for way, by_job in spent.items() for name in by_job):
                columns = {source: [one[way][name] for one in of] for source, of in rounds.items()}
                content["runs"].setdefault(way, {})[name] = dict(columns)
                if given.against:
                    columns["ratio"] = [a / b for a, b in zip(columns["here"], columns["there"], strict=True)]
                content["summary"].setdefault(way, {})[name] = {key: spread(values) for key, values in columns.items()}
            results.save(path, content)
    for way, by_job in content["summary"].items():
        for name, row in by_job.items():
            words = (f"{column} {' '.join(f'{value:.3f}' for value in values)}" for column, values in row.items())
            print(f"{way:14}{name:8}{'   '.join(words)}")
    return 0


def spread(values: list[float]) -> tuple[float, float, float]:
    """The lowest, the median and the highest."""
    return min(values), statistics.median(values), max(values)


if __name__ == "__main__":
    sys.exit(main())
