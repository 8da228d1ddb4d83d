"""Regret of the planner's choice on this machine: its time over that of the best of plans named beforehand.

    python -m bench.forecast.regret [--jobs cnn gpt lstm mlp] [--processes 5] [--quick]

For each job at most 48 legal plans are named by a fixed rule and written to the results with their digest; only then
is anything timed. Each is timed briefly, in two rounds in two processes; the planner chooses by itself, in a process of
its own. Then the three fastest and the chosen are timed again, interleaved, in `--processes` fresh processes. Printed
and written to bench/results/: how much slower the chosen is than the best, with an upper bound (95 %).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import stoker
from bench.forecast.bounds import FEWEST, regret
from bench.forecast.jobs import JOBS, Size, make_job
from bench.forecast.measuring import ROOT, Measured, Request, ask
from bench.forecast.plan_space import RULE, every_plan, registered_plans, same_execution
from bench.forecast.registration import dated, register, write
from stoker.devices import attached_cpu
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, Plan, dumps, from_json, loads, to_json
from stoker.records.codec import JSON
from stoker.stepping.activation_checkpointing import num_blocks
from stoker.stepping.coupling import find_coupling
from stoker.stepping.model import build_model

BAR = 1.05
"""The chosen plan's time over the best's may be this much, by its upper bound."""

FINALISTS = 3


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the planner chose, and the seconds it took."""

    schema: ClassVar[int] = 1
    plan: Plan
    took_s: float


def registered(name: str, size: Size, most: int) -> dict[str, JSON]:
    """What is fixed about a job before anything is timed: its coupling and its plans."""
    job = make_job(size, name)
    coupling = find_coupling(job, datasets_of(job).train)
    model = build_model(job)
    grid = every_plan(
        coupling=coupling,
        batch=job.batch,
        cores=os.cpu_count() or 1,
        num_blocks=num_blocks(model),
        has_convolutions=any(type(module).__name__ == "Conv2d" for module in model.modules()),
        precisions=("fp32", *(["bf16"] if "bf16" in attached_cpu().fast_dtypes else [])),
    )
    plans = registered_plans(grid, most)
    return {"size": size, "coupling": to_json(coupling), "plans_possible": len(grid), "plans": to_json(plans)}


def choice(name: str, size: Size) -> Choice:
    """The plan that the planner chooses, in a process of its own."""
    command = [sys.executable, "-m", "bench.forecast.regret", "--size", size, "--choose", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)
    if done.returncode != 0:
        raise RuntimeError(f"planning {name} ended with {done.returncode}: {done.stderr[-2000:]}")
    return loads(done.stdout.splitlines()[-1], Choice)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Plans of jobs of one size against each other: `passes` over all of them, then `processes` over the finalists.

    `ask` measures, `choose` plans; both in processes of their own.
    """

    size: Size
    most: int
    passes: int
    processes: int
    finalist_rounds: int = 8
    ask: Callable[[Request], list[Measured]] = ask
    choose: Callable[[str, Size], Choice] = choice

    def medians(
        self, name: str, coupling: Coupling, plans: Sequence[Plan], *, seed: int, **counts: int
    ) -> dict[int, float]:
        """Median seconds of an update of each plan that works, in fresh processes: one for each malloc among the plans.

        A process keeps its malloc, and two that follow each other are nearly one. `counts` are the request's `rounds`,
        `updates` and `warm_up`.
        """
        found: dict[int, list[float]] = {}
        for malloc in dict.fromkeys(plan.malloc for plan in plans):
            places = [at for at, plan in enumerate(plans) if plan.malloc == malloc]
            alike = tuple(plans[at] for at in places)
            request = Request(job=name, size=self.size, plans=alike, coupling=coupling, seed=seed, **counts)
            for one in self.ask(request):
                if one.error is None:
                    found.setdefault(places[one.plan], []).append(statistics.median(one.update_s))
        return {at: statistics.median(times) for at, times in found.items()}

    def screened(self, name: str, fixed: dict[str, JSON]) -> dict[int, float]:
        """Each plan's brief time [s]: the faster of the passes, each in its own processes; what fails is absent."""
        coupling, plans = _decoded(fixed)
        best: dict[int, float] = {}
        for seed in range(self.passes):
            for at, seconds in self.medians(name, coupling, plans, seed=seed, rounds=1, updates=3, warm_up=1).items():
                best[at] = min(seconds, best.get(at, seconds))
        return best

    def judged(self, name: str, fixed: dict[str, JSON], chosen: Plan, brief_s: dict[int, float]) -> dict[str, JSON]:
        """The finalists timed again, and the chosen's regret."""
        coupling, plans = _decoded(fixed)
        finalists = [plans[at] for at in sorted(brief_s, key=brief_s.__getitem__)[:FINALISTS]]
        if not any(same_execution(chosen, plan) for plan in finalists):
            finalists.append(chosen)
        place = next(at for at, plan in enumerate(finalists) if same_execution(chosen, plan))
        times: dict[int, list[float]] = {at: [] for at in range(len(finalists))}
        for seed in range(self.processes):
            again = self.medians(
                name, coupling, finalists, seed=100 + seed, rounds=self.finalist_rounds, updates=4, warm_up=2
            )
            for at, seconds in again.items():
                times[at].append(seconds)
        if len({len(seconds) for seconds in times.values()}) > 1:
            raise RuntimeError(f"{name}: a finalist failed when it was timed again: {times}")
        best, ratio, bound = regret(times, place)
        return {
            "finalists": [{"plan": to_json(plan), "update_s": times[at]} for at, plan in enumerate(finalists)],
            "chosen": place,
            "best": best,
            "regret": ratio - 1,
            "regret_upper": bound - 1,
            "is_met": bound <= BAR,
        }

    def run(self, names: Sequence[str], path: Path, command: str) -> bool:
        """Register, time, choose, judge, job after job; whether every bound is met."""
        fixed = {name: registered(name, self.size, self.most) for name in names}
        document = register(path, "regret of the chosen plan", command, {"rule": RULE, "jobs": fixed})
        num_plans = sum(len(one["plans"]) for one in fixed.values())
        print(f"{num_plans} plans named, digest {document['registered_digest'][:16]}, written to {path}", flush=True)
        document["results"] = {}
        for name in names:
            started = time.perf_counter()
            chosen = self.choose(name, self.size)
            brief_s = self.screened(name, fixed[name])
            found: dict[str, JSON] = {"choice": to_json(chosen), "brief_s": to_json(brief_s)}
            found |= self.judged(name, fixed[name], chosen.plan, brief_s)
            document["results"][name] = found | {"took_s": time.perf_counter() - started}
            write(path, document)
            print("\n".join(_told(name, fixed[name], document["results"][name])), flush=True)
        return all(one["is_met"] for one in document["results"].values())


def _decoded(fixed: dict[str, JSON]) -> tuple[Coupling, list[Plan]]:
    return from_json(fixed["coupling"], Coupling), [from_json(one, Plan) for one in fixed["plans"]]


def _told(name: str, fixed: dict[str, JSON], found: dict[str, JSON]) -> list[str]:
    times = sorted(found["brief_s"].values())
    num_plans, took_s = len(fixed["plans"]), found["choice"]["took_s"]
    span = f"{times[0] * 1e3:.1f} to {times[-1] * 1e3:.1f} ms an update"
    lines = [f"\n{name}: {len(times)} of {num_plans} plans work, {span}; planned in {took_s:.1f} s"]
    for at, finalist in enumerate(found["finalists"]):
        marks = [word for word in ("chosen", "best") if found[word] == at]
        words = from_json(finalist["plan"], Plan).in_words()
        lines.append(f"  {statistics.median(finalist['update_s']) * 1e3:8.1f} ms  {words}  {' and '.join(marks)}")
    lines.append(
        f"  regret {found['regret']:.1%}, at most {found['regret_upper']:.1%} "
        f"({'met' if found['is_met'] else 'MISSED'}: {BAR - 1:.0%}); {found['took_s']:.0f} s"
    )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 if the bar is met for every job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS["here"]), choices=list(JOBS["here"]))
    parser.add_argument("--processes", type=int, default=5, help="fresh processes for the finalists (5 or more)")
    parser.add_argument("--quick", action="store_true", help="6 plans of tiny jobs, to see that it works")
    parser.add_argument("--out", type=Path, help="where results go (default: bench/results, dated)")
    parser.add_argument("--size", default="here", choices=list(JOBS), help=argparse.SUPPRESS)
    parser.add_argument("--choose", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.choose:
        decision = stoker.plan(JOBS[given.size][given.choose]())
        print(dumps(Choice(plan=decision.chosen.plan, took_s=decision.took_s), indent=None))
        return 0
    if given.processes < FEWEST:
        parser.error(f"--processes: {FEWEST} or more, with fewer nothing is bounded")
    contest = Contest(size="here", most=48, passes=2, processes=given.processes)
    if given.quick:
        contest = Contest(size="tiny", most=6, passes=1, processes=given.processes)
    command = f"python -m bench.forecast.regret --jobs {' '.join(given.jobs)} --processes {given.processes}"
    is_met = contest.run(
        given.jobs,
        path=given.out or dated("regret_quick" if given.quick else "regret"),
        command=command + (" --quick" if given.quick else ""),
    )
    return 0 if is_met or given.quick else 1


if __name__ == "__main__":
    sys.exit(main())
