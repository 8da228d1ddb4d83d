"""Going on where training breaks: memory runs out, or a number is not finite.

What: an update is atomic. Memory that runs out before the weights move: the same update again, from the buffers and
generators it began with, at the next smaller legal micro-batch. After they began to move: back to the last checkpoint.
A number that is not finite: whatever the Job says. Use when: always. Costs: see `before_update.py`.
Does not combine with: coupled samples that must stay whole (there is no smaller micro-batch then, and the error says
so); a process that the system kills for want of memory hears of nothing.

What an update changes before its weights move, kept so that the update can be redone as if it had not begun.

What: buffers are copied, those of a model in one call; Python's and NumPy's generators are kept as they were (PyTorch's
are seeded before each micro-batch anyway). Weights, optimiser and average are not here: they change last.
Use when: before every update. Costs: half a microsecond for a model without buffers; 17 µs for the 24 buffers of eight
batch norms; for large buffers that change, their copy. Reading Python's and NumPy's generators takes 40 µs, so a model
that is not seen to draw from them has them read every 256 updates only.
Does not combine with: state that is no buffer (a plain attribute, a generator of the model's own), and large buffers
written to past PyTorch's version counter (`.data`).
"""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from stoker.errors import BadJob, DoesNotFit, RunFailed, first_line
from stoker.loading.batches import Batch
from stoker.loading.order import Indices
from stoker.records import FULL_PRECISIONS, EventKind, Plan, Position, Precision, to_json
from stoker.stepping.capture import Buffers
from stoker.stepping.step import Step
from stoker.stepping.step_failures import NotFinite, free_bytes, ran_out_of_memory, reachable_bytes
from stoker.training.non_finite import InData, examine, write_dump
from stoker.units import format_bytes

Found = TypeVar("Found")

MOST_SKIPPED = 10
"""More updates skipped in a row than this end the run: such a run no longer learns."""


class Tell(Protocol):
    """Sends an event."""

    def __call__(self, kind: EventKind, **fields: Any) -> None:
        """Of this kind, with these fields."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replanned:
    """A plan that gave way to another while it ran.

    `free_bytes` is what the device had left when memory ran out, `reachable_bytes` what this process held or could have
    got; both None where memory was not the reason, or nobody knows.
    """

    old: Plan
    new: Plan
    why: str
    free_bytes: int | None = None
    reachable_bytes: int | None = None


class RollBack(Exception):
    """Asks whoever made the loop to make it anew from the last checkpoint, under `change.new`."""

    def __init__(self, change: Replanned) -> None:
        super().__init__(change.why)
        self.change = change


class ReplanAllRanks(Exception):
    """Asks whoever made the loop to let all processes go on under `change.new` from where they are."""

    def __init__(self, change: Replanned) -> None:
        super().__init__(change.why)
        self.change = change


def _silent(kind: EventKind, **fields: Any) -> None:
    """Tell nobody."""
    del kind, fields


def _forget(_change: Replanned) -> None:
    """Keep nothing."""


def _same_indices(indices: Indices, _epoch: int) -> Indices:
    """The samples are the data."""
    return indices


class Recovery:
    """Makes updates of `step`, again where they break.

    Args:
        step: what is trained.
        tell: sends an event.
        replanned: called with each change of plan before the update is redone: where it is written down.
        dumps: directory for what is found out about numbers that are not finite; None: nothing is written.
        in_data: where samples of an epoch lie in the data that the user gave.
    """

    def __init__(
        self,
        step: Step,
        *,
        tell: Tell = _silent,
        replanned: Callable[[Replanned], None] = _forget,
        dumps: Path | None = None,
        in_data: InData = _same_indices,
    ) -> None:
        self.step = step
        self._tell, self._replanned, self._dumps, self._in_data = tell, replanned, dumps, in_data
        self._before = UpdateSnapshot(step.model)
        self._skipped = 0

    def update(self, batch: Batch, position: Position, progress: float) -> torch.Tensor | None:
        """Make the update at `position`; its loss, or None where it was skipped.

        Raises:
            DoesNotFit: memory ran out, and there is no smaller legal micro-batch.
            RunFailed: a number was not finite, and the job does not say to go on; or that happened too often.
            RollBack: the state has to be had from the last checkpoint.
            Together: memory ran out here, and all processes have to go on under another plan.
        """
        self._before.keep()
        change: Replanned | None = None
        while True:
            try:
                loss = self.step.update(batch, position.updates, progress)
            except NotFinite as problem:
                self._not_finite(problem, batch, position)
                return None
            except BadJob as problem:
                if change is None:
                    raise
                raise DoesNotFit(f"{change.why}; {problem.message}", remedy=problem.remedy) from problem
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                said, free = first_line(error), free_bytes(self.step.device)
            else:
                self._skipped = 0
                return loss
            # Out of the handler, whose error holds on to the activations.
            is_put_back = not self.step.is_moving and self._before.restore()
            change = self._smaller(batch.size, said, free, position, is_put_back=is_put_back)
            self._replan(change, position)

    def drop(self) -> bool:
        """Put back what an update that came to nothing has changed; whether the state is as it was before it."""
        self.step.forget_gradients()
        return not self.step.is_moving and self._before.restore()

    def without_weights(self, work: Callable[[], Found], position: Position) -> Found:
        """`work`, such as an evaluation, which changes no weights: smaller micro-batches if memory is short.

        Raises:
            DoesNotFit: memory ran out, and there is no smaller legal micro-batch.
        """
        while True:
            try:
                return work()
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                said, free = first_line(error), free_bytes(self.step.device)
            # The update before it is made: there is nothing to put back.
            change = self._smaller(self.step.plan.micro_batch, said, free, position, is_put_back=True)
            self._replan(change, position)

    def late(self, problem: NotFinite, position: Position) -> RunFailed | RollBack:
        """What to raise where a number that is not finite was noticed after the weights had moved, as on a GPU."""
        return self._verdict(problem, None, position)

    def _smaller(self, size: int, said: str, free: int | None, position: Position, *, is_put_back: bool) -> Replanned:
        """The change of plan after `size` samples at once were too many; `is_put_back`: the state is as it was before.

        Raises:
            DoesNotFit: no smaller micro-batch is legal.
            RollBack: the state is not as it was before.
        """
        step, plan = self.step, self.step.plan
        step.forget_gradients()
        _give_back(step.device)
        sizes = [one for one in step.coupling.legal_micro_batches(step.job.batch) if one < min(plan.micro_batch, size)]
        where = f"at update {position.updates + 1}{_with(free)}: {said}"
        if not sizes:
            raise self._no_smaller(min(plan.micro_batch, size), where)
        change = Replanned(
            old=plan,
            new=dataclasses.replace(plan, micro_batch=sizes[0], captured=False),
            why=f"{plan.device} ran out of memory {where}",
            free_bytes=free,
            reachable_bytes=reachable_bytes(step.device),
        )
        if not is_put_back:
            raise RollBack(change)
        return change

    def _replan(self, change: Replanned, position: Position) -> None:
        if self.step.world.layout.world_size > 1:
            raise ReplanAllRanks(change)
        self._replanned(change)
        self.step.cut_to(change.new.micro_batch)
        emit_replanned(self._tell, change, position.samples)

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
            RunFailed, RollBack: it does not.
        """
        is_put_back = not self.step.is_moving and self._before.restore()
        if self.step.job.on_non_finite != "skip" or not is_put_back:
            raise self._verdict(problem, batch, position) from problem
        self.step.forget_gradients()
        self._skipped += 1
        if self._skipped > MOST_SKIPPED:
            raise RunFailed(
                f"{self._skipped} updates in a row were not finite, up to update {position.updates + 1}: "
                f"{problem.message}",
                remedy="The last checkpoint is intact. Lower the learning rate, set clip_norm, or look at the data.",
            ) from problem
        self._tell(
            "skipped", samples=position.samples, updates=position.updates, why=problem.message, in_a_row=self._skipped,
            indices=self._in_data(batch.indices, batch.epoch).tolist(),
        )  # fmt: skip

    def _verdict(self, problem: NotFinite, batch: Batch | None, position: Position) -> RunFailed | RollBack:
        """The end, or the request to go back, with a dump of what was found."""
        found = examine(self.step, problem, batch, position, self._in_data)
        if batch is not None:
            self._before.restore()
        self.step.forget_gradients()
        path = write_dump(self._dumps, found, position)
        words = problem.message if found.first is None else f"{problem.message}; the first was {found.first}"
        job, plan = self.step.job, self.step.plan
        if job.on_non_finite == "roll_back" and (plan.precision not in FULL_PRECISIONS or plan.compile):
            full: Precision = "fp64" if plan.precision == "fp64" else "fp32"
            new = dataclasses.replace(plan, precision=full, compile=False, captured=False)
            return RollBack(Replanned(old=plan, new=new, why=words))
        if job.on_non_finite == "roll_back":
            words += f"; this was in {plan.precision} already: from the last checkpoint it would come to the same again"
        where = "" if path is None else f" What was found is in {path}."
        return RunFailed(words, remedy=f"{problem.remedy or ''}{where}".strip() or None)


def emit_replanned(tell: Tell, change: Replanned, samples: int) -> None:
    """Send the event of a change of plan at a position."""
    tell(
        "replanned", samples=samples, old=to_json(change.old), new=to_json(change.new), why=change.why,
        free_bytes=change.free_bytes,
    )  # fmt: skip


def _give_back(device: torch.device) -> None:
    """Memory that nothing refers to any more, to where a smaller micro-batch can have it in other pieces."""
    gc.collect()  # what was computed may refer to itself
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _with(free: int | None) -> str:
    return "" if free is None else f" with {format_bytes(free)} free"


_LOOK_EVERY = 256
"""Updates between two looks at generators that were not seen to be drawn from."""


class UpdateSnapshot:
    """The state of a model's buffers and of the generators when `keep` was called last."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = Buffers(model)
        self._generators = Generators()

    def keep(self) -> None:
        """Remember the present state."""
        if self._buffers.are_there:
            self._buffers.keep()
        self._generators.keep()

    def restore(self) -> bool:
        """Put back what was kept; whether all of it could be."""
        self._generators.restore()
        return self._buffers.restore()


class Generators:
    """Python's and NumPy's global generators as they were."""

    def __init__(self) -> None:
        self._kept: tuple[object, object] | None = None
        self._are_drawn = False
        self._times = 0

    def keep(self) -> None:
        """Remember their states, each time if they are drawn from, else now and then."""
        self._times += 1
        if self._times % _LOOK_EVERY and self._times > 2 and not self._are_drawn:
            return
        before, self._kept = self._kept, _states()
        self._are_drawn = self._are_drawn or (before is not None and not _are_equal(before, self._kept))

    def restore(self) -> None:
        """Put back what was kept: where nothing had been drawn, that is what was before this update."""
        if self._kept is not None:
            python, numpy = self._kept
            random.setstate(python)  # type: ignore[arg-type]
            np.random.set_state(numpy)  # type: ignore[arg-type]  # noqa: NPY002 - the generator that users draw from


def _states() -> tuple[object, object]:
    return random.getstate(), np.random.get_state()  # noqa: NPY002 - as above


def _are_equal(one: tuple[object, object], other: tuple[object, object]) -> bool:
    (python, numpy), (pythons, numpys) = one, other
    assert isinstance(numpy, tuple)
    assert isinstance(numpys, tuple)
    return python == pythons and numpy[2:] == numpys[2:] and bool(np.array_equal(numpy[1], numpys[1]))
