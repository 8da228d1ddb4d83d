"""Whether Stoker became slower: this checkout against another one, in turns.

    python -m bench.against CHECKOUT [--rounds 7] [--only plan] [--out FILE]

`CHECKOUT` is a clone of another revision with an environment of its own (`make .venv/.installed` there). Each way is a
process of its own, and what is counted is the CPU time of the process and its children, which other work on the machine
disturbs less than the clock: `import` (import stoker), `plan` (a small convolutional net with an empty cache), `start`
(the same job trained for three updates under a plan that was kept), `loop` (each checkout's own `bench.loop_overhead`:
the least of 30 rounds beyond the least of plain PyTorch [µs an update]), `loop calls` (calls of functions an update),
`answer` (`bench.serving.answer_path`: the event loop's CPU an answer [µs], the least of its rounds),
`grpc_raw` and `http_json` (`bench.serving.wire_overhead`, each checkout's own: the server's CPU a request [µs], in
binary by gRPC and in JSON by HTTP). Printed and written: medians, the ratio of each pair's medians, and a 95 % interval
of the median ratio by bootstrap over pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
JOB = """
import torch, stoker
from torch import nn


def job():
    data = torch.randn(6000, 1, 28, 28), torch.randint(0, 10, (6000,))
    net = lambda: nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
                                nn.Flatten(), nn.Linear(256, 10))
    return stoker.Job(model=net, data=data, loss="cross_entropy", optimizer=stoker.SGD(lr=0.01), batch=100,
                      until=stoker.updates(3), seed=0)
"""

LOOP = """
import sys, tempfile
from pathlib import Path
import torch
from bench import loop_overhead

torch.set_num_threads(1)
job, calls = loop_overhead.the_job(), 0


def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")


with tempfile.TemporaryDirectory() as folder:
    ours, plain = (lambda: loop_overhead.stokers(job, 400, Path(folder))), (lambda: loop_overhead.plain(job, 400))
    ours(), plain()
    pairs = [(ours(), plain()) for _ in range(30)]
    sys.setprofile(count)
    ours()
    sys.setprofile(None)
print("overhead", 1e6 * (min(one for one, _ in pairs) - min(one for _, one in pairs)))
print("calls", calls / (loop_overhead.SAMPLES // loop_overhead.BATCH))
"""


def cpu_s(checkout: Path, command: list[str], folder: Path, cache: Path) -> float:
    """CPU time of `command` under the checkout's interpreter, with its children [s]."""
    environment = os.environ | {"STOKER_CACHE": str(cache), "STOKER_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [checkout / ".venv/bin/python", *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} under {checkout} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def printed(checkout: Path, module: list[str], pattern: str) -> float:
    """The number that a benchmark of the checkout prints, under its own interpreter."""
    results = checkout / "bench/results"
    before = set(results.iterdir())
    done = subprocess.run(
        [checkout / ".venv/bin/python", *module],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    for file in set(results.iterdir()) - before:  # what it wrote of itself
        file.unlink()
    subprocess.run(["git", "checkout", "-q", "bench/results"], cwd=checkout, check=True)
    found = re.search(pattern, done.stdout)
    if found is None:
        raise SystemExit(f"{module} under {checkout} printed no {pattern!r}: {done.stdout[-300:]}")
    return float(found[1])


def ways(folder: Path) -> dict[str, Callable[[Path], float]]:
    """What is compared, by name: from a checkout to a figure that should be low."""
    job = folder / "job.py"
    job.write_text(JOB, encoding="utf-8")

    def planned(checkout: Path) -> float:
        with tempfile.TemporaryDirectory() as cache:
            return cpu_s(checkout, ["-m", "stoker", "plan", str(job)], folder, Path(cache))

    def started(checkout: Path) -> float:
        cache, plan = folder / f"cache-{checkout.name}", folder / f"plan-{checkout.name}.json"
        if not plan.exists():
            with plan.open("w", encoding="utf-8") as file:
                subprocess.run(
                    [checkout / ".venv/bin/python", "-m", "stoker", "plan", str(job), "--json"],
                    cwd=folder,
                    check=True,
                    stdout=file,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | {"STOKER_CACHE": str(cache)},
                )
        return cpu_s(checkout, ["-m", "stoker", "train", str(job), "--new", "--plan", str(plan)], folder, cache)

    return {
        "import": lambda checkout: cpu_s(checkout, ["-c", "import stoker"], folder, folder / "none"),
        "plan": planned,
        "start": started,
        "loop": partial(printed, module=["-c", LOOP], pattern=r"overhead ([\d.]+)"),
        "loop calls": partial(printed, module=["-c", LOOP], pattern=r"calls ([\d.]+)"),
        "answer": partial(printed, module=["-m", "bench.serving.answer_path"], pattern=r"'least': ([\d.]+)"),
        **{
            case: partial(
                printed, module=["-m", "bench.serving.wire_overhead", "--rounds", "3"], pattern=rf"{case}\s+([\d.]+) µs"
            )
            for case in ("grpc_raw", "http_json")
        },
    }


def revision(checkout: Path) -> str:
    """The commit that is checked out."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of the median ratio, by bootstrap over pairs."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def main() -> None:
    """Compare, print a line for each way, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    other = options.checkout.resolve()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        for name, way in ways(Path(made)).items():
            if options.only not in name:
                continue
            pairs = [(way(HERE), way(other)) for _ in range(options.rounds)]
            here, there = (statistics.median(column) for column in zip(*pairs, strict=True))
            low, high = interval([a / b for a, b in pairs])
            results[name] = {
                "here": here,
                "other": there,
                "ratio": here / there,
                "low": low,
                "high": high,
                "pairs": pairs,
            }
            print(f"{name:<8}{here:>10.4g}{there:>10.4g}   {here / there:.3f}× ({low:.3f} to {high:.3f})", flush=True)
    if options.out:
        content = {
            "command": "python -m bench.against CHECKOUT",
            "here": revision(HERE),
            "other": revision(other),
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "results": results,
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
