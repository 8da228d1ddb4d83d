"""Regret of plans chosen by trials on a run's own updates, against plans named beforehand.

    python -m bench.start.regret [--kinds unet,gru] [--runs 3] [--processes 7] [--seconds 25] [--most 30] [--out FILE]

For each kind of `bench.start`: at most `--most` legal plans are named by the rule of `bench.forecast.plan_space` and
written with their digest; then Stoker trains `--runs` times from cold, for about `--seconds`. The plan that the last of
them settled on is compared with the named ones as `bench.forecast.regret` does it: all timed briefly, the fastest three
and the chosen again, interleaved, in `--processes` fresh processes.

`regret` is the chosen plan's time over the best's: what a long run loses. `trials` is what trying others cost a short
run: the time of all its updates over as many of its last ones. Their product is a short run's regret.
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
from stoker.records import Plan, to_json
from stoker.store import RunDirectory


def trials(run: dict[str, Any]) -> float:
    """Time of all updates after the first over that of as many of the last half [1]."""
    times: list[float] = run["updates_s"]
    return (times[-1] - times[0]) / (len(times) - 1) / float(run["update_s"])


def settled_plan(runs: Path) -> tuple[Plan, bool]:
    """(plan, whether trials had ended) of the one run below `runs`."""
    directory = RunDirectory(next(path for path in runs.iterdir() if path.is_dir()))
    schedule = directory.read_report().schedule
    assert schedule is not None
    return schedule.last, schedule.is_settled


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
            runs = [run_once("stoker", kind, folder, updates, keep=updates) for _ in range(given.runs)]
            chosen, is_settled = settled_plan(folder / "runs")
            brief_s = contest.screened(kind, fixed[kind])
            found = contest.judged(kind, fixed[kind], chosen, brief_s)
            costs = sorted(trials(run) for run in runs)
            found |= {
                "updates": updates, "is_settled": is_settled, "chosen_plan": to_json(chosen),
                "brief_s": to_json(brief_s),
                "trials": costs, "short_regret": (1 + found["regret"]) * statistics.median(costs) - 1,
                "short_regret_upper": (1 + found["regret_upper"]) * costs[-1] - 1, "took_s": time.monotonic() - began,
            }  # fmt: skip
            document["results"][kind] = found
            write(path, document)
            print(
                f"{kind}: {len(brief_s)} of {len(fixed[kind]['plans'])} plans work; {chosen.in_words()}"
                f"{'' if is_settled else ' (not settled)'}: regret {found['regret']:.1%}, at most "
                f"{found['regret_upper']:.1%}; with trials in {updates} updates {found['short_regret']:.1%}, at most "
                f"{found['short_regret_upper']:.1%}; {found['took_s']:.0f} s", flush=True,
            )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
