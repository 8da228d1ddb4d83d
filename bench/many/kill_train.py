"""`stoker train --on Nxhere` under SIGKILL: it ends by itself, and with the weights of one process.

    python -m bench.many.kill_train [--kills 20] [--per-run 5] [--workers 4] [--updates 2000] [--seed 0]
                                    [--axis replicas|shards] [--signal KILL|STOP]

A GPT is trained in one process, then again in several, of which random ones are killed at random moments, every third
time another one right after. Recorded: seconds from the signal to the event `recovered` and to the next progress, how
many samples were trained, how far the final weights are from those of one process, and who is left over. With
`--axis shards` nobody has the state of the one that is lost: those that are left go back to the last checkpoint, one of
which is written every two seconds, and the next progress is the first one after that. With `--signal STOP` processes
are stopped for good instead, one at a time.

Bars: at most 2 s in the running processes (replicas), 10 s from a checkpoint (shards); stopped ones the 5 s after which
they count as lost, and 5 s more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from stoker.records import Layout, Plan, dumps

HERE = Path(__file__).parent
LONGEST_S = 240.0
CHECKPOINT_EVERY_S = 2.0
METRICS_TO = 1e-3
"""Relative; rounding in fp32 is amplified as training goes on."""


@dataclass
class Training:
    """The command under way: its events with when they were read [s, monotonic]."""

    process: subprocess.Popen[str]
    events: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)

    def read(self) -> None:
        """Read events to the end."""
        for line in self.process.stdout or ():
            self.events.append((time.monotonic(), json.loads(line)))

    def wait(self, kind: str, after: float, words: str = "") -> float | None:
        """When the first event of a kind, with such words in it, was read after that time [s]; None: the run ended."""
        until = time.monotonic() + LONGEST_S
        while time.monotonic() < until:
            for at, event in list(self.events):
                if event["event"] == kind and at > after and words in json.dumps(event):
                    return at
            if self.process.poll() is not None:
                return None
            time.sleep(0.005)
        raise SystemExit(f"no {kind} {words} in {LONGEST_S} s; the last events: {self.events[-5:]}")

    def workers(self) -> list[int]:
        """Process ids of the workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = [int(pid) for pid in children if b"take-part" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        self.pids |= set(found)
        return found


def command(folder: Path, run: str, layout: Layout, updates: int) -> list[str]:
    """What trains the job."""
    workers = layout.world_size
    plan = Plan(device="cpu", micro_batch=24, threads=1, loader="memory", layout=layout)
    if layout.shards > 1:
        plan = replace(plan, checkpoint_every_s=CHECKPOINT_EVERY_S)
    path = folder / f"plan-{workers}.json"
    path.write_text(dumps(plan))
    return [
        sys.executable,
        "-m",
        "stoker",
        "train",
        str(HERE / "jobs" / "gpt.py"),
        "--set",
        f"updates={updates}",
        "--json",
        "--on",
        f"{workers}xhere" if workers > 1 else "here",
        "--plan",
        str(path),
        "--run-dir",
        str(folder / run),
    ]


def hit(
    arguments: list[str], workers: int, kills: int, randomly: random.Random, number: signal.Signals
) -> dict[str, Any]:
    """One run, whose workers get the signal so often, if it lasts for long enough."""
    hits: list[dict[str, Any]] = []
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        training = Training(process)
        threading.Thread(target=training.read, daemon=True).start()
        whole = training.wait("progress", 0.0)
        while len(hits) < kills and whole is not None:
            time.sleep(randomly.uniform(0.5, 3.0))
            present = training.workers()
            is_double = len(hits) % 3 == 2 and workers > 2 and number == signal.SIGKILL
            for victim in randomly.sample(present, 2 if is_double else 1):
                at = time.monotonic()
                os.kill(victim, number)
                time.sleep(randomly.uniform(0.0, 0.3) if is_double else 0.0)
            recovered = training.wait("recovered", at)
            trains = None if recovered is None else training.wait("progress", recovered)
            whole = None if trains is None else training.wait("recovered", at, f"{workers} processes")
            if recovered is None or trains is None:
                break
            hits.append({"twice": is_double, "recovered_s": recovered - at, "progress_s": trains - at})
            print(hits[-1], flush=True)
        process.wait(LONGEST_S)
    left = sum(Path(f"/proc/{pid}").exists() for pid in training.pids)
    return {"exit": process.returncode, "left_over": left, "hits": hits}


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The final weights of a run."""
    return safetensors.torch.load_file(run / "model.safetensors")


def compared(folder: Path, run: str) -> dict[str, Any]:
    """How the run's end differs from that of one process: samples, metrics, and the largest difference of a weight."""
    alone, mine = weights(folder / "alone"), weights(folder / run)
    records = [json.loads((folder / name / "run.json").read_text()) for name in ("alone", run)]
    return {
        "samples": [record["samples"] for record in records],
        "metrics": [record["metrics"] for record in records],
        "largest_difference": max(float((alone[name] - mine[name]).abs().max()) for name in alone),
        "largest_weight": max(float(one.abs().max()) for one in alone.values()),
    }


def learned_alike(run: dict[str, Any]) -> bool:
    """Whether a run had the samples of one process, and its metrics to a thousandth."""
    alone, mine = run["metrics"]
    near = (abs(mine[name] - value) <= METRICS_TO * abs(value) for name, value in alone.items())
    return len(set(run["samples"])) == 1 and all(near)


def spread(values: list[float]) -> dict[str, float]:
    """How many there are, the least, the median and the most."""
    if not values:
        return {}
    return {"number": len(values), "least": min(values), "median": statistics.median(values), "most": max(values)}


def main() -> int:
    """Measure, print and write; 0 if every run ended well and learned what one process does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"kills": 20, "per-run": 5, "workers": 4, "updates": 2000, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--axis", choices=("replicas", "shards"), default="replicas")
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    given = parser.parse_args()
    randomly, done = random.Random(given.seed), 0
    runs: list[dict[str, Any]] = []
    number, layout = signal.Signals[f"SIG{given.signal}"], Layout(**{given.axis: given.workers})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(command(folder, "alone", Layout(), given.updates), check=True, stdout=subprocess.DEVNULL)
        while done < given.kills and len(runs) < given.kills:
            run = f"killed{len(runs)}"
            arguments = command(folder, run, layout, given.updates)
            found = hit(arguments, given.workers, min(given.per_run, given.kills - done), randomly, number)
            done += len(found["hits"])
            runs.append({**found, **compared(folder, run)} if found["exit"] == 0 else found)
            print({key: value for key, value in runs[-1].items() if key != "hits"}, flush=True)
    hits = [one for run in runs for one in run["hits"]]
    date = datetime.now(UTC).date().isoformat()
    result = {
        "what": f"stoker train over {layout.in_words()} under {number.name} of random processes",
        "command": "python -m bench.many.kill_train "
        + " ".join(f"--{key.replace('_', '-')} {value}" for key, value in vars(given).items()),
        "date": date,
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "system": platform.platform(),
        },
        "load": os.getloadavg(),
        "recovered_s": spread([one["recovered_s"] for one in hits]),
        "progress_s": spread([one["progress_s"] for one in hits]),
        "runs": runs,
    }
    words = [given.axis] * (given.axis != "replicas") + [given.signal.lower()] * (given.signal != "KILL")
    path = HERE.parent / "results" / ("_".join(["many_kill_train", *words, date]) + ".json")
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"recovered {result['recovered_s']}\nprogress {result['progress_s']}\nwritten to {path}")
    good = all(run["exit"] == 0 and run["left_over"] == 0 and learned_alike(run) for run in runs)
    return 0 if good and runs else 1


if __name__ == "__main__":
    sys.exit(main())
