"""PyTorch's profiler over a few updates of a real run, and the files it leaves.

What  After some updates, one is run under the profiler and forgotten, and up to five are kept: a Chrome trace (Perfetto
      and TensorBoard open it), a table of operations, a timeline of memory, and on CUDA PyTorch's own memory snapshot.
      Ranges are named in every update, for Nsight Systems.
Use when  `stoker train JOB --profile`.
Costs  The profiled updates take up to several times as long; writing and reading the trace takes seconds. What is
      learned is the same, bit for bit.
Does not combine with  Nsight Systems at the same time for kernels: one of the two gets CUDA's activity interface.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torch.profiler import ProfilerActivity, profile

from stoker.loading import Batch, BatchSource
from stoker.profiling import cuda_memory, kernel_table, memory_timeline
from stoker.profiling.ranges import Ranges, ranges_over
from stoker.profiling.trace_events import operation_calls
from stoker.records import KernelTable, Position
from stoker.stepping import Step
from stoker.store import write_atomic

WARM_UP = 5
"""Updates before the first that is kept: kernels are chosen, caches filled and the optimiser's state made by then."""
MOST_UPDATES = 5
_LONGEST_S = 5.0
"""Of updates that are profiled [s], as the ones before let expect: a trace of minutes is too large to open."""
TRACE, KERNELS, MEMORY, SNAPSHOT = ".pt.trace.json", "kernels.csv", "memory.csv", "memory_snapshot.pickle"


class TorchProfile:
    """A profile of some updates of a run; `ProfiledSource` tells it where an update begins and ends.

    Args:
        step: what is trained.
        directory: where files go; it must be there.
        name: the run's, which the trace is called after.
        clock: reads seconds.
    """

    def __init__(
        self, step: Step, directory: Path, name: str, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._step, self._directory, self._name, self._clock = step, directory, name, clock
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
        """Updates `first` up to `total` of the run are about to be made."""
        is_done = self.table is not None or self.problem is not None
        self._first = total + 1 if is_done else first + min(WARM_UP, max(0, total - first - 1))
        self._stop = total

    def updating(self, update: int) -> None:
        """Update number `update` is next."""
        if update == self._first - 1:
            self._start(is_kept=False)
        elif update == self._first:
            self._drop()
            affordable = _LONGEST_S / self._update_s if self._update_s else MOST_UPDATES
            self._stop = min(self._stop, update + max(1, int(min(MOST_UPDATES, affordable))))
            self._start(is_kept=True)
        self._began_s = self._clock()  # of the update alone: PyTorch's first start of a profiler can take seconds
        self._ranges.enter("data")

    def fetched(self) -> None:
        """The batch is there."""
        self._ranges.leave()

    def updated(self, update: int) -> bool:
        """Update number `update` is made, with what follows it; whether `table` or `problem` was set now."""
        self._update_s = self._clock() - self._began_s
        if self._profiler is None or update + 1 != self._stop or update < self._first:
            return False
        try:
            self._write(self._profiler)
        except Exception as problem:  # noqa: BLE001 - what a trace holds is PyTorch's; training goes on without it
            self.problem = f"{type(problem).__name__}: {problem}"
        return True

    def close(self) -> None:
        """No update follows; a profile that is not whole is dropped."""
        self._ranges.leave()
        self._drop()

    def _start(self, *, is_kept: bool) -> None:
        """Profile from now on."""
        is_cuda = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
        self._is_recording_memory = is_kept and is_cuda and cuda_memory.start_recording()
        # What was captured has no lines of the user's, and PyTorch 2.13's profiler now and then ends the process when
        # it follows a captured pass while another thread collects what capturing left. An ordinary pass has the same
        # bits.
        self._step.repeats_captured = False
        gc.collect()
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True, with_stack=True)
        self._profiler.start()

    def _drop(self) -> None:
        """Stop, and forget what was seen."""
        if self._profiler is not None:
            self._stop_profiler(self._profiler)
        if self._is_recording_memory:
            cuda_memory.stop_recording()
            self._is_recording_memory = False

    def _stop_profiler(self, profiler: profile) -> None:
        profiler.stop()
        self._profiler = None
        self._step.repeats_captured = True

    def _write(self, profiler: profile) -> None:
        """Stop, and leave the files."""
        self._stop_profiler(profiler)
        files = {"trace": f"{self._name}.{self._first}{TRACE}", "kernels": KERNELS, "memory": MEMORY}
        if self._is_recording_memory:
            files["memory snapshot"] = SNAPSHOT
            cuda_memory.stop_recording(self._directory / SNAPSHOT)
            self._is_recording_memory = False
        trace = self._directory / files["trace"]
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_bytes())["traceEvents"]
        calls = operation_calls(events)
        timeline = memory_timeline.memory_timeline(events, calls, self._device.type)
        peak_bytes, shares = memory_timeline.peak_shares(timeline)
        self.table = KernelTable(
            device=str(self._device),
            first_update=self._first,
            updates=self._stop - self._first,
            kernels=kernel_table.kernels(calls),
            peak_bytes=peak_bytes,
            peak_shares=shares,
            files=files,
        )
        write_atomic(self._directory / KERNELS, kernel_table.as_csv(self.table), what="the table of operations")
        write_atomic(self._directory / MEMORY, memory_timeline.as_csv(timeline), what="the timeline of memory")


@dataclass(frozen=True)
class ProfiledSource(BatchSource):
    """The same batches in the same order; the profile hears when each is asked for, and when its update is made.

    `written` is called once the profile was written, or could not be, before the next batch is fetched.
    """

    profile: TorchProfile | None = None
    written: Callable[[], None] | None = None

    @classmethod
    def of(cls, source: BatchSource, profile: TorchProfile, written: Callable[[], None]) -> Self:
        """`source`, watched."""
        same = {field.name: getattr(source, field.name) for field in dataclasses.fields(source) if field.init}
        return cls(**same, profile=profile, written=written)

    def batches(self, start: Position, total_updates: int) -> Generator[Batch, None, None]:
        """As of the source it was made of."""
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
