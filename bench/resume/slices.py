"""A run cut into slices against one that is not: the same command again and again, weights bit-equal in the end.

    python -m bench.resume.slices [--slices 20] [--slice 8s] [--on here] [--epochs …]

The job is the CNN of the proofs of resuming (loader workers, augmentation, dropout, an average), under one plan. It is
made so long that it takes at least so many slices, by what a slice of another run reaches here and a half more, unless
the number of epochs is given. Each must end with exit code 75 before its time is over, the last with 0. The result
(length of each process, samples it reached, SHA-256 of the final weights) goes to bench/results/.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
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

        def one_slice(run: str, epochs: float) -> dict[str, Any]:
            began = time.monotonic()
            words = command(run, epochs, "--slice", options.slice)
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            took_s = round(time.monotonic() - began, 3)
            events = [json.loads(line) for line in done.stdout.splitlines()]
            reached = [event["samples"] for event in events if event["event"] in {"stopped", "finished"}]
            return {"exit": done.returncode, "took_s": took_s, "samples": reached[-1]}

        epochs = options.epochs
        if epochs is None:
            samples = one_slice("probe", _ENDLESS)["samples"]
            total_samples = json.loads((folder / "probe" / "run.json").read_text())["total_samples"]
            epochs = round(1.5 * options.slices * _ENDLESS * samples / total_samples, 2)
        while not slices or slices[-1]["exit"] == 75:
            slices.append(one_slice("sliced", epochs))
            print(slices[-1], flush=True)
        whole = subprocess.run(command("whole", epochs), capture_output=True, text=True, check=True)
        finished = json.loads(whole.stdout.splitlines()[-1])
        same = digest(folder / "sliced") == digest(folder / "whole")
        sha256 = digest(folder / "whole")
    longest = max(one["took_s"] for one in slices)
    held = longest <= parse_duration(options.slice, "--slice") and slices[-1]["exit"] == 0
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
