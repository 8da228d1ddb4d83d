"""Does training give the same weights under every legal plan?

The plan, another legal one and a plain reference train side by side in float64, with random draws silenced, on a job
scaled down to fit the time limit. Also: the verdicts on a job's own step, and on a reduced precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import torch

from stoker.errors import BadJob
from stoker.jobs.batch_size import TokenBatch, with_rates_scaled
from stoker.jobs.optimizers import ScheduleFree
from stoker.loading.order import seed_generators
from stoker.planning.model.search_space import allowed_states
from stoker.records import FULL_PRECISIONS, LARGEST_GRADIENT_ERROR, Coupling, Plan, Verdict
from stoker.stepping.distributed_tensors import as_real
from stoker.stepping.random_draws import RandomDraws
from stoker.stepping.step import Step
from stoker.verifying.subject import Level, Subject, Timebox, verdict

_QUESTION = "Is training the same under every legal plan?"
_FEWEST, _MOST = 3, 30
_AT_MOST = 3
"""Plans side by side."""
_LARGEST = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference of weights that counts as rounding [relative to the largest weight]."""
_AMPLIFIED = 1e3
"""Largest increase of the difference in one update by which training amplifies its own rounding [1]."""
_FEW = 8
_COSTLIER = 2.5
"""Longest update of the other micro-batch, as a factor of the plan's [1]."""
_SAFETY = 2.0


@dataclass(frozen=True)
class _Terms:
    """The dtype of the comparison, and whether random draws are silenced, which takes time."""

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
    """The largest relative difference from the reference after each update [1], and the plan that has the last one."""

    differences: tuple[float, ...]
    worst: Plan


def check_equality(subject: Subject, timebox: Timebox) -> Verdict:
    """Train under the plan, another legal one and the reference, with random draws silenced; compare the weights.

    The comparison is in float64; in fp32 if the model has fixed dtypes, or rounds to fp32 on the way and the plans
    differ by that. The plan's other choices are kept, such as the memory format. Where updates take too long, batch,
    group, micro-batch and learning rate are reduced in proportion. The ragged batch is included.
    """
    subject = subject.without_workers()
    try:
        result = _check(subject, torch.float64, timebox)
        if not result.passed:
            draws = _watched_loss(subject, _Terms(torch.float64, is_silenced=True))
            if draws.coarsest > torch.finfo(torch.float64).eps:  # as losses that call `logits.float()`
                return _check(subject, torch.float32, timebox)
        return result
    except (BadJob, RuntimeError, TypeError):  # tensors of a fixed type in the model or the loss
        return _check(subject, torch.float32, timebox)


def is_random(subject: Subject, *, silenced: bool = False, dtype: torch.dtype | None = None) -> bool:
    """Whether the loss of the same samples and weights differs between two updates."""
    values = []
    few = min(_FEW, subject.plan.micro_batch)
    for update in (0, 1):
        step = Step(subject.job, subject.plan, subject.coupling, dtype=dtype, dropout=not silenced)
        batch = subject.first_batch(step, few if subject.coupling.kind != "whole_group" else subject.plan.micro_batch)
        seed_generators(update)  # for draws from Python and NumPy, which do not depend on the update
        values.append(float(step.loss_of(batch.cut(0, batch.size), batch.size, update, 0).sum.detach()))
    return abs(values[0] - values[1]) > 1e-6 * max(map(abs, values))


def _watched_loss(subject: Subject, terms: _Terms) -> RandomDraws:
    """Random draws and dtypes in a micro-batch's loss, operation by operation."""
    step = terms.step(subject)
    batch = subject.first_batch(step, subject.plan.micro_batch)
    draws = RandomDraws()
    with draws:
        step.loss_of(batch.cut(0, batch.size), batch.size, 0, 0)
    return draws


def _check(subject: Subject, dtype: torch.dtype, timebox: Timebox) -> Verdict:
    """As `check_equality`, in `dtype`; a difference is checked again with every draw silenced."""
    seen = _watched_loss(subject, _Terms(dtype, is_silenced=False))
    result = _compare(subject, _Terms(dtype, is_silenced=bool(seen.drawn)), timebox)
    if result.passed or seen.drawn:
        return result
    return _compare(subject, _Terms(dtype, is_silenced=True), timebox)


def _compare(subject: Subject, terms: _Terms, timebox: Timebox) -> Verdict:
    if is_random(subject, silenced=terms.is_silenced, dtype=terms.dtype):
        return verdict(
            _QUESTION,
            "Yes in law: the model draws at random other than through PyTorch, which cannot be silenced to compare.",
            "not compared; under the same plan the draws come back on resume",
            "same law",
        )
    race = _race(subject, terms, timebox)
    if len(race.plans) == 1:
        same = f"Yes: the plan takes {subject.plan.micro_batch} samples at once, as what it is compared with does."
        evidence = "there is no other legal micro-batch to try in the time there is"
        return verdict(_QUESTION, same, evidence, "same mathematics")
    return _race_verdict(race, _run(race, timebox), subject.job.batch_size)


def _race(subject: Subject, terms: _Terms, timebox: Timebox) -> _Race:
    """The plans to compare, for a job so small that three updates of each fit into the time."""
    try:
        each_s = _gradient_s(subject, terms, _FEW, timebox) / _FEW
    except (BadJob, RuntimeError, ValueError):  # the model takes whole batches only
        each_s = _gradient_s(subject, terms, subject.plan.micro_batch, timebox) / subject.plan.micro_batch
        small = subject
    else:
        affordable = (timebox.seconds - timebox.spent_s) / (_SAFETY * _FEWEST * _AT_MOST * max(each_s, 1e-9))
        small = scaled(subject, affordable_batch(subject.job.batch_size, affordable))
    batch = small.job.batch_size
    reference = Plan(
        device=small.plan.device,
        micro_batch=reference_micro_batch(small.coupling, batch),
        optimizer_states=small.plan.optimizer_states,  # which the job allows, and no plan changes
        threads=small.plan.threads,
        loader=small.plain_loader,
    )
    planned = replace(small.plan, precision="fp32", num_workers=0, checkpoint_every_s=reference.checkpoint_every_s)
    plans = [reference] if planned == reference else [reference, planned]
    taken = {plan.micro_batch for plan in plans}
    for size in other_micro_batches(small.coupling, batch, taken):
        if _update_s(small, terms, size, timebox) <= _COSTLIER * batch * each_s:
            plans.append(replace(reference, micro_batch=size))
            break
    return _Race(small, tuple(plans), terms)


def _update_s(subject: Subject, terms: _Terms, size: int, timebox: Timebox) -> float:
    """Approximate time of an update in micro-batches of `size` [s]; infinite where the model cannot take so few."""
    whole, rest = divmod(subject.job.batch_size, size)
    try:
        last_s = _gradient_s(subject, terms, rest, timebox) if rest else 0.0
        return whole * _gradient_s(subject, terms, size, timebox) + last_s
    except (BadJob, RuntimeError, ValueError):
        return math.inf


def _gradient_s(subject: Subject, terms: _Terms, size: int, timebox: Timebox) -> float:
    """Time of one gradient of `size` samples under the plan [s], after a first one."""
    step = terms.step(subject)
    batch = subject.first_batch(step, size)
    for _ in range(2):
        started = timebox.clock()
        step.loss_of(batch.cut(0, batch.size), batch.size, 0, 0).sum.backward()
    return timebox.clock() - started


def _run(race: _Race, timebox: Timebox) -> _Outcome:
    """Train side by side for 3 to 30 updates, until the plans differ or the time is over."""
    subject = race.subject
    steps = [race.terms.step(subject, plan) for plan in race.plans]
    begin = max(0, subject.extent.updates_per_epoch - 2)
    differences: list[float] = []
    worst = race.plans[-1]
    with ExitStack() as streams:
        position = subject.extent.position(begin)
        last = position.updates + _MOST
        feeds = [streams.enter_context(closing(subject.source(step).batches(position, last))) for step in steps]
        for made in range(_MOST):
            for step, feed in zip(steps, feeds, strict=True):
                batch = next(feed)
                batch.progress = (made % _FEWEST + 0.5) / _FEWEST
                step.update(batch, begin + made, batch.progress)
            of_plans = [relative_difference(step, steps[0]) for step in steps[1:]]
            differences.append(largest_of(of_plans))
            worst = race.plans[1 + of_plans.index(differences[-1])]
            is_enough = made + 1 >= _FEWEST and timebox.is_over
            if is_enough or not differences[-1] <= _LARGEST[race.terms.dtype]:
                break
    return _Outcome(tuple(differences), worst)


def relative_difference(step: Step, reference: Step) -> float:
    """Largest difference of a weight, buffer or average, relative to the largest weight or its own maximum [1]."""
    weights = [(p, q) for p, q in zip(step.model.parameters(), reference.model.parameters(), strict=True)]
    largest = max((float(q.detach().abs().max()) for _, q in weights if q.numel()), default=0.0)
    relative = [_largest_difference(p, q) / max(largest, 1e-300) for p, q in weights]
    buffers = zip(step.model.buffers(), reference.model.buffers(), strict=True)
    relative += [_largest_difference(p, q) / max(float(q.abs().double().max()), 1e-12) for p, q in buffers if q.numel()]
    if step.average is not None and reference.average is not None:
        mine, theirs = step.average.weights, reference.average.weights
        relative += [
            _largest_difference(mine[name], theirs[name]) / max(largest, 1e-300)
            for name, _ in step.model.named_parameters()
        ]
    return largest_of(relative)


def largest_of(values: Sequence[float]) -> float:
    """Largest of the values [their unit]; the first NaN if there is one, which `max` would not return."""
    return next((value for value in values if math.isnan(value)), max(values))


def _largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.numel():
        return 0.0
    mine, theirs = as_real(one.detach()).double(), as_real(other.detach()).double()
    # Equal infinities, as of a mask in a buffer, have no difference; NaN has.
    return float(torch.where(mine == theirs, 0.0, mine - theirs).abs().max())


def _race_verdict(race: _Race, outcome: _Outcome, batch: int) -> Verdict:
    differences, limit = outcome.differences, _LARGEST[race.terms.dtype]
    subject, largest = race.subject, largest_of(differences)
    of = "" if subject.job.batch_size == batch else f" (of the job's {batch}, for time)"
    ragged = ", the ragged batch among them," if len(subject.data.train) % subject.job.batch_size else ""
    if isinstance(subject.job.batch, TokenBatch):
        of, ragged = f" at most, as they come to {subject.job.batch.num_tokens:,} tokens,", ""
    silenced = "with random draws silenced" if race.terms.is_silenced else "without random draws"
    evidence = (
        f"{len(differences)} updates of {subject.job.batch_size} samples{of}{ragged} in "
        f"{str(race.terms.dtype).removeprefix('torch.')} {silenced}: "
        f"{' and '.join(_described(plan, race.plans[0]) for plan in race.plans[1:])}, against micro-batches of "
        f"{race.plans[0].micro_batch} in plain settings; largest difference of weights {largest:.1e}, limit {limit:g}"
    )
    level: Level = "same mathematics" if race.terms.dtype is torch.float64 else "same law"
    if largest <= limit:
        answer = f"Yes: weights agree to {largest:.1e} after {len(differences)} updates."
        return verdict(_QUESTION, answer, evidence, level)
    if len(differences) > _FEWEST and largest <= _AMPLIFIED * differences[-2]:
        answer = (
            f"Yes for {len(differences) - 1} updates, to {differences[-2]:.1e}; then training amplifies its own "
            "rounding (too high a learning rate does that)."
        )
        return verdict(_QUESTION, answer, evidence, level)
    answer = (
        f"No: micro-batches of {outcome.worst.micro_batch} move the weights by {largest:.1e} after "
        f"{len(differences)} updates. Do parts of the model depend on how many samples they see, or on earlier calls?"
    )
    return verdict(_QUESTION, answer, evidence, None)


def _described(plan: Plan, reference: Plan) -> str:
    size, settings = f"micro-batches of {plan.micro_batch}", list[str]()
    if plan.memory_format != reference.memory_format:
        settings.append(plan.memory_format.replace("_", "-"))
    if plan.optimizer_implementation != reference.optimizer_implementation:
        settings.append(f"{plan.optimizer_implementation} optimiser")
    return f"{size} with {' and '.join(settings)}" if settings else size


_SMALLEST = 8


def affordable_batch(batch: int, num_samples: float) -> int:
    """Batch size, halved until it is at most `num_samples`, but not below eight [samples].

    >>> affordable_batch(512, 100), affordable_batch(512, 1e9), affordable_batch(512, 0), affordable_batch(3, 0)
    (64, 512, 8, 3)
    """
    while batch > num_samples and batch // 2 >= _SMALLEST:
        batch //= 2
    return batch


def scaled(subject: Subject, batch: int) -> Subject:
    """The subject with an optimiser batch of `batch` samples; group and micro-batch are scaled with it.

    So is the learning rate, which keeps training as stable as it is (Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677, section 2.1).
    """
    job, coupling = subject.job, subject.coupling
    if batch == job.batch_size:
        return subject
    group = (
        None
        if coupling.group is None
        else max(min(2, coupling.group), math.ceil(coupling.group * batch / job.batch_size))
    )
    small = replace(coupling, group=group)
    micro_batch, share = subject.plan.micro_batch, batch / job.batch_size
    if micro_batch >= job.batch_size:
        micro_batch = batch
    elif coupling.group is None or group is None:
        micro_batch = max(1, math.ceil(micro_batch * batch / job.batch_size))
    else:
        micro_batch = min(batch, micro_batch // coupling.group * group)
    scaled_job = replace(job, batch=batch, coupling_group=None if job.coupling_group is None else group)
    if isinstance(job.optimizer, ScheduleFree):  # takes no schedule
        scaled_job = replace(scaled_job, optimizer=with_rates_scaled(job.optimizer, share))
    else:
        scaled_job = replace(scaled_job, schedule=lambda progress: job.schedule(progress) * share)
    plan = replace(subject.plan, micro_batch=micro_batch)
    return replace(subject, job=scaled_job, plan=plan, coupling=small)


def other_micro_batches(coupling: Coupling, batch: int, taken: set[int]) -> list[int]:
    """Legal micro-batches other than those `taken`: first those that leave a rest, then small ones.

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
    """Micro-batch of the reference [samples]: the whole batch of a separable job, else one group."""
    return batch if coupling.group is None else coupling.group


def check_own_step(subject: Subject) -> Verdict:
    """The verdict for a job's own step, which is atomic; its computation is not examined."""
    batch = subject.job.batch_size
    return verdict(
        _QUESTION,
        f"In law: the update is the job's own step, which every plan gives all {batch} samples at once with the "
        "same random draws. Whether it divides by the right counts is not examined, nor compared in exact arithmetic.",
        "declared: step=…, which is never cut; that a run resumes to the same bits is examined above",
        "same law",
    )


_COMPARED = 8
_LARGEST_CHANGE = 0.25
"""Difference of what the first updates change, by moments of fewer bits, beyond which they are not close [fraction]."""


def check_states(subject: Subject) -> Verdict | None:
    """The verdict on what the first updates change with moments of fewer bits; None for a job that allows none.

    They are the plan's, or else the fewest that the job allows.
    """
    allowed, subject = allowed_states(subject.job.numerics), subject.without_workers()
    if not allowed:
        return None
    states = allowed[-1] if subject.plan.optimizer_states == "full" else subject.plan.optimizer_states
    kind = states.replace("8bit", "8-bit")
    plain = replace(subject.plan, captured=False, optimizer_implementation="default")
    plans = (replace(plain, optimizer_states="full"), replace(plain, optimizer_states=states))
    steps = [Step(subject.job, plan, subject.coupling) for plan in plans]
    begun = [parameter.detach().clone() for parameter in steps[0].model.parameters()]
    for step in steps:
        with closing(subject.source(step).batches(subject.extent.position(0), _COMPARED)) as batches:
            for update, batch in enumerate(batches):
                step.update(batch, update, (update + 0.5) / _COMPARED)
    full, few = (
        torch.cat([(p.detach() - q).double().flatten() for p, q in zip(step.model.parameters(), begun, strict=True)])
        for step in steps
    )
    error = float((few - full).norm() / full.norm().clamp_min(1e-300))
    passed = error <= _LARGEST_CHANGE
    answer = f"{'Yes' if passed else 'No'}: the first {_COMPARED} updates differ by {error:.2%} of what they change."
    evidence = f"norm of the difference over the norm, from equal weights; limit {_LARGEST_CHANGE:.0%}"
    question = f"Are {kind} optimiser states close enough to full ones?"
    return verdict(question, answer, evidence, "same law" if passed else None)


def check_precision(subject: Subject, gradient_error: float | None) -> Verdict | None:
    """The verdict on the gradient's relative error against fp32 from the same state; None for fp32 plans."""
    precision = subject.plan.precision
    if precision in FULL_PRECISIONS:
        return None
    question = f"Is {precision} close enough to fp32?"
    if gradient_error is None:
        return verdict(question, "Unknown: its gradient was not compared with that of fp32.", "not measured", None)
    passed = gradient_error <= LARGEST_GRADIENT_ERROR
    compared = f"gradients are {gradient_error:.2%} off those of fp32, limit {LARGEST_GRADIENT_ERROR:.0%}"
    evidence = "norm of the difference over the norm, in one update from equal weights; the worst of three batches"
    return verdict(question, f"{'Yes' if passed else 'No'}: {compared}.", evidence, "same law" if passed else None)
