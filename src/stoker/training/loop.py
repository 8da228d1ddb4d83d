"""The training loop."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

from stoker.errors import RunFailed, StokerError
from stoker.jobs.extent import Extent
from stoker.loading import BatchSource, Samples
from stoker.records import Position
from stoker.stepping import Step
from stoker.training.checkpoints import Checkpointer, Written
from stoker.training.evaluation import evaluate, evaluation_batch, is_better
from stoker.training.interrupts import StopRequest
from stoker.training.telemetry import Telemetry
from stoker.units import Duration


@dataclass
class Best:
    """The best evaluation so far of the measure `name`."""

    name: str
    value: float | None = None
    samples: int = 0
    lower_is_better: bool = False


@dataclass
class Loop:
    """Everything the loop needs, made ready elsewhere."""

    step: Step
    source: BatchSource
    extent: Extent
    total_updates: int
    valid: Samples | None
    evaluate_every: Duration
    best: Best
    checkpointer: Checkpointer
    telemetry: Telemetry
    stop: StopRequest

    def run(self, position: Position) -> Position:
        """Train from `position` to the end, or until asked to stop; the state is saved at the point returned.

        Raises:
            RunFailed: a loss is not finite, a worker died, or a checkpoint cannot be written.
        """
        try:
            position = self._train(position)
        except BaseException:
            with contextlib.suppress(StokerError):  # the first error is the one to tell
                self._announce(self.checkpointer.close())
            raise
        self._announce(self.checkpointer.close())
        return position

    def _train(self, position: Position) -> Position:
        telemetry, total = self.telemetry, self.extent.position(self.total_updates).samples
        next_save_s = telemetry.wall_s + self.step.plan.checkpoint_every_s
        for batch in self.source.batches(position, self.total_updates):
            telemetry.lap("data")
            before = position
            loss = self.step.update(batch, before.updates, before.samples / total)
            position = self.extent.position(before.updates + 1)
            if telemetry.updated(loss, batch.size) or position.updates == 1:
                self._report_progress(position)
            is_last = position.updates == self.total_updates
            is_stopping = self.stop.reason is not None
            is_best = self._evaluate_if_due(before, position, is_last=is_last)
            if is_best or is_last or is_stopping or telemetry.wall_s >= next_save_s:
                self._save(position, is_best=is_best)
                next_save_s = telemetry.wall_s + self.step.plan.checkpoint_every_s
            self._announce(self.checkpointer.collect())
            if is_stopping:
                break
        if telemetry.has_news:
            self._report_progress(position)
        return position

    def _report_progress(self, position: Position) -> None:
        loss = self.telemetry.progress(position, float(self.step.optimizer.param_groups[0]["lr"]))
        if not math.isfinite(loss):  # on a GPU, where updates do not wait to be looked at
            raise RunFailed(
                f"the loss is {loss} after {position.samples} samples",
                remedy="Lower the learning rate or set clip_norm; the last checkpoint is intact.",
            )

    def _evaluate_if_due(self, before: Position, position: Position, *, is_last: bool) -> bool:
        """Evaluate where an interval ends; whether this was the best so far."""
        if self.valid is None or not (is_last or evaluation_is_due(self.evaluate_every, self.extent, before, position)):
            return False
        if self.telemetry.has_news:
            self._report_progress(position)
        metrics = evaluate(self.step, self.valid, evaluation_batch(self.step))
        is_best = is_better(self.best.name, metrics[self.best.name], self.best.value, lower=self.best.lower_is_better)
        if is_best:
            self.best.value, self.best.samples = metrics[self.best.name], position.samples
        took_s = self.telemetry.lap("evaluation")
        self.telemetry.evaluated(took_s)
        self.telemetry.emit(
            "evaluated", split="valid", samples=position.samples, metrics=dict(metrics), took_s=took_s, best=is_best
        )
        return is_best

    def _save(self, position: Position, *, is_best: bool) -> None:
        progress = {
            "wall_s": self.telemetry.wall_s,
            "best": {"name": self.best.name, "value": self.best.value, "samples": self.best.samples},
        }
        self._announce(self.checkpointer.save(self.step, position, progress, best=is_best))
        self.telemetry.lap("checkpoint")

    def _announce(self, written: list[Written]) -> None:
        for one in written:
            self.telemetry.emit(
                "checkpointed", samples=one.position.samples, bytes=one.num_bytes, blocked_s=one.blocked_s,
                write_s=one.write_s, path=str(one.path), best=one.best,
            )  # fmt: skip


def evaluation_is_due(every: Duration, extent: Extent, before: Position, after: Position) -> bool:
    """Whether an interval of `every` ends between two positions."""
    return extent.intervals(every, before) < extent.intervals(every, after)
