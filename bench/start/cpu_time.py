"""CPU seconds of small runs, almost all of which are start: in a new process, and of a second call in one process.

    python -m bench.start.cpu_time [--jobs cnn,table,gpt] [--pairs 5] [--against SRC] [--out FILE]

A run has eight updates and evaluates 1 % of its samples. `cold` is `stoker train JOB` with an empty cache, `kept` with
the plan that `stoker plan JOB` left: user and system time of the whole process. `second` is the second `stoker.train`
in a process, of another learning rate under the kept plan, and `second_first` that up to its first update. `SRC` is the
`src` folder of another revision, measured in turns (`git archive REVISION src | tar -x -C build/before`). Printed are
lowest, median and highest, and of the ratio here over there, pair by pair.
"""

from __future__ import annotations

import argparse
import hashlib
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
from torch import nn

import stoker

draw = torch.Generator().manual_seed(0)


def cnn():
    data = torch.randn(6_000, 1, 28, 28, generator=draw), torch.randint(0, 10, (6_000,), generator=draw)
    return lambda: stoker.zoo.ResNet9(width=16), data, "cross_entropy", 128


def table():
    data = torch.randn(20_000, 64, generator=draw), torch.randint(0, 10, (20_000,), generator=draw)
    layers = lambda width: (nn.Linear(width, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1))
    return lambda: nn.Sequential(*layers(64), *layers(256), nn.Linear(256, 10)), data, nn.CrossEntropyLoss(), 256


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

job = runpy.run_path(sys.argv[1])["job"]
for lr in (1e-3, 2e-3):
    first = []
    began = time.process_time()
    hook = stoker.on("updated", lambda _, moments=first: moments.append(time.process_time()))
    stoker.train(job(lr=lr), new=True, sink=lambda _: None, hooks=[hook])
print(json.dumps({"second": time.process_time() - began, "second_first": first[0] - began}))
"""
"""A process with two calls, the second of another learning rate."""


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


def measured(source: Path, name: str, folder: Path) -> dict[str, float]:
    """CPU seconds by way of starting; the folder keeps the source's plan of the job from one round to the next."""
    job, kept = folder / f"{name}.py", folder / f"kept-{name}-{hashlib.sha256(bytes(source)).hexdigest()[:8]}"
    train = ["-m", "stoker", "train", str(job), "--new"]
    if not kept.exists():
        cpu_s(source, ["-m", "stoker", "plan", str(job)], folder, kept)
        cpu_s(source, train, folder, kept)  # the modules that a plan does not compile
    with tempfile.TemporaryDirectory() as cache:
        spent = {"cold": cpu_s(source, train, folder, Path(cache))[0]}
    spent["kept"] = cpu_s(source, train, folder, kept)[0]
    calls: dict[str, float] = json.loads(cpu_s(source, ["-c", SECOND, str(job)], folder, kept)[1].splitlines()[-1])
    return spent | calls


def main() -> int:
    """Measure in turns, print medians and ratios, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="cnn,table,gpt")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    sources = {"here": Path(__file__).resolve().parents[2] / "src"}
    sources |= {"there": given.against.resolve()} if given.against else {}
    content = results.document("CPU seconds of small runs", "python -m bench.start.cpu_time --against SRC", {})
    content |= {"pairs": given.pairs, "runs": {}, "summary": {}}
    with tempfile.TemporaryDirectory(prefix="bench-cpu-time-") as made:
        folder = Path(made)
        for name in given.jobs.split(","):
            (folder / f"{name}.py").write_text(JOB.replace("NAME", name), encoding="utf-8")
            runs: dict[str, list[dict[str, float]]] = {source: [] for source in sources}
            for number in range(given.pairs):
                for source in sorted(sources, reverse=number % 2 > 0):
                    runs[source].append(measured(sources[source], name, folder))
            summary: dict[str, dict[str, tuple[float, float, float]]] = {}
            for way in runs["here"][0]:
                columns = {source: [run[way] for run in of] for source, of in runs.items()}
                if given.against:
                    columns["ratio"] = [a / b for a, b in zip(columns["here"], columns["there"], strict=True)]
                summary[way] = {column: spread(values) for column, values in columns.items()}
                words = (f"{column} {' '.join(f'{v:.3f}' for v in row)}" for column, row in summary[way].items())
                print(f"{name:8}{way:14}{'   '.join(words)}", flush=True)
            content["runs"][name], content["summary"][name] = runs, summary
            results.save(given.out or dated("start_cpu_time"), content)
    return 0


def spread(values: list[float]) -> tuple[float, float, float]:
    """The lowest, the median and the highest."""
    return min(values), statistics.median(values), max(values)


if __name__ == "__main__":
    sys.exit(main())
