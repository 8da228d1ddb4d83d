"""Selective backprop: which samples make an update, and that nothing else decides it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import stoker
from stoker.errors import BadJob, BadSetting
from stoker.jobs import Job
from stoker.jobs.job_description import describe_settings
from stoker.layouts.rules import layout_problem
from stoker.records import Coupling, Layout
from stoker.stepping.layouts.compatibility import traits_of
from stoker.stepping.step import Step
from tests.stepping.driving import SEPARABLE, are_equal, grouped, largest_difference, plan_of, source_of
from tests.stepping.models import cnn, gradient_penalty, images, make_job, mlp, texts, vectors

KEEP = stoker.SelectiveBackprop(keep=0.3, start=0.0, end=1.0, interrupt=3)


def job_of(model: Any = mlp, **changed: Any) -> Job:
    """A classifier that keeps three tenths of its batches, every third one whole."""
    loss = stoker.Objective("cross_entropy", selective_backprop=KEEP)
    return make_job(model, **{"data": vectors(150), "batch": 40, "loss": loss, **changed})


def trained(
    job: Job, micro_batch: int, begin: int = 0, end: int = 12, step: Step | None = None, coupling: Coupling = SEPARABLE
) -> Step:
    """The job after updates of a run of 12, as the training loop makes them."""
    step = step or Step(job, plan_of(micro_batch), coupling, dtype=torch.float64)
    source = source_of(job, step)
    for update, batch in enumerate(source.batches(source.extent.position(begin), end), begin):
        step.update(dataclasses.replace(batch, progress=update / 12), update, update / 12)
    return step


def test_an_update_is_that_of_the_hardest_samples() -> None:
    """Against a loop by hand: the mean loss of the 12 highest of 40, every third batch whole; SGD in float64."""
    job = job_of()
    step = trained(job, 40)
    by_hand = Step(job, plan_of(40), SEPARABLE, dtype=torch.float64)
    optimizer = torch.optim.SGD(by_hand.model.parameters(), lr=0.1)
    for update, batch in enumerate(source_of(job, by_hand).batches(source_of(job, by_hand).extent.position(0), 12)):
        inputs, labels = batch.cut(0, batch.size)
        losses = F.cross_entropy(by_hand.model(inputs), labels, reduction="none")
        kept = losses if update % 3 == 0 else losses.topk(int(np.ceil(0.3 * len(losses)))).values
        optimizer.zero_grad()
        kept.mean().backward()
        optimizer.step()
    assert largest_difference(step, by_hand) < 1e-9


@pytest.mark.parametrize("micro_batch", [1, 7, 20])
def test_micro_batches_keep_the_same_samples(micro_batch: int) -> None:
    """Equal to 1e-9 after 12 updates, ragged batches included."""
    assert largest_difference(trained(job_of(), micro_batch), trained(job_of(), 40)) < 1e-9


def test_samples_coupled_in_groups_are_kept_by_the_whole_batch() -> None:
    """With batch norm in groups of 8, micro-batches of one and of several groups learn the same."""
    job = job_of(lambda: cnn(torch.nn.BatchNorm2d), data=images(80), coupling_group=8)
    assert largest_difference(*(trained(job, size, coupling=grouped(8)) for size in (8, 40))) < 1e-9


def test_choosing_moves_no_statistics() -> None:
    """The pass that only chooses leaves running statistics alone: one update counts one batch."""
    job = job_of(lambda: cnn(torch.nn.BatchNorm2d), data=images(80))
    step = trained(job, 40, coupling=grouped(40))
    assert int(step.model[1].num_batches_tracked) == 12  # type: ignore[union-attr,index,arg-type]


def test_going_on_in_the_middle_is_the_same_run() -> None:
    """Twelve updates at once, or five and then seven: the same bits."""
    in_two = trained(job_of(), 40, begin=5, step=trained(job_of(), 40, end=5))
    assert are_equal(in_two, trained(job_of(), 40))


def test_outside_of_its_part_of_the_run_batches_are_whole() -> None:
    """Before the start nothing differs from a job without it, and the loss counts every sample."""
    late = stoker.Objective("cross_entropy", selective_backprop=dataclasses.replace(KEEP, start=0.99))
    assert are_equal(trained(job_of(loss=late), 40), trained(job_of(loss="cross_entropy"), 40))


def test_the_setting_is_part_of_the_identity() -> None:
    """Described with the loss that it belongs to."""
    given, plain = (describe_settings(job)["loss"] for job in (job_of(), job_of(loss="cross_entropy")))
    assert given["selective_backprop"]["keep"] == 0.3  # type: ignore[index,call-overload]
    assert not plain["selective_backprop"]  # type: ignore[index,call-overload]


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"keep": 1.2}, {"start": 0.9, "end": 0.5}, {"interrupt": -1}])
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    """Each with its number."""
    with pytest.raises(BadSetting, match=str(next(iter(wrong.values())))):
        stoker.SelectiveBackprop(**wrong)


@pytest.mark.parametrize(
    "changed",
    [
        {"mix": stoker.transforms.Mixup()},
        {"step": print, "optimizer": lambda _model: None},
        {"sync": stoker.LocalSGD(every=stoker.updates(4))},
        {"loss": stoker.Objective("token_cross_entropy", selective_backprop=KEEP), "data": texts()},
    ],
    ids=["mix", "step", "sync", "tokens"],
)
def test_what_does_not_combine_is_refused(changed: dict[str, Any]) -> None:
    """When the job is made, with the name of the setting."""
    with pytest.raises(BadJob, match="selective_backprop"):
        job_of(**changed)


def test_losses_without_samples_and_closures_are_refused() -> None:
    """A loss of model and batch, a scalar, and L-BFGS: each before or at the first update."""
    for loss in (gradient_penalty, F.cross_entropy):
        with pytest.raises(BadJob, match="selective_backprop"):
            trained(job_of(loss=stoker.Objective(loss, selective_backprop=KEEP)), 40)
    with pytest.raises(BadJob, match="LBFGS"):
        trained(job_of(optimizer=torch.optim.LBFGS), 40)


def test_several_processes_are_refused() -> None:
    """Each has a part of the batch, and would keep others than one process does."""
    assert "selective backprop" in (layout_problem(Layout(replicas=2), traits_of(job_of())) or "")
