"""The learning-rate range test: which rates a job bears, found in a few hundred updates that are thrown away.

What: from the initial weights the rate rises exponentially, update by update, until the loss runs away; for two seeds
or more. The edge is where the smoothed loss begins to rise for good; what is suggested is a quarter of it.
Use when: nothing is known of a learning rate. The result is a number to put into the Job; nothing is changed.
Costs: at most `updates` updates a seed, under the plan the job would be trained with.
Does not combine with: optimisers that choose their own rate, where it says that there is no clear answer.
Source: Smith 2017, https://arxiv.org/abs/1506.01186, section 3.3; the quarter is ours (bench/train/noise_scale.py
has runs at several shares of the edge), and so is saying when there is no clear answer.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from stoker.devices import attached_devices, resolve_place
from stoker.devices.malloc import apply_malloc
from stoker.errors import BadJob, RunFailed
from stoker.jobs import Entry, Job, schedules
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import Datasets
from stoker.loading.order import generators_kept
from stoker.planning.decision import decide, given_plan
from stoker.planning.resolved_job import resolve_job, users_code
from stoker.profiling.ceilings import computing_threads
from stoker.records import Coupling, Plan, Position
from stoker.stepping.step import Step

LOWEST, HIGHEST = 1e-6, 10.0
"""Default rates at which a sweep begins, and ends at most."""

FEWEST_UPDATES, MOST_UPDATES = 20, 1000
"""Updates a seed: fewer cannot be smoothed, more would be training."""

AWAY = 0.5
"""The loss has run away when it stays above its lowest by this share of its fall (of a quarter of its first value,
if it hardly fell). Not the whole fall: a model that is normalised layer by layer rises no higher than it began."""

_WINDOW = 5
"""Losses over which the median is taken: it leaves the place of a turn alone, where a mean would shift it."""

BELOW_EDGE = 4.0
"""How far the suggestion is below the edge. The best rate of a quadratic bowl is half of its edge, and the sweep finds
the edge late by as much, since running away takes updates."""

LARGEST_SPREAD = 3.0
"""Edges of seeds within this factor agree: the suggestion is further below them than that."""

_HALF_A_DECADE = 10**0.5

_NOISES = 3.0
"""A fall of the loss is one if it is more than so many standard deviations of the loss from batch to batch."""

_MAD_TO_SIGMA = 1.4826
"""From the median absolute deviation of normal draws to their standard deviation."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One seed's sweep: `losses[i]` is the mean loss of the batch after the update at `LrRange.rates[i]`.

    There are fewer losses than rates where the sweep ended early, because the loss ran away. `edge` is the largest rate
    at which the smoothed loss was still falling; None where it never ran away.
    """

    seed: int
    losses: tuple[float, ...]
    edge: float | None


@dataclass(frozen=True, kw_only=True)
class LrRange:
    """A suggestion for the learning rate, what it rests on, and how far it can be relied on.

    `lr` is always one to begin with: where `is_clear` is false, `why` says what was not found and what `lr` is instead.
    `low` to `high` are the rates between which training made good progress: from where the loss had fallen by a tenth
    of its whole fall, to the edge. `edge` is the geometric mean of the seeds' edges (None: no edge was found);
    `spread` is the largest edge over the smallest. `batch` is the optimiser batch [samples] it holds for, `stated_lr`
    what the job says.
    """

    schema: ClassVar[int] = 1
    lr: float
    low: float
    high: float
    is_clear: bool
    why: str
    edge: float | None
    spread: float | None
    stated_lr: float
    batch: int
    rates: tuple[float, ...]
    sweeps: tuple[Sweep, ...]
    num_updates: int
    took_s: float

    def mean_losses(self) -> tuple[float, ...]:
        """The loss after each rate, averaged over the seeds that got that far."""
        longest = max((len(sweep.losses) for sweep in self.sweeps), default=0)
        columns = [[sweep.losses[i] for sweep in self.sweeps if i < len(sweep.losses)] for i in range(longest)]
        return tuple(sum(column) / len(column) for column in columns)


def lr_range(  # noqa: PLR0913 - what the command line offers
    job: Job,
    *,
    on: str = "here",
    lowest: float = LOWEST,
    highest: float = HIGHEST,
    updates: int = 100,
    seeds: int = 2,
    seconds: float = 120.0,
    plan: str | Path | Plan | None = None,
    entry: Entry | None = None,
) -> LrRange:
    """Find the learning rates that `job` bears from its initial weights; the job is left as it is.

    Args:
        job: what is to be learned; groups of parameters keep their rates' ratio to the first group's.
        on: the device, as for `train`.
        lowest: the rate of the first update.
        highest: the rate of the last update.
        updates: updates from the lowest to the highest rate.
        seeds: sweeps from initial weights and in orders of their own; the first has the job's seed.
        seconds: for all sweeps together [s]; a sweep that runs out of it ends where it is.
        plan: a plan, or a JSON file that holds one, instead of the planner's choice.
        entry: the job file it came from.

    Raises:
        BadJob, DoesNotFit, NoDevice: as for `train`.
        RunFailed: the loss is not finite before anything was learned.
    """
    problems = (
        (not 0 < lowest < highest < math.inf, f"rates rise from lowest to highest, got {lowest:g} to {highest:g}"),
        (
            not FEWEST_UPDATES <= updates <= MOST_UPDATES,
            f"a sweep has {FEWEST_UPDATES} to {MOST_UPDATES} updates, got {updates}",
        ),
        (seeds < 2, f"one seed cannot tell how far it can be relied on: wanted at least 2, got {seeds}"),
        (not seconds > 0, f"the time for it must be positive, got {seconds} s"),
    )
    for is_wrong, problem in problems:
        if is_wrong:
            raise BadJob(f"lr_range: {problem}")
    with generators_kept():
        started = time.perf_counter()
        prepared = resolve_job(job, entry)
        decision, coupling = decide(prepared, resolve_place(on, attached_devices()), given_plan(plan))
        chosen = decision.chosen.plan
        rates = tuple(lowest * (highest / lowest) ** (i / (updates - 1)) for i in range(updates))
        ends_at = time.perf_counter() + seconds
        apply_malloc(chosen.malloc)
        sweeps: list[Sweep] = []
        stated = math.nan
        with users_code("the model or the loss", entry), computing_threads(chosen.intra_op_threads):
            for number in range(seeds):
                # Each sweep has its share of what is left, so that one that is slow leaves time for the others.
                now = time.perf_counter()
                until = now + max(0.0, ends_at - now) / (seeds - number)
                seeded = dataclasses.replace(prepared.job, seed=prepared.job.seed + number)
                stated, losses = _sweep(seeded, chosen, coupling, prepared.data, rates, until)
                sweeps.append(Sweep(seed=seeded.seed, losses=losses, edge=edge_of(rates, losses)))
        return read_sweeps(
            rates, sweeps, stated_lr=stated, batch=prepared.job.batch_size, took_s=time.perf_counter() - started
        )


def _sweep(
    job: Job,
    plan: Plan,
    coupling: Coupling,
    data: Datasets,
    rates: Sequence[float],
    until: float,
) -> tuple[float, tuple[float, ...]]:
    """The job's own rate, and the loss after the update at each rate, until it runs away or the time is over."""
    losses: list[float] = []
    step = Step(dataclasses.replace(job, schedule=schedules.constant()), plan, coupling)
    stated = step.set_rates(0.0)
    source = BatchSource(data.train, step.pipeline(data.train, augmented=True), data.extent(job), job.seed, plan)
    with closing(source.batches(Position(), len(rates) + 1)) as batches:
        for update, batch in enumerate(batches):
            step.rate_factor = rates[min(update, len(rates) - 1)] / stated
            try:
                loss = float(step.update(batch, update, 0.0))  # the batch's mean loss before the update
            except RunFailed:
                if update == 0:  # no rate is to blame
                    raise
                loss = math.inf
            if update:
                losses.append(loss if math.isfinite(loss) else math.inf)  # which ends the sweep
            if has_run_away(losses) or time.perf_counter() > until:
                break
    return stated, tuple(losses)


def has_run_away(losses: Sequence[float]) -> bool:
    """Whether the last losses all lie above the lowest by AWAY of the fall, or the last one is not finite."""
    if len(losses) <= _WINDOW:
        return bool(losses) and math.isinf(losses[-1])
    smooth = smoothed(losses[:-_WINDOW])
    lowest, first = min(smooth), smooth[0]
    bar = lowest + AWAY * max(first - lowest, abs(first) / 4)
    return math.isinf(losses[-1]) or min(losses[-_WINDOW:]) > bar


def smoothed(losses: Sequence[float]) -> list[float]:
    """Each loss as the median of the few around it."""
    half = _WINDOW // 2
    return [statistics.median(losses[max(0, i - half) : i + half + 1]) for i in range(len(losses))]


def edge_of(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Rate [1] from which on the smoothed loss only rose until it had run away; None where it did not.

    Found from the end: back to a loss below which there is none within half a decade of rates further back. The lowest
    loss of all may lie far before it, by chance or because momentum makes the loss swing.
    """
    if not has_run_away(losses):
        return None
    smooth = smoothed(losses)
    edge = len(smooth) - 1
    while True:
        back = [i for i in range(edge) if rates[i] * _HALF_A_DECADE >= rates[edge] and smooth[i] < smooth[edge]]
        if not back:
            return rates[edge]
        edge = min(back, key=smooth.__getitem__)


def read_sweeps(
    rates: tuple[float, ...], sweeps: Sequence[Sweep], *, stated_lr: float, batch: int, took_s: float
) -> LrRange:
    """The result of all sweeps."""
    edges = [sweep.edge for sweep in sweeps if sweep.edge is not None]
    edge = statistics.geometric_mean(edges) if len(edges) == len(sweeps) else None
    spread = max(edges) / min(edges) if edge is not None else None
    low = max(_begins_to_fall(rates, sweep) for sweep in sweeps)
    doubt = _doubt(rates, sweeps, edge, spread)
    if edge is not None and doubt is None:
        lr, why = edge / BELOW_EDGE, f"a quarter of {edge:.3g}, beyond which the loss runs away"
    else:
        # Of what is known, the most careful: a quarter of the lowest edge, and not more than what the job says.
        lr = min([stated_lr, *(edge / BELOW_EDGE for edge in edges)])
        source = "what the job says" if lr == stated_lr else "a quarter of the lowest edge"
        why = f"no clear answer: {doubt}; use {lr:.3g}, {source}"
    high = min(edges, default=rates[-1])
    return LrRange(
        lr=lr,
        low=min(low, high),
        high=high,
        is_clear=doubt is None,
        why=why,
        edge=edge,
        spread=spread,
        stated_lr=stated_lr,
        batch=batch,
        rates=rates,
        sweeps=tuple(sweeps),
        num_updates=sum(len(sweep.losses) + 1 for sweep in sweeps),
        took_s=took_s,
    )


def _doubt(rates: Sequence[float], sweeps: Sequence[Sweep], edge: float | None, spread: float | None) -> str | None:
    """Why the sweeps give no clear answer; None where they do."""
    shortest = min(len(sweep.losses) for sweep in sweeps if sweep.edge is None) if edge is None else len(rates)
    if shortest < len(rates):
        reached = rates[max(0, shortest - 1)]
        return (
            f"the time was over at a rate of {reached:.3g}, before the loss ran away (more seconds, or fewer updates)"
        )
    if edge is None or spread is None:
        return f"up to {rates[-1]:g} the loss did not run away in every sweep"
    if not all(map(_falls, sweeps)):
        return "the loss does not fall by more than its noise before it runs away"
    if spread > LARGEST_SPREAD:
        return f"it runs away at rates that differ {spread:.1f}-fold from seed to seed"
    return None


def _falls(sweep: Sweep) -> bool:
    """Whether the loss falls by more than its noise."""
    smooth = smoothed(sweep.losses)
    lowest = min(range(len(smooth)), key=smooth.__getitem__)
    deviations = [abs(a - b) for a, b in zip(sweep.losses[: lowest + 1], smooth[: lowest + 1], strict=True)]
    noise = _MAD_TO_SIGMA * statistics.median(deviations)
    return lowest > 0 and smooth[0] - smooth[lowest] > _NOISES * noise


def _begins_to_fall(rates: Sequence[float], sweep: Sweep) -> float:
    """The first rate at which the smoothed loss had fallen by a tenth of its whole fall."""
    smooth = smoothed(sweep.losses)
    if not smooth:
        return rates[0]
    bar = smooth[0] - (smooth[0] - min(smooth)) / 10
    return rates[next(i for i, loss in enumerate(smooth) if loss <= bar)]
