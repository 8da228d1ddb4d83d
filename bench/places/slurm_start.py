"""How soon a run on Slurm makes its first update, and how long it takes against its forecast.

    python -m bench.places.slurm_start [--rounds 3] [--epochs 300]

A real Slurm is started on this machine (tests/places/slurm_cluster.py), whose nodes are idle: the queue is the
scheduler's own pause. The same job is launched again and again, the first time with nothing at the place; Python's
environment is there. Recorded for each: seconds of the command until the job is in the queue, waiting in the queue, and
from its start there to the event of the first update; the time from that to the end of the run, and its forecast.

Bars: from the command to the first update, without the queue, 10 s where all was sent before; forecast within 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.places.slurm_preempted import HERE, Run
from stoker.launching.slurm_scheduler import read_job
from tests.places.slurm_cluster import SlurmCluster, missing


def measure(cluster: SlurmCluster, folder: Path, number: int, epochs: int) -> dict[str, Any]:
    """One run, from the command to its end."""
    began, load = time.time(), os.getloadavg()[0]
    run = Run(cluster, folder, f"slurm:low/cpu:cpus={os.cpu_count()}", epochs, name=f"start-{number}")
    submitted = time.time()
    run.wait(lambda state: state.phase == "finished")
    environ = {"TZ": "UTC"}
    job = read_job(cluster.run("scontrol", "show", "job", run.handle["job"], "-o", environ=environ))
    assert job is not None
    assert job.starts_at is not None
    events = run.events()
    kinds = ("started", "progress", "finished")
    at = {kind: next(event["at"] for event in events if event["kind"] == kind) for kind in kinds}
    queued = max(0.0, job.starts_at - submitted)
    forecast = run.launch.forecast_s
    total = at["finished"] - at["started"]
    return {
        "load_before": load, "command_s": round(submitted - began, 2), "sent_bytes": run.launch.sent_bytes,
        "queue_s": round(queued, 2),
        "start_to_first_update_s": round(at["progress"] - max(job.starts_at, submitted), 2),
        "without_queue_s": round(at["progress"] - began - queued, 2), "training_s": round(total, 2),
        "forecast_s": None if forecast is None else round(forecast, 2),
        "error": None if forecast is None else round(forecast / total - 1, 3), "notes": run.told,
    }  # fmt: skip


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"rounds": 3, "epochs": 300}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    if reason := missing():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "digits_mlp.py").write_text((HERE / "digits_mlp.py").read_text())
        cluster = SlurmCluster(folder / "slurm")
        try:
            cluster.start()
            os.environ["SLURM_CONF"] = cluster.environ["SLURM_CONF"]
            os.chdir(folder)
            rounds = [measure(cluster, folder, number, given.epochs) for number in range(given.rounds)]
        finally:
            cluster.stop()
    date = datetime.now(UTC).date().isoformat()
    errors = [abs(one["error"]) for one in rounds if one["error"] is not None]
    result = {
        "what": "submission to first update on Slurm, and total time against its forecast",
        "command": f"python -m bench.places.slurm_start --rounds {given.rounds} --epochs {given.epochs}",
        "date": date,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        "warm_without_queue_s": [one["without_queue_s"] for one in rounds[1:]],
        "median_forecast_error": round(statistics.median(errors), 3) if errors else None,
        "rounds": rounds,
    }  # fmt: skip
    path = HERE.parent / "results" / f"slurm_start_{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for one in rounds:
        print(one)
    return 0


if __name__ == "__main__":
    sys.exit(main())
