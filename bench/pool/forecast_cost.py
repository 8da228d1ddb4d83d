"""Predicted against paid money to finish: 20 jobs on agents of three speeds, after a probe, and with history.

    python -m bench.pool.forecast_cost --folder /dev/shm/cost

Three agents lend a share of this machine's CPU each (a control group's quota: 0.8, 0.55 and 0.4 of one core) and call
it a CPU of one core, so that nothing but what ran there before tells the three apart. Each job is forecast and rented
three times, as `stoker train --on pool` does it: for a minute, in which the shortest jobs end (the probe); to its end,
forecast from that probe (*cold*); to its end again, forecast from both (*history*). What is predicted is what the lease
says (`forecast.credits`); what is paid is what the meter says at its end. Jobs take half a minute to a minute: starting
Python is a fifth of that, and a whole second of the meter 2 %.
Other processes may be at work on this machine: groups of the pool's jobs get a hundred times their weight, so that
their quota holds, and what is left is that caches and memory are shared.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.pool.local_pool import JOB, ROOT, LocalPool, job_submission, local_pool, until
from bench.pool.result_file import write_result
from stoker.jobs import load_job
from stoker.pool.forecasting import job_forecasts
from stoker.pool.pool_launcher import LAUNCHER
from stoker.records import ENDED
from stoker.records.codec import to_json

SHARES = (0.8, 0.55, 0.4)
KINDS = ("mlp", "cnn", "lstm", "attention", "mlp_sgd")
BARS = {"cold": 0.25, "history": 0.10}
WEIGHT = 100 * 1024
FORECASTING = threading.Lock()
"""Forecasts are made one at a time: each tries its plans on this machine."""


def keep_weight(pool: LocalPool, name: str) -> None:
    """Give control groups of an agent's jobs more weight than whatever else runs here, as they come."""
    while True:
        mine = {str(pid) for pid in pool.job_processes(name)}
        for path in Path("/sys/fs/cgroup/cpu").rglob("stoker-*"):
            with suppress(OSError):
                if mine & set((path / "cgroup.procs").read_text().split()):
                    (path / "cpu.shares").write_text(str(WEIGHT))
        time.sleep(0.5)


def updates_for(settings: dict[str, Any], train_s: float) -> int:
    """Updates that take so long on one core of this machine, by its forecast."""
    job, entry = load_job(ROOT / JOB, {**settings, "updates": "1000"})
    forecast = job_forecasts(job, entry)("cpu/1")
    if isinstance(forecast, str):
        sys.exit(forecast)
    return max(100, int(round(1000 * train_s / (forecast.raw_s or forecast.run_s), -2)))


def rent(pool: LocalPool, run: str, offer: str, settings: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Forecast, rent, and follow to the end; the lease."""
    with FORECASTING:
        job, entry = load_job(ROOT / JOB, {name: str(value) for name, value in settings.items()})
    submission = job_submission(run, settings, is_safe=True, block="1s", offer=offer, limit_s=limit_s)
    submission = replace(submission, arguments=(*submission.arguments, "--threads", "1"))
    with FORECASTING:
        submission = LAUNCHER.with_forecasts(job, entry, submission, lambda _: None)
    handle = LAUNCHER.start(submission, lambda _: None)
    until(lambda: LAUNCHER.state(handle).phase in ENDED, 600, f"the end of {run}", lambda: pool.text(offer), 0.5)
    return dict(to_json(pool.renter.lease(f"{handle['job']}.{handle['first']}")))


def rent_all(
    pool: LocalPool,
    share: float,
    lengths: dict[str, int],
    rows: list[dict[str, Any]],
    kept: Path,
    left: list[int],
    most_s: float,
    probe_s: float,
) -> None:
    """Rent of one agent for the next job that is left, again and again."""
    until_s, name = time.monotonic() + most_s, f"share-{share:g}"
    pool.lend(name, price=1.0, cores=share, beat_s=1.0, more=("--no-replay",))
    threading.Thread(target=keep_weight, args=(pool, name), daemon=True).start()
    while left and time.monotonic() < until_s:
        number = left.pop(0)
        kind = KINDS[number % len(KINDS)]
        length = int(round(lengths[kind] * random.Random(number).uniform(0.7, 1.3), -2))
        settings = {"kind": kind, "updates": length, "seed": number}
        row: dict[str, Any] = {"job": number, "kind": kind, "share": share, "updates": length}
        for step in ("probe", "cold", "history"):
            limit_s = float(math.ceil(probe_s / share)) if step == "probe" else 3600.0
            lease = rent(pool, f"{kind.replace('_', '-')}-{number}-{step}", name, settings, limit_s)
            paid = lease["paid_s"] * lease["rate_per_hour"] // 3600
            row[step] = {
                "predicted_credits": lease["forecast"]["credits"] / 1e6,
                "paid_credits": paid / 1e6,
                "raw_s": lease["forecast"]["raw_hours"] * 3600,
                "paid_s": lease["paid_s"],
                "ran_s": lease["running_s"],
                "reason": lease["reason"],
                "blocks": len(lease["commitments"]),
                "error": lease["forecast"]["credits"] / paid - 1 if paid else None,
            }
        rows.append(row)
        print(json.dumps(row), flush=True)
        kept.write_text(json.dumps(rows))


def main() -> None:
    """Rent, compare, print, and write the result."""
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, required=True, help="on a file system that is quick to sync")
    options.add_argument("--jobs", type=int, default=20)
    options.add_argument("--train-s", type=float, default=20.0, help="of CPU time, of each job [s]")
    options.add_argument("--probe-s", type=float, default=11.0, help="of CPU time, of a probe with its start [s]")
    options.add_argument("--most-s", type=float, default=1e9, help="no job is begun after it; the same command goes on")
    given = options.parse_args()
    given.folder.mkdir(exist_ok=True)
    given.folder.chmod(0o755)
    rows: list[dict[str, Any]] = json.loads(kept.read_text()) if (kept := given.folder / "rows.json").exists() else []
    with local_pool(given.folder / "pool") as pool:
        lengths = json.loads(sized.read_text()) if (sized := given.folder / "updates.json").exists() else {}
        lengths = lengths or {kind: updates_for({"kind": kind}, given.train_s) for kind in KINDS}
        sized.write_text(json.dumps(lengths))
        print(lengths, flush=True)
        left = [number for number in range(given.jobs) if number not in {row["job"] for row in rows}]
        threads = [
            threading.Thread(
                target=rent_all, args=(pool, share, lengths, rows, kept, left, given.most_s, given.probe_s)
            )
            for share in SHARES
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if len(rows) < given.jobs:
        sys.exit(f"{len(rows)} of {given.jobs} jobs; the same command goes on")
    errors = {step: [row[step]["error"] for row in rows] for step in BARS}
    sticker = [row["probe"]["raw_s"] / row["cold"]["ran_s"] - 1 for row in rows]
    mape = {step: statistics.mean(map(abs, each)) for step, each in errors.items()}
    values = {
        "bars": BARS,
        "mape": mape,
        "is_held": {step: mape[step] <= bar for step, bar in BARS.items()},
        "median_error": {step: statistics.median(map(abs, each)) for step, each in errors.items()},
        "worst_error": {step: max(map(abs, each)) for step, each in errors.items()},
        "bias": {step: statistics.mean(each) for step, each in errors.items()},
        "mape_by_share": {
            str(share): {
                step: statistics.mean(abs(row[step]["error"]) for row in rows if row["share"] == share) for step in BARS
            }
            for share in SHARES
        },
        "mape_without_a_probe": statistics.mean(map(abs, sticker)),
        "rows": rows,
    }
    write_result("forecast_cost", __doc__, values)


if __name__ == "__main__":
    main()
