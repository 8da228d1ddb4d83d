"""A run cut into slices against one that is not: the same command again and again, weights bit-equal in the end.

    python -m bench.resume.slices [--slices 20] [--slice 8s] [--on here] [--epochs …]

The job is the CNN of the proofs of resuming (loader workers, augmentation, dropout, an average), under one plan. It is
made twice as long as so many slices of what a slice of another run reaches here, unless the number of epochs is given.
What is left after so many slices is trained in one more process without a limit. Where the machine was busier before,
so that the run is over in fewer slices, it begins again, as long as the largest of them says. Each slice must end with
exit code 75 before its time is over, the last process with 0. The result (length of each process, samples it reached,
SHA-256 of the final weights) goes to bench/results/.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.resume.kill import HERE, PLANS, digest
from stoker.records import Layout, dumps
from stoker.units import parse_duration

_ENDLESS = 10_000.0
"""Epochs of a run that no slice finishes."""


def main() -> int:
    """Compare; 0 if the weights are bit-equal and no slice took longer than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=20)
    parser.add_argument("--slice", default="8s")
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--on", default="here", choices=["here", "2xhere"])
    options = parser.parse_args()
    plan = dataclasses.replace(PLANS["cnn"], threads=1, checkpoint_every_s=5.0)
    if options.on == "2xhere":
        plan = dataclasses.replace(plan, layout=Layout(replicas=2), micro_batch=50)
    slices: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.json").write_text(dumps(plan))

        def command(run: str, epochs: float, *more: str) -> list[str]:
            return [
                sys.executable,
                "-m",
                "stoker",
                "train",
                str(HERE / "jobs" / "cnn.py"),
                "--json",
                "--set",
                f"epochs={epochs}",
                "--run-dir",
                str(folder / run),
                "--plan",
                str(folder / "plan.json"),
                "--on",
                options.on,
                *more,
            ]

        def one_process(run: str, epochs: float, *more: str) -> dict[str, Any]:
            began = time.monotonic()
            done = subprocess.run(command(run, epochs, *more), capture_output=True, text=True, check=False)
            took_s = round(time.monotonic() - began, 3)
            events = [json.loads(line) for line in done.stdout.splitlines()]
            reached = [event["samples"] for event in events if event["event"] in {"stopped", "finished"}]
            return {"exit": done.returncode, "took_s": took_s, "samples": reached[-1]}

        def lasting(samples_of_slice: int) -> float:
            """Epochs of a run that takes twice as many slices, each of so many samples."""
            total_samples = json.loads((folder / "probe" / "run.json").read_text())["total_samples"]
            return round(2 * options.slices * _ENDLESS * samples_of_slice / total_samples, 2)

        limit = ("--slice", options.slice)
        epochs = options.epochs or lasting(one_process("probe", _ENDLESS, *limit)["samples"])
        while True:
            slices.clear()
            while len(slices) < options.slices and (not slices or slices[-1]["exit"] == 75):
                slices.append(one_process("sliced", epochs, *limit))
                print(slices[-1], flush=True)
            if len(slices) >= options.slices or slices[-1]["exit"] or options.epochs:
                break
            reached = [0, *(one["samples"] for one in slices)]
            epochs = lasting(max(after - before for before, after in itertools.pairwise(reached)))
            print(f"over in {len(slices)} slices: again, {epochs:g} epochs", flush=True)
            shutil.rmtree(folder / "sliced")
        processes = [*slices]
        if slices[-1]["exit"] == 75:
            processes.append(one_process("sliced", epochs))
            print(f"the rest without a limit: {processes[-1]}", flush=True)
        whole = subprocess.run(command("whole", epochs), capture_output=True, text=True, check=True)
        finished = json.loads(whole.stdout.splitlines()[-1])
        same = digest(folder / "sliced") == digest(folder / "whole")
        sha256 = digest(folder / "whole")
    longest = max(one["took_s"] for one in slices)
    held = longest <= parse_duration(options.slice, "--slice") and processes[-1]["exit"] == 0
    print(f"{len(slices)} slices of {options.slice}, the longest {longest:.1f} s, bit-equal: {same}")
    date = datetime.now(UTC).date().isoformat()
    result = {
        "what": "a run in slices against one run: bit-equal weights",
        "date": date,
        "torch": torch.__version__,
        "command": " ".join(["python -m bench.resume.slices", *sys.argv[1:]]),
        "slice": options.slice,
        "epochs": epochs,
        "load": os.getloadavg(),
        "on": options.on,
        "slices": slices,
        "rest": processes[len(slices) :],
        "longest_s": longest,
        "bit_equal": same,
        "weights_sha256": sha256,
        "wall_s_of_one_run": finished["wall_s"],
    }
    path = HERE.parent / "results" / f"slices_{options.on}_{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    return 0 if same and held and len(slices) >= options.slices else 1


if __name__ == "__main__":
    sys.exit(main())
