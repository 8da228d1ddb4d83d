"""Trainings before and after they moved to Stoker: are the losses the same, and how fast is each?

    pip install --no-deps -c constraints.txt -r bench/moving/requirements.txt
    python -m bench.moving.compare [--rounds 9] [--cases lightning hugging_face own_loop]

Before and after are the files in examples/moving, one thread, fp32, the plan being the job's batch in one piece; the
samples come in Stoker's order and the weights are the job's initial ones. Registered beforehand: no loss may be more
than 1e-5 from the other's at any of at least 50 updates. Rates are of the loops as they are, data loading included,
evaluations and the way to the first update left out; the two take turns, in an order that alternates.
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
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import stoker
from bench.forecast.registration import dated
from bench.moving.befores import EXAMPLES, Before, Curve, by_lightning, by_own_loop, by_the_trainer
from bench.train import results
from bench.train.intervals import interval_of
from stoker import training
from stoker.jobs import load_job
from stoker.loading import datasets_of
from stoker.loading.order import EpochOrder
from stoker.records import Plan
from stoker.stepping import build_model

LIMIT = 1e-5
"""The largest difference of two losses at the same update."""


@dataclass(frozen=True)
class Case:
    """A pair of files, what the one before needs, and how many epochs both train."""

    name: str
    what: str
    packages: tuple[str, ...]
    theirs: Before
    epochs: int


CASES = {
    "lightning": Case("lightning", "Lightning's Trainer, two micro-batches an update", ("lightning",), by_lightning, 20),
    "hugging_face": Case(
        "trainer", "Hugging Face's Trainer, two micro-batches an update", ("transformers", "accelerate"),
        by_the_trainer, 5,
    ),
    "own_loop": Case("own_loop", "a plain loop", (), by_own_loop, 20),
}  # fmt: skip


def missing(case: Case) -> list[str]:
    """Packages that the file before needs and that are not here."""
    return [name for name in case.packages if importlib.util.find_spec(name) is None]


def measure(case: Case, epochs: int, rounds: int) -> dict[str, Any]:
    """Both curves in each round; their largest difference, and the ratio of the rates."""
    job = job_of(case, epochs)
    gap, ratios, rates, updates = 0.0, [], {"stoker": [], "theirs": []}, 0
    began = os.getloadavg()[0]
    for turn in range(rounds):
        with tempfile.TemporaryDirectory(prefix="bench-moving-") as name:
            folder = Path(name)
            if turn % 2:
                theirs, ours = _theirs(case, job, epochs, folder), by_stoker(job, folder / "run")
            else:
                ours, theirs = by_stoker(job, folder / "run"), _theirs(case, job, epochs, folder)
        updates = len(ours.losses)
        gap = max(gap, *(abs(one - other) for one, other in zip(ours.losses, theirs.losses, strict=True)))
        rates["stoker"].append(ours.rate(job.batch))
        rates["theirs"].append(theirs.rate(job.batch))
        ratios.append(rates["stoker"][-1] / rates["theirs"][-1])
        print(f"  round {turn + 1}: difference {gap:.1e}, ratio {ratios[-1]:.2f}", flush=True)
    interval = interval_of([ratios])
    return {
        "what": case.what,
        "versions": {name: version(name) for name in case.packages},
        "updates": updates,
        "largest_loss_difference": gap,
        "limit": LIMIT,
        "holds": gap <= LIMIT and updates >= 50,
        "losses_of_stoker": [ours.losses[0], ours.losses[-1]],
        "losses_of_theirs": [theirs.losses[0], theirs.losses[-1]],
        "samples_per_s": rates,
        "ratio": None if interval is None else dataclasses.asdict(interval),
        "load_average": [began, os.getloadavg()[0]],
        "lines_of_code": {side: lines_of_code(EXAMPLES / f"{case.name}_{side}.py") for side in ("before", "after")},
    }


def job_of(case: Case, epochs: int) -> stoker.Job:
    """The job after the move, evaluated at its end alone, as the other is."""
    job, _ = load_job(EXAMPLES / f"{case.name}_after.py", {"epochs": str(epochs)})
    return dataclasses.replace(job, evaluate_every=stoker.epochs(epochs), stop=())


def _theirs(case: Case, job: stoker.Job, epochs: int, folder: Path) -> Curve:
    size = len(datasets_of(job).train)
    order = EpochOrder(size, job.seed)
    samples = [int(at) for epoch in range(epochs) for at in order.indices(epoch, 0, size)]
    return case.theirs(build_model(job), samples, folder / "theirs")


def by_stoker(job: stoker.Job, folder: Path) -> Curve:
    """`stoker.train`, its telemetry telling the loss of each update."""
    curve, usual = Curve(), training.Telemetry

    class Recorded(usual):  # type: ignore[valid-type,misc]  # what it is, is known only now
        """Keeps the loss of each update."""

        def updated(self, loss: torch.Tensor, num_samples: int) -> bool:
            """As ever."""
            curve.losses.append(float(loss))
            curve.at_s.append(time.perf_counter())
            return super().updated(loss, num_samples)

    plan = Plan(device="cpu", micro_batch=job.batch, threads=1)
    training.Telemetry = Recorded  # type: ignore[misc]  # where flow/starting.py takes it from
    try:
        stoker.train(job, plan=plan, run_dir=folder, new=True, sink=lambda event: None)
    finally:
        training.Telemetry = usual  # type: ignore[misc]  # as it was
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
    torch.set_num_threads(1)
    path = given.out or dated("moving")
    content = results.read(path) or results.document(
        "trainings before and after they moved to Stoker: losses, rates, lines",
        f"python -m bench.moving.compare --rounds {given.rounds}", {"torch": torch.__version__},
    )  # fmt: skip
    for name in given.cases:
        case = CASES[name]
        if absent := missing(case):
            print(f"{name}: left out, as {', '.join(absent)} is not installed")
            continue
        print(case.what, flush=True)
        content.setdefault("cases", {})[name] = measure(case, case.epochs, given.rounds)
        results.save(path, content)
    print(path)


if __name__ == "__main__":
    main()
