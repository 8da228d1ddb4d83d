"""Recovery of an update that fails: memory runs out, or a number is not finite.

What: an update is atomic. Where memory runs out before the weights move, the same update is repeated, from the buffers
and generators it began with (`UpdateSnapshot`), at the next smaller legal micro-batch. Where weights have begun to
move, training goes back to the last checkpoint. A number that is not finite: what `Job(on_non_finite=…)` asks for.
Use when: always. Costs: half a microsecond an update for a model without buffers; 17 µs for the 24 buffers of eight
batch norms; the copy of large buffers that change. Reading Python's and NumPy's generators takes 40 µs: for a model
that has not drawn from them, every 256 updates only. If it has begun to draw since, training goes back to the last
checkpoint. PyTorch's are seeded before each micro-batch.
Does not combine with: coupled samples that must stay whole (no smaller micro-batch is legal, and the error says so);
state that is no buffer (a generator of the model's own; a plain attribute, unless a plan that is tried fails); large
buffers written past PyTorch's version counter (`.data`). A process that the system kills for want of memory is not
recovered here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from stoker.errors import BadJob, DoesNotFit, RunFailed, first_line
from stoker.loading.batches import Batch
from stoker.loading.order import python_generators, restore_python_generators
from stoker.records import FULL_PRECISIONS, Position, Precision
from stoker.stepping.buffers import Buffers, FrozenWatch
from stoker.stepping.python_state import unchanged
from stoker.stepping.step import Step
from stoker.stepping.step_failures import NotFinite, free_bytes, ran_out_of_memory, reachable_bytes
from stoker.training.non_finite import InData, examine, write_dump
from stoker.training.plan_in_force import Replanned
from stoker.training.telemetry import Emit
from stoker.units import format_bytes

Found = TypeVar("Found")

MOST_SKIPPED = 10
"""More updates skipped in a row than this end the run: such a run no longer learns."""


class ReplanningRequested(Exception):
    """The loop ends so that training goes on under `change.new`."""

    def __init__(self, change: Replanned) -> None:
        super().__init__(change.why)
        self.change = change


class RollBack(ReplanningRequested):
    """Training has to go on from the last checkpoint."""


class ReplanAllRanks(ReplanningRequested):
    """All processes have to go on under the new plan, from where they are."""


class Shortage(NamedTuple):
    """Memory ran out: the first line of the error, and the device's free memory then [bytes], if known."""

    said: str
    free_bytes: int | None


class Recovery:
    """Repeats or skips updates of `step` that fail, where that is possible.

    Args:
        step: the step to train.
        tell: sends events.
        replanned: called with each change of plan, before the update is repeated.
        dumps: directory for reports about numbers that are not finite; None: none is written.
        in_data: the indices of an epoch's samples in the data that the user gave.
    """

    def __init__(
        self,
        step: Step,
        *,
        tell: Emit = lambda kind, **fields: None,  # noqa: ARG005 - sends nothing
        replanned: Callable[[Replanned], None] = lambda _change: None,
        dumps: Path | None = None,
        in_data: InData = lambda indices, _epoch: indices,
    ) -> None:
        self.step = step
        self._tell, self._replanned, self._dumps, self._in_data = tell, replanned, dumps, in_data
        self.compare: Callable[[], object] = lambda: None
        """Finds how samples are coupled, where that is not known, so that smaller micro-batches may be legal."""
        self._before = UpdateSnapshot(step.model, always=step.job.on_non_finite == "skip")
        self._skipped, self._last_skipped = 0, -1

    def keep(self) -> None:
        """Copy what an update changes before the weights; call it before each update."""
        self._before.keep()

    def judge(self, error: Exception, batch: Batch, position: Position) -> Shortage | None:
        """The reaction to `error` in the update at `position`: repeat it in smaller pieces; None: it is skipped.

        Raises:
            Exception: `error` itself, which is neither.
            RunFailed: a number was not finite, and the job does not skip such updates; or too many were skipped.
            RollBack: the state has to come from the last checkpoint.
        """
        if isinstance(error, NotFinite):
            self._not_finite(error, batch, position)
            return None
        if not ran_out_of_memory(error):
            raise error
        return Shortage(first_line(error), free_bytes(self.step.device))

    def repeat(
        self, failure: Shortage | Replanned | None, batch: Batch, position: Position, progress: float
    ) -> torch.Tensor | None:
        """Make the update again, in smaller micro-batches or under the plan of a change; None where it is skipped.

        To be called outside the handler of the error, which keeps the activations alive.

        Raises:
            DoesNotFit: memory ran out, and there is no smaller legal micro-batch.
            RollBack: the state has to come from the last checkpoint.
            ReplanAllRanks: all processes have to go on under another plan.
        """
        while failure is not None:
            is_put_back = not self.step.is_moving and self._before.restore()
            change = failure
            if isinstance(change, Shortage):
                change = self._smaller(batch.size, change, position, is_put_back=is_put_back)
            elif not is_put_back:
                raise RollBack(change)
            self.step.forget_gradients()
            self._replan(change, position)
            is_channels_last = change.new.memory_format == "channels_last"
            batch.pipeline = dataclasses.replace(batch.pipeline, channels_last=is_channels_last)
            try:
                return self.step.update(batch, position.updates, progress)
            except BadJob as problem:
                raise DoesNotFit(f"{change.why}; {problem.message}", remedy=problem.remedy) from problem
            except Exception as error:  # noqa: BLE001 - raised again where it is no shortage of memory
                failure = self.judge(error, batch, position)
        return None

    def drop(self) -> bool:
        """Roll a failed update back; returns whether the state is as it was before the update."""
        self.step.forget_gradients()
        return not self.step.is_moving and self._before.restore()

    def without_weights(self, work: Callable[[], Found], position: Position) -> Found:
        """Result of `work`, such as an evaluation; in smaller micro-batches if memory is short. It changes no weights.

        Raises:
            DoesNotFit: memory ran out, and there is no smaller legal micro-batch.
        """
        while True:
            try:
                return work()
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                shortage = Shortage(first_line(error), free_bytes(self.step.device))
            # No update is under way: nothing has to be rolled back.
            change = self._smaller(self.step.plan.micro_batch, shortage, position, is_put_back=True)
            self._replan(change, position)

    def late(self, problem: NotFinite, position: Position) -> RunFailed | RollBack:
        """The error of a number that is not finite and was noticed after the weights had moved, as on a GPU."""
        return self._verdict(problem, None, position)

    def _smaller(self, size: int, shortage: Shortage, position: Position, *, is_put_back: bool) -> Replanned:
        """The change of plan after `size` samples at once were too many; `is_put_back`: the update was rolled back.

        Raises:
            DoesNotFit: no smaller micro-batch is legal.
            RollBack: the update could not be rolled back.
        """
        step, plan = self.step, self.step.plan
        step.forget_gradients()
        gc.collect()  # activations may refer to each other
        if step.device.type == "cuda":
            torch.cuda.empty_cache()
        largest = min(plan.micro_batch, size)
        if not (sizes := self._legal_below(largest)):
            self.compare()
            sizes = self._legal_below(largest)
        said, free = shortage
        left = "" if free is None else f" with {format_bytes(free)} free"
        where = f"at update {position.updates + 1}{left}: {said}"
        if not sizes:
            raise self._no_smaller(largest, where)
        change = Replanned(
            old=plan,
            new=dataclasses.replace(plan, micro_batch=sizes[0], captured=False),
            why=f"{plan.device} ran out of memory {where}",
            position=position if is_put_back else None,
            is_shortage=True,
            free_bytes=free,
            reachable_bytes=reachable_bytes(step.device),
        )
        if not is_put_back:
            raise RollBack(change)
        return change

    def _legal_below(self, micro_batch: int) -> list[int]:
        """The legal micro-batches below one, largest first [samples]."""
        legal = self.step.coupling.legal_micro_batches(self.step.job.batch_size)
        return [size for size in legal if size < micro_batch]

    def _replan(self, change: Replanned, position: Position) -> None:
        if self.step.world.layout.world_size > 1:
            raise ReplanAllRanks(change)
        self._replanned(change)
        self.step.change_to(change.new)
        change.emit(self._tell, position.samples)

    def _no_smaller(self, size: int, where: str) -> DoesNotFit:
        coupling, plan = self.step.coupling, self.step.plan
        if coupling.group is not None:
            tied = f": samples are coupled in groups of {coupling.group} by {', '.join(coupling.causes)}"
            remedy = "A smaller coupling_group or batch is a change of Job. "
        else:
            tied, remedy = "", ""
        return DoesNotFit(
            f"a micro-batch of {size} ran out of memory on {plan.device} {where}; no smaller one is legal{tied}",
            remedy=f"{remedy}Take a plan that needs less (checkpointed_blocks, bf16), a smaller model or a larger "
            "device; what was saved is intact.",
        )

    def _not_finite(self, problem: NotFinite, batch: Batch, position: Position) -> None:
        """Skip the update, if the job says so.

        Raises:
            RunFailed, RollBack: the job says otherwise.
        """
        is_put_back = not self.step.is_moving and self._before.restore()
        if self.step.job.on_non_finite != "skip" or not is_put_back:
            raise self._verdict(problem, batch, position) from problem
        self.step.forget_gradients()
        self._skipped = self._skipped + 1 if self._last_skipped == position.updates - 1 else 1
        self._last_skipped = position.updates
        if self._skipped > MOST_SKIPPED:
            raise RunFailed(
                f"{self._skipped} updates in a row were not finite, up to update {position.updates + 1}: "
                f"{problem.message}",
                remedy="The last checkpoint is intact. Lower the learning rate, set clip_norm, or look at the data.",
            ) from problem
        self._tell(
            "skipped",
            samples=position.samples,
            updates=position.updates,
            why=problem.message,
            in_a_row=self._skipped,
            indices=self._in_data(batch.indices, batch.epoch).tolist(),
        )

    def _verdict(self, problem: NotFinite, batch: Batch | None, position: Position) -> RunFailed | RollBack:
        """The error that ends the run, or rolls it back; a report of the number is written."""
        report = examine(self.step, problem, batch, position, self._in_data)
        if batch is not None:
            self._before.restore()
        self.step.forget_gradients()
        path = write_dump(self._dumps, report, position)
        why = problem.message if report.first is None else f"{problem.message}; the first was {report.first}"
        job, plan = self.step.job, self.step.plan
        if job.on_non_finite == "roll_back" and (plan.precision not in FULL_PRECISIONS or plan.compile):
            full: Precision = "fp64" if plan.precision == "fp64" else "fp32"
            new = dataclasses.replace(plan, precision=full, compile=False, captured=False)
            return RollBack(Replanned(old=plan, new=new, why=why))
        if job.on_non_finite == "roll_back":
            why += f"; this was in {plan.precision} already: from the last checkpoint it would come to the same again"
        where = "" if path is None else f" What was found is in {path}."
        remedy = _NOTHING_COUNTED if report.counts_nothing else problem.remedy
        return RunFailed(why, remedy=f"{remedy or ''}{where}".strip() or None)


_NOTHING_COUNTED = (
    "Leave samples without a valid target out of the data, or take larger batches, so that each has one; "
    'on_non_finite="skip" leaves such updates out.'
)
"""What to do about a batch whose loss is divided by zero targets; the learning rate has nothing to do with it."""

_LOOK_EVERY = 256
"""Updates between two readings of generators that nothing has drawn from."""


class UpdateSnapshot:
    """A model's buffers, frozen parameters that passes change, and the global generators as they were before an update.

    Weights change last. `always`: generators are copied before each update, since one that fails is skipped and not
    made again.
    """

    def __init__(self, model: nn.Module, *, always: bool = False) -> None:
        self._buffers = Buffers(model)
        self._frozen = FrozenWatch(model)
        self._generators = Generators(always=always)

    def keep(self) -> None:
        """Copy the present state."""
        self._frozen.look()
        if self._buffers.are_there:
            self._buffers.keep()
        self._generators.keep()

    def restore(self) -> bool:
        """Put the copy back; returns whether all of it could be."""
        are_back = self._generators.restore() and not self._frozen.has_unkept()
        return self._buffers.restore() and are_back


@contextlib.contextmanager
def nothing_changed(step: Step) -> Iterator[None]:
    """Restores buffers, generators and plain Python values of a step's model and loss at the end."""
    snapshot = UpdateSnapshot(step.model)
    snapshot.keep()
    with unchanged(step.model, step.objective.loss_object), torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            snapshot.restore()


class Generators:
    """Python's and NumPy's global generators as they were."""

    def __init__(self, *, always: bool = False) -> None:
        self._kept: tuple[object, ...] | None = None
        self._are_drawn, self._is_present = always, False
        self._times = 0

    def keep(self) -> None:
        """Copy their states: each time if something draws from them, else every 256 updates."""
        self._times += 1
        self._is_present = self._are_drawn or self._times <= 2 or self._times % _LOOK_EVERY == 0
        if not self._is_present:
            return
        before = self._kept
        self._kept = python_generators()
        self._are_drawn = self._are_drawn or (before is not None and before != self._kept)

    def restore(self) -> bool:
        """Put the copies back; returns whether that was possible.

        If something drew from them after an older copy, how far they were before the last update is not known.
        """
        if self._kept is None or not self._is_present:
            return self._kept is None or self._kept == python_generators()
        restore_python_generators(self._kept)
        return True
