"""Exact resuming, shown by killing: SIGKILL at random moments, the same command again, weights bit-equal in the end.

    python -m bench.resume.kill [--kills 20] [--jobs cnn gpt] [--seed 0]

For each job: one run that is never stopped, then one under the same plan that is killed again and again at random
moments, every other time while a checkpoint is being written. The result (kills, where they fell, SHA-256 of the final
weights) is printed and written to bench/results/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from stoker.records import Plan, dumps

HERE = Path(__file__).parent
PLANS = {
    "cnn": Plan(device="cpu", micro_batch=100, precision="bf16", memory_format="channels_last", threads=2,
                loader="workers", num_workers=2, optimizer_implementation="fused", checkpoint_every_s=0.15),
    "gpt": Plan(device="cpu", micro_batch=8, precision="bf16", threads=2, optimizer_implementation="fused",
                checkpoint_every_s=0.15),
}  # fmt: skip


def command(job: str, folder: Path, run: str) -> list[str]:
    """The command line that trains `job` in `folder`/`run`: the same for the first try and for every other."""
    return [
        sys.executable, "-m", "stoker", "train", str(HERE / "jobs" / f"{job}.py"), "--json",
        "--run-dir", str(folder / run), "--plan", str(folder / "plan.json"),
    ]  # fmt: skip


def train_to_the_end(arguments: list[str]) -> list[dict[str, object]]:
    """Run the command; its events."""
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def kill_at(arguments: list[str], run: Path, delay_s: float, *, in_checkpoint: bool) -> dict[str, object] | None:
    """Start the command and SIGKILL it `delay_s` after training began, or in the next checkpoint; None if it finished.

    Its loader workers are left to notice by themselves.
    """
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    seen: list[dict[str, object]] = []
    begun = threading.Event()

    def read() -> None:
        for line in process.stdout or ():
            seen.append(json.loads(line))
            if seen[-1]["event"] == "progress":
                begun.set()
        begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    begun.wait()
    time.sleep(delay_s)
    while in_checkpoint and process.poll() is None and not any((run / "checkpoints").glob(".writing-*")):
        pass
    inside = any((run / "checkpoints").glob(".writing-*"))
    os.kill(process.pid, signal.SIGKILL)
    code = process.wait()
    reader.join()
    if code == 0:
        return None
    last = next((e for e in reversed(seen) if "samples" in e), {})
    return {"after_samples": last.get("samples"), "inside_a_checkpoint": inside, "exit": code}


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
        arguments, happened = command(job, folder, "killed"), []
        while len(happened) < kills:
            in_checkpoint = len(happened) % 2 == 1
            delay_s = randomly.uniform(0.0, 1.6 * trained_s / kills)
            killed = kill_at(arguments, folder / "killed", delay_s, in_checkpoint=in_checkpoint)
            if killed is None:
                break
            happened.append(killed)
        if not (folder / "killed" / "model.safetensors").exists():
            train_to_the_end(arguments)
        same = digest(folder / "whole") == digest(folder / "killed")
        print(f"{job}: {len(happened)} kills, bit-equal: {same}", flush=True)
        return {"kills": happened, "bit_equal": same, "weights_sha256": digest(folder / "whole"), "wall_s": trained_s}


def main() -> int:
    """Prove it for every job; 0 if all weights are bit-equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--jobs", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    date = datetime.now(UTC).date().isoformat()
    result = {
        "what": "bit-equal weights after SIGKILL at random moments",
        "command": f"python -m bench.resume.kill --kills {arguments.kills} --seed {arguments.seed}",
        "date": date,
        "torch": torch.__version__,
        "jobs": {job: prove(job, arguments.kills, random.Random(arguments.seed)) for job in arguments.jobs},
    }
    path = HERE.parent / "results" / f"resume_kill_{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    jobs = result["jobs"]
    return 0 if isinstance(jobs, dict) and all(one["bit_equal"] for one in jobs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
