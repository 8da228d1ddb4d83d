"""The training loop."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker.devices.failure_rates import checkpoint_interval_s
from stoker.jobs.extent import Extent
from stoker.loading.batches import BatchSource
from stoker.loading.samples import Samples, reads_repeated
from stoker.loading.workers import WorkerDeath
from stoker.records import Position
from stoker.records.codec import JSON
from stoker.records.progress import by_measure
from stoker.stepping.step import Step
from stoker.stepping.step_failures import NotFinite, evaluating
from stoker.stepping.weight_averaging import EqualAverage
from stoker.training.averaged_weights import average_is_due, renew_statistics, require_renewable
from stoker.training.checkpoints import Checkpointer, Written, kept_at
from stoker.training.evaluation import evaluate, evaluation_batch, is_better
from stoker.training.hooks import Update
from stoker.training.recovery import Recovery
from stoker.training.run_control import RunControl, metric_value
from stoker.training.signals import StopRequest
from stoker.training.telemetry import SpikeDetector, Telemetry
from stoker.training.threads import ThreadKeeper
from stoker.training.watchdog import Watchdog
from stoker.units import Duration

if TYPE_CHECKING:
    import torch


class RendezvousRequested(Exception):
    """Asks whoever made the loop to meet the other processes anew: one of them waits to be let in."""


def _never_called() -> bool:
    return False


@dataclass
class Best:
    """The best evaluation so far of the measure `name`."""

    name: str
    value: float | None = None
    samples: int = 0
    lower_is_better: bool = False


@dataclass
class Loop:
    """Everything the loop needs, made ready elsewhere.

    `is_called` says whether a process waits to be let in. `unevaluated` is where the last update began, if what was due
    after it did not come to an end. `unsaved_s` is how long ago the run's last checkpoint was saved, whichever
    processes trained since [s]. `held_out` are the validation sets by split.
    """

    step: Step
    source: BatchSource
    extent: Extent
    total_updates: int
    held_out: Mapping[str, Samples]
    evaluate_every: Duration
    best: Best
    checkpointer: Checkpointer
    telemetry: Telemetry
    stop: StopRequest
    recovery: Recovery | None = None
    watchdog: Watchdog | None = None
    spikes: SpikeDetector = field(default_factory=SpikeDetector)
    reached: Position = field(default_factory=Position, init=False)
    """How far it is, also after an error."""
    threads: ThreadKeeper | None = None
    is_called: Callable[[], bool] = _never_called
    unevaluated: Position | None = None
    unsaved_s: float = 0.0
    save_every_s: float = math.nan
    """Time between checkpoints [s]: the plan's, until saving was measured."""
    course: RunControl = field(default_factory=RunControl)
    """What evaluations have decided about the rate and the end."""
    losses: tuple[float | None, float | None] = (None, None)
    """The first update's, where this process made it, and the mean since the last but one progress event."""
    on_update: Callable[[Update], None] | None = None
    """Who looks on at every update."""
    keep_every: Duration | None = None
    """How often weights are kept for good."""
    _least_blocked_s: float = field(default=math.inf, init=False)
    _least_write_s: float = field(default=math.inf, init=False)
    _is_told_not_compiled: bool = field(default=False, init=False)
    _num_told_repeated: int = field(default_factory=lambda: reads_repeated()[0], init=False)

    def run(self, position: Position) -> Position:
        """Train from `position` to the end, or until asked to stop; the state is saved at the point returned.

        Raises:
            RunFailed: a loss is not finite, workers died over the same batch, training hangs, or a checkpoint cannot
                be written.
            DoesNotFit: memory ran out, and there is no smaller legal micro-batch.
            RollBack: training has to go on from the last checkpoint.
            Called: the processes have to meet anew; the update before is complete.
        """
        recovery = self.recovery or Recovery(self.step, tell=self.telemetry.emit)
        self.reached, self.step.rate_factor = position, self.course.rate_factor
        require_renewable(self.step, self.source)
        self.source.watch.tell = self._tell_replaced
        if self.threads is not None:
            self.threads.start(position)
        try:
            with self.watchdog or contextlib.nullcontext():
                position = self._train(position, recovery)
                self._announce(self.checkpointer.close())
        except NotFinite as problem:  # noticed late, as on a GPU
            self._close()
            raise recovery.late(problem, self.reached) from problem
        except BaseException:
            self._close()
            raise
        return position

    def _close(self) -> None:
        """After an error, which is the one to tell; other processes may be gone."""
        self._announce(self.checkpointer.abandon())

    def _train(self, position: Position, recovery: Recovery) -> Position:
        telemetry, total = self.telemetry, self.extent.position(self.total_updates).samples
        saved_s, is_first = telemetry.wall_s - self.unsaved_s, self.step.world.is_first
        if math.isnan(self.save_every_s):
            self.save_every_s = self.step.plan.checkpoint_every_s
        self._make_up(position, recovery)
        end = self.total_updates if self.course.verdict is None else position.updates
        for batch in self.source.batches(position, end):
            telemetry.lap("data")
            before = position
            self.step.looks_at_norm = telemetry.is_nearly_due or before.updates == 0 or self.on_update is not None
            loss = recovery.update(batch, before, before.samples / total)
            self.reached = position = self.extent.position(before.updates + 1)
            self.unevaluated = before
            self._average_if_due(before, position)
            is_due = telemetry.skipped() if loss is None else telemetry.updated(loss, batch.whole_size)
            if self.on_update is not None and loss is not None:
                self.on_update(self._as_seen(loss, batch.whole_size, position))
            if is_due or (position.updates == 1 and loss is not None):
                self._report_progress(position)
            is_last = position.updates == self.total_updates
            if is_last:
                self.step.settle()
            is_stopping = self._agreed("stop", mine=self.stop.reason is not None)
            is_best = self._evaluate_if_due(before, position, recovery, is_last=is_last)
            is_over = is_last or self._ends_early()
            is_due = self._agreed("save", mine=is_first and telemetry.wall_s - saved_s >= self.save_every_s)
            keeps = self._keeps(before, position)
            if is_best or is_over or is_stopping or is_due or keeps:
                self._save(position, is_best=is_best, keeps=keeps)
                saved_s = telemetry.wall_s
            self.unevaluated = None
            self._announce(self.checkpointer.collect())
            if is_stopping or (is_over and not is_last):  # the last batch's source comes to its own end
                break
            if self._agreed("meet", mine=self.is_called()) and not is_last:
                self._keep_for_the_next_meeting(position)
                raise RendezvousRequested
        if telemetry.has_news:
            self._report_progress(position)
        return position

    def is_between_updates(self) -> bool:
        """After an error: whether the state is that after some update; one that came to nothing is put back.

        Where a site's exchange failed, its update before that is made: it counts, and what is due after it is not done.
        """
        outer = self.step.outer
        if outer is not None and outer.shared.update == self.reached.updates:
            self.unevaluated, self.reached = self.reached, self.extent.position(self.reached.updates + 1)
        return self.unevaluated is not None or (self.recovery is not None and self.recovery.drop())

    def is_complete(self, position: Position) -> bool:
        """Whether nothing is left to train: the end is reached, or it came before its time."""
        return position.updates == self.total_updates or self.course.verdict is not None

    def _ends_early(self) -> bool:
        """Whether the run ends here, before its time."""
        if self.course.verdict is None:
            return False
        self.step.settle()
        return True

    def _average_if_due(self, before: Position, position: Position) -> None:
        """Take the weights into their equal-weight average, where the job says so."""
        average, settings = self.step.average, self.step.job.swa
        if not isinstance(average, EqualAverage) or settings is None:
            return
        if average_is_due(settings, self.extent, self.total_updates, before, position):
            average.take()

    def _agreed(self, signal: str, *, mine: bool) -> bool:
        """Whether this process wants it; among several, whether any did when the last update was made."""
        world = self.step.world
        if world.layout.world_size == 1:
            return mine
        is_heard = world.signals.heard(signal)
        world.signals.tell(signal, value=mine and not is_heard)  # what is done now need not be asked for again
        return is_heard

    def _keep_for_the_next_meeting(self, position: Position) -> None:
        """Save a state that no single process holds; where each does, it carries it over itself."""
        if not self.step.plan.layout.is_replicated:
            self._save(position, is_best=False)
            self._announce(self.checkpointer.collect(wait=True))

    def _make_up(self, position: Position, recovery: Recovery) -> None:
        """Do what was due after the update that led here, and did not come to an end."""
        if self.unevaluated is not None:
            is_last = position.updates == self.total_updates
            if is_last:
                self.step.settle()
            is_best = self._evaluate_if_due(self.unevaluated, position, recovery, is_last=is_last)
            keeps = self._keeps(self.unevaluated, position)
            if is_best or is_last or self._ends_early() or keeps:
                self._save(position, is_best=is_best, keeps=keeps)
        self.unevaluated = None

    def _report_progress(self, position: Position) -> None:
        rates = [float(group["lr"]) for group in self.step.optimizer.param_groups]
        loss = self.telemetry.progress(position, rates[0], self._beside(rates))
        self.losses = (loss if position.updates == 1 else self.losses[0], loss)
        if not math.isfinite(loss):  # on a GPU, where updates do not wait to be looked at
            raise NotFinite(
                f"the loss is {loss} after {position.samples} samples",
                remedy="Lower the learning rate or set clip_norm; the last checkpoint is intact.",
            )
        if (spike := self.spikes.look(loss)) is not None:
            self.telemetry.emit("warned", message=f"at {position.samples} samples {spike}", samples=position.samples)
        if self.threads is not None:
            self.threads.look(self.telemetry.samples_per_s, position)
        self._tell_not_compiled()
        self._tell_reads_repeated()

    def _as_seen(self, loss: torch.Tensor, batch: int, position: Position) -> Update:
        """An update in numbers; on a GPU it is waited for."""
        norm, rate = self.step.gradient_norm, float(self.step.optimizer.param_groups[0]["lr"])
        return Update(
            samples=position.samples, updates=position.updates, epoch=position.epoch, batch=batch, loss=float(loss),
            lr=rate, grad_norm=None if norm is None else float(norm), wall_s=self.telemetry.wall_s,
        )  # fmt: skip

    def _beside(self, rates: list[float]) -> dict[str, JSON]:
        """What else a progress event says: the gradient's norm in the last update, rates where there are several."""
        norm, self.step.gradient_norm = self.step.gradient_norm, None
        found: dict[str, JSON] = {} if norm is None else {"grad_norm": float(norm)}
        return found if len(set(rates)) == 1 else found | {"lrs": list(rates)}

    def _tell_not_compiled(self) -> None:
        """Say once that a compiled plan's model runs uncompiled after all, and why."""
        compilation = self.step.compilation
        if compilation is not None and compilation.problem is not None and not self._is_told_not_compiled:
            self._is_told_not_compiled = True
            self.telemetry.emit("warned", message=compilation.problem)

    def _tell_reads_repeated(self) -> None:
        """Say how often data were read again since that was last said, because a network disk had failed."""
        number, code = reads_repeated()
        if number > self._num_told_repeated:
            why = f"{number - self._num_told_repeated} reads failed and were repeated ({os.strerror(code)})"
            self._num_told_repeated = number
            self.telemetry.emit("recovered", samples=self.reached.samples, what="reading data", why=why)

    def _tell_replaced(self, death: WorkerDeath) -> None:
        self.telemetry.emit("recovered", samples=self.reached.samples, what="loader worker", why=death.why)

    def _evaluate_if_due(self, before: Position, position: Position, recovery: Recovery, *, is_last: bool) -> bool:
        """Evaluate where an interval ends; whether this was the best so far."""
        is_due = is_last or evaluation_is_due(self.evaluate_every, self.extent, before, position)
        if is_due or self._keeps(before, position):
            recovery.without_weights(lambda: renew_statistics(self.step, self.source), position)
        if not (self.held_out and is_due):
            return False
        if self.telemetry.has_news:
            self._report_progress(position)
        evaluated, took_s = dict[str, dict[str, float]](), dict[str, float]()
        for split, samples in self.held_out.items():
            with evaluating(split):
                evaluated[split] = recovery.without_weights(functools.partial(self._evaluated, samples), position)
            took_s[split] = self.telemetry.lap("evaluation")
        metrics = by_measure(evaluated)
        value = metric_value(metrics, self.best.name)
        is_best = is_better(self.best.name, value, self.best.value, lower=self.best.lower_is_better)
        if is_best:
            self.best.value, self.best.samples = value, position.samples
        decided = self.course.judge(metrics, position, self.extent)
        self.step.rate_factor = self.course.rate_factor
        self.telemetry.evaluated(sum(took_s.values()))
        first, last = next(iter(evaluated)), next(reversed(evaluated))
        chooses = next((split for split in evaluated if f"valid/{self.best.name}".startswith(f"{split}/")), first)
        for split in evaluated:
            self.telemetry.emit(
                "evaluated", split=split, samples=position.samples, metrics=dict(evaluated[split]),
                took_s=took_s[split], best=is_best and split == chooses,
                **({} if decided is None or split != last else {"decided": decided}),
                **({} if split == last else {"more": True}),
            )  # fmt: skip
        return is_best

    def _evaluated(self, samples: Samples) -> dict[str, float]:
        return evaluate(self.step, samples, evaluation_batch(self.step), self.telemetry.beat)

    def _keeps(self, before: Position, position: Position) -> bool:
        """Whether weights are kept for good between these two updates."""
        return self.keep_every is not None and evaluation_is_due(self.keep_every, self.extent, before, position)

    def progress(self) -> dict[str, JSON]:
        """What is kept with a state besides the state itself."""
        course, average = self.course.state(), self.step.average
        return {
            "wall_s": self.telemetry.wall_s,
            "best": {"name": self.best.name, "value": self.best.value, "samples": self.best.samples},
            **({} if self.step.plan.device_mtbf_h is None else {"save_every_s": self.save_every_s}),
            **self.source.reader.kept(),
            **({"course": course} if course else {}),
            **({"averaged": average.count} if isinstance(average, EqualAverage) else {}),
        }

    def _save(self, position: Position, *, is_best: bool, keeps: bool = False) -> None:
        self.step.check()
        kept = kept_at(self.extent, position) if keeps else None
        self._announce(self.checkpointer.save(self.step, position, self.progress(), best=is_best, kept=kept))
        if keeps and self.step.world.layout.world_size > 1:
            # A process lost while this is written would take the checkpoint with it, and the others go on without.
            self._announce(self.checkpointer.collect(wait=True))
        self.telemetry.lap("checkpoint")

    def _announce(self, written: list[Written]) -> None:
        plan = self.step.plan
        if written and plan.device_mtbf_h is not None:
            # The least so far: one checkpoint that met a busy disk must not put off the next for long.
            self._least_blocked_s = min(self._least_blocked_s, *(one.blocked_s for one in written))
            self._least_write_s = min(self._least_write_s, *(one.write_s for one in written))
            mtbf_s = 3600 * plan.device_mtbf_h / plan.layout.world_size
            self.save_every_s = checkpoint_interval_s(self._least_blocked_s, self._least_write_s, mtbf_s)
        for one in written:
            self.telemetry.emit(
                "checkpointed", samples=one.position.samples, bytes=one.num_bytes, blocked_s=one.blocked_s,
                write_s=one.write_s, path=str(one.path), best=one.best,
            )  # fmt: skip


def evaluation_is_due(every: Duration, extent: Extent, before: Position, after: Position) -> bool:
    """Whether an interval of `every` ends between two positions."""
    return extent.intervals(every, before) < extent.intervals(every, after)
