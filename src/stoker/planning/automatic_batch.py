"""Choose the batch of `batch="auto"` by the gradient's noise, measured on a throw-away copy; the answer is cached.

The noise is measured on the initial weights, where it is smallest, and at points of a short warm-up of the copy, whose
median decides. It keeps growing in training (McCandlish et al. 2018, figure 4), so that the choice costs updates rather
than samples. Random generators of the user's process are restored.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from stoker.devices import attached_devices, resolve_place
from stoker.errors import BadJob, DoesNotFit, RunFailed
from stoker.jobs import Job
from stoker.jobs.batch_size import largest_batch, rate_factor, scalable, with_rates_scaled
from stoker.jobs.run_length import Extent
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import Datasets
from stoker.loading.order import generators_kept
from stoker.profiling.ceilings import computing_threads
from stoker.records import Coupling, Device, Estimate, Plan, digest, dumps, loads
from stoker.stepping.coupling import find_coupling
from stoker.stepping.model import build_model, bytes_of, meta_model
from stoker.stepping.noise_scale import BLOCKS, NoiseScale, measure_noise
from stoker.stepping.step import Step
from stoker.stepping.torch_optimizers import implementations
from stoker.store import cache_root, disk_errors, write_atomic
from stoker.store.files import make_directories
from stoker.store.locations import is_own
from stoker.units import format_bytes

METHOD = 2
"""Version of the method, in the cache key; raised when the same job would get another answer."""

FEWEST_UPDATES = 100
"""Least number of updates of a run, unless it has fewer at the base batch: a judgement."""

INITIAL_SHARE, WARM_UP_SHARE, TRAINED_SHARE = 0.01, 0.02, 0.02
"""Samples for measuring on the initial weights, warming up and measuring again, as shares of the run's, at most."""

LONGEST_WARM_UP = 200
"""Most updates of the copy: there, curves of the noise scale have left their steep beginning."""

FEWEST_POINTS, MOST_POINTS = 3, 9
"""Points of the second half of the warm-up at which the noise is measured, as samples allow. Gradients, and with them
the noise scale, vary tenfold from update to update, most of all under Adam; the median of several varies less."""

_GROUP, _FEWEST = 16, 512
"""Samples in a group if they are separable, and in a measurement at least: 32 groups."""

_MICRO_BATCH = 256
"""Largest micro-batch of the warm-up [samples]."""

_THREADS = 4
"""Most threads: more do not pay for so few samples at once."""

_EPOCHS_IF_TIMED = 5.0
"""Assumed epochs of a run of stated seconds, whose number is not known yet."""

_RATE_DIGITS = 3
"""Significant digits of the learning rate's factor."""

_COPIES = BLOCKS + 6
"""Copies of the weights held while measuring: gradients by block, one more, the optimiser's state, and an average."""


@dataclass(frozen=True, kw_only=True)
class BatchChoice:
    """An optimiser batch [samples] chosen by the noise scale, and what became of the learning rate.

    `lr` was stated for `base`, and is multiplied by `lr_factor` for `batch`, a power of two times `base`; `exponent` is
    that of the rule, 1 for SGD and 1/2 for Adam. `noise_scale` [samples] is what both follow: the median of `trained`,
    measured at points of a short warm-up; `initial` is that of the initial weights. `why` says what decided: the noise
    scale or a limit.
    """

    schema: ClassVar[int] = 1
    base: int
    batch: int
    lr: float
    lr_factor: float
    exponent: float
    noise_scale: float
    coupling_group: int | None
    initial: NoiseScale
    trained: tuple[NoiseScale, ...]
    why: str
    took_s: float

    def in_words(self) -> str:
        """The choice and its numbers on one line."""
        first, later = self.initial.scale, sorted((one.scale for one in self.trained), key=lambda scale: scale.value)
        initial = _bound(first)  # `410 (330 to 540)`, or its lower bound
        if first.value != float("inf"):
            initial += f" ({first.low:.3g} to {first.high:.3g})"
        span = f"{_bound(later[0])} to {_bound(later[-1])}"
        after = f"{self.noise_scale:.3g} ({span}) after up to {self.trained[-1].trained_samples:,} samples"
        groups = "" if self.coupling_group is None else f" in coupling groups of {self.coupling_group}"
        return (
            f"batch {self.batch:,}{groups} and lr {self.lr * self.lr_factor:.4g}, from lr {self.lr:g} stated for "
            f"batch {self.base:,}: the gradient's noise scale is {initial} "
            f"on the initial weights, {after}; {self.why} "
            f"(measured in {self.took_s:.1f} s)"
        )


def _bound(scale: Estimate) -> str:
    return f"above {scale.low:.3g}" if scale.value == float("inf") else f"{scale.value:.3g}"


def with_batch(job: Job, most: int | None, data: Datasets, spec_digest: str) -> tuple[Job, BatchChoice]:
    """The job, whose batch is the base, with the chosen batch and learning rate, and how they were chosen.

    No batch above `most` samples is chosen. The same job, by `spec_digest`, gets the same answer: the cached one, else
    measured from the same seeds, on the best device here.

    Raises:
        BadJob: a batch cannot be chosen for this job.
        DoesNotFit: the model is too large to be run here.
        RunFailed: the gradient is not finite.
    """
    optimizer, _ = scalable(job.optimizer)
    _require_scalable(job)
    key = digest([spec_digest, job.batch_size, most, METHOD])[:24]
    path = cache_root() / "batches" / f"{key}.json"
    choice = _kept(path)
    if choice is None:
        with generators_kept():
            choice = _measured(job, data, most)
        with disk_errors(path.parent, "the batch that was chosen", error=RunFailed):
            make_directories(path.parent)
        write_atomic(path, dumps(choice) + "\n", what="the batch that was chosen")
    scaled = with_rates_scaled(optimizer, choice.lr_factor)
    return dataclasses.replace(
        job, batch=choice.batch, optimizer=scaled, coupling_group=choice.coupling_group or job.coupling_group
    ), choice


def _require_scalable(job: Job) -> None:
    """Refuse jobs that would mean something else under another batch."""
    if job.step is not None:
        raise BadJob(
            'Job(batch="auto", step=…): a step of the job\'s own does not say what its gradient is, so that its noise '
            "cannot be measured",
            remedy="Give the batch as a number.",
        )
    if job.until.unit == "updates":
        raise BadJob(
            f'Job(batch="auto", until={job.until}): a number of updates is another amount of data under each batch',
            remedy="Say how long to train in epochs or samples.",
        )
    if job.objective.scope == "batch" and job.coupling_group is None:
        raise BadJob(
            'Job(batch="auto", loss=Objective(scope="batch")): the loss is over the whole batch, so that another batch '
            "is another loss, and there is no noise of single samples to measure",
            remedy="Give the batch as a number, or say with coupling_group over how many samples the loss goes.",
        )


def _measured(job: Job, data: Datasets, most: int | None) -> BatchChoice:
    """Measure the noise of `job`, whose batch is the base, and choose a batch."""
    started = time.perf_counter()
    if job.batch_size > len(data.train):
        raise BadJob(
            f"stoker.auto(base={job.batch_size}): the training data have only {len(data.train)} samples",
            remedy="State the learning rate for a batch that the data can fill.",
        )
    device = resolve_place("here", attached_devices())
    coupling = find_coupling(job, data.train)
    if coupling.kind == "whole_group" and job.coupling_group is None:
        raise BadJob(
            f'Job(batch="auto"): the samples of a batch depend on one another through {", ".join(coupling.causes)}, so '
            f"that another batch is another loss ({coupling.evidence})",
            remedy="Give the batch as a number, or say with coupling_group how many samples belong together.",
        )
    group = coupling.group if coupling.group is not None else min(_GROUP, job.batch_size)
    # Normalisation over a batch stays over as many samples as under the stated learning rate.
    grouped = job if coupling.kind == "separable" else dataclasses.replace(job, coupling_group=group)
    initial, trained = _Copy(grouped, data, coupling, device, group).measure()
    return choose_batch(
        job,
        len(data.train),
        initial,
        trained,
        most=most,
        coupling_group=grouped.coupling_group,
        took_s=time.perf_counter() - started,
    )


def choose_batch(
    job: Job,
    num_train: int,
    initial: NoiseScale,
    trained: Sequence[NoiseScale],
    *,
    most: int | None,
    coupling_group: int | None,
    took_s: float,
) -> BatchChoice:
    """The batch for a measured noise; `job.batch_size` is the base, `num_train` the samples of an epoch."""
    scales = [noise.scale for noise in trained]
    noise_scale = statistics.median_low([scale.value for scale in scales])
    is_bounded = noise_scale != float("inf")
    if not is_bounded:
        noise_scale = statistics.median_low([scale.low for scale in scales])
    by_data = min(num_train, int(total_samples(job, num_train) // FEWEST_UPDATES))
    limit = by_data if most is None else min(most, by_data)
    batch = largest_batch(job.batch_size, noise_scale, limit)
    if 2 * batch <= noise_scale:
        why = (
            f"limited to {most:,} as asked"
            if most is not None and most <= by_data
            else (f"limited by the data, so that the run has at least {FEWEST_UPDATES} updates")
        )
    elif noise_scale < job.batch_size:
        why = "the noise would allow less, but the batch is not taken below the one stated"
    else:
        why = "twice the batch would be above the noise scale"
    if not is_bounded:
        why += f" (of which only the low end is known: {trained[-1].num_samples:,} samples do not bound it)"
    optimizer, exponent = scalable(job.optimizer)
    # Rounded, so that a repeated measurement does not make another job of it.
    factor = float(f"{rate_factor(job.batch_size, batch, noise_scale=noise_scale, exponent=exponent):.{_RATE_DIGITS}g}")
    return BatchChoice(
        base=job.batch_size,
        batch=batch,
        lr=optimizer.lr,
        lr_factor=factor,
        exponent=exponent,
        noise_scale=noise_scale,
        coupling_group=coupling_group,
        initial=initial,
        trained=tuple(trained),
        why=why,
        took_s=took_s,
    )


def total_samples(job: Job, num_train: int) -> float:
    """Number of samples of the whole run; of one of stated seconds, those of a few epochs."""
    if job.until.unit == "seconds":
        return _EPOCHS_IF_TIMED * num_train
    return job.until.value * (num_train if job.until.unit == "epochs" else 1)


class _Copy:
    """A throw-away copy of the job's model, trained briefly at the base batch."""

    def __init__(self, job: Job, data: Datasets, coupling: Coupling, device: Device, group: int) -> None:
        self._job, self._data, self._coupling, self._group = job, data, coupling, group
        self._total = total_samples(job, len(data.train))
        is_separable = coupling.kind == "separable"
        is_fused = "fused" in implementations(job, meta_model(job), device.kind)
        self._plan = Plan(
            device=device.torch_name,
            micro_batch=min(job.batch_size, _MICRO_BATCH) if is_separable else group,
            threads=min(_THREADS, device.cores) if device.kind == "cpu" else 1,
            optimizer_implementation="fused" if is_fused else "default",
            loader="memory" if data.train.is_in_memory else "inline",
        )
        needed = _COPIES * bytes_of(build_model(job).parameters())
        if device.memory_bytes and needed > device.memory_bytes:
            raise DoesNotFit(
                f'measuring the gradient\'s noise for batch="auto" takes {format_bytes(needed)}, {_COPIES} copies of '
                f"the weights; {device.name} has {format_bytes(device.memory_bytes)}",
                remedy="Give the batch as a number.",
            )

    def measure(self) -> tuple[NoiseScale, tuple[NoiseScale, ...]]:
        """The noise on the initial weights, and at points of the warm-up; on samples that the copy is not trained on.

        The learning rate rises linearly to the job's largest, whatever the schedule: the batch must suit that rate.
        """
        job = self._job
        peak = max(job.schedule(part / 64) for part in range(64))
        rising = dataclasses.replace(job, schedule=lambda progress: peak * progress)
        with computing_threads(self._plan.threads):
            step = Step(rising, self._plan, self._coupling)
            return self._noise(step, 0, INITIAL_SHARE * self._total), tuple(self._trained(step))

    def _trained(self, step: Step) -> Iterator[NoiseScale]:
        """Train the copy, and measure at points of the second half, the last update among them."""
        job, extent = self._job, self._data.extent(self._job)
        updates = max(1, min(LONGEST_WARM_UP, int(WARM_UP_SHARE * self._total / job.batch_size)))
        most = TRAINED_SHARE * self._total
        points = min(MOST_POINTS, max(FEWEST_POINTS, int(most / self._fewest)))
        stops = {updates - point * updates // (2 * points) for point in range(points)}
        with closing(self._source(step, extent).batches(extent.position(0), updates)) as batches:
            for update, batch in enumerate(batches, 1):
                try:
                    step.update(batch, update - 1, update / updates)
                    # On a GPU, non-finite values only show in the measurement.
                    noise = self._noise(step, update, most / points) if update in stops else None
                except RunFailed as problem:
                    raise BadJob(
                        f"a copy trained for {update} updates at the batch and learning rate stated fails: "
                        f"{problem.message}",
                        remedy="Lower the learning rate, or say for which batch it is meant: stoker.auto(base=…).",
                    ) from problem
                if noise is not None:
                    yield noise

    @property
    def _fewest(self) -> int:
        """Samples of one measurement, at least."""
        return max(_FEWEST, BLOCKS * self._group)

    def _noise(self, step: Step, updates: int, most: float) -> NoiseScale:
        """The noise at the weights of `step`, after `updates` updates."""
        extent = Extent(len(self._data.train), self._group)
        trained = self._data.extent(self._job).position(updates).samples
        # Fresh samples: those after the ones trained on, as long as the epoch has any.
        first = math.ceil(trained / self._group)
        most_samples = max(self._fewest, int(most))
        # A short epoch may repeat; its ragged batches are skipped.
        last = first + 2 * (most_samples // self._group + BLOCKS) + extent.updates_per_epoch
        with closing(self._source(step, extent).batches(extent.position(first), last)) as batches:
            return measure_noise(
                step, batches, group=self._group, fewest=self._fewest, most=most_samples, trained_samples=trained
            )

    def _source(self, step: Step, extent: Extent) -> BatchSource:
        return BatchSource(
            self._data.train, step.pipeline(self._data.train, augmented=True), extent, self._job.seed, self._plan
        )


def _kept(path: Path) -> BatchChoice | None:
    """The cached answer; None if there is none, it is another user's, or it cannot be read."""
    try:
        return loads(path.read_bytes(), BatchChoice) if is_own(path) else None
    except (OSError, ValueError):
        return None
