"""Is a run that was interrupted and resumed equal, bit for bit, to one that never stopped?"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Self

import torch

from stoker.errors import StokerError
from stoker.loading.batches import Batch, in_order
from stoker.loading.order import python_generators, restore_python_generators
from stoker.records import Verdict
from stoker.stepping.python_state import is_shared
from stoker.stepping.step import Step
from stoker.verifying.subject import Subject, Timebox, same_bits, verdict

ThroughCheckpoint = Callable[[Step, Step], None]
"""Writes the first step's state to disk as a checkpoint and restores it into the second."""

_QUESTION = "Is a resumed run equal to one never stopped?"
_FEWEST, _MOST = 2, 15


class _Training:
    """A run of the job from an update on."""

    def __init__(self, subject: Subject, begin: int = 0) -> None:
        self.step = Step(subject.job, subject.begins_under or subject.plan, subject.coupling)
        self.done = begin
        self._subject = subject
        self._source = subject.source(self.step)
        self._batches: Generator[Batch, None, None] = self._source.batches(subject.extent.position(begin), 2 * _MOST)

    def __enter__(self) -> Self:
        """Loader workers start with the first update."""
        return self

    def __exit__(self, *_: object) -> None:
        """End loader workers."""
        self._batches.close()

    def train(self, updates: int) -> None:
        """Make `updates` updates."""
        for _ in range(updates):
            batch = next(self._batches)
            batch.progress = self._subject.progress(self._subject.extent.position(self.done))
            self.step.update(batch, self.done, batch.progress)
            self.done += 1

    def settle(self) -> None:
        """Go on under the plan that the run settles on."""
        if self._subject.begins_under is None:
            return
        self.step.change_to(self._subject.plan)
        self._source.use(self.step.pipeline(self._subject.data.train, augmented=True))

    def gradient(self) -> list[torch.Tensor]:
        """The gradients of the next batch."""
        self.step.gradients(next(self._batches), self.done)
        return [p.grad.clone() for p in self.step.model.parameters() if p.grad is not None]

    def evaluate_a_batch(self) -> None:
        """Evaluate one batch, as in the middle of a run."""
        data = self._subject.data
        samples = data.valid or data.test or data.train
        pipeline = self.step.pipeline(samples, augmented=False)
        batch = next(in_order(samples, pipeline, self.step.plan.micro_batch))
        with self.step.evaluation() as measure:
            measure(batch.cut(0, batch.size), batch.size)


def check_resume(subject: Subject, through_checkpoint: ThroughCheckpoint, timebox: Timebox) -> Verdict:
    """Train N updates straight; train N/2, save, restore into a fresh model, train N/2; compare every tensor.

    The straight run evaluates in the middle and the resumed one does not: evaluation must not change anything either.
    Where a run of the job begins under another plan, both go over to this one halfway between checkpoint and end.
    """
    with _Training(subject) as straight:
        straight.train(_FEWEST)
        while straight.done < _MOST and 3 * timebox.spent_s < timebox.seconds:
            straight.train(1)
        half = straight.done
        with _Training(subject, half) as resumed:
            try:
                through_checkpoint(straight.step, resumed.step)
            except StokerError as problem:
                return verdict(_QUESTION, f"No: {problem.message}.", "writing a checkpoint and restoring it", None)
            # One process plays two, each with its own generators, and its own values in the loss and in globals.
            generators, python = python_generators(), straight.step.python_changes()
            straight.evaluate_a_batch()
            straight.train(half // 2)
            straight.settle()
            straight.train(half - half // 2)
            restore_python_generators(generators)
            resumed.step.put_python({holder: kept for holder, kept in python.items() if is_shared(holder)})
            resumed.train(half // 2)
            resumed.settle()
            resumed.train(half - half // 2)
            here, there = state_of(straight.step), state_of(resumed.step)
    began = subject.begins_under
    begun = "" if began is None else f", the first {half + half // 2} under {began.in_words()}"
    evidence = (
        f"{2 * half} updates straight, and {half}, a checkpoint on disk and {half} in a fresh model, in one process "
        f"under {subject.plan.in_words()}{begun}: {len(here)} tensors of model, optimiser and average compared bit for "
        "bit"
    )
    name = first_difference(here, there)
    if name is None and subject.coupling.unsaved:
        lost = " and ".join(subject.coupling.unsaved)
        return verdict(
            _QUESTION,
            f"No: checkpoints do not hold {lost}, from which the next pass goes on: keep it in a persistent buffer "
            "(register_buffer).",
            f"{evidence}; tensors in attributes as the probe found them",
            None,
        )
    if name is None:
        return verdict(_QUESTION, "Yes, bit for bit, with all that is random in it.", evidence, "bit-equal")
    reason = _reason(subject, through_checkpoint, half)
    return verdict(_QUESTION, f"No: {name} is the first that differs. {reason}", evidence, None)


def state_of(step: Step) -> dict[str, torch.Tensor]:
    """Every tensor and number of a step's state by name: parameters, all buffers, optimiser state, averages."""
    names = {id(parameter): name for name, parameter in step.named_parameters().items()}
    tree = {
        "weight": step.named_parameters(),
        "buffer": dict(step.model.named_buffers()),
        "optimiser state of": {names.get(id(p), "?"): state for p, state in step.optimizer.state.items()},
        "average of": {} if step.average is None else step.average.weights,
    }
    return dict(_leaves(tree, ""))


def first_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str | None:
    """The name of the first tensor that differs in any bit, or that one of the states lacks."""
    for name in [*one, *(name for name in other if name not in one)]:
        if name not in one or name not in other or not same_bits(one[name], other[name]):
            return name
    return None


def _reason(subject: Subject, through_checkpoint: ThroughCheckpoint, updates: int) -> str:
    """Why a resumed run differs, found by comparing step by step."""
    with _Training(subject) as one, _Training(subject) as two, _Training(subject, updates) as restored:
        generators = python_generators()
        two.train(updates)
        restore_python_generators(generators)
        one.train(updates)
        if first_difference(state_of(one.step), state_of(two.step)) is not None:
            return (
                "Two runs that are never stopped differ as well: something draws from a generator that is seeded by "
                "chance, keeps state outside the model, or computes in an order that is not fixed."
            )
        two.evaluate_a_batch()
        if name := first_difference(state_of(one.step), state_of(two.step)):
            return f"A pass in evaluation mode changes {name}: let the model change its state in training mode alone."
        through_checkpoint(one.step, restored.step)
        if name := first_difference(state_of(one.step), state_of(restored.step)):
            kind, _, tensor = name.partition(" ")
            if kind == "buffer" and tensor not in one.step.model.state_dict():
                return (
                    "Checkpoints do not hold this buffer: register it with persistent=True instead of False "
                    f"({tensor})."
                )
            return f"A checkpoint does not bring {name} back."
        generators = python_generators()
        gradient = one.gradient()
        restore_python_generators(generators)
        if any(not same_bits(a, b) for a, b in zip(gradient, restored.gradient(), strict=True)):
            return (
                "The first gradient after the resume is another one, from equal tensors: the model or the loss keeps "
                "state in a Python attribute, a global or a generator of its own. Keep it in a buffer "
                "(register_buffer), and draw from PyTorch's global generator, which is keyed."
            )
    return "Gradients are equal after the resume: the optimiser keeps state outside its state_dict()."


def _leaves(tree: Any, path: str) -> list[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        return [(path, tree)]
    if isinstance(tree, dict):
        return [leaf for key, item in tree.items() for leaf in _leaves(item, f"{path} {key}".strip())]
    if isinstance(tree, list | tuple):
        return [leaf for index, item in enumerate(tree) for leaf in _leaves(item, f"{path}[{index}]")]
    return [(path, torch.tensor(float(tree), dtype=torch.float64))] if isinstance(tree, bool | int | float) else []
