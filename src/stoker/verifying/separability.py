"""Are samples separable, does the loss add up over micro-batches, and are batches the same however they are cut?"""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import replace

import numpy as np
import torch

from stoker.loading.batches import Batch, BatchSource
from stoker.loading.fields import Content, map_tensors
from stoker.records import Position, Verdict
from stoker.stepping.step import Step
from stoker.verifying.subject import Subject, Timebox, same_bits

_QUESTION = "Are samples separable?"
_UNSEEN = "a coupling that shows in none of these batches, such as a capacity that only rare ones exceed, is not found"


def check_separability(subject: Subject) -> Verdict:
    """The coupling of samples that the probe detected, and its remedy."""
    coupling, batch = subject.coupling, subject.job.batch
    causes = " and ".join(coupling.causes)
    if subject.job.step is not None:
        answer = f"Not asked: the update is the job's own step, which takes its batch of {batch} samples in one piece."
    elif coupling.kind == "separable" or coupling.group is None:
        answer = f"Yes: any micro-batch from 1 to {batch} samples is legal."
    elif coupling.kind == "batch_norm":
        answer = f"No: coupled by the batch statistics of {causes}, taken over {coupling.group} samples."
        if coupling.group < batch:
            answer += " A micro-batch is a whole number of such groups."
        else:
            answer += (
                f" Only the whole batch is a legal micro-batch. Smaller ones need coupling_group=… below {batch}, "
                "which is another job, or a norm of single samples (GroupNorm, LayerNorm)."
            )
    else:
        answer = (
            f"No: coupled by {causes}. Every group of {coupling.group} samples goes through the model alone. A smaller "
            "coupling_group makes micro-batches smaller, and is another job."
        )
    return Verdict(
        question=_QUESTION,
        answer=answer,
        passed=True,
        level="same mathematics",
        evidence=coupling.evidence if coupling.kind == "whole_group" else f"{coupling.evidence}; {_UNSEEN}",
    )


_LOSS_QUESTION = "Does the loss add up over micro-batches?"
_FEW = 4
_FORMS = {
    "sum and count": "it gives a sum and a count, and an update divides once by the count of its whole batch",
    "value per sample": "it gives one value per sample or token; they are summed, and an update divides once by their "
    "number in its whole batch",
    "scalar": "it gives a scalar, and the probe found it to be a mean over samples",
}
_OF_GROUPS = "it gives a scalar, taken for the mean over the samples of each group"


def check_loss_form(subject: Subject) -> Verdict:
    """The form in which the loss function returns its value, and whether it may be accumulated."""
    step = Step(subject.job, subject.plan, subject.coupling)
    samples = min(_FEW if subject.coupling.kind == "separable" else subject.job.batch, subject.job.batch)
    batch = subject.first_batch(step, samples)
    form = step.objective.form(step.model, batch.cut(0, batch.size))
    blamed = next((cause for cause in subject.coupling.causes if cause.startswith("the loss")), None)
    if blamed is None:
        is_probed = form != "scalar" or subject.coupling.kind != "whole_group"
        answer = f"Yes: {_FORMS[form] if is_probed else _OF_GROUPS}."
    else:
        answer = f"No: {blamed.removeprefix('the loss: ')}. It is never accumulated: {_REMEDIES[form]}"
    evidence = f"returned for {batch.size} samples: {_RETURNED[form]}"
    return Verdict(question=_LOSS_QUESTION, answer=answer, passed=True, level="same mathematics", evidence=evidence)


_RETURNED = {
    "sum and count": "stoker.Loss(sum, count)",
    "value per sample": "a tensor of values",
    "scalar": "a scalar tensor",
}
_REMEDIES = {
    "sum and count": "let sum and count be sums over the samples given, and weight penalties go into Job(penalty=…).",
    "value per sample": 'if it compares the samples of a batch on purpose, say so: loss_scope="batch".',
    "scalar": "return stoker.Loss(sum, count) from it, with the sum over samples or valid tokens and their number; "
    'or, if it compares the samples of a batch on purpose, say so: loss_scope="batch".',
}


_ORDER_QUESTION = "Is the order of the data fixed?"
_GUARANTEES = {
    "indexed": "indexed: the order is computed from (seed, epoch, position), so training resumes at any sample at once",
    "seekable": "seekable: the reader's position is saved and restored",
    "stream": "stream: what was read before is read again on resume",
}
_FEWEST, _MOST = 4, 16
"""Batches compared: at least, and as many as time allows."""


def check_order(subject: Subject, timebox: Timebox) -> Verdict:
    """Compare batches from a middle position with those of an uninterrupted stream, bit for bit."""
    step = Step(subject.job, subject.plan, subject.coupling)
    plain = replace(subject.plan, loader=subject.plain_loader, num_workers=0)
    stream: list[Batch] = []
    for batch in replace(subject.source(step), plan=plain).batches(Position(), _MOST):
        stream.append(batch)
        if len(stream) >= _FEWEST and timebox.is_over:
            break
    middle = len(stream) // 2
    problem = (
        _problem_with_order(subject)
        or _problem_with_batches(subject, step, stream, middle)
        or _problem_with_cutting(stream[0], subject.plan.micro_batch)
    )
    is_computed = subject.data.train.data_class == "indexed"
    order = f"the order of {_num_ordered(subject)} samples of two epochs; " if is_computed else ""
    loader = f"{subject.plan.num_workers} loader workers" if subject.plan.num_workers else "this process"
    examined = (
        f"batches {middle + 1} to {len(stream)} fetched by {loader} after a start in the middle, against those of one "
        f"stream fetched in this process: indices and bytes; {order}"
        "the first batch made ready whole and in parts"
    )
    guarantee = _GUARANTEES[subject.data.train.data_class]
    return Verdict(
        question=_ORDER_QUESTION,
        answer=f"Yes, {guarantee}." if problem is None else f"No: {problem}",
        passed=problem is None,
        level="bit-equal" if problem is None else "none",
        evidence=examined,
    )


def _num_ordered(subject: Subject) -> int:
    return min(len(subject.data.train), 2**20)


def _problem_with_order(subject: Subject) -> str | None:
    """Check that an epoch's order has every sample once, differs from the next, and is the same from its middle."""
    train, seed, count = subject.data.train, subject.job.seed, _num_ordered(subject)
    if train.data_class != "indexed":
        return None  # the order of a stream is that of reading
    size, order = len(train), train.order(seed)
    first, second = (order.indices(epoch, 0, count) for epoch in (0, 1))
    if len(np.unique(first)) != count:
        return "an epoch's order holds a sample twice."
    if not np.array_equal(train.order(seed).indices(0, count // 2, count), first[count // 2 :]):
        return "an epoch's order depends on where it is begun."
    if size > 8 and np.array_equal(first, second):
        return "two epochs have the same order."
    return None


def _problem_with_batches(subject: Subject, step: Step, stream: list[Batch], middle: int) -> str | None:
    resumed: BatchSource = subject.source(step)
    with closing(resumed.batches(subject.extent.position(middle), len(stream))) as batches:
        for number, (ours, theirs) in enumerate(itertools.zip_longest(batches, stream[middle:]), middle + 1):
            if ours is None or theirs is None or not np.array_equal(ours.indices, theirs.indices):
                return f"batch {number} holds other samples when training resumes."
            mine, others = _tensors(ours.content), _tensors(theirs.content)
            if len(mine) != len(others) or not all(map(same_bits, mine, others)):
                return (
                    f"batch {number} holds the same samples with other content when it is fetched again. Does the "
                    "dataset draw from a generator of its own, or read something that changes? Random draws in "
                    "__getitem__ are keyed if they come from random, numpy.random or torch."
                )
    return None


def _problem_with_cutting(batch: Batch, micro_batch: int) -> str | None:
    """Check that a sample's content does not depend on how the batch is cut, up to rounding at the ends of vectors."""
    if batch.size == 1:
        return None
    middle = micro_batch if micro_batch < batch.size else batch.size // 2
    first, last = _tensors(batch.cut(0, middle)), _tensors(batch.cut(middle, batch.size))
    for whole, *parts in zip(_tensors(batch.cut(0, batch.size)), first, last, strict=True):
        if whole.dim() and whole.shape[0] == batch.size and not _is_close(whole, torch.cat(parts)):
            return (
                "augmentation or preparation gives a sample other content when the batch is cut otherwise. Let it "
                "draw from its second argument, draw.uniform() and draw.integers(low, high), and treat each sample by "
                "itself."
            )
    return None


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_floating_point() and one.shape == other.shape:
        return torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
    return same_bits(one, other)


def _tensors(content: Content) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    map_tensors(content, tensors.append)
    return tensors
