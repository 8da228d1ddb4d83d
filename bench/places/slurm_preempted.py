"""A run on Slurm, preempted by a higher partition and ended by time limits, finishes by itself with the same weights.

    python -m bench.places.slurm_preempted [--preemptions 5] [--epochs 400] [--minutes 2]

A real Slurm of two nodes is started on this machine (tests/places/slurm_cluster.py). One run of 2 nodes x 2 processes,
under a pinned plan of one thread each, trains in the partition `high` without a break; then the same in `low`, each
start limited to so many minutes (`time=`), where a job of `high` takes both nodes each time that it has trained on. It
is left alone after that: time limits go on ending its starts. Recorded: the starts, what ended them, seconds from the
preemption to the next update, and whether the final weights are equal, byte for byte.

Bar: finished by itself, weights equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stoker.launching import launcher_of
from stoker.launching.launch import launch
from stoker.launching.launch_options import LaunchOptions
from stoker.records import Layout, Plan, dumps
from stoker.records.launch import ENDED, LaunchState
from tests.places.slurm_cluster import SlurmCluster, missing

HERE = Path(__file__).parent
LONGEST_S = 900.0


class Run:
    """A run on the cluster, followed by its log."""

    def __init__(self, folder: Path, on: str, epochs: int, *, name: str, plan: Path, **place: str) -> None:
        self.launcher = launcher_of("slurm")
        options = LaunchOptions(
            run_dir=folder / "runs" / name,
            env=sys.executable,
            plan=plan,
            place={"root": str(folder / "root"), **place},
        )
        self.began = time.monotonic()
        settings = {"epochs": str(epochs)}
        job_file = folder / "digits_mlp.py"
        self.launch = launch(job_file, on=on, settings=settings, options=options).launch
        self.handle = self.launch.handle
        self.phases: list[tuple[float, str, str]] = []

    def state(self) -> LaunchState:
        """The state now, noted if it is another one."""
        state = self.launcher.state(self.handle)
        if not self.phases or self.phases[-1][1] != state.phase:
            self.phases.append((round(time.monotonic() - self.began, 1), state.phase, state.why))
            print(*self.phases[-1], flush=True)
        return state

    def events(self) -> list[dict[str, Any]]:
        """All events."""
        log = self.launcher.events(self.handle, 0)
        return [json.loads(line) for line in log.split(b"\n")[:-1]]

    def progress_since(self, at: float) -> list[dict[str, Any]]:
        """Its events `progress` after a time [s since 1970]."""
        return [event for event in self.events() if event["kind"] == "progress" and event["at"] > at]

    def samples(self) -> int:
        """The newest position [samples]."""
        return max(
            (event["fields"].get("samples", 0) for event in self.events() if event["kind"] == "progress"), default=0
        )

    def wait(self, holds: Callable[[LaunchState], bool]) -> LaunchState:
        """Wait for a state."""
        until = time.monotonic() + LONGEST_S
        while time.monotonic() < until:
            state = self.state()
            if holds(state):
                return state
            if state.phase in ENDED:
                raise SystemExit(f"{state}\n{self.log()}")
            time.sleep(0.3)
        raise SystemExit(f"no such state in {LONGEST_S} s: {self.phases}\n{self.log()}")

    def log(self) -> str:
        """What the job printed."""
        files = sorted(Path(self.handle["directory"], "launch").glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def weights(self) -> str:
        """SHA-256 of the final weights."""
        return hashlib.sha256(Path(self.handle["directory"], "model.safetensors").read_bytes()).hexdigest()


def preempt(run: Run, cluster: SlurmCluster) -> dict[str, Any]:
    """Let the run train on, take its nodes, and wait until it trains again."""
    before = run.samples()
    restarts = run.wait(lambda state: state.phase == "running" and run.samples() > before + 2000).restarts
    at, reached = time.time(), run.samples()
    taker = cluster.run("sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "true")
    run.wait(lambda state: state.restarts > restarts)
    cluster.wait_for(
        lambda: "JobState=COMPLETED" in cluster.run("scontrol", "show", "job", taker), "the end of it", 120
    )
    requeued_s = time.time() - at
    since = time.time()
    run.wait(lambda _: bool(run.progress_since(since)))
    again = run.progress_since(since)[0]
    resumed = [event for event in run.events() if event["kind"] == "resumed"][-1]
    return {
        "samples": reached,
        "requeued_after_s": round(requeued_s, 1),
        "training_again_after_s": round(again["at"] - at, 1),
        "resumed_at": resumed["fields"]["samples"],
    }


def main() -> int:
    """Measure, print and write; 0 if the weights are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"preemptions": 5, "epochs": 400, "minutes": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    if reason := missing():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "digits_mlp.py").write_text((HERE / "digits_mlp.py").read_text())
        plan = Plan(device="cpu", micro_batch=16, threads=1, checkpoint_every_s=5.0, layout=Layout(replicas=4))
        (folder / "plan.json").write_text(dumps(plan))
        cluster = SlurmCluster(folder / "slurm")
        try:
            cluster.start()
            os.environ["SLURM_CONF"] = cluster.environ["SLURM_CONF"]
            os.chdir(folder)
            pinned: dict[str, Any] = {"plan": folder / "plan.json", "cpus": "2"}
            unbroken = Run(folder, "slurm:high/2x2xcpu", given.epochs, name="unbroken", time="60", **pinned)
            unbroken.wait(lambda state: state.phase == "finished")
            broken = Run(folder, "slurm:low/2x2xcpu", given.epochs, name="broken", time=str(given.minutes), **pinned)
            preemptions = [preempt(broken, cluster) for _ in range(given.preemptions)]
            final = broken.wait(lambda state: state.phase == "finished")
            comment = cluster.run("squeue", "-h", "-t", "all", "-j", broken.handle["job"], "-o", "%k")
            digests = [unbroken.weights(), broken.weights()]
        finally:
            cluster.stop()
    date = datetime.now(UTC).date().isoformat()
    result = {
        "what": "a run on Slurm, 2 nodes x 2 processes, preempted and ended by time limits, against an unbroken one",
        "command": f"python -m bench.places.slurm_preempted --preemptions {given.preemptions} --epochs {given.epochs} "
        f"--minutes {given.minutes}",
        "date": date,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        "slurm": subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout.strip(),
        "load": os.getloadavg(),
        "weights_equal": digests[0] == digests[1],
        "sha256_of_weights": digests,
        "restarts": final.restarts,
        "of_them_preemptions": given.preemptions,
        "of_them_time_limits": final.restarts - given.preemptions,
        "preemptions": preemptions,
        "last_comment": comment,
        "unbroken_phases": unbroken.phases,
        "phases": broken.phases,
    }
    path = HERE.parent / "results" / f"slurm_preempted_{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("weights_equal", "restarts", "of_them_time_limits", "load")}))
    return 0 if result["weights_equal"] and final.restarts > given.preemptions else 1


if __name__ == "__main__":
    sys.exit(main())
