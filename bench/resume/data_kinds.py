"""Exact resuming from every kind of files, shown by killing, with and without loader workers.

    python -m bench.resume.data_kinds [--kills 3] [--kinds folder csv …] [--workers 0 2] [--seed 0]

For each kind and number of workers: one run that is never stopped, then one under the same plan that is killed with
SIGKILL at random moments, each time continued by the same command. Every command is a process of its own. The files
(480 samples of each kind) are made in a temporary folder. The result (kills, where they fell, SHA-256 of the final
weights) is printed and written to bench/results/.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from bench.resume.kill import digest, kill_at, train_to_the_end
from stoker.records import Plan, dumps
from tests.data.files.making import SOURCES

HERE = Path(__file__).parent


def prove(kind: str, num_workers: int, kills: int, randomly: random.Random) -> dict[str, object]:
    """Kill the job of this kind so many times; what came out."""
    loader = "workers" if num_workers else "inline"
    plan = Plan(device="cpu", micro_batch=20, loader=loader, num_workers=num_workers, checkpoint_every_s=0.1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.json").write_text(dumps(plan))

        def command(run: str) -> list[str]:
            return [
                sys.executable,
                "-m",
                "stoker",
                "train",
                str(HERE / "jobs" / "data_kind.py"),
                "--json",
                "--set",
                f"kind={kind}",
                "--set",
                f"root={folder / 'files'}",
                "--run-dir",
                str(folder / run),
                "--plan",
                str(folder / "plan.json"),
            ]

        finished = next(event for event in train_to_the_end(command("whole")) if event["event"] == "finished")
        total = int(str(finished["samples"]))
        happened = []
        for target in sorted(randomly.randrange(total) for _ in range(kills)):
            killed = kill_at(
                command("killed"), folder / "killed", target, randomly.uniform(0.0, 0.1), in_checkpoint=False
            )
            if killed is None:
                break
            happened.append(killed)
        if not (folder / "killed" / "model.safetensors").exists():
            train_to_the_end(command("killed"))
        whole = digest(folder / "whole")
        same = digest(folder / "killed") == whole
        print(f"{kind}, {num_workers} workers: {len(happened)} kills, bit-equal: {same}", flush=True)
        return {
            "kind": kind,
            "workers": num_workers,
            "kills": happened,
            "bit_equal": same,
            "weights_sha256": whole,
            "samples": total,
        }


def main() -> int:
    """Prove it for every kind; 0 if all weights are bit-equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    date, randomly = datetime.now(UTC).date().isoformat(), random.Random(arguments.seed)
    cases = [(kind, workers) for kind in arguments.kinds for workers in arguments.workers]
    result = {
        "what": "bit-equal weights after SIGKILL at random moments, for every kind of files",
        "command": f"python -m bench.resume.data_kinds --kills {arguments.kills} --seed {arguments.seed}",
        "date": date,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "numpy", "pyarrow", "pillow", "protobuf", "stoker")},
        "threads": torch.get_num_threads(),
        "cases": [prove(kind, workers, arguments.kills, randomly) for kind, workers in cases],
    }
    path = HERE.parent / "results" / f"resume_data_kinds_{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    return 0 if all(case["bit_equal"] for case in result["cases"]) else 1  # type: ignore[index, union-attr]


if __name__ == "__main__":
    sys.exit(main())
