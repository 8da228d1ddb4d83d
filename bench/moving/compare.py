"""Trainings before and after they moved to Stoker: are the losses the same, and how fast is each?

    pip install --no-deps -c constraints.txt -r bench/moving/requirements.txt
    python -m bench.moving.compare [--rounds 9] [--cases lightning hugging_face own_loop]

Before and after are the files in examples/moving, on one core; samples come in Stoker's order, and the weights are the
job's initial ones. Stoker trains twice: in fp32 with the micro-batch that the other has, and as it plans by itself. The
first is what losses are compared with. Registered beforehand: no loss may be more than 1e-5 from the other's at any of
at least 50 updates. Rates are of the loops as they are, data loading included; evaluations and the way to the first
update are left out. All take turns, in an order that rotates.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import io
import os
import tempfile
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch

import stoker
from bench.forecast.registration import dated
from bench.moving.befores import EXAMPLES, Before, Curve, by_lightning, by_own_loop, by_the_trainer
from bench.train import results
from bench.train.intervals import interval_of
from stoker.jobs import load_job
from stoker.loading.datasets import datasets_of
from stoker.loading.order import EpochOrder
from stoker.records import Plan
from stoker.records.codec import JSON
from stoker.stepping.model import build_model
from stoker.training import session

LIMIT = 1e-5
"""The largest difference of two losses at the same update."""


@dataclass(frozen=True)
class Case:
    """A pair of files, what the one before needs, and the micro-batch and epochs of both."""

    name: str
    what: str
    packages: tuple[str, ...]
    theirs: Before
    micro_batch: int
    epochs: int


CASES = {
    "lightning": Case("lightning", "Lightning's Trainer", ("lightning",), by_lightning, 32, 20),
    "hugging_face": Case("trainer", "Hugging Face's Trainer", ("transformers", "accelerate"), by_the_trainer, 16, 2),
    "own_loop": Case("own_loop", "A plain loop", (), by_own_loop, 64, 20),
}


def missing(case: Case) -> list[str]:
    """Packages that the file before needs and that are not here."""
    return [name for name in case.packages if importlib.util.find_spec(name) is None]


@dataclass
class Rounds:
    """What came of the rounds so far: rates [samples/s] of the three, and the largest difference of two losses."""

    stoker: list[float] = field(default_factory=list)
    planned: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    gap: float = 0.0
    updates: int = 0

    def add(self, ours: Curve, planned: Curve, theirs: Curve, batch: int) -> None:
        """Another round."""
        self.updates = len(ours.losses)
        self.gap = max(self.gap, *(abs(one - other) for one, other in zip(ours.losses, theirs.losses, strict=True)))
        for rates, curve in ((self.stoker, ours), (self.planned, planned), (self.theirs, theirs)):
            rates.append(curve.rate(batch))

    def ratio(self, rates: Sequence[float]) -> dict[str, JSON] | None:
        """Of `rates` to theirs, round by round: the median and its interval."""
        found = interval_of([[one / other for one, other in zip(rates, self.theirs, strict=True)]])
        return None if found is None else dataclasses.asdict(found)


def measure(case: Case, rounds: int) -> Iterator[dict[str, JSON]]:
    """Train `rounds` times before and after the move; what has come of it, after each round."""
    job = job_of(case)
    same = Plan(device="cpu", micro_batch=case.micro_batch, threads=1)
    planned = stoker.plan(job).chosen.plan
    found, began = Rounds(), os.getloadavg()[0]
    for turn in range(rounds):
        with tempfile.TemporaryDirectory(prefix="bench-moving-") as name:
            folder = Path(name)
            sides: dict[str, Callable[[], Curve]] = {
                "ours": lambda at=folder: by_stoker(job, same, at / "same"),
                "theirs": lambda at=folder: _theirs(case, job, at),
                "planned": lambda at=folder: by_stoker(job, planned, at / "planned"),
            }
            names = list(sides)[turn % 3 :] + list(sides)[: turn % 3]
            curves = {side: sides[side]() for side in names}
        found.add(**curves, batch=job.batch)
        yield {
            "what": case.what,
            "versions": {name: version(name) for name in case.packages},
            "updates": found.updates,
            "largest_loss_difference": found.gap,
            "limit": LIMIT,
            "holds": found.gap <= LIMIT and found.updates >= 50,
            "last_losses": {side: curve.losses[-1] for side, curve in curves.items()},
            "samples_per_s": {"stoker": found.stoker, "planned": found.planned, "theirs": found.theirs},
            "ratio_same_micro_batch": found.ratio(found.stoker),
            "ratio_planned": found.ratio(found.planned),
            "plan": planned.in_words(),
            "load_average": [began, os.getloadavg()[0]],
            "lines_of_code": {side: lines_of_code(EXAMPLES / f"{case.name}_{side}.py") for side in ("before", "after")},
        }


def job_of(case: Case) -> stoker.Job:
    """The job after the move, evaluated at its end alone, as the other is."""
    job, _ = load_job(EXAMPLES / f"{case.name}_after.py", {"epochs": str(case.epochs)})
    return dataclasses.replace(job, evaluation=stoker.Evaluation(every=stoker.epochs(case.epochs)), stop=())


def _theirs(case: Case, job: stoker.Job, folder: Path) -> Curve:
    size = len(datasets_of(job).train)
    order = EpochOrder(size, job.seed)
    samples = [int(at) for epoch in range(case.epochs) for at in order.indices(epoch, 0, size)]
    return case.theirs(build_model(job), samples, folder / "theirs")


def by_stoker(job: stoker.Job, plan: Plan, folder: Path) -> Curve:
    """`stoker.train`, its telemetry telling the loss of each update."""
    curve, usual = Curve(), session.Telemetry

    class Recorded(usual):  # type: ignore[valid-type,misc]  # what it is, is known only now
        """Keeps the loss of each update."""

        def updated(self, loss: torch.Tensor, num_samples: int) -> bool:
            """As ever."""
            curve.losses.append(float(loss))
            curve.at_s.append(time.perf_counter())
            return super().updated(loss, num_samples)

    session.Telemetry = Recorded  # type: ignore[misc]
    try:
        stoker.train(job, plan=plan, run_dir=folder, new=True, sink=lambda _: None)
    finally:
        session.Telemetry = usual  # type: ignore[misc]
    return curve


def lines_of_code(path: Path) -> int:
    """Lines that hold code; comments, docstrings and empty lines are none."""
    lines: set[int] = set()
    idle = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    starts = True
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        is_docstring = starts and token.type == tokenize.STRING
        if token.type not in idle:
            starts = False
            if not is_docstring:
                lines |= set(range(token.start[0], token.end[0] + 1))
        starts = starts or token.type in {tokenize.NEWLINE, tokenize.INDENT}
    return len(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases asked for, and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, help="where results go (default: bench/results, dated)")
    given = parser.parse_args(arguments)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # then one thread is all that can be planned
    torch.set_num_threads(1)
    path = given.out or dated("moving")
    content = results.read(path) or results.document(
        "trainings before and after they moved to Stoker: losses, rates, lines",
        f"python -m bench.moving.compare --rounds {given.rounds}",
        {"torch": torch.__version__},
    )
    for name in given.cases:
        case = CASES[name]
        if absent := missing(case):
            print(f"{name}: left out, as {', '.join(absent)} is not installed")
            continue
        print(case.what, flush=True)
        for found in measure(case, given.rounds):
            content.setdefault("cases", {})[name] = found
            results.save(path, content)
            rates = " · ".join(f"{side} {rate[-1]:.0f}" for side, rate in found["samples_per_s"].items())
            print(f"  largest difference {found['largest_loss_difference']:.1e}; samples/s: {rates}", flush=True)
    print(path)


if __name__ == "__main__":
    main()
