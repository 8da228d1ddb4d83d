"""Tracing of a training step: it runs twice on fake tensors, and the second run becomes a Trace.

`trace_step` traces any function of a batch. The function and all it reaches are copied with fakes in place of tensors:
the variables it closes over, the globals named by it and the user's own functions, the object it is bound to. The
originals and their memory are not touched.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import dataclasses
import logging
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stoker.errors import BadJob, StokerError
from stoker.loading.fields import map_tensors, tensors_of
from stoker.profiling.tracing.fake_device import MixedDevices, pretending
from stoker.profiling.tracing.fakes import NO_HINTS, FakeAnswers, Fakes, Hints
from stoker.profiling.tracing.operations import SourceLines, is_users_code, tensors_in
from stoker.profiling.tracing.recomputation import kept_shares
from stoker.profiling.tracing.recorder import Recorder
from stoker.profiling.tracing.routing import GROUPED
from stoker.profiling.tracing.storages import Recording
from stoker.profiling.tracing.target_kernels import attention_of, recurrence_of_cudnn, single_kernels_of_cuda
from stoker.records import Category, Phase, Storage, Trace, TraceSettings
from stoker.records.trace import settled


@dataclass(frozen=True)
class TracingSession:
    """A fake device on which operations are recorded."""

    settings: TraceSettings
    device: torch.device
    is_fallback: bool
    fakes: Fakes
    recorder: Recorder
    answers: FakeAnswers
    started: float

    def trace(
        self,
        settings: TraceSettings,
        run: Callable[[], object],
        hold: Callable[[], None],
        begin: Callable[[], object] | None = None,
        *,
        has_begun: bool = False,
    ) -> tuple[Trace, Recording]:
        """The trace of a call of `run`, and its recording, which also has the owner of each storage.

        Args:
            settings: those of the session, but for the micro-batch.
            run: the step to trace.
            hold: marks the tensors that live from update to update; called before `run`.
            begin: makes the state that exists after the first update; `run` itself by default.
            has_begun: that state is there, up to what an update of this size makes once, such as a cache.

        Raises:
            BadJob: an operation cannot be traced, or sizes depend on the data.
        """
        self.answers.number = 1
        with self.recorder.following():
            if not has_begun:
                run_traced(self, begin or run)
            recording = self._recorded(run, hold)
            if has_begun and not recording.is_steady:
                recording = dataclasses.replace(self._recorded(run, hold), is_second=True)
            if self.answers.lines_of_numbers:
                self._require_same(recording, run, hold)
        took_s = time.perf_counter() - self.started
        return _trace(recording, settings, self, took_s), recording

    def _recorded(self, run: Callable[[], object], hold: Callable[[], None]) -> Recording:
        hold()
        recording = self.recorder.begin()
        try:
            run_traced(self, run)
        finally:
            self.recorder.end()
        return recording

    def _require_same(self, recording: Recording, run: Callable[[], object], hold: Callable[[], None]) -> None:
        """Raise BadJob if other answers to questions for whole numbers change the operations."""
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
def tracing_session(
    settings: TraceSettings, hints: Hints | None, known: TracingSession | None = None
) -> Iterator[TracingSession]:
    """A fake device for `settings`, on which operations are recorded; afterwards the process is restored.

    `hints` are None where the user has no way to give any. `known` is a session of the same device that goes on.
    """
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        # About fakes, copies and missing libraries; the real step has its own warnings.
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        # PyTorch logs a traceback of an operation that it cannot fake, in addition to the error.
        log = logging.getLogger("torch._subclasses.fake_tensor")
        stack.callback(setattr, log, "disabled", log.disabled)
        log.disabled = True
        pretence = stack.enter_context(pretending(settings, None if known is None else known.fakes.mode))
        if pretence.device.type == "cuda":
            stack.enter_context(attention_of(settings.capability))
            stack.enter_context(recurrence_of_cudnn())
            stack.enter_context(single_kernels_of_cuda())
        if known is not None:
            stack.enter_context(known.recorder).routing.is_assumed = False
            yield dataclasses.replace(known, started=started)
            return
        answers = FakeAnswers(hints)
        recorder = stack.enter_context(Recorder(pretence.device, answers, SourceLines()))
        fakes = Fakes(pretence.mode, pretence.device)
        yield TracingSession(settings, pretence.device, pretence.is_fallback, fakes, recorder, answers, started)


def run_traced(session: TracingSession, run: Callable[[], object]) -> None:
    """Run once.

    Raises:
        BadJob: an operation cannot be traced; the message has the operation and the user's line.
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
        # The first sentence: PyTorch goes on to list every backend.
        reason = next(iter(str(error).splitlines()), "").split(". ")[0]
        raise BadJob(
            f"{operation} at {where} cannot be traced: {type(error).__name__}: {reason}",
            remedy=_REMEDY_DEVICES if isinstance(error, MixedDevices) else _REMEDY,
        ) from error


_REMEDY = (
    "Does the step run on real tensors? If it does: an operation of your own needs a fake implementation "
    "(torch.library.register_fake), and values must not be read on the way (.numpy(), .tolist())."
)

_REMEDY_DEVICES = "Make the tensor where the others are, such as torch.arange(n, device=x.device), or as a buffer."


def _executed(recording: Recording) -> list[object]:
    return [recording.operations[occurrence.operation] for occurrence in recording.occurrences]


def _trace(recording: Recording, settings: TraceSettings, session: TracingSession, took_s: float) -> Trace:
    phases: list[Phase] = [occurrence.phase for occurrence in recording.occurrences]
    for index in range(len(phases) - 1, -1, -1):  # all after the last backward pass belongs to the optimiser
        if phases[index] == "backward":
            break
        phases[index] = "optimizer"
    last_part, starts = settings.parts - 1, _micro_batch_starts(recording)
    occurrences = tuple(
        dataclasses.replace(occurrence, phase=phase, part=min(bisect.bisect_right(starts, index), last_part))
        for index, (occurrence, phase) in enumerate(zip(recording.occurrences, phases, strict=True))
    )
    categories = [
        life.category or _category(life.born, life.died, phases, recording.backward_starts) for life in recording.lives
    ]
    shares = _compiled_shares(recording, phases, categories)
    storages = tuple(
        Storage(
            num_bytes=life.num_bytes,
            category=category,
            born=life.born,
            died=life.died,
            compiled_share=share,
        )
        for life, category, share in zip(recording.lives, categories, shares, strict=True)
    )
    return Trace(
        settings=settings,
        operations=tuple(recording.operations),
        occurrences=occurrences,
        storages=storages,
        events=settled(recording.events, storages),
        modules=tuple(session.recorder.modules),
        sources=tuple(session.recorder.lines.names),
        is_fallback=session.is_fallback,
        is_balanced=session.recorder.routing.is_assumed
        or any(operation.name in GROUPED for operation in recording.operations),
        took_s=took_s,
    )


def _compiled_shares(recording: Recording, phases: Sequence[Phase], categories: Sequence[Category]) -> list[float]:
    """Of each storage the share that compiled code keeps; 1 on a CPU."""
    if not recording.calls:
        return [1.0] * len(recording.lives)
    outliving = {index for index, category in enumerate(categories) if category != "temporary"}
    calls = [call for call, phase in zip(recording.calls, phases, strict=True) if phase != "optimizer"]
    return kept_shares(calls, [life.num_bytes if life.born >= 0 else 0 for life in recording.lives], outliving)


def _micro_batch_starts(recording: Recording) -> list[int]:
    """First occurrences of micro-batches after the first: right after the last backward operation of the one before.

    Backward operations alone do not show it: a loss in chunks begins a backward pass for each chunk.
    """
    backward = [index for index, occurrence in enumerate(recording.occurrences) if occurrence.phase == "backward"]
    ends = {bisect.bisect_left(backward, start) for start in recording.micro_batch_starts} - {0}
    return [backward[end - 1] + 1 for end in sorted(ends)]


def _category(born: int, died: int | None, phases: list[Phase], backward_starts: list[int]) -> Category:
    if born < 0:
        return "buffer"
    following = next((start for start in backward_starts if start > born), None)
    if phases[born] == "forward" and following is not None and (died is None or died >= following):
        return "activation"
    return "temporary"


def trace_step(
    step_fn: Callable[[Any], Any], example_batch: Any, settings: TraceSettings, *, hints: Hints = NO_HINTS
) -> Trace:
    """The second of two calls of `step_fn(example_batch)`, as the target of `settings` would execute it.

    Only the target and the number of parts of the settings are used: the batch, the precision and all else are the
    function's own. Nothing is computed, and neither the function's model nor its optimiser changes.

    Args:
        step_fn: one update: forward, backward, optimiser. All its tensors are on the CPU, or on one GPU.
        example_batch: a tensor, or a tuple, list or dict of tensors, of the shapes of every batch.
        settings: the target.
        hints: sizes that depend on the data, by the user's line.

    Raises:
        BadJob: the step cannot be traced, or sizes depend on the data.
    """
    with tracing_session(settings, hints) as traced:
        reached = _Reached(traced.fakes)
        step = reached.function(step_fn)
        batch = map_tensors(example_batch, traced.fakes.of)
        for name, module in reached.modules.items():  # a single model's modules need no prefix
            traced.recorder.name_modules(module, "" if len(reached.modules) == 1 else name)
        trace, _ = traced.trace(settings, lambda: step(batch), lambda: _hold(reached, batch, traced))
    return trace


class _Reached:
    """Copies, with fakes for tensors, of everything a function reaches; each thing once."""

    def __init__(self, fakes: Fakes) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.tensors: list[torch.Tensor] = []
        self._fakes = fakes
        self._copied: dict[int, Any] = {}  # the memo of all deep copies: things shared between them stay shared
        self._functions: dict[int, Any] = {}
        self._globals: dict[int, dict[str, Any]] = {}

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` over copies."""
        if isinstance(function, types.MethodType):
            return types.MethodType(self._code(function.__func__), self._holder(function.__self__))
        if isinstance(function, types.FunctionType):
            return self._code(function)  # type: ignore[no-any-return]
        if isinstance(function, nn.Module):
            return self.value("step", function)  # type: ignore[no-any-return]
        return types.MethodType(self._code(type(function).__call__), self._holder(function))

    def value(self, name: str, value: Any) -> Any:
        """A copy of `value` if it holds tensors, else itself; `name` is the variable it was found in."""
        if isinstance(value, types.FunctionType | types.MethodType) and is_users_code(value.__code__):
            return self.function(value)
        if isinstance(value, torch.Tensor):
            self.tensors.append(self._fakes.of(value))
            return self.tensors[-1]
        if type(value) is dict:
            return {key: self.value(f"{name}.{key}", item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.value(f"{name}.{place}", item) for place, item in enumerate(value))
        if not isinstance(value, _HOLDERS):
            return value
        try:
            with self._fakes.copying():
                copied = copy.deepcopy(value, self._copied)
        except (TypeError, RuntimeError) as error:
            raise BadJob(
                f"`{name}`, a {type(value).__name__} that the step uses, cannot be copied: {error}",
                remedy="Keep locks, files and generators out of it, or hand the step a fresh one.",
            ) from error
        if isinstance(copied, nn.Module):
            self.modules.setdefault(name, copied)
        if isinstance(copied, torch.optim.Optimizer) and not any(copied is known for known in self.optimizers):
            self.optimizers.append(copied)
        return copied

    def _holder(self, holder: Any) -> Any:
        """The object a method is bound to, with copies of its attributes."""
        if isinstance(holder, _HOLDERS):
            return self.value("self", holder)
        copied = copy.copy(holder)
        for key, value in vars(holder).items():
            vars(copied)[key] = self.value(key, value)
        return copied

    def _code(self, function: Any) -> Any:
        if not isinstance(function, types.FunctionType) or id(function) in self._functions:
            return self._functions.get(id(function), function)
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        own_globals = self._globals.setdefault(id(function.__globals__), dict(function.__globals__))
        copied = types.FunctionType(function.__code__, own_globals, function.__name__, function.__defaults__, cells)
        self._functions[id(function)] = copied  # before its globals and cells, which may refer to itself
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__defaults__ = self.value("defaults", function.__defaults__)
        names = _names_in(function.__code__)
        for name in names & function.__globals__.keys():
            copied.__globals__[name] = self.value(name, function.__globals__[name])
        for name, cell, original in zip(function.__code__.co_freevars, cells, function.__closure__ or (), strict=True):
            try:
                contents = original.cell_contents
            except ValueError:  # a variable that is assigned later, or never
                continue
            cell.cell_contents = self.value(name, contents)
        return copied


_HOLDERS = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""Objects with tensors that can be copied as a whole."""


def _names_in(code: types.CodeType) -> set[str]:
    """Global names that the code and the functions defined in it may use."""
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _hold(reached: _Reached, batch: Any, traced: TracingSession) -> None:
    """Mark the tensors that live from update to update."""
    hold = traced.recorder.storages.hold
    for tensor in tensors_of(batch):
        hold(tensor, "input")
    for optimizer in reached.optimizers:
        for values in optimizer.state.values():
            for value in tensors_in(values.values() if isinstance(values, dict) else ()):
                hold(value, "optimizer state")
    for tensor in reached.tensors:
        hold(tensor, "buffer")
    for module in reached.modules.values():
        for name, buffer in module.named_buffers():
            hold(buffer, "buffer", name.rpartition(".")[0])
        for name, parameter in module.named_parameters():
            hold(parameter, "parameter", name.rpartition(".")[0])
            if parameter.grad is not None:
                hold(parameter.grad, "gradient", name.rpartition(".")[0])
