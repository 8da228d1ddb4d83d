from __future__ import annotations

import pytest
import torch
from torch import nn

from stoker.jobs import EMA
from stoker.stepping.step import Step
from stoker.stepping.weight_averaging import EqualAverage, ExponentialAverage
from tests.stepping.driving import SEPARABLE, plan_of, train
from tests.stepping.models import make_job, mlp


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_average_follows_its_law(decay: float) -> None:
    """From the initial weights, update t moves it by 1 - min(decay, (1 + t) / (10 + t)) towards the model's."""
    job = make_job(mlp, average=decay)
    step = Step(job, plan_of(16), SEPARABLE, dtype=torch.float64)
    assert step.average is not None
    expected = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    for update in range(12):
        train(job, step, 1, begin=update)
        share = min(decay, (1 + update) / (10 + update))
        for name, tensor in step.model.state_dict().items():
            expected[name] = share * expected[name] + (1 - share) * tensor
    for name, tensor in step.average.weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-15)


def test_an_average_begins_at_weights_that_were_loaded() -> None:
    """A fork that takes over weights alone begins its average at them, not at the initial ones."""
    step = Step(make_job(mlp, average=0.9), plan_of(16), SEPARABLE)
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.add_(1.0)
    assert step.average is not None
    assert not torch.equal(step.average.weights["0.weight"], step.model.state_dict()["0.weight"])
    step.begin_at_weights()
    for name, tensor in step.model.state_dict().items():
        assert torch.equal(step.average.weights[name], tensor)


def test_buffers_and_whole_numbers_are_copied() -> None:
    """Running statistics are those of the model, not an average of averages."""
    model = nn.BatchNorm1d(2)
    average = ExponentialAverage(EMA(0.9), model)
    model(torch.randn(4, 2))
    average.update(0)
    assert torch.equal(average.weights["running_mean"], model.running_mean)
    assert int(average.weights["num_batches_tracked"]) == 1


def test_saved_averages_are_taken_over() -> None:
    """Loading puts the saved values into the tensors that are already there."""
    model = nn.Linear(2, 2)
    average = ExponentialAverage(EMA(0.9), model)
    held = average.weights["weight"]
    average.load({"weight": torch.ones(2, 2)})
    assert held is average.weights["weight"]
    assert torch.equal(held, torch.ones(2, 2))


def test_a_batch_norm_of_two_names_has_one_set_of_statistics() -> None:
    """Under its second name too they are copied: an average loaded under it would take the first one's place."""
    shared = nn.BatchNorm1d(2)
    model = nn.ModuleDict({"first": shared, "second": shared})
    average = ExponentialAverage(EMA(0.9), model)
    shared(torch.randn(4, 2) + 3)
    average.update(0)
    assert torch.equal(average.weights["second.running_mean"], shared.running_mean)
    assert torch.equal(average.weights["first.running_mean"], shared.running_mean)


def test_complex_weights_have_a_mean_too() -> None:
    """The equal-weight one is of all that is trained, as the exponential one is."""
    model = nn.Module()
    model.spectrum = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    average = EqualAverage(model)
    for value in (1 + 1j, 3 + 2j):
        with torch.no_grad():
            model.spectrum.fill_(value)
        average.take()
    assert average.weights["spectrum"].tolist() == [2 + 1.5j] * 2
