"""Does the plan learn what the whole batch would, in exact arithmetic?

A job made small enough to be examined in the time there is: fewer samples in everything, in proportion.

What is known of a step of the job's own, and what cannot be promised of it.

Is reduced precision close enough to fp32?
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.jobs.batch_size import TokenBatch, with_rates_scaled
from stoker.jobs.optimizers import ScheduleFree
from stoker.loading.batches import Batch
from stoker.loading.randomness import seed_generators
from stoker.records import FULL_PRECISIONS, LARGEST_GRADIENT_ERROR, Coupling, Plan, Position, Verdict
from stoker.stepping.distributed_tensors import as_real
from stoker.stepping.random_draws import RandomDraws
from stoker.stepping.step import Step
from stoker.verifying.subject import Level, Subject, Timebox

_QUESTION = "Is training the same under every legal plan?"
_FEWEST, _MOST = 3, 30
_AT_MOST = 3
"""Plans side by side."""
_LARGEST = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The largest difference of weights [relative to the largest weight] that counts as rounding."""
_AMPLIFIED = 1e3
"""How much of an increase in one update [a factor] may be training amplifying its own rounding."""
_FEW = 8
_COSTLIER = 2.5
"""How much longer than the plan's [a factor] an update of the other micro-batch may take."""
_SAFETY = 2.0


@dataclass(frozen=True)
class _Terms:
    """What is computed in, and whether random draws are silenced: where nothing draws that would only take time."""

    dtype: torch.dtype
    is_silenced: bool

    def step(self, subject: Subject, plan: Plan | None = None) -> Step:
        """The subject's step under `plan` (None: its own)."""
        chosen = subject.plan if plan is None else plan
        return Step(subject.job, chosen, subject.coupling, dtype=self.dtype, dropout=not self.is_silenced)


@dataclass(frozen=True)
class _Race:
    """Plans to train side by side, the reference first."""

    subject: Subject
    plans: tuple[Plan, ...]
    terms: _Terms


@dataclass(frozen=True)
class _Outcome:
    """How far the plans came apart: after each update, the largest relative difference from the reference."""

    differences: tuple[float, ...]
    worst: Plan


def check_equality(subject: Subject, timebox: Timebox) -> Verdict:
    """Train under the plan, another legal one and the reference, with random draws silenced; compare the weights.

    In float64, or in fp32 if the model insists, or rounds to it on the way and the plans come apart by that. What else
    the plan chooses is kept, such as the memory format. Where updates take too long, batch, group, micro-batch and
    learning rate are made smaller in proportion. The ragged batch is among them.
    """
    subject = subject.without_workers()
    try:
        found = _check(subject, torch.float64, timebox)
        is_rounding = not found.passed and _rounds_on_the_way(subject)
        return _check(subject, torch.float32, timebox) if is_rounding else found
    except (BadJob, RuntimeError, TypeError):  # tensors of a fixed type in the model or the loss
        return _check(subject, torch.float32, timebox)


def is_random(subject: Subject, *, silenced: bool = False, dtype: torch.dtype | None = None) -> bool:
    """Whether the same samples have another loss in another update, from the same weights."""
    values = []
    few = min(_FEW, subject.plan.micro_batch)
    for update in (0, 1):
        step = Step(subject.job, subject.plan, subject.coupling, dtype=dtype, dropout=not silenced)
        batch = subject.first_batch(step, few if subject.coupling.kind != "whole_group" else subject.plan.micro_batch)
        seed_generators(update)  # for draws from Python and NumPy, which updates do not key
        values.append(float(step.loss_of(batch.cut(0, batch.size), batch.size, update, 0).sum.detach()))
    return abs(values[0] - values[1]) > 1e-6 * max(map(abs, values))


def _rounds_on_the_way(subject: Subject) -> bool:
    """Whether the model or the loss turns float64 into something coarser, as losses that call `logits.float()` do."""
    draws = _watched_loss(subject, _Terms(torch.float64, is_silenced=True))
    return bool(draws.coarsest > torch.finfo(torch.float64).eps)


def _watched_loss(subject: Subject, terms: _Terms) -> RandomDraws:
    """What was seen of a micro-batch's loss, operation by operation."""
    step = terms.step(subject)
    batch = subject.first_batch(step, subject.plan.micro_batch)
    draws = RandomDraws()
    with draws:
        step.loss_of(batch.cut(0, batch.size), batch.size, 0, 0)
    return draws


def _check(subject: Subject, dtype: torch.dtype, timebox: Timebox) -> Verdict:
    """As `check_equality`, in `dtype`; what is not equal is looked at again with every draw silenced."""
    seen = _watched_loss(subject, _Terms(dtype, is_silenced=False))
    found = _compared(subject, _Terms(dtype, is_silenced=bool(seen.drawn)), timebox)
    if found.passed or seen.drawn:
        return found
    return _compared(subject, _Terms(dtype, is_silenced=True), timebox)


def _compared(subject: Subject, terms: _Terms, timebox: Timebox) -> Verdict:
    if is_random(subject, silenced=terms.is_silenced, dtype=terms.dtype):
        return _verdict(
            "Yes in law: the model draws at random other than through PyTorch, which cannot be silenced to compare.",
            "not compared; under the same plan the draws come back on resume",
            level="same law",
        )
    race = _race(subject, terms, timebox)
    if len(race.plans) == 1:
        same = f"Yes: the plan takes {subject.plan.micro_batch} samples at once, as what it is compared with does."
        return _verdict(same, "there is no other legal micro-batch to try in the time there is")
    return _race_verdict(race, _run(race, timebox), subject.job.batch)


def _race(subject: Subject, terms: _Terms, timebox: Timebox) -> _Race:
    """The plans to compare, and of how many samples, so that three updates of each fit into the time."""
    try:
        each_s = _gradient_s(subject, terms, _FEW, timebox) / _FEW
    except (BadJob, RuntimeError, ValueError):  # a model that takes whole batches only
        each_s = _gradient_s(subject, terms, subject.plan.micro_batch, timebox) / subject.plan.micro_batch
        small = subject
    else:
        affordable = (timebox.seconds - timebox.spent_s) / (_SAFETY * _FEWEST * _AT_MOST * max(each_s, 1e-9))
        small = scaled(subject, affordable_batch(subject.job.batch, affordable))
    batch = small.job.batch
    reference = Plan(
        device=small.plan.device,
        micro_batch=reference_micro_batch(small.coupling, batch),
        threads=small.plan.threads,
        loader=small.plain_loader,
    )
    planned = replace(small.plan, precision="fp32", num_workers=0, checkpoint_every_s=reference.checkpoint_every_s)
    plans = [reference] if planned == reference else [reference, planned]
    taken = {plan.micro_batch for plan in plans}
    for size in other_micro_batches(small.coupling, batch, taken):
        if _costs(small, terms, size, timebox) <= _COSTLIER * batch * each_s:
            plans.append(replace(reference, micro_batch=size))
            break
    return _Race(small, tuple(plans), terms)


def _costs(subject: Subject, terms: _Terms, size: int, timebox: Timebox) -> float:
    """About how long an update in micro-batches of `size` takes [s]; infinite where the model cannot take so few."""
    whole, rest = divmod(subject.job.batch, size)
    try:
        last_s = _gradient_s(subject, terms, rest, timebox) if rest else 0.0
        return whole * _gradient_s(subject, terms, size, timebox) + last_s
    except (BadJob, RuntimeError, ValueError):
        return math.inf


def _gradient_s(subject: Subject, terms: _Terms, size: int, timebox: Timebox) -> float:
    """Seconds of one gradient of `size` samples under the plan, not counting the first."""
    step = terms.step(subject)
    batch = subject.first_batch(step, size)
    for _ in range(2):
        started = timebox.clock()
        step.loss_of(batch.cut(0, batch.size), batch.size, 0, 0).sum.backward()
    return timebox.clock() - started


def _run(race: _Race, timebox: Timebox) -> _Outcome:
    """Train side by side for up to 30 updates, at least three, stopping where the plans have come apart."""
    subject = race.subject
    steps = [race.terms.step(subject, plan) for plan in race.plans]
    begin = max(0, subject.extent.updates_per_epoch - 2)
    differences: list[float] = []
    worst = race.plans[-1]
    with ExitStack() as streams:
        position = subject.extent.position(begin)
        feeds = [_feed(streams, subject, step, position) for step in steps]
        for made in range(_MOST):
            for step, feed in zip(steps, feeds, strict=True):
                step.update(next(feed), begin + made, (made % _FEWEST + 0.5) / _FEWEST)
            apart = [relative_difference(step, steps[0]) for step in steps[1:]]
            differences.append(largest_of(apart))
            worst = race.plans[1 + apart.index(differences[-1])]
            is_enough = made + 1 >= _FEWEST and timebox.is_over
            if is_enough or not differences[-1] <= _LARGEST[race.terms.dtype]:
                break
    return _Outcome(tuple(differences), worst)


def _feed(streams: ExitStack, subject: Subject, step: Step, position: Position) -> Iterator[Batch]:
    batches = subject.source(step).batches(position, position.updates + _MOST)
    return streams.enter_context(closing(batches))


def relative_difference(step: Step, reference: Step) -> float:
    """The largest difference of any weight over the largest weight; buffers and averages likewise, each by itself."""
    weights = [(p, q) for p, q in zip(step.model.parameters(), reference.model.parameters(), strict=True)]
    largest = max((float(q.detach().abs().max()) for _, q in weights if q.numel()), default=0.0)
    found = [_largest_difference(p, q) / max(largest, 1e-300) for p, q in weights]
    buffers = zip(step.model.buffers(), reference.model.buffers(), strict=True)
    found += [_largest_difference(p, q) / max(float(q.abs().double().max()), 1e-12) for p, q in buffers if q.numel()]
    if step.average is not None and reference.average is not None:
        mine, theirs = step.average.weights, reference.average.weights
        found += [
            _largest_difference(mine[name], theirs[name]) / max(largest, 1e-300)
            for name, _ in step.model.named_parameters()
        ]
    return largest_of(found)


def largest_of(values: Sequence[float]) -> float:
    """The largest; the first NaN if there is one, which `max` would take for the least."""
    return next((value for value in values if math.isnan(value)), max(values))


def _largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.numel():
        return 0.0
    mine, theirs = as_real(one.detach()).double(), as_real(other.detach()).double()
    # Infinities that are equal, as of a mask in a buffer, are not apart; numbers that are none are.
    return float(torch.where(mine == theirs, 0.0, mine - theirs).abs().max())


def _race_verdict(race: _Race, outcome: _Outcome, batch: int) -> Verdict:
    differences, limit = outcome.differences, _LARGEST[race.terms.dtype]
    subject, largest = race.subject, largest_of(differences)
    of = "" if subject.job.batch == batch else f" (of the job's {batch}, for time)"
    ragged = ", the ragged batch among them," if len(subject.data.train) % subject.job.batch else ""
    if isinstance(subject.job.batch, TokenBatch):
        of, ragged = f" at most, as they come to {subject.job.batch.num_tokens:,} tokens,", ""
    silenced = "with random draws silenced" if race.terms.is_silenced else "without random draws"
    evidence = (
        f"{len(differences)} updates of {subject.job.batch} samples{of}{ragged} in "
        f"{str(race.terms.dtype).removeprefix('torch.')} {silenced}: "
        f"{' and '.join(_described(plan, race.plans[0]) for plan in race.plans[1:])}, against micro-batches of "
        f"{race.plans[0].micro_batch} in plain settings; largest difference of weights {largest:.1e}, limit {limit:g}"
    )
    level: Level = "same mathematics" if race.terms.dtype is torch.float64 else "same law"
    if largest <= limit:
        return _verdict(f"Yes: weights agree to {largest:.1e} after {len(differences)} updates.", evidence, level=level)
    if len(differences) > _FEWEST and largest <= _AMPLIFIED * differences[-2]:
        kept = len(differences) - 1
        return _verdict(
            f"Yes for {kept} updates, to {differences[-2]:.1e}; then training amplifies its own rounding (too high a "
            "learning rate does that).",
            evidence,
            level=level,
        )
    return _verdict(
        f"No: micro-batches of {outcome.worst.micro_batch} move the weights by {largest:.1e} after "
        f"{len(differences)} updates. Do parts of the model depend on how many samples they see, or on earlier calls?",
        evidence,
        passed=False,
    )


def _described(plan: Plan, reference: Plan) -> str:
    words = [f"micro-batches of {plan.micro_batch}"]
    if plan.memory_format != reference.memory_format:
        words.append(plan.memory_format.replace("_", "-"))
    if plan.optimizer_implementation != reference.optimizer_implementation:
        words.append(f"{plan.optimizer_implementation} optimiser")
    return " with ".join([words[0], " and ".join(words[1:])]) if words[1:] else words[0]


def _verdict(answer: str, evidence: str, *, passed: bool = True, level: Level = "same mathematics") -> Verdict:
    return Verdict(
        question=_QUESTION, answer=answer, passed=passed, level=level if passed else "none", evidence=evidence
    )


_SMALLEST = 8


def affordable_batch(batch: int, num_samples: float) -> int:
    """The batch, halved until it has at most `num_samples` samples, but not below eight.

    >>> affordable_batch(512, 100), affordable_batch(512, 1e9), affordable_batch(512, 0), affordable_batch(3, 0)
    (64, 512, 8, 3)
    """
    while batch > num_samples and batch // 2 >= _SMALLEST:
        batch //= 2
    return batch


def scaled(subject: Subject, batch: int) -> Subject:
    """The subject with an optimiser batch of `batch` samples; group and micro-batch keep their share of it.

    The learning rate shrinks with the batch, so that training stays as stable as it is (Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677, section 2.1).
    """
    job, coupling = subject.job, subject.coupling
    if batch == job.batch:
        return subject
    group = (
        None if coupling.group is None else max(min(2, coupling.group), math.ceil(coupling.group * batch / job.batch))
    )
    small = replace(coupling, group=group)
    micro_batch = _micro_batch(subject.plan, small, coupling, batch, job.batch)
    return replace(
        subject,
        job=replace(
            job,
            batch=batch,
            coupling_group=None if job.coupling_group is None else group,
            **_slower(job, batch / job.batch),
        ),
        plan=replace(subject.plan, micro_batch=micro_batch),
        coupling=small,
    )


def _slower(job: Job, share: float) -> dict[str, Any]:
    """What of the job is replaced for a learning rate at a share of its height."""
    if isinstance(job.optimizer, ScheduleFree):  # takes no schedule
        return {"optimizer": with_rates_scaled(job.optimizer, share)}
    return {"schedule": lambda progress: job.schedule(progress) * share}


def other_micro_batches(coupling: Coupling, batch: int, taken: set[int]) -> list[int]:
    """Legal micro-batches other than those `taken`, the most telling first: those that leave a rest, then small ones.

    >>> separable = Coupling(kind="separable", group=None, causes=(), evidence="")
    >>> other_micro_batches(separable, 64, {64, 16})
    [7, 5, 3, 1, 32]
    >>> other_micro_batches(separable, 70, {70})
    [3, 7, 5, 1, 35]
    """
    sizes = [7, 5, 3, 1, batch // 2] if coupling.kind == "separable" else coupling.legal_micro_batches(batch)
    legal = [size for size in sizes if size not in taken and coupling.problem_with(size, batch) is None]
    return sorted(dict.fromkeys(legal), key=lambda size: batch % size == 0)


def reference_micro_batch(coupling: Coupling, batch: int) -> int:
    """What other plans are compared with: the whole batch of a separable job, else every group alone."""
    return batch if coupling.group is None else coupling.group


def _micro_batch(plan: Plan, small: Coupling, coupling: Coupling, batch: int, whole: int) -> int:
    if plan.micro_batch >= whole:
        return batch
    if coupling.group is None or small.group is None:
        return max(1, math.ceil(plan.micro_batch * batch / whole))
    return min(batch, plan.micro_batch // coupling.group * small.group)


def check_own_step(subject: Subject) -> Verdict:
    """Say what follows from the step being atomic; what it computes is not looked into."""
    batch = subject.job.batch
    return Verdict(
        question=_QUESTION,
        answer=f"In law: the update is the job's own step, which every plan gives all {batch} samples at once with the "
        "same random draws. Whether it divides by the right counts is not examined, nor compared in exact arithmetic.",
        passed=True,
        level="same law",
        evidence="declared: step=…, which is never cut; that a run resumes to the same bits is examined above",
    )


def check_precision(subject: Subject, gradient_error: float | None) -> Verdict | None:
    """Judge the gradient's relative error against fp32 from the same state; None where the plan is fp32."""
    precision = subject.plan.precision
    if precision in FULL_PRECISIONS:
        return None
    question = f"Is {precision} close enough to fp32?"
    if gradient_error is None:
        answer = "Unknown: its gradient was not compared with that of fp32."
        return Verdict(question=question, answer=answer, passed=False, level="none", evidence="not measured")
    passed = gradient_error <= LARGEST_GRADIENT_ERROR
    compared = f"gradients are {gradient_error:.2%} off those of fp32, limit {LARGEST_GRADIENT_ERROR:.0%}"
    return Verdict(
        question=question,
        answer=f"{'Yes' if passed else 'No'}: {compared}.",
        passed=passed,
        level="same law" if passed else "none",
        evidence="norm of the difference over the norm, in one update from equal weights; the worst of three batches",
    )
