"""Averages in a run: when weights are taken, running statistics at the mean, and that both survive a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker import optimizers
from stoker.errors import BadJob
from stoker.jobs.averages import SWA
from stoker.jobs.run_length import Extent
from stoker.records import Coupling, Plan
from stoker.stepping.step import Step
from stoker.stepping.weight_averaging import EqualAverage
from stoker.training.averaged_weights import average_is_due, renew_statistics, require_renewable
from stoker.training.checkpoints import restore
from tests.training.builders import advance, assert_bit_equal, blobs, saved, source_of, tiny_job

COUPLED = Coupling(kind="batch_norm", group=16, causes=("BatchNorm1d",), evidence="known")
PLAN = Plan(device="cpu", micro_batch=16)


def normed() -> nn.Module:
    """With a batch norm, and dropout."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def without_dropout() -> nn.Module:
    """The same; dropout draws otherwise under another micro-batch."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def step_with(plan: Plan = PLAN, coupling: Coupling = COUPLED, **changed: Any) -> Step:
    """A step of a model with a batch norm."""
    return Step(tiny_job(**({"model": normed} | changed)), plan, coupling)


@pytest.mark.parametrize(
    ("settings", "due_after"),
    [
        (SWA(start=0.5), [10, 15, 20]),
        (SWA(start=0.0), [5, 10, 15, 20]),
        (SWA(start=0.9, every=stoker.updates(1)), [18, 19, 20]),
        (SWA(start=0.9, every=stoker.epochs(3)), [20]),
    ],
)
def test_weights_are_taken_where_an_interval_ends_and_at_the_end(settings: SWA, due_after: list[int]) -> None:
    """Of four epochs of five updates; not before the start, which is a share of the run."""
    extent = Extent(num_train=80, batch=16)
    due = [n for n in range(1, 21) if average_is_due(settings, extent, 20, extent.position(n - 1), extent.position(n))]
    assert due == due_after


def test_a_mean_is_of_all_weights_that_were_taken() -> None:
    """Each counts equally; until the first the model's own weights are what is kept."""
    step = step_with(average=SWA())
    average = step.average
    assert isinstance(average, EqualAverage)
    taken = []
    for update in range(4):
        advance(step, update, update + 1)
        if update == 0:
            assert torch.equal(step.kept_weights()["0.weight"], step.model.state_dict()["0.weight"])
        average.take()
        taken.append(step.model.state_dict()["0.weight"].clone())
    torch.testing.assert_close(step.kept_weights()["0.weight"], torch.stack(taken).mean(0))


@pytest.mark.parametrize("kind", ["swa", "schedule-free"])
def test_statistics_are_means_over_whole_groups_whatever_the_plan(kind: str) -> None:
    """In one micro-batch of several groups as in one of each; training is left as it was."""
    changed: dict[str, Any] = {"batch": 40, "coupling_group": 20, "model": without_dropout}
    changed |= {"average": SWA(statistics=2)} if kind == "swa" else {"optimizer": optimizers.ScheduleFreeSGD(lr=0.1)}
    coupling = Coupling(kind="batch_norm", group=20, causes=("BatchNorm1d",), evidence="known")
    found = []
    for micro_batch in (20, 40):
        step = step_with(Plan(device="cpu", micro_batch=micro_batch), coupling, **changed)
        advance(step, 0, 3)
        if isinstance(step.average, EqualAverage):
            step.average.take()
        before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
        torch.manual_seed(3)
        drawn = torch.get_rng_state()
        renew_statistics(step, source_of(step))
        assert torch.equal(torch.get_rng_state(), drawn)
        assert step.model.training
        assert step.model[1].momentum == 0.1
        assert all(torch.equal(tensor, before[name]) for name, tensor in step.model.state_dict().items())
        found.append(step.kept_weights())
    source, kept = source_of(step), found[0]
    num_groups = 2 if kind == "swa" else 4
    rows = [torch.from_numpy(source.order.indices(0, at, at + 20).copy()) for at in range(0, 20 * num_groups, 20)]
    hidden = [nn.functional.linear(blobs()[0][group], kept["0.weight"], kept["0.bias"]) for group in rows]
    torch.testing.assert_close(kept["1.running_mean"], torch.stack([one.mean(0) for one in hidden]).mean(0))
    torch.testing.assert_close(kept["1.running_var"], torch.stack([one.var(0) for one in hidden]).mean(0))
    torch.testing.assert_close(found[1]["1.running_mean"], kept["1.running_mean"])


class OfParts(nn.Module):
    """A batch norm behind two inputs, which a batch of (a, b, label) does not hand to the model by default."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scores = nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.scores(self.norm(a + b))


def loss_of_parts(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Knows how the model is called."""
    a, b, labels = batch
    return nn.functional.cross_entropy(model(a, b), labels, reduction="none")


def test_statistics_are_found_by_the_passes_that_the_loss_makes() -> None:
    """A model that is not called with a batch's first entry alone failed in the middle of the run."""
    inputs, labels = blobs()
    job = tiny_job(model=OfParts, data=(inputs, inputs * 2, labels), loss=loss_of_parts, metrics=[], average=SWA())
    step = Step(job, PLAN, COUPLED)
    advance(step, 0, 3)
    assert isinstance(step.average, EqualAverage)
    step.average.take()
    source = source_of(step)
    renew_statistics(step, source)
    groups = [inputs[torch.from_numpy(source.order.indices(0, at, at + 16).copy())] * 3 for at in range(0, 80, 16)]
    expected = torch.stack([group.mean(0) for group in groups]).mean(0)
    torch.testing.assert_close(step.kept_weights()["norm.running_mean"], expected)


@pytest.mark.parametrize("kind", ["swa", "schedule-free"])
def test_what_is_kept_comes_back_from_a_checkpoint(kind: str, tmp_path: Path) -> None:
    """Bit for bit: the mean and its statistics, also where nothing is evaluated any more."""
    changed: dict[str, Any] = (
        {"average": SWA()} if kind == "swa" else {"optimizer": optimizers.ScheduleFreeAdamW(lr=0.1)}
    )
    step = step_with(**changed)
    advance(step, 0, 3)
    if isinstance(step.average, EqualAverage):
        step.average.take()
    renew_statistics(step, source_of(step))
    expected = {name: tensor.clone() for name, tensor in step.kept_weights().items()}
    path, manifest = saved(step, tmp_path, 3)
    again = step_with(**changed)
    restore(again, path, manifest)
    if isinstance(again.average, EqualAverage):
        again.average.count = 1
    assert_bit_equal(again.kept_weights(), expected)
    assert not torch.equal(expected["1.running_mean"], step.model.state_dict()["1.running_mean"])


def test_a_model_without_batch_norms_needs_none() -> None:
    """Nor do other averages, or none."""
    for changed in ({"average": SWA(), "model": lambda: nn.Linear(6, 2)}, {"average": 0.9}, {}):
        step = step_with(coupling=Coupling(kind="separable", group=None, causes=(), evidence="known"), **changed)
        before = {name: tensor.clone() for name, tensor in step.kept_weights().items()}
        renew_statistics(step, source_of(step))
        assert_bit_equal(step.kept_weights(), before)


def test_statistics_of_a_stream_are_refused_before_training() -> None:
    """A stream is read once; the error says what would do."""
    step = step_with(average=SWA())
    source = source_of(step)
    require_renewable(step, source)
    source.samples.data_class = "stream"
    with pytest.raises(BadJob, match="is a stream that is read once") as caught:
        require_renewable(step, source)
    assert "indexed" in (caught.value.remedy or "")
