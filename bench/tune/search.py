"""How much training a search needs to find what random search finds with 40 whole trials.

    python -m bench.tune.search [--case branin digits_accuracy] [--seeds 3] [--trials 40]

For each seed random search trains 40 configurations to their end. Then each rule searches the same space until it has a
finished trial as good as random search's best, or has trained half as many samples as random search did in all. What
counts is samples, those of trials that were given up included: seconds would depend on what else the machine does.

branin: the Branin function at a growing fidelity, so that early values say something, not all.
digits_accuracy: `examples/tune_me.py`, a small network on the handwritten digits; each trial is a real run in this
process, under one plan, judged by the accuracy on held-out data, which is what chooses a run's best checkpoint.
digits: the same, judged by the loss of those weights. They were not chosen by it, so that the least of 40 is probably
in part the luck of 40 draws, of which a rule that trains few trials to their end has less; both are kept.
In the results, a best accuracy has a minus before it: lower is better throughout.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from optuna.storages import InMemoryStorage

from bench.forecast.registration import surroundings
from stoker.records import Plan
from stoker.records.codec import JSON
from stoker.records.study import PrunerName, SamplerName, StudySettings, StudyTrial
from stoker.tuning.conductor import Conductor, StudyWorker
from stoker.tuning.processes import Judge, RunTrial, TrialReading, TrialRequest, TrialResult, TrialSlot, run_here
from stoker.tuning.search_algorithms import pruner_for
from stoker.tuning.space import parse_space
from stoker.tuning.study_database import open_study, read_trials
from stoker.tuning.study_forecast import rungs_of
from stoker.tuning.trials import JobSource, TrainTrial
from stoker.tuning.tune import require_optuna

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"

Rule = tuple[SamplerName, PrunerName]

RULES: tuple[Rule, ...] = (
    ("tpe", "asha"),
    ("tpe", "none"),
    ("random", "asha"),
    ("gp", "none"),
)
HALF = 0.5


@dataclass(frozen=True)
class Case:
    """A space, what runs a trial of it, and how long a trial is [samples]."""

    name: str
    space: str
    run_trial: RunTrial
    first_samples: int
    total_samples: int
    fixed: dict[str, str] = field(default_factory=dict)
    objective: str = "loss"


def branin_trial(request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:  # noqa: ARG001 - a trial's arguments
    """A trial whose loss is the Branin function at a fidelity that grows with its samples.

    Source: K. Kandasamy et al., "Multi-fidelity Bayesian Optimisation with Continuous Approximations", ICML 2017,
    appendix: its b, c and t, all three fidelities being the share of samples trained.
    """
    x, y = (float(request.parameters[name]) for name in "xy")
    total, loss = 2700, math.inf
    for samples in range(100, total + 1, 100):
        missing = 1 - samples / total
        b, c, t = (
            5.1 / (4 * math.pi**2) - 0.01 * missing,
            5 / math.pi - 0.1 * missing,
            1 / (8 * math.pi) + 0.05 * missing,
        )
        loss = (y - b * x**2 + c * x - 6) ** 2 + 10 * (1 - t) * math.cos(x) + 10
        if judge(TrialReading(samples=samples, total_samples=total, metrics={"loss": loss})):
            return TrialResult(kind="stopped", samples=samples)
    return TrialResult(kind="finished", metrics={"loss": loss}, samples=total)


def cases() -> dict[str, Case]:
    """What is searched."""
    plan = Plan(device="cpu", micro_batch=64)
    fixed = {"batch": "64", "epochs": "9"}
    source = JobSource(path=ROOT / "examples" / "tune_me.py", fixed=fixed)
    space = (
        "lr=log(1e-4,1) momentum=float(0,0.99) weight_decay=log(1e-6,1e-2) width=choice(4,8,16) dropout=float(0,0.6)"
    )
    return {
        "branin": Case("branin", "x=float(-5,10) y=float(0,15)", branin_trial, 100, 2700),
        "digits": Case("digits", space, TrainTrial(source=source, plan=plan), 1150, 10350, fixed),
        "digits_accuracy": Case(
            "digits_accuracy", space, TrainTrial(source=source, plan=plan), 1150, 10350, fixed, "accuracy"
        ),
    }


def cost(objective: str, value: float) -> float:
    """A value such that lower is better."""
    return -value if objective == "accuracy" else value


class Limited:
    """A conductor that begins no trial once enough was found, or enough was spent."""

    def __init__(self, conductor: Conductor, objective: str, *, target: float, samples: float) -> None:
        self._conductor, self._objective, self._target, self._samples = conductor, objective, target, samples
        self.seconds_left, self.is_over = None, False
        self.spent, self.reached_at = 0, None

    def next_request(self) -> TrialRequest | None:
        """The next trial, if there is reason for one."""
        if self.reached_at is not None or self.spent >= self._samples:
            return None
        return self._conductor.next_request()

    def on_place(self, number: int, on: str) -> None:
        """Hand on."""
        self._conductor.on_place(number, on)

    def judge(self, number: int, reading: TrialReading) -> bool:
        """Hand on."""
        return self._conductor.judge(number, reading)

    def ended(self, number: int, ending: TrialResult) -> None:
        """Hand on, and see whether it was good enough."""
        self._conductor.ended(number, ending)
        self.spent += ending.samples
        if ending.kind == "finished" and cost(self._objective, ending.metrics[self._objective]) <= self._target:
            self.reached_at = self.spent


def settings(case: Case, sampler: SamplerName, pruner: PrunerName, seed: int) -> StudySettings:
    """A study of a case."""
    return StudySettings(
        name=f"{case.name}-{sampler}-{pruner}-{seed}",
        job=case.name,
        job_digest="",
        fixed=case.fixed,
        space=parse_space(case.space),
        objective=f"valid/{case.objective}",
        higher_is_better=case.objective == "accuracy",
        sampler=sampler,
        pruner=pruner,
        seed=seed,
        on="cpu",
        first_samples=case.first_samples,
        total_samples=case.total_samples,
    )


def search(
    case: Case, study: StudySettings, folder: Path, *, trials: int, target: float = -math.inf, samples: float = math.inf
) -> tuple[tuple[StudyTrial, ...], Limited]:
    """Run a study until it has enough trials, is as good as `target`, or has trained `samples`."""
    place = folder / study.name
    place.mkdir()
    storage = InMemoryStorage()  # what is found does not depend on where it is kept
    opened = open_study(storage, study.name, higher_is_better=study.higher_is_better)
    opened.pruner = pruner_for(study.pruner, rungs_of(study.first_samples, study.total_samples))
    work = StudyWorker(directory=place, worker="bench", trials=trials)
    conductor = Conductor(storage, opened, study, work, lambda _: None)
    limited = Limited(conductor, case.objective, target=target, samples=samples)
    run_here(limited, case.run_trial, TrialSlot(on="cpu"))
    return read_trials(opened), limited


def one_seed(case: Case, seed: int, trials: int, rules: Sequence[Rule], folder: Path) -> dict[str, JSON]:
    """Random search, then each rule against it."""
    whole, _ = search(case, settings(case, "random", "none", seed), folder, trials=trials)
    values = [cost(case.objective, one.value) for one in whole if one.state == "finished" and one.value is not None]
    print(f"{case.name} seed {seed}: random search found {min(values):.4g}", flush=True)
    target, spent = min(values), sum(one.samples for one in whole)
    found: dict[str, JSON] = {"seed": seed, "random_best": target, "random_samples": spent}
    for sampler, pruner in rules:
        began = time.perf_counter()
        done, limited = search(
            case, settings(case, sampler, pruner, seed), folder, trials=10 * trials, target=target, samples=HALF * spent
        )
        values = [cost(case.objective, one.value) for one in done if one.state == "finished" and one.value is not None]
        best = min(values, default=math.inf)
        found[f"{sampler}+{pruner}"] = {
            "share_of_samples": None if limited.reached_at is None else limited.reached_at / spent,
            "best": best,
            "trials": len(done),
            "took_s": time.perf_counter() - began,
        }
        share = "not in half" if limited.reached_at is None else f"{limited.reached_at / spent:.0%}"
        print(
            f"{case.name} seed {seed} {sampler}+{pruner}: {share} ({len(done)} trials, best {best:.4g}, "
            f"random's {target:.4g})",
            flush=True,
        )
    return found


def summary(rows: Sequence[dict[str, JSON]], rules: Sequence[Rule]) -> dict[str, JSON]:
    """Of each rule: how often it was as good in half of the samples, and the median share; none counts as more."""
    told: dict[str, JSON] = {}
    for sampler, pruner in rules:
        shares = [row[f"{sampler}+{pruner}"]["share_of_samples"] for row in rows]
        reached = [share for share in shares if share is not None]
        told[f"{sampler}+{pruner}"] = {
            "reached": len(reached),
            "of": len(shares),
            "median_share": statistics.median(1.0 if share is None else share for share in shares),
        }
    return told


def write(name: str, trials: int, rules: Sequence[Rule], rows: Sequence[dict[str, JSON]]) -> None:
    """What is known so far, in a file."""
    date, told = datetime.now(UTC).date().isoformat(), summary(rows, rules)
    words = f"--case {name} --seeds {len(rows)} --trials {trials} --rules {' '.join(map('+'.join, rules))}"
    result = {
        "what": "share of random search's samples that other rules need to be as good as its best",
        "command": f"python -m bench.tune.search {words}",
        "date": date,
        "machine": surroundings(),
        "optuna": version("optuna"),
        "summary": told,
        "seeds": list(rows),
    }
    path = RESULTS / f"tune_{name}_{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{name}: {json.dumps(told)}\n{path}", flush=True)


def main() -> int:
    """Search every case; 0 if TPE with ASHA was as good as random search in half of its samples with every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", nargs="+", default=["branin", "digits_accuracy"], choices=["branin", "digits", "digits_accuracy"]
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--rules", nargs="+", default=["+".join(rule) for rule in RULES], metavar="SAMPLER+PRUNER")
    asked = parser.parse_args()
    rules = [rule for rule in RULES if "+".join(rule) in {*asked.rules, "tpe+asha"}]
    require_optuna("gp")
    is_good = True
    for name in asked.case:
        rows: list[dict[str, JSON]] = []
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(asked.seeds):
                rows.append(one_seed(cases()[name], seed, asked.trials, rules, Path(folder)))
                write(name, asked.trials, rules, rows)
        is_good = is_good and summary(rows, rules)["tpe+asha"]["reached"] == asked.seeds
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
