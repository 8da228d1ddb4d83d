"""PyTorch's profiler over a few updates of a real run, and its files.

What  After a warm-up, one update is profiled and dropped, and up to five are kept: a Chrome trace (for Perfetto and
      TensorBoard), a table of operations, a timeline of memory, and on CUDA PyTorch's memory snapshot with Python
      stacks (for https://pytorch.org/memory_viz). Named ranges (`Ranges`) mark the parts of every update, on CUDA also
      as NVTX ranges for Nsight Systems.
Use when  `stoker train JOB --profile`.
Costs  The profiled updates take up to several times as long, a microsecond per allocation for the snapshot; writing and
      reading the trace takes seconds. The training result is the same, bit for bit.
Does not combine with  Nsight Systems recording kernels at the same time: only one can use CUDA's activity interface.
Source  PyTorch documentation, "Understanding CUDA Memory Usage", for the private functions `_record_memory_history` and
      `_dump_snapshot`; without them there is no snapshot.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from stoker.loading.batches import Batch, BatchSource
from stoker.profiling import chrome_trace
from stoker.profiling.chrome_trace import operation_calls
from stoker.records import KernelTable, Position
from stoker.stepping.step import Step
from stoker.store import write_atomic

WARM_UP = 5
"""Updates before the first one kept: by then kernels are chosen, caches filled and the optimiser's state made."""
MOST_UPDATES = 5
_LONGEST_S = 5.0
"""Longest expected time of the profiled updates [s]: a trace of minutes is too large to open."""
TRACE, KERNELS, MEMORY, SNAPSHOT = ".pt.trace.json", "kernels.csv", "memory.csv", "memory_snapshot.pickle"


class TorchProfile:
    """A profile of some updates of a run; `ProfiledSource` calls it at the beginning and end of each update.

    Args:
        step: the training step.
        directory: an existing directory for the files.
        name: the run's name, part of the trace's file name.
    """

    def __init__(self, step: Step, directory: Path, name: str) -> None:
        self._step, self._directory, self._name = step, directory, name
        self._device = step.device
        self._ranges = Ranges(step.device)
        self._profiler: profile | None = None
        self._first = self._stop = 0
        self._began_s = self._update_s = 0.0
        self._is_recording_memory = False
        self.table: KernelTable | None = None
        self.problem: str | None = None

    def over(self) -> AbstractContextManager[None]:
        """Name the parts of every update within the block."""
        return ranges_over(self._step, self._ranges)

    def begin(self, first: int, total: int) -> None:
        """Called before updates `first` up to `total` of the run."""
        is_done = self.table is not None or self.problem is not None
        self._first = total + 1 if is_done else first + min(WARM_UP, max(0, total - first - 1))
        self._stop = total

    def updating(self, update: int) -> None:
        """Called before update number `update`."""
        if update == self._first - 1:
            self._start(is_kept=False)
        elif update == self._first:
            self._drop()
            affordable = _LONGEST_S / self._update_s if self._update_s else MOST_UPDATES
            self._stop = min(self._stop, update + max(1, int(min(MOST_UPDATES, affordable))))
            self._start(is_kept=True)
        self._began_s = time.perf_counter()  # after PyTorch's first start of a profiler, which can take seconds
        self._ranges.enter("data")

    def fetched(self) -> None:
        """Called once the batch is fetched."""
        self._ranges.leave()

    def updated(self, update: int) -> bool:
        """Called after update number `update`; returns whether `table` or `problem` was set now."""
        self._update_s = time.perf_counter() - self._began_s
        if self._profiler is None or update + 1 != self._stop or update < self._first:
            return False
        try:
            self._write(self._profiler)
        except Exception as problem:  # noqa: BLE001 - the trace's content is PyTorch's; training goes on without it
            self.problem = f"{type(problem).__name__}: {problem}"
        return True

    def close(self) -> None:
        """Called after the last update; drops an incomplete profile."""
        self._ranges.leave()
        self._drop()

    def _start(self, *, is_kept: bool) -> None:
        is_cuda = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
        self._is_recording_memory = is_kept and is_cuda and start_recording()
        # Captured passes have no user's lines, and PyTorch 2.13's profiler sometimes crashes on one while another
        # thread collects its garbage. An ordinary pass has the same bits.
        self._step.loss_pass.repeats_captured = False
        gc.collect()
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True, with_stack=True)
        self._profiler.start()

    def _drop(self) -> None:
        """Stop, and drop the profile."""
        if self._profiler is not None:
            self._stop_profiler(self._profiler)
        if self._is_recording_memory:
            stop_recording()
            self._is_recording_memory = False

    def _stop_profiler(self, profiler: profile) -> None:
        profiler.stop()
        self._profiler = None
        self._step.loss_pass.repeats_captured = True

    def _write(self, profiler: profile) -> None:
        """Stop, and write the files."""
        self._stop_profiler(profiler)
        files = {"trace": f"{self._name}.{self._first}{TRACE}", "kernels": KERNELS, "memory": MEMORY}
        if self._is_recording_memory:
            files["memory snapshot"] = SNAPSHOT
            stop_recording(self._directory / SNAPSHOT)
            self._is_recording_memory = False
        trace = self._directory / files["trace"]
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_bytes())["traceEvents"]
        calls = operation_calls(events)
        timeline = chrome_trace.memory_timeline(events, calls, self._device.type)
        peak_bytes, shares = chrome_trace.peak_shares(timeline)
        self.table = KernelTable(
            device=str(self._device),
            first_update=self._first,
            updates=self._stop - self._first,
            kernels=chrome_trace.kernels(calls),
            peak_bytes=peak_bytes,
            peak_shares=shares,
            files=files,
        )
        write_atomic(self._directory / KERNELS, chrome_trace.kernels_csv(self.table), what="the table of operations")
        write_atomic(self._directory / MEMORY, chrome_trace.memory_csv(timeline), what="the timeline of memory")


@dataclass(frozen=True)
class ProfiledSource(BatchSource):
    """The same batches in the same order, with calls of the profile before and after each update.

    `written` is called once the profile was written or failed, before the next batch is fetched.
    """

    profile: TorchProfile | None = None
    written: Callable[[], None] | None = None

    @classmethod
    def of(cls, source: BatchSource, profile: TorchProfile, written: Callable[[], None]) -> Self:
        """`source` with a profile."""
        same = {field.name: getattr(source, field.name) for field in dataclasses.fields(source) if field.init}
        return cls(**same, profile=profile, written=written)

    def batches(self, start: Position, total_updates: int) -> Generator[Batch, None, None]:
        """As `BatchSource.batches`."""
        profile, written = self.profile, self.written
        assert profile is not None and written is not None, "made by `of`"  # noqa: PT018 - one fact
        profile.begin(start.updates, total_updates)
        with closing(super().batches(start, total_updates)) as batches, closing(profile), profile.over():
            for update in range(start.updates, total_updates):
                profile.updating(update)
                batch = next(batches)
                profile.fetched()
                yield batch
                if profile.updated(update):
                    written()


# The public `record_function` is an operation, which would be captured with a pass. Inductor's private one is not.
_profiler: Any = torch._C._profiler  # noqa: SLF001
_named: Callable[[str], AbstractContextManager[Any]] = getattr(_profiler, "_RecordFunctionFast", record_function)


class Ranges:
    """One named range at a time; entering one leaves the last.

    `data` is the wait for a batch; `forward` model and loss; `backward` all up to the next forward pass or the
    gradient's end; `gradient` the rest: copying the batch to the device, augmentation, captured passes; `update`
    clipping, the optimiser and the average of weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._open: AbstractContextManager[Any] | None = None

    def enter(self, name: str) -> None:
        """Begin the range `name`."""
        self.leave()
        self._open = _named(name)
        self._open.__enter__()
        if self._is_cuda:
            torch.cuda.nvtx.range_push(name)

    def leave(self) -> None:
        """End the range, if any."""
        if self._open is None:
            return
        if self._is_cuda:
            torch.cuda.nvtx.range_pop()
        self._open.__exit__(None, None, None)
        self._open = None


@contextmanager
def ranges_over(step: Step, ranges: Ranges) -> Iterator[None]:
    """Name the parts of every update of `step` within the block."""

    def around(run: Callable[..., Any], first: str, then: str | None) -> Callable[..., Any]:
        @functools.wraps(run)
        def named(*args: Any, **settings: Any) -> Any:
            ranges.enter(first)
            result = run(*args, **settings)
            if then is None:
                ranges.leave()
            else:
                ranges.enter(then)
            return result

        return named

    # Set on the instances, and so for this run alone.
    over = (
        (step, "update", "update", None),
        (step.loss_pass, "gradients", "gradient", "update"),
        (step.objective, "loss", "forward", "backward"),
    )
    for owner, method, first, then in over:
        setattr(owner, method, around(getattr(owner, method), first, then))
    try:
        yield
    finally:
        for owner, method, _, _ in over:
            delattr(owner, method)
        ranges.leave()


_MOST_ENTRIES = 200_000

_record: Callable[..., Any] | None = getattr(torch.cuda.memory, "_record_memory_history", None)
_dump: Callable[..., Any] | None = getattr(torch.cuda.memory, "_dump_snapshot", None)


def start_recording() -> bool:
    """Record allocations from now on; returns whether this PyTorch can."""
    if _record is None or _dump is None:
        return False
    _record(max_entries=_MOST_ENTRIES, stacks="python")
    return True


def stop_recording(path: Path | None = None) -> None:
    """Stop, and write the record to `path` if it is given, as a pickle for PyTorch's viewer in the browser."""
    if _record is not None and _dump is not None:
        if path is not None:
            _dump(str(path))
        _record(enabled=None)
