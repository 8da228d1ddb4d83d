"""Exact resuming, shown by killing: SIGKILL at random moments, the same command again, weights bit-equal in the end.

    python -m bench.resume.kill [--kills 20] [--jobs cnn gpt] [--seed 0] [--trying]

For each job: one run that is never stopped, then one under the same plan that is killed again and again at random
moments, every other time while a checkpoint is being written. With `--trying` the runs try plans on their own updates:
each is killed twice before its choice is settled and twice after, and the run that is never stopped is given the final
schedule. The result (kills, where they fell, SHA-256 of the final weights) is printed and written to bench/results/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from stoker.records import Plan, dumps

HERE = Path(__file__).parent
PLANS = {
    "cnn": Plan(
        device="cpu",
        micro_batch=100,
        precision="bf16",
        memory_format="channels_last",
        threads=2,
        loader="workers",
        num_workers=2,
        optimizer_implementation="fused",
        checkpoint_every_s=0.15,
    ),
    "gpt": Plan(
        device="cpu",
        micro_batch=8,
        precision="bf16",
        threads=2,
        optimizer_implementation="fused",
        checkpoint_every_s=0.15,
    ),
}


def command(job: str, folder: Path, run: str) -> list[str]:
    """The command line that trains `job` in `folder`/`run`: the same for the first try and for every other."""
    return [
        sys.executable,
        "-m",
        "stoker",
        "train",
        str(HERE / "jobs" / f"{job}.py"),
        "--json",
        "--run-dir",
        str(folder / run),
        "--plan",
        str(folder / "plan.json"),
    ]


def train_to_the_end(arguments: list[str]) -> list[dict[str, object]]:
    """Run the command; its events."""
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def kill_at(
    arguments: list[str],
    run: Path,
    target: int,
    jitter_s: float,
    *,
    in_checkpoint: bool = False,
    once: Callable[[], bool] = lambda: True,
) -> dict[str, object] | None:
    """Start the command and SIGKILL it `jitter_s` after it passed `target` samples; None if it finished before.

    `once` is waited for before the jitter. With `in_checkpoint`, the kill waits for the next checkpoint to be
    half-written. Loader workers are left to notice by themselves.
    """
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    at = 0
    for line in process.stdout or ():
        at = int(json.loads(line).get("samples", 0))
        if at >= target and once():
            break
    time.sleep(jitter_s)
    writing = run / "checkpoints"
    while in_checkpoint and process.poll() is None and not any(writing.glob(".writing-*")):
        pass
    inside = any(writing.glob(".writing-*"))
    process.kill()
    rest, _ = process.communicate()
    if process.returncode == 0:
        return None
    at = max([at, *(int(json.loads(line).get("samples", 0)) for line in rest.splitlines() if line.endswith("}"))])
    return {"after_samples": at, "inside_a_checkpoint": inside, "exit": process.returncode}


def digest(run: Path) -> str:
    """SHA-256 of the final weights."""
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()


def prove(job: str, kills: int, randomly: random.Random) -> dict[str, object]:
    """Kill `job` so many times; what came out."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.json").write_text(dumps(PLANS[job]))
        whole = train_to_the_end(command(job, folder, "whole"))
        trained_s = float(str(next(e for e in whole if e["event"] == "finished")["wall_s"]))
        total = int(str(next(e for e in whole if e["event"] == "finished")["samples"]))
        happened: list[dict[str, object]] = []
        digests: set[str] = set()
        while len(happened) < kills:
            run = folder / f"killed{len(digests)}"
            arguments = command(job, folder, run.name)
            for target in sorted(randomly.randrange(total) for _ in range(kills - len(happened))):
                in_checkpoint = len(happened) % 2 == 1
                killed = kill_at(arguments, run, target, randomly.uniform(0.0, 0.5), in_checkpoint=in_checkpoint)
                if killed is None:
                    break
                happened.append(killed)
            if not (run / "model.safetensors").exists():
                train_to_the_end(arguments)
            digests.add(digest(run))
        same = digests == {digest(folder / "whole")}
        inside = sum(bool(one["inside_a_checkpoint"]) for one in happened)
        print(f"{job}: {len(happened)} kills, {inside} inside a checkpoint, bit-equal: {same}", flush=True)
        return {"kills": happened, "bit_equal": same, "weights_sha256": digest(folder / "whole"), "wall_s": trained_s}


ATTEMPTS = 3
"""Attempts at a reference under the same schedule: one that gave up threads to other processes has another."""


def prove_trying(job: str, kills: int, randomly: random.Random) -> dict[str, object]:
    """Kill a run of `job` so many times that chooses its plan as it trains; what came out."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        happened: list[dict[str, object]] = []
        are_equal: list[bool] = []
        while len(happened) < kills:
            run = folder / f"killed{len(are_equal)}"
            os.environ["STOKER_CACHE"] = str(folder / f"cache{len(are_equal)}")  # no plan is kept from a run before
            arguments = [*command(job, folder, run.name)[:-2], "--checkpoint-every", "0.15"]
            moments = [True, True, False, False][: kills - len(happened)]
            for is_early in moments:
                switched = len(switches(run)) + randomly.randrange(1, 5)
                once = partial(has_switched, run, switched) if is_early else partial(is_settled, run)
                killed = kill_at(arguments, run, 1, randomly.uniform(0.0, 0.3 if is_early else 1.0), once=once)
                if killed is None:
                    break
                happened.append({**killed, "while_trying": not is_settled(run), "switches": len(switches(run))})
            train_to_the_end(arguments)
            for attempt in range(ATTEMPTS):
                reference = folder / f"reference{len(are_equal)}-{attempt}"
                undisturbed = [*command(job, folder, reference.name)[:-2], "--checkpoint-every", "0.15"]
                kill_at(undisturbed, reference, 1, 0.0)
                shutil.rmtree(reference / "checkpoints", ignore_errors=True)
                for file in ("plans.jsonl", "plan.json", "coupling.json"):
                    shutil.copy(run / file, reference / file)
                train_to_the_end(undisturbed)
                if switches(reference) == switches(run):
                    break
            else:
                raise RuntimeError(f"other processes made {ATTEMPTS} references give up threads: use a quiet machine")
            are_equal.append(digest(run) == digest(reference))
        among = sum(bool(one["while_trying"]) for one in happened)
        print(f"{job}: {len(happened)} kills, {among} while plans were tried, bit-equal: {all(are_equal)}", flush=True)
        return {"kills": happened, "bit_equal": all(are_equal), "runs": len(are_equal)}


def switches(run: Path) -> list[str]:
    """The lines of a run's schedule."""
    path = run / "plans.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def has_switched(run: Path, times: int) -> bool:
    """Whether the run's schedule has so many lines."""
    return len(switches(run)) >= times


def is_settled(run: Path) -> bool:
    """Whether the run has chosen its plan."""
    return any(json.loads(line)["kind"] == "settled" for line in switches(run))


def main() -> int:
    """Prove it for every job; 0 if all weights are bit-equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--jobs", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trying", action="store_true")
    arguments = parser.parse_args()
    date, proof = datetime.now(UTC).date().isoformat(), prove_trying if arguments.trying else prove
    result = {
        "what": "bit-equal weights after SIGKILL at random moments",
        "command": " ".join(["python -m bench.resume.kill", *sys.argv[1:]]),
        "date": date,
        "torch": torch.__version__,
        "jobs": {job: proof(job, arguments.kills, random.Random(arguments.seed)) for job in arguments.jobs},
    }
    path = HERE.parent / "results" / f"resume_kill{'_trying' if arguments.trying else ''}_{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    jobs = result["jobs"]
    return 0 if isinstance(jobs, dict) and all(one["bit_equal"] for one in jobs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
