"""Trial of a plan: a few updates on the device, with the job's own batches, on a throw-away model.

Peak memory is the allocated memory on a GPU, and the resident memory of the whole process on a CPU.
"""

from __future__ import annotations

import gc
import itertools
import math
import resource
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

import torch

from stoker.devices.malloc import apply_malloc, heap_kept_small, untouched_bytes
from stoker.errors import DoesNotFit
from stoker.jobs import Job
from stoker.loading.batches import Batch, BatchSource, in_order
from stoker.loading.datasets import Datasets
from stoker.loading.token_batches import mean_samples
from stoker.profiling.ceilings import computing_threads
from stoker.records import FULL_PRECISIONS, Coupling, Measurement, Plan, Position
from stoker.stepping.frozen_parameters import with_all_unfrozen
from stoker.stepping.gradient_distance import gradient_distance
from stoker.stepping.model import bytes_of
from stoker.stepping.step import Step
from stoker.stepping.step_failures import evaluating, ran_out_of_memory

_FEWEST, _MOST = 3, 30
_COMPARED_BATCHES = 3
_MOST_EVALUATED, _EVALUATING_S = 8, 0.25
"""Held-out batches to time, and the longest time [s]: a single batch was seen to be off by a factor of five."""


def try_plan(
    job: Job,
    plan: Plan,
    coupling: Coupling,
    data: Datasets,
    *,
    budget_s: float,
    known_error: float | None = None,
    most_threads: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Train a throw-away model under `plan` for about `budget_s` seconds, and at least three updates of the run.

    `known_error` is the gradient's error if it is known: comparing costs several updates, in fp32 too. At most
    `most_threads` compute, even if the plan has more.

    Raises:
        RunFailed: the loss is not finite.
        BadJob: the data do not fit the model or the loss.
        DoesNotFit: the device ran out of memory.
    """
    started, job = clock(), with_all_unfrozen(job)  # all its gradients and states have to fit
    apply_malloc(plan.malloc)
    gc.collect()  # models with checkpointed blocks refer to themselves, and are freed by the collector only
    threads = plan.intra_op_threads or torch.get_num_threads()
    with computing_threads(min(threads, most_threads or threads)), PeakMemory(plan.device) as peak:
        try:
            step, first_s, times = _timed_updates(job, plan, coupling, data, budget_s, clock)
            evaluate_s = evaluation_time(step, data, clock)
            # Weights that are offloaded are not on the device in fp32 to compare with: they would not fit.
            is_as_written = plan.is_offloaded or (plan.precision in FULL_PRECISIONS and not plan.compile)
            error = None if is_as_written else known_error
            if error is None and not is_as_written:
                error = gradient_error(job, plan, coupling, data)
        except Exception as problem:
            if not ran_out_of_memory(problem):
                raise
            raise DoesNotFit(f"{plan.in_words()} ran out of memory on {plan.device}: {problem}") from problem
    state = [tensor for values in step.optimizer.state.values() for tensor in values.values()]
    held = [*step.model.state_dict().values(), *(t for t in state if isinstance(t, torch.Tensor))]
    has_own = step.average is not None and step.average.has_own_weights
    averages = list(step.average.weights.values()) if step.average is not None and has_own else []
    return Measurement(
        plan=plan,
        samples_per_update=max(1, round(mean_samples(job, data.train))),
        update_s=tuple(times),
        evaluate_s_per_sample=evaluate_s,
        peak_bytes=peak.num_bytes,
        state_bytes=bytes_of([*held, *averages]) + bytes_of(step.model.parameters()),
        took_s=clock() - started,
        gradient_error=error,
        compile_s=max(0.0, first_s - statistics.median(times)) if plan.compile else 0.0,
        not_compiled=None if step.compilation is None else step.compilation.problem,
    )


@heap_kept_small()
def gradient_error(job: Job, plan: Plan, coupling: Coupling, data: Datasets) -> float:
    """Relative error of the gradient under `plan` against fp32 from the same state [1]: the worst of three batches.

    The norm of the difference over the norm of the fp32 gradient, over all parameters together. The fp32 one is not
    compiled; blocks are checkpointed as in `plan`, which does not change the gradient and may be needed to fit.
    """
    plain = Plan(
        device=plan.device,
        micro_batch=plan.micro_batch,
        checkpointed_blocks=plan.checkpointed_blocks,
        checkpointing=plan.checkpointing,
        activation_offload=plan.activation_offload,
        loss_chunks=plan.loss_chunks,
        threads=plan.threads,
        loader="inline",
    )
    steps = [Step(job, each, coupling, fewer_draws=not plan.compile) for each in (plan, plain)]

    def gradient_of(step: Step, batch: Batch, update: int) -> list[torch.Tensor]:
        step.gradients(batch, update)
        gradients = [parameter.grad for parameter in step.model.parameters() if parameter.grad is not None]
        step.optimizer.zero_grad(set_to_none=True)
        return gradients

    worst = 0.0
    sources = [_source(step, data, plain) for step in steps]
    updates = range(min(_COMPARED_BATCHES, data.extent(job).updates_per_epoch))
    streams = [source.batches(Position(), len(updates)) for source in sources]
    for update, pair in zip(updates, zip(*streams, strict=True), strict=True):
        tried, exact = (gradient_of(step, batch, update) for step, batch in zip(steps, pair, strict=True))
        worst = max(worst, gradient_distance(tried, exact))
    return worst


def _timed_updates(
    job: Job, plan: Plan, coupling: Coupling, data: Datasets, budget_s: float, clock: Callable[[], float]
) -> tuple[Step, float, list[float]]:
    """The step after the run's first updates at its learning rates, and the times of the first and the others [s]."""
    step, extent = Step(job, plan, coupling), data.extent(job)
    # The updates of a run limited by seconds are unknown: its learning rate stays at the first one.
    total = math.inf if job.until.unit == "seconds" else extent.updates_in(job.until)
    num_updates = int(min(total, _MOST + 1, max(2, extent.updates_per_epoch)))
    at_once = step.updates_at_once if data.train.is_in_memory else 1  # as in the run
    times: list[float] = []
    with closing(_source(step, data, plan).batches(Position(), num_updates)) as batches:
        mark = begun = clock()
        for batch in batches:
            made, rest = len(times), [batch]
            if at_once > 1 and made > 0 and made % at_once == 0 and made + at_once < num_updates:
                rest += itertools.islice(batches, at_once - 1)
                together = len(step.updates(rest, made, [(made + index) / total for index in range(at_once)]))
            else:
                together = 0
            for update, single in enumerate(rest[together:], made + together):
                step.update(single, update, update / total)
            _wait_for(step.device)
            now = clock()
            times += [(now - mark) / len(rest)] * len(rest)
            mark = now
            if made == 0 and plan.compile:
                begun = now  # the time of compiling is not part of the budget
            if len(times) > _FEWEST and now - begun > budget_s:
                break
    return step, times[0], times[1:] or times


def evaluation_time(step: Step, data: Datasets, clock: Callable[[], float]) -> float:
    """Time to evaluate one validation sample [s]: medians over a few batches of each set, weighted by its size.

    Every set is tried, so that one that cannot be evaluated fails early. The test set's batches go through an untrained
    model, and their results are not used.
    """
    per_sample_s, total_s = 0.0, 0.0
    size = data.extent(step.job).evaluated_at_once(step.plan.micro_batch)
    for split, samples in (("test", data.test), *data.held_out.items()):
        if samples is None:
            continue
        with evaluating(split), step.evaluation() as measure:
            batches = in_order(samples, step.pipeline(samples, augmented=False), size)
            first, times = next(batches), []
            measure(first.cut(0, first.size), first.size)
            _wait_for(step.device)
            mark = begun = clock()
            for batch in itertools.chain((first,), itertools.islice(batches, _MOST_EVALUATED)):
                measure(batch.cut(0, batch.size), batch.size)
                _wait_for(step.device)
                now = clock()
                times.append((now - mark) / batch.size)
                mark = now
                if now - begun > _EVALUATING_S:
                    break
        per_sample_s = statistics.median(times)
        total_s += per_sample_s * len(samples) if split != "test" else 0.0
    return total_s / sum(map(len, data.held_out.values())) if len(data.held_out) > 1 else per_sample_s


def _source(step: Step, data: Datasets, plan: Plan) -> BatchSource:
    pipeline = step.pipeline(data.train, augmented=True)
    return BatchSource(data.train, pipeline, data.extent(step.job), step.job.seed, plan)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_SAMPLING_S = 0.02


class PeakMemory:
    """Within its block, watches memory; `num_bytes` is the peak so far, and afterwards the peak of the block.

    On Linux the kernel's high-water mark is reset before and read after; where that is not allowed, the process's
    resident size is sampled every 20 ms. Elsewhere it is the peak since the process began. Blocks may be nested
    or overlap.
    """

    _open: ClassVar[weakref.WeakSet[PeakMemory]] = weakref.WeakSet()

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._done = threading.Event()
        self._sampler: threading.Thread | None = None
        self._seen = 0
        self._num_bytes: int | None = None

    @property
    def num_bytes(self) -> int:
        """Peak memory so far, or of the whole block after its end [bytes]."""
        return self._read() if self._num_bytes is None else self._num_bytes

    def __enter__(self) -> Self:
        """Begin to watch."""
        for outer in self._open:
            outer.keep()
        self._open.add(self)
        if self._device.type == "cuda":
            torch.cuda.init()  # before the first use of CUDA there is nothing to reset, which would raise
            torch.cuda.reset_peak_memory_stats(self._device)
        elif _STATUS.exists():
            try:
                _RESET.write_text("5", encoding="ascii")
            except OSError:
                self._sampler = threading.Thread(target=self._sample, daemon=True)
                self._sampler.start()
        return self

    def keep(self) -> None:
        """Keep the peak so far: the system's mark is about to be reset."""
        if self._sampler is None:
            self._seen = self._read()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Keep the peak."""
        self._done.set()
        self._open.discard(self)
        if self._sampler is not None:
            self._sampler.join()
        self._num_bytes = self._read()

    def _read(self) -> int:
        if self._device.type == "cuda":
            return max(self._seen, torch.cuda.max_memory_allocated(self._device))
        if self._sampler is not None:
            return max(self._seen, _status_bytes("VmRSS")) - untouched_bytes()
        if _STATUS.exists():
            return max(self._seen, _status_bytes("VmHWM"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLING_S):
            self._seen = max(self._seen, _status_bytes("VmRSS"))
        self._seen = max(self._seen, _status_bytes("VmRSS"))


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
