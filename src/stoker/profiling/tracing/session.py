"""A traced run of a step: prepared once, run twice, and the second one told as a Trace."""

from __future__ import annotations

import bisect
import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from stoker.errors import BadJob, StokerError
from stoker.profiling.tracing.answers import Answers, Hints
from stoker.profiling.tracing.attention import attention_of
from stoker.profiling.tracing.fake_device import MixedDevices, pretending
from stoker.profiling.tracing.fakes import Fakes
from stoker.profiling.tracing.lines import SourceLines
from stoker.profiling.tracing.recorder import Recorder
from stoker.profiling.tracing.recurrent import recurrence_of_cudnn
from stoker.profiling.tracing.storages import Recording
from stoker.records import Category, Occurrence, Phase, Storage, Trace, TraceSettings
from stoker.records.timeline import settled


@dataclass(frozen=True)
class Session:
    """A fake device on which something is about to be traced."""

    settings: TraceSettings
    device: torch.device
    is_fallback: bool
    fakes: Fakes
    recorder: Recorder
    answers: Answers
    started: float

    def trace(
        self, run: Callable[[], object], hold: Callable[[], None], begin: Callable[[], object] | None = None
    ) -> tuple[Trace, Recording]:
        """The trace of a call of `run`, and what was recorded, which also says whose each storage is.

        Args:
            run: what is traced.
            hold: tells the recorder what lives from update to update; called before.
            begin: brings about what is there from the first update on; `run` itself by default.

        Raises:
            BadJob: an operation cannot be traced, or sizes depend on the data.
        """
        with self.recorder.following():
            run_traced(self, begin or run)
            recording = self._recorded(run, hold)
            if self.answers.lines_of_numbers:
                self._require_same(recording, run, hold)
        took_s = time.perf_counter() - self.started
        return _trace(recording, self, took_s), recording

    def _recorded(self, run: Callable[[], object], hold: Callable[[], None]) -> Recording:
        hold()
        recording = self.recorder.begin()
        try:
            run_traced(self, run)
        finally:
            self.recorder.end()
        return recording

    def _require_same(self, recording: Recording, run: Callable[[], object], hold: Callable[[], None]) -> None:
        """Other answers to questions for whole numbers must not change what is computed."""
        lines = ", ".join(sorted(self.answers.lines_of_numbers))
        problem = BadJob(
            f"shapes depend on a number that is read from a tensor, at {lines}",
            remedy=self.answers.remedy("Say what it is", lines.split(", ")[0], "the number there"),
        )
        self.answers.number = 2
        try:
            other = self._recorded(run, hold)
        except StokerError as error:
            raise problem from error
        if _executed(recording) != _executed(other):
            raise problem


@contextlib.contextmanager
def session(settings: TraceSettings, hints: Hints | None) -> Iterator[Session]:
    """A fake device for `settings`, on which operations are seen; afterwards the process is as it was.

    `hints` are None where the user has no way to give any.
    """
    started = time.perf_counter()
    answers, lines = Answers(hints), SourceLines()
    with contextlib.ExitStack() as stack:
        # Of fakes, copies and libraries that are not here; the real step will warn of itself.
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(_without_log_of_fakes())
        pretence = stack.enter_context(pretending(settings))
        if pretence.device.type == "cuda":
            stack.enter_context(attention_of(settings.capability))
            stack.enter_context(recurrence_of_cudnn())
        recorder = stack.enter_context(Recorder(pretence.device, answers, lines))
        fakes = Fakes(pretence.mode, pretence.device)
        yield Session(settings, pretence.device, pretence.is_fallback, fakes, recorder, answers, started)


@contextlib.contextmanager
def _without_log_of_fakes() -> Iterator[None]:
    """Within the block, PyTorch logs no traceback of an operation that it cannot fake: the error raised tells it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


def run_traced(session: Session, run: Callable[[], object]) -> None:
    """Run once; what goes wrong is told with the operation and the user's line.

    Raises:
        BadJob: an operation cannot be traced.
    """
    recorder = session.recorder
    recorder.last_failure = None
    try:
        run()
    except StokerError:
        raise
    except Exception as error:
        operation, line = recorder.failure() or ("the step", recorder.lines.of_error(error))
        where = line or "an unknown line"
        raise BadJob(
            f"{operation} at {where} cannot be traced: {type(error).__name__}: {_first_line(error)}",
            remedy=_REMEDY_DEVICES if isinstance(error, MixedDevices) else _REMEDY,
        ) from error


_REMEDY = (
    "Does the step run on real tensors? If it does: an operation of your own needs a fake implementation "
    "(torch.library.register_fake), and values must not be read on the way (.numpy(), .tolist())."
)

_REMEDY_DEVICES = "Make the tensor where the others are, such as torch.arange(n, device=x.device), or as a buffer."


def _first_line(error: Exception) -> str:
    """The first sentence: PyTorch goes on to list every backend there is."""
    return next(iter(str(error).splitlines()), "").split(". ")[0]


def _executed(recording: Recording) -> list[object]:
    return [recording.operations[one.operation] for one in recording.occurrences]


def _trace(recording: Recording, session: Session, took_s: float) -> Trace:
    phases = _phases(recording)
    last_part, starts = session.settings.parts - 1, _micro_batch_starts(recording)
    occurrences = tuple(
        Occurrence(
            operation=one.operation,
            phase=phase,
            part=min(bisect.bisect_right(starts, index), last_part),
            module=one.module,
            source=one.source,
        )
        for index, (one, phase) in enumerate(zip(recording.occurrences, phases, strict=True))
    )
    storages = tuple(
        Storage(
            num_bytes=life.num_bytes,
            category=life.category or _category(life.born, life.died, phases, recording.backward_starts),
            born=life.born,
            died=life.died,
        )
        for life in recording.lives
    )
    return Trace(
        settings=session.settings,
        operations=tuple(recording.operations),
        occurrences=occurrences,
        storages=storages,
        events=settled(recording.events, storages),
        modules=tuple(session.recorder.modules),
        sources=tuple(session.recorder.lines.names),
        is_fallback=session.is_fallback,
        took_s=took_s,
    )


def _phases(recording: Recording) -> list[Phase]:
    """What neither belongs to a backward pass nor leads to one is the optimiser's."""
    found: list[Phase] = [one.phase for one in recording.occurrences]
    for place in range(len(found) - 1, -1, -1):
        if found[place] == "backward":
            break
        found[place] = "optimizer"
    return found


def _micro_batch_starts(recording: Recording) -> list[int]:
    """Where micro-batches after the first begin: behind the last backward operation of the one before.

    Backward operations alone would not tell: a loss in chunks begins a backward pass of its own for each chunk.
    """
    backward = [index for index, one in enumerate(recording.occurrences) if one.phase == "backward"]
    ends = {bisect.bisect_left(backward, start) for start in recording.micro_batch_starts} - {0}
    return [backward[end - 1] + 1 for end in sorted(ends)]


def _category(born: int, died: int | None, phases: list[Phase], backward_starts: list[int]) -> Category:
    if born < 0:
        return "buffer"
    following = next((start for start in backward_starts if start > born), None)
    if phases[born] == "forward" and following is not None and (died is None or died >= following):
        return "activation"
    return "temporary"
