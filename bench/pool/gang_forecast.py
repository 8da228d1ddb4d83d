"""Predicted against measured time of gangs: two agents of this machine that exchange through the pool.

    python -m bench.pool.gang_forecast --folder /dev/shm/gang

Two agents lend a share of this machine's CPU each (a control group's quota) and measure their links to the pool. Each
job has a site at both: few large exchanges, many small ones, ones that go on while updates are made, and fragments in
turn. It is forecast and rented twice as `stoker train --on pool --place-option agents=2` does it: *cold*, by the
planner and the links alone, and *once* more, forecast from the run before. What is predicted is what the leases say
(`forecast.hours`); what is measured is what their meters say at the end, the slower of both. Jobs take half a minute,
as long as the set-up that is assumed where nothing ran before: errors stand with it and without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.pool.forecast_cost import keep_weight
from bench.pool.local_pool import JOB, ROOT, LocalPool, job_submission, local_pool, until
from bench.pool.result_file import write_result
from stoker.jobs import load_job
from stoker.pool.matching import earlier_runs
from stoker.pool.pool_launcher import LAUNCHER
from stoker.pool.terms import Terms
from stoker.records import ENDED

JOBS: dict[str, dict[str, Any]] = {
    "many small": {"width": 64, "updates": 400, "sync": "20,0,1"},
    "few large": {"width": 100_000, "updates": 60, "sync": "20,0,1"},
    "overlapped": {"width": 20_000, "updates": 240, "sync": "40,20,1"},
    "fragments": {"width": 20_000, "updates": 120, "sync": "40,0,4"},
}
STEPS = ("cold", "once")
BAR = 0.15


def rent(pool: LocalPool, run: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Forecast, rent from both agents, and follow to the end; what was predicted and measured."""
    job, entry = load_job(ROOT / JOB, {name: str(value) for name, value in settings.items()})
    submission = job_submission(run, settings, is_safe=True, block="5s")
    submission = replace(
        submission,
        arguments=(*submission.arguments, "--threads", "1"),
        options={**submission.options, "agents": "2"},
    )
    submission = LAUNCHER.with_forecasts(job, entry, submission, lambda _: None)
    told: list[str] = []
    handle = LAUNCHER.start(submission, told.append)
    until(lambda: LAUNCHER.state(handle).phase in ENDED, 280, f"the end of {run}", lambda: pool.text("ox"), 0.5)
    names = [f"{handle['job']}-s{site}.{first}" for site, first in enumerate(handle["firsts"])]
    leases = [pool.renter.lease(name) for name in names]
    predicted_s = max(3600 * lease.forecast.hours for lease in leases)
    measured_s = max(lease.running_s for lease in leases)
    terms = Terms.of(submission.options)
    shown = earlier_runs(leases, terms.identity, sites=2).values()
    setup_s = max((run.setup_s for each in shown for run in each if run.setup_s is not None), default=0.0)
    forecasts = [one for one in terms.forecasts.values() if not isinstance(one, str)]
    known = [one.setup_s for one in forecasts if one.has_exchanges and one.setup_s is not None]
    assumed_s = max(known, default=terms.needs.setup_s)
    return {
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "error": predicted_s / measured_s - 1,
        "setup_s": {"assumed": assumed_s, "measured": setup_s},
        "error_without_setup": (predicted_s - assumed_s) / (measured_s - setup_s) - 1,
        "reasons": [lease.reason for lease in leases],
        "exchanges": asdict(terms.exchanges),
        "said": next(text for text in told if "sites at" in text),
    }


def main() -> None:
    """Rent, compare, print, and write the result."""
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, required=True, help="on a file system that is quick to sync")
    options.add_argument("--share", type=float, default=0.7, help="of a core, of each agent")
    options.add_argument("--most-s", type=float, default=1e9, help="then nothing is begun; the same command goes on")
    given = options.parse_args()
    until_s = time.monotonic() + given.most_s
    given.folder.mkdir(exist_ok=True)
    given.folder.chmod(0o755)
    kept = given.folder / "rows.json"
    rows: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    with local_pool(given.folder / "pool") as pool:
        for name in ("ox", "cow"):
            pool.lend(name, price=1.0, cores=given.share, beat_s=1.0, more=("--no-replay",), measures=True)
            threading.Thread(target=keep_weight, args=(pool, name), daemon=True).start()
        listed: Any = pool.renter.state("offers")
        links = {one["offer"]["offer_id"]: one["offer"]["upload_bytes_per_s"] for one in listed}
        for number, (name, settings) in enumerate(JOBS.items()):
            for step in STEPS:
                if step not in rows.get(name, {}) and time.monotonic() < until_s:
                    row = rent(pool, f"gang-{number}-{step}", {**settings, "seed": number})
                    rows.setdefault(name, {})[step] = row
                    print(name, step, json.dumps(row), flush=True)
                    kept.write_text(json.dumps(rows))
    if any(step not in rows.get(name, {}) for name in JOBS for step in STEPS):
        sys.exit("the same command goes on")
    values: dict[str, Any] = {"bar": BAR, "upload_bytes_per_s": links}
    for error in ("error", "error_without_setup"):
        errors = {step: [abs(rows[name][step][error]) for name in JOBS] for step in STEPS}
        values[error] = {
            "mean": {step: statistics.mean(each) for step, each in errors.items()},
            "worst": {step: max(each) for step, each in errors.items()},
            "by_job": {name: {step: each[step][error] for step in STEPS} for name, each in rows.items()},
        }
    values["rows"] = rows
    write_result("gang_forecast", __doc__, values)


if __name__ == "__main__":
    main()
