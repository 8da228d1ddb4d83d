"""The training loop: updates, progress, evaluations, checkpoints, and when a run ends."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field

import torch

from stoker.activity import doing
from stoker.devices.hardware import checkpoint_interval_s
from stoker.jobs.averages import SWA
from stoker.jobs.run_length import Extent
from stoker.jobs.schedules import length_in_updates
from stoker.loading.batches import Batch, BatchSource
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
from stoker.training.evaluation import evaluate, is_better
from stoker.training.hooks import Update
from stoker.training.plan_in_force import PlanInForce, Replanned
from stoker.training.plan_trials import PlanTrials
from stoker.training.recovery import Recovery, Shortage
from stoker.training.run_control import RunControl, metric_value
from stoker.training.signals import StopRequest
from stoker.training.slices import SLICE_OVER, Slice
from stoker.training.telemetry import SpikeDetector, Telemetry
from stoker.training.threads import ThreadKeeper
from stoker.training.watchdog import Watchdog
from stoker.units import Duration

_NOTHING = contextlib.nullcontext()


class RendezvousRequested(Exception):
    """The loop ends so that the processes form a new generation: another process waits to join."""


@dataclass
class Best:
    """The best evaluation so far of the measure `name`."""

    name: str
    value: float | None = None
    samples: int = 0
    lower_is_better: bool = False


@dataclass
class Loop:
    """The training loop and all it works with; `stoker.training.session` builds it.

    `is_called` returns whether a process waits to join. `unevaluated` is the position before the last update, if what
    was due after that update did not complete. `unsaved_s` is the time since the run's last checkpoint [s]. `held_out`
    are the validation sets by split.
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
    recovery: Recovery
    watchdog: Watchdog | None = None
    trials: PlanTrials | None = None
    """Tries plans on the run's updates, where the choice is not settled."""
    plans: PlanInForce | None = None
    """The plan in force; None for a loop that keeps the one that its step was made with."""
    spikes: SpikeDetector = field(default_factory=SpikeDetector)
    reached: Position = field(default_factory=Position, init=False)
    """Position of the last complete update, also after an error."""
    threads: ThreadKeeper | None = None
    is_called: Callable[[], bool] = lambda: False
    unevaluated: Position | None = None
    unsaved_s: float = 0.0
    save_every_s: float = math.nan
    """Time between checkpoints [s]: the plan's, until saving was measured."""
    course: RunControl = field(default_factory=RunControl)
    """Decisions of evaluations about the learning rate and the end."""
    losses: tuple[float | None, float | None] = (None, None)
    """Loss of the first update, if this process made it, and the last mean loss between two progress events."""
    on_update: Callable[[Update], None] | None = None
    """Sees every update."""
    keep_every: Duration | None = None
    """How often weights are kept for good."""
    saves_first: bool = False
    """Whether the state is saved before the first update: a fork's, whose parent may train on or be deleted."""
    slice: Slice | None = None
    """The time that this process may take, at places that end jobs."""
    until: int | None = None
    """Number of updates after which it saves and ends, in all processes; None: as the job says."""
    saves_at: frozenset[int] = frozenset()
    """Numbers of updates after which it saves as well, in all processes."""
    _least_blocked_s: float = field(default=math.inf, init=False)
    _least_write_s: float = field(default=math.inf, init=False)
    _is_compilation_reported: bool = field(default=False, init=False)
    _is_nan_reported: bool = field(default=False, init=False)
    _num_reported_repeats: int = field(default_factory=lambda: reads_repeated()[0], init=False)

    def run(self, position: Position) -> Position:
        """Train from `position` to the end, or until asked to stop; the state is saved at the position returned.

        Raises:
            RunFailed: a loss is not finite, workers died over the same batch, training hangs, or a checkpoint cannot
                be written.
            DoesNotFit: memory ran out, and there is no smaller legal micro-batch.
            RollBack: training has to go on from the last checkpoint.
            RendezvousRequested: a new generation has to be formed; the last update is complete.
        """
        self.reached, self.step.rate_factor = position, self.course.rate_factor
        if math.isnan(self.save_every_s):
            self.save_every_s = self.step.plan.checkpoint_every_s
        require_renewable(self.step, self.source)
        self.source.watch.tell = self._report_replaced_worker
        if self.threads is not None:
            self.threads.start(position)
        try:
            with self.watchdog or contextlib.nullcontext():
                position = self._train(position)
                with doing("writing the checkpoint to disk"):
                    self._announce(self.checkpointer.close())
        except BaseException as error:
            self._announce(self.checkpointer.abandon())
            if isinstance(error, NotFinite):  # noticed late, as on a GPU
                raise self.recovery.late(error, self.reached) from error
            raise
        return position

    def _train(self, position: Position) -> Position:
        telemetry, total = self.telemetry, self.extent.position(self.total_updates).samples
        saved_s, is_first = telemetry.wall_s - self.unsaved_s, self.step.world.is_first
        self._make_up(position)
        self._keep_to_schedule(position.updates)
        end = self.total_updates if self.course.verdict is None else position.updates
        end = end if self.until is None else min(end, self.until)
        telemetry.lap("other")  # since the session was built; what follows waits for the first batch
        for batch in self._made_singly(position, end, total):
            telemetry.lap("data")
            before = self.reached
            is_long = telemetry.is_nearly_due or before.updates == 0
            self.step.clipping.looks_at_norm = is_long or self.on_update is not None
            with doing("update", of=self.total_updates, step=before.updates + 1) if is_long else _NOTHING:
                loss = self._updated(batch, before, before.samples / total)
            self.reached = position = self.extent.position(before.updates + 1)
            self.unevaluated = before
            self._average_if_due(before, position)
            is_due = telemetry.skipped() if loss is None else telemetry.updated(loss, batch.whole_size)
            if self.trials is not None and loss is not None:
                self.trials.after(position)
            if self.on_update is not None and loss is not None:
                self._show_update(self.on_update, loss, batch.whole_size, position)
            if is_due or (position.updates == 1 and loss is not None):
                self._report_progress(position)
            is_last = position.updates == self.total_updates
            if is_last:
                self.step.settle()
            is_slice_over = self._agreed("slice", mine=self._slice_is_over(before, position))
            if is_slice_over and self.stop.reason is None:
                self.stop.ask(SLICE_OVER)
            is_stopping = self._agreed("stop", mine=self.stop.reason is not None) or is_slice_over
            is_stopping = is_stopping or position.updates == self.until
            is_best = self._evaluate_if_due(before, position, is_last=is_last)
            is_over = is_last or self._ends_early()
            is_due = self._agreed("save", mine=is_first and telemetry.wall_s - saved_s >= self.save_every_s)
            # The same in all processes: signals of others come an update later.
            is_due = is_due or self.save_every_s == 0 or position.updates in self.saves_at
            keeps = self._keeps(before, position)
            if is_best or is_over or is_stopping or is_due or keeps:
                self._save(position, is_best=is_best, keeps=keeps)
                saved_s = telemetry.wall_s
            self.unevaluated = None
            self._announce(self.checkpointer.collect())
            self._keep_to_schedule(position.updates)
            if is_stopping or (is_over and not is_last):  # the last batch's source comes to its own end
                break
            if self._agreed("meet", mine=self.is_called()) and not is_last:
                if not self.step.plan.layout.is_replicated:  # no process carries the whole state over
                    self._save(position, is_best=False)
                    self._announce(self.checkpointer.collect(wait=True))
                raise RendezvousRequested
        if telemetry.has_news:
            self._report_progress(position)
        return position

    def _updated(self, batch: Batch, position: Position, progress: float) -> torch.Tensor | None:
        """Make the update at `position`, again if it fails and can be made; its loss, or None where it is skipped."""
        batch.progress, trials = progress, self.trials
        progress = self._scheduled(position, progress)
        failure: Replanned | Shortage | None = None
        if trials is not None:
            trials.before(batch, position)
        self.recovery.keep()
        try:
            return self.step.update(batch, position.updates, progress)
        except Exception as error:  # noqa: BLE001 - raised again where there is no recovery
            if trials is not None and not self.stop.is_ended:  # a hang ends the process
                failure = trials.leave_out(error, position)
            failure = failure or self.recovery.judge(error, batch, position)
        if isinstance(failure, Replanned) and self.threads is not None:
            self.threads.follow(failure.new)
        return None if failure is None else self.recovery.repeat(failure, batch, position, progress)

    @property
    def _is_choosing(self) -> bool:
        """Whether plans are being tried, or the run's schedule is being replayed."""
        is_replaying = self.plans is not None and self.plans.due < math.inf
        return is_replaying or (self.trials is not None and not self.trials.is_over)

    def hangs(self) -> None:
        """Note that the update under way hangs, where a candidate is being tried."""
        if self.trials is not None:
            self.trials.hangs(self.reached)

    def _keep_to_schedule(self, update: int) -> None:
        """Make update number `update` under the plan that the run's schedule says."""
        if self.plans is None or update < self.plans.due:
            return
        if self.trials is not None and self.trials.is_over:
            self.trials = None
        # A process that goes on alone keeps its GPU; the plan names that of the first one.
        plan = dataclasses.replace(self.plans.at(update), device=self.step.plan.device)
        if plan != self.step.plan:
            self.step.change_to(plan)
        self.source.use(self.step.pipeline(self.source.samples, augmented=True))
        if self.threads is not None:
            self.threads.follow(plan)

    def _made_singly(self, position: Position, end: int, total: int) -> Generator[Batch, None, None]:
        """The batches whose updates are made one by one; others are made here, several in a call, if nothing is due."""
        with contextlib.closing(self.source.batches(position, end)) as batches:
            for batch in batches:
                rest, start = [batch], self.reached.updates
                at_once = self.step.updates_at_once if self.source.samples.is_in_memory else 1
                if at_once > 1 and start > 0 and start % at_once == 0 and self._is_quiet(at_once, end):
                    rest += itertools.islice(batches, at_once - 1)
                    self.telemetry.lap("data")
                    if self.trials is not None:
                        self.trials.before(batch, self.reached)
                    self.recovery.keep()
                    positions = [self.extent.position(start + index) for index in range(at_once)]
                    progresses = [self._scheduled(position, position.samples / total) for position in positions]
                    losses = self.step.updates(rest, start, progresses)
                    if losses:
                        self.telemetry.updated_together(losses, batch.whole_size)
                        self.reached = self.extent.position(start + len(losses))
                        if self.trials is not None:
                            self.trials.after(self.reached, len(losses))
                    del rest[: len(losses)]
                yield from rest

    def _scheduled(self, position: Position, progress: float) -> float:
        """The share of the run before `position` by which the schedule goes: `progress`, of samples, or of updates."""
        updates = length_in_updates(self.step.job.schedule)
        return progress if updates is None else position.updates / updates

    def _is_quiet(self, num_updates: int, end: int) -> bool:
        """Whether nothing but updates is due in so many updates, and in the one after."""
        updates = self.reached.updates + num_updates
        if updates >= end or self.on_update is not None or self.stop.reason is not None or self.telemetry.is_nearly_due:
            return False
        if self._is_choosing and (self.trials is None or not self.trials.takes_together(num_updates)):
            return False
        before, after = self.reached, self.extent.position(updates)
        is_due = evaluation_is_due(self.evaluate_every, self.extent, before, after) or self._keeps(before, after)
        return not (is_due or self.unevaluated is not None)

    def is_between_updates(self) -> bool:
        """After an error: whether the state is one between two updates; a failed update is rolled back.

        Where the exchange between replicas failed, the update before it counts, and what is due after it is still due.
        """
        outer = self.step.outer
        if outer is not None and outer.shared.update == self.reached.updates:
            self.unevaluated, self.reached = self.reached, self.extent.position(self.reached.updates + 1)
        return self.unevaluated is not None or self.recovery.drop()

    def is_complete(self, position: Position) -> bool:
        """Whether nothing is left to train: the run reached its end, or ended early."""
        return position.updates == self.total_updates or self.course.verdict is not None

    def _slice_is_over(self, before: Position, position: Position) -> bool:
        """Whether what comes before the next chance to save has no room left in this process's slice."""
        if self.slice is None:
            return False
        self.slice.trained_from(before.samples)
        # Among several processes a signal takes effect after the next update; replicas with updates of their own hear
        # it at their next exchange.
        sync, is_alone = self.step.job.sync, self.step.world.layout.world_size == 1
        updates = 1 if is_alone else 2 if sync is None else 1 + sync.interval(self.step.job.batch_size)
        after = self.extent.position(min(self.total_updates, position.updates + updates))
        is_due = after.updates == self.total_updates or evaluation_is_due(
            self.evaluate_every, self.extent, position, after
        )
        evaluate_s = (self.telemetry.evaluate_s or self.slice.evaluate_s) if self.held_out and is_due else 0.0
        return self.slice.is_over(updates_s=updates * self.telemetry.next_update_s, evaluate_s=evaluate_s)

    def _ends_early(self) -> bool:
        """Whether the run ends here, early."""
        if self.course.verdict is None:
            return False
        self.step.settle()
        return True

    def _average_if_due(self, before: Position, position: Position) -> None:
        """Take the weights into their equal-weight average (SWA)."""
        average, swa = self.step.average, self.step.job.average
        if not isinstance(average, EqualAverage) or not isinstance(swa, SWA):
            return
        if average_is_due(swa, self.extent, self.total_updates, before, position):
            average.take()

    def _agreed(self, signal: str, *, mine: bool) -> bool:
        """The signal of this process; among several, whether any process had set it before the last update."""
        world = self.step.world
        if world.layout.world_size == 1:
            return mine
        is_set = world.signals.is_set(signal)
        world.signals.send(signal, value=mine and not is_set)  # what is done now is not asked for again
        return is_set

    def tell_overflow(self, update: int, scale: float) -> None:
        """Say that the gradients of an update overflowed, so that it is made again at half the scale of the loss."""
        why = f"gradients of update {update + 1} overflowed fp16 at a loss scale of {scale:g}; again at {scale / 2:g}"
        self.telemetry.emit("recovered", samples=self.reached.samples, what="loss scale", why=why)

    def _make_up(self, position: Position) -> None:
        """Do what was due after the last update and did not complete; save what a fork begins with."""
        if self.saves_first:
            self._save(position, is_best=False)
            self._announce(self.checkpointer.collect(wait=True))
        if self.unevaluated is not None:
            is_last = position.updates == self.total_updates
            if is_last:
                self.step.settle()
            is_best = self._evaluate_if_due(self.unevaluated, position, is_last=is_last)
            keeps = self._keeps(self.unevaluated, position)
            if is_best or is_last or self._ends_early() or keeps:
                self._save(position, is_best=is_best, keeps=keeps)
        self.unevaluated = None

    def _report_progress(self, position: Position) -> None:
        rates = [float(group["lr"]) for group in self.step.optimizer.param_groups]
        norm, self.step.clipping.gradient_norm = self.step.clipping.gradient_norm, None
        more: dict[str, JSON] = {} if norm is None else {"grad_norm": float(norm)}
        if len(set(rates)) > 1:
            more["lrs"] = list(rates)
        if self.trials is not None and not self.trials.is_over:
            more["trying"] = self.step.plan.in_words()
        loss = self.telemetry.progress(position, rates[0], more)
        self.losses = (loss if position.updates == 1 else self.losses[0], loss)
        if not math.isfinite(loss):  # on a GPU, where updates do not wait to be looked at
            raise NotFinite(
                f"the loss is {loss} after {position.samples} samples",
                remedy="Lower the learning rate or set clip_norm; the last checkpoint is intact.",
            )
        if (spike := self.spikes.look(loss)) is not None:
            self.telemetry.emit("warned", message=f"at {position.samples} samples {spike}", samples=position.samples)
        if self.threads is not None and not self._is_choosing:
            self.threads.look(self.telemetry.samples_per_s, position)
        compilation = self.step.compilation
        if compilation is not None and compilation.problem is not None and not self._is_compilation_reported:
            self._is_compilation_reported = True
            self.telemetry.emit("warned", message=compilation.problem)
        num_repeats, code = reads_repeated()  # of reads that failed, as on a network disk
        if num_repeats > self._num_reported_repeats:
            why = f"{num_repeats - self._num_reported_repeats} reads failed and were repeated ({os.strerror(code)})"
            self._num_reported_repeats = num_repeats
            self.telemetry.emit("recovered", samples=self.reached.samples, what="reading data", why=why)

    def _show_update(self, show: Callable[[Update], None], loss: torch.Tensor, batch: int, position: Position) -> None:
        """Pass an update on as numbers; waits for a GPU."""
        norm, rate = self.step.clipping.gradient_norm, float(self.step.optimizer.param_groups[0]["lr"])
        show(
            Update(
                samples=position.samples,
                updates=position.updates,
                epoch=position.epoch,
                batch=batch,
                loss=float(loss),
                lr=rate,
                grad_norm=None if norm is None else float(norm),
                wall_s=self.telemetry.wall_s,
            )
        )

    def _report_replaced_worker(self, death: WorkerDeath) -> None:
        self.telemetry.emit("recovered", samples=self.reached.samples, what="loader worker", why=death.why)

    def _evaluate_if_due(self, before: Position, position: Position, *, is_last: bool) -> bool:
        """Evaluate where an interval ends; True if the result is the best so far."""
        is_due = is_last or evaluation_is_due(self.evaluate_every, self.extent, before, position)
        if is_due or self._keeps(before, position):
            self.recovery.without_weights(lambda: renew_statistics(self.step, self.source), position)
        if not (self.held_out and is_due):
            return False
        if self.telemetry.has_news:
            self._report_progress(position)
        evaluated, took_s = dict[str, dict[str, float]](), dict[str, float]()
        for split, samples in self.held_out.items():
            with evaluating(split):
                work = functools.partial(self._evaluate, samples)
                evaluated[split] = self.recovery.without_weights(work, position)
            took_s[split] = self.telemetry.lap("evaluation")
        metrics = by_measure(evaluated)
        value = metric_value(metrics, self.best.name)
        is_repeated = self.best.samples == position.samples  # a process was lost before its checkpoint was whole
        is_best = is_repeated or is_better(self.best.name, value, self.best.value, lower=self.best.lower_is_better)
        if is_best:
            self.best.value, self.best.samples = value, position.samples
        if math.isnan(value) and not self._is_nan_reported:
            self._is_nan_reported = True
            message = f"{self.best.name} on valid is not a number; until it is one, the last weights count as the best"
            self.telemetry.emit("warned", message=message, samples=position.samples)
        decided = self.course.judge(metrics, position, self.extent)
        self.step.rate_factor = self.course.rate_factor
        self.telemetry.evaluated(sum(took_s.values()))
        if self.slice is not None:
            self.slice.evaluate_s = sum(took_s.values())
        first, last = next(iter(evaluated)), next(reversed(evaluated))
        chooses = next((split for split in evaluated if f"valid/{self.best.name}".startswith(f"{split}/")), first)
        for split in evaluated:
            self.telemetry.emit(
                "evaluated",
                split=split,
                samples=position.samples,
                metrics=dict(evaluated[split]),
                took_s=took_s[split],
                best=is_best and split == chooses,
                **({} if decided is None or split != last else {"decided": decided}),
                **({} if split == last else {"more": True}),
            )
        return is_best

    def _evaluate(self, samples: Samples) -> dict[str, float]:
        size, whole = map(self.extent.evaluated_at_once, (self.step.plan.micro_batch, self.step.job.batch_size))
        return evaluate(self.step, samples, size, self.telemetry.beat, padded_together=whole)

    def _keeps(self, before: Position, position: Position) -> bool:
        """Whether the weights at `position` are kept for good."""
        return self.keep_every is not None and evaluation_is_due(self.keep_every, self.extent, before, position)

    def progress(self) -> dict[str, JSON]:
        """Progress kept with every state: time, best value, decisions, the data reader's place."""
        course, average = self.course.state(), self.step.average
        return {
            "wall_s": self.telemetry.wall_s,
            "best": {"name": self.best.name, "value": self.best.value, "samples": self.best.samples},
            **({} if self.step.plan.device_mtbf_h is None else {"save_every_s": self.save_every_s}),
            **self.source.reader.kept(),
            **({} if self.slice is None else {"save_s": self.slice.save_s, "evaluate_s": self.slice.evaluate_s}),
            **({"course": course} if course else {}),
            **({"averaged": average.count} if isinstance(average, EqualAverage) else {}),
            **({"loss_scale": [*self.step.loss_scale.state()]} if "fp16" in self.step.job.numerics else {}),
        }

    def _save(self, position: Position, *, is_best: bool, keeps: bool = False) -> None:
        with doing("comparing a captured pass with an ordinary one"):
            self.step.check()
        kept = kept_at(self.extent, position) if keeps else None
        self._announce(self.checkpointer.save(self.step, position, self.progress(), best=is_best, kept=kept))
        if (is_best or keeps) and self.step.world.layout.world_size > 1:
            # Else a process lost during the write would take the checkpoint with it, and survivors would have none.
            self._announce(self.checkpointer.collect(wait=True))
        self.telemetry.lap("checkpoint")

    def _announce(self, written: list[Written]) -> None:
        plan = self.step.plan
        if written and plan.device_mtbf_h is not None:
            # The least so far: one checkpoint on a busy disk must not postpone the next for long.
            self._least_blocked_s = min(self._least_blocked_s, *(checkpoint.blocked_s for checkpoint in written))
            self._least_write_s = min(self._least_write_s, *(checkpoint.write_s for checkpoint in written))
            mtbf_s = 3600 * plan.device_mtbf_h / plan.layout.world_size
            self.save_every_s = checkpoint_interval_s(self._least_blocked_s, self._least_write_s, mtbf_s)
        for checkpoint in written:
            if self.slice is not None:
                self.slice.saved(checkpoint.blocked_s + checkpoint.write_s)
            if self.step.outer is not None:
                self.step.outer.saved(checkpoint.position.updates)
            self.telemetry.emit(
                "checkpointed",
                samples=checkpoint.position.samples,
                bytes=checkpoint.num_bytes,
                blocked_s=checkpoint.blocked_s,
                write_s=checkpoint.write_s,
                path=str(checkpoint.path),
                best=checkpoint.best,
            )


def evaluation_is_due(every: Duration, extent: Extent, before: Position, after: Position) -> bool:
    """Whether an interval of `every` ends between two positions."""
    return extent.intervals(every, before) < extent.intervals(every, after)
