"""Regret of plans chosen by trials on a run's own updates, against plans named beforehand.

    python -m bench.start.regret [--kinds unet,gru] [--runs 3] [--processes 7] [--seconds 25] [--most 30] [--out FILE]

For each kind of `bench.start`: at most `--most` legal plans are named by the rule of `bench.forecast.plan_space` and
written with their digest; then Stoker trains `--runs` times from cold, for about `--seconds`. The plan that the last of
them settled on is compared with the named ones as `bench.forecast.regret` does it: all timed briefly, the fastest three
and the chosen again, interleaved, in `--processes` fresh processes.

`regret` is the chosen plan's time over the best's: what a long run loses. `trials` is what trying others cost a short
run: the time of its updates until it settled, with all that was done in between, over that of as many under the plan
it settled on, each of the same moments, since a shared machine drifts by more. Their product is a short run's regret.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.forecast.jobs import START_DATA
from bench.forecast.plan_space import RULE
from bench.forecast.registration import dated, register, write
from bench.forecast.regret import Contest, registered
from bench.start.__main__ import run_once, updates_in
from bench.start.kinds import KINDS, prepare
from stoker.records import to_json
from stoker.records.plan_schedule import PlanSchedule
from stoker.store import RunDirectory

NEIGHBOURS = 9
"""Updates by which the time of one under the settled plan is known at a moment."""


def trials(run: dict[str, Any], schedule: PlanSchedule) -> float:
    """Time of all updates after the first over what they had taken under the plan that the run settled on [1]."""
    ends_s: list[float] = run["updates_s"]
    times_s = {update: ends_s[update] - ends_s[update - 1] for update in range(1, len(ends_s))}
    switched = {switch.update for switch in schedule.switches}
    typical = [at for at in times_s if schedule.at(at) == schedule.last and at not in switched]
    settled = len(ends_s) if schedule.settled is None else schedule.settled.update
    lost_s = 0.0
    for update in range(1, min(settled + 1, len(ends_s))):
        near = sorted(typical, key=lambda at: abs(at - update))[:NEIGHBOURS]
        lost_s += times_s[update] - statistics.median(times_s[at] for at in near)
    whole_s = ends_s[-1] - ends_s[0]
    return whole_s / (whole_s - lost_s)


def schedule_of(runs: Path) -> PlanSchedule:
    """Which plan made which update of the one run below `runs`."""
    directory = RunDirectory(next(path for path in runs.iterdir() if path.is_dir()))
    schedule = directory.read_report().schedule
    assert schedule is not None
    return schedule


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--most", type=int, default=30)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    path, names = given.out or dated("regret_trials"), given.kinds.split(",")
    with tempfile.TemporaryDirectory(prefix="bench-regret-") as name:
        folder = Path(name)
        prepare(folder)
        os.environ[START_DATA] = name
        contest = Contest(size="start", most=given.most, passes=1, processes=given.processes, finalist_rounds=3)
        fixed = {kind: registered(kind, "start", given.most) for kind in names}
        command = " ".join(["python -m bench.start.regret", *sys.argv[1:]])
        document = register(path, "regret of plans chosen by trials", command, {"rule": RULE, "jobs": fixed})
        document["results"] = {}
        for kind in names:
            began = time.monotonic()
            updates = updates_in(given.seconds, "stoker", kind, folder)
            costs = []
            for _ in range(given.runs):
                run = run_once("stoker", kind, folder, updates, keep=updates)
                schedule = schedule_of(folder / "runs")
                costs.append(trials(run, schedule))
            costs.sort()
            chosen, is_settled = schedule.last, schedule.is_settled
            brief_s = contest.screened(kind, fixed[kind])
            found = contest.judged(kind, fixed[kind], chosen, brief_s)
            found |= {
                "updates": updates,
                "is_settled": is_settled,
                "chosen_plan": to_json(chosen),
                "brief_s": to_json(brief_s),
                "trials": costs,
                "short_regret": (1 + found["regret"]) * statistics.median(costs) - 1,
                "short_regret_upper": (1 + found["regret_upper"]) * costs[-1] - 1,
                "took_s": time.monotonic() - began,
            }
            document["results"][kind] = found
            write(path, document)
            print(
                f"{kind}: {len(brief_s)} of {len(fixed[kind]['plans'])} plans work; {chosen.in_words()}"
                f"{'' if is_settled else ' (not settled)'}: regret {found['regret']:.1%}, at most "
                f"{found['regret_upper']:.1%}; with trials in {updates} updates {found['short_regret']:.1%}, at most "
                f"{found['short_regret_upper']:.1%}; {found['took_s']:.0f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
