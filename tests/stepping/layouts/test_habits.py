"""Optimisers, averages and metrics over several processes: what one process alone comes to."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from stoker import optimizers
from stoker.errors import BadJob
from stoker.jobs import AdamW, Job
from stoker.jobs.averages import SWA
from stoker.layouts.rules import layout_problem
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, Layout, Plan
from stoker.stepping.layouts.compatibility import traits_of
from stoker.stepping.step import Step
from stoker.stepping.torch_optimizers import implementations
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from stoker.training.evaluation import evaluate
from tests.stepping.driving import SEPARABLE, largest_difference
from tests.stepping.layouts.conformance import largest_loss_difference, taught
from tests.stepping.models import CLASSES, make_job, mlp, vectors

KINDS: dict[str, Any] = {
    "rmsprop": optimizers.RMSprop(lr=1e-2, momentum=0.5, centered=True),
    "nadam": optimizers.NAdam(lr=1e-2),
    "adamax": optimizers.Adamax(lr=1e-2),
    "adadelta": optimizers.Adadelta(),
    "adagrad": optimizers.Adagrad(lr=0.05),
    "radam": optimizers.RAdam(lr=1e-2),
    "amsgrad": AdamW(lr=1e-2, amsgrad=True),
    "a user's": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "schedule-free": optimizers.ScheduleFreeAdamW(lr=1e-2, weight_decay=0.01),
    "predicate": AdamW(lr=1e-2, groups={lambda _name, parameter: parameter.dim() >= 2: {"weight_decay": 0.3}}),
}


def all_of_them(world: World, layout: Layout) -> dict[str, Any]:
    """What 10 updates by each optimiser come to in this process, in the implementation that a planner prefers."""
    results = {}
    for name, one in KINDS.items():
        job = make_job(mlp, optimizer=one)
        preferred, *_ = implementations(job, mlp(), "cpu")
        plan = Plan(device="cpu", micro_batch=8, layout=layout, optimizer_implementation=preferred)
        results[name] = taught(world, job, plan, SEPARABLE, torch.float64, 10)
    return results


@pytest.mark.parametrize("layout", [Layout(replicas=2), Layout(shards=2)], ids=["replicas", "shards"])
def test_two_processes_learn_what_one_does(layout: Layout) -> None:
    """To 1e-9 in float64, the weights that are kept as well: state of a part of a tensor is all that a part needs."""
    alone = all_of_them(ALONE, Layout())
    for together in on_ranks(layout, all_of_them, layout):
        for name, expected in alone.items():
            assert largest_loss_difference(together[name], expected) < 1e-9, name
            assert largest_difference(together[name].weights, expected.weights) < 1e-9, name
            assert largest_difference(together[name].averages, expected.averages) < 1e-9, name


def metrics_job() -> Job:
    """With a score, a value for each class and a curve, of 37 samples."""
    from torchmetrics import classification as of_classes

    from stoker.jobs.metrics import probabilities

    return make_job(
        mlp,
        data=vectors(37),
        metrics={
            "f1": of_classes.MulticlassF1Score(CLASSES),
            "recall": of_classes.MulticlassRecall(CLASSES, average=None),
            "auroc": probabilities(of_classes.MulticlassAUROC(CLASSES)),
        },
    )


def measured(world: World, layout: Layout) -> list[dict[str, float]]:
    """The metrics of 37 samples, and of 17, under fresh weights."""
    step = Step(metrics_job(), Plan(device="cpu", micro_batch=8, layout=layout), SEPARABLE, world=world)
    sets = [datasets_of(make_job(mlp, data=vectors(count))).train for count in (37, 17)]
    return [evaluate(step, samples, 8) for samples in sets]


@pytest.mark.slow
def test_metrics_with_a_state_are_those_of_one_process() -> None:
    """In both of two processes, also where the last batch leaves one of them without a sample that counts."""
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    alone = measured(ALONE, Layout())
    two = Layout(replicas=2)
    for together in on_ranks(two, measured, two):
        for mine, expected in zip(together, alone, strict=True):
            assert mine == pytest.approx(expected, rel=1e-5)


def test_what_needs_whole_matrices_or_outputs_is_refused_in_parts() -> None:
    """By the step, and by the planner beforehand."""
    job = make_job(mlp, optimizer=optimizers.Adafactor(lr=1e-2))
    plan = Plan(device="cpu", micro_batch=8, layout=Layout(shards=2))
    with pytest.raises(BadJob, match="2 shards: Adafactor needs whole matrices, and shards hold parts of them"):
        Step(job, plan, SEPARABLE)
    assert "Adafactor, which needs whole matrices" in (layout_problem(Layout(tensor=2), traits_of(job)) or "")
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    assert "f1, recall, auroc, which sees outputs" in (layout_problem(Layout(stages=2), traits_of(metrics_job())) or "")


def test_statistics_of_an_average_need_whole_models() -> None:
    """A batch norm and SWA on shards are refused with what to do."""
    coupled = Coupling(kind="batch_norm", group=16, causes=("BatchNorm1d",), evidence="known")
    job = make_job(lambda: mlp(norm=torch.nn.BatchNorm1d), average=SWA())
    with pytest.raises(BadJob, match="need running statistics of their own") as caught:
        on_shards(job, coupled)
    assert "stoker.EMA" in (caught.value.remedy or "")


def on_shards(job: Job, coupling: Coupling) -> None:
    """Which average a job has where models lie in parts; nothing is made of them."""
    from stoker.stepping.weight_averaging import average_of

    model = mlp(norm=torch.nn.BatchNorm1d)
    plan = Plan(device="cpu", micro_batch=16, layout=Layout(shards=2))
    average_of(job, model, torch.optim.SGD(model.parameters(), lr=0.1), coupling, plan)
