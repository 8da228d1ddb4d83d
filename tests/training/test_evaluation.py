"""Evaluating a set: whole-set values for any batch size, and which of two values is better."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stoker
from stoker.errors import RunFailed
from stoker.loading.dataset_adapters import as_samples
from stoker.training.evaluation import evaluate, is_better
from tests.training.builders import advance, blobs, net, step_of, tiny_job

INPUTS, TARGETS = blobs(37)


def margin(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric of one's own, one value per sample."""
    return output.gather(1, target[:, None])[:, 0] - output.mean(1)


def positives(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> stoker.Loss:
    """A metric of the form (model, batch), over the samples of class 1 alone."""
    inputs, target = batch
    found = (model(inputs).argmax(1) == 1) & (target == 1)
    return stoker.Loss(found.sum().float(), (target == 1).sum())


@settings(max_examples=25)
@given(size=st.integers(1, 40))
def test_an_evaluation_is_that_of_the_whole_set_whatever_the_batch(size: int) -> None:
    """Sums divided once by their counts: ragged batches, and batches without anything to count, change nothing."""
    targets = TARGETS.clone()
    targets[:9] = -100
    step = step_of(tiny_job(metrics=["accuracy", positives]))
    found = evaluate(step, as_samples((INPUTS, targets), what="valid"), size)
    step.model.eval()
    with torch.no_grad():
        output = step.model(INPUTS)
    valid = targets != -100
    assert found["loss"] == pytest.approx(float(F.cross_entropy(output, targets)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((output.argmax(1) == targets)[valid].float().mean()))
    hits = ((output.argmax(1) == 1) & (targets == 1)).sum() / (targets == 1).sum()
    assert found["positives"] == pytest.approx(float(hits))


def test_a_metric_per_sample_is_averaged_over_samples() -> None:
    """The mean over the set of what the function gives for each sample."""
    step = step_of(tiny_job(metrics=[margin]))
    found = evaluate(step, as_samples((INPUTS, TARGETS), what="valid"), 10)
    step.model.eval()
    with torch.no_grad():
        assert found["margin"] == pytest.approx(float(margin(step.model(INPUTS), TARGETS).mean()), rel=1e-5)


def test_evaluating_changes_nothing_that_training_goes_on_from() -> None:
    """Weights, mode and generators are as before; dropout is off, so that two evaluations agree."""
    step = step_of(tiny_job(average=0.9))
    advance(step, 0, 4)
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    torch.manual_seed(3)
    drawn = torch.get_rng_state()
    samples = as_samples((INPUTS, TARGETS), what="valid")
    assert evaluate(step, samples, 7) == pytest.approx(evaluate(step, samples, 37))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert step.model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in step.model.state_dict().items())


def test_the_average_is_what_is_evaluated() -> None:
    """With an average, the loss is that of the averaged weights."""
    step = step_of(tiny_job(average=0.95))
    advance(step, 0, 6)
    found = evaluate(step, as_samples((INPUTS, TARGETS), what="valid"), 37)
    model = net().eval()
    model.load_state_dict(step.average.weights)
    with torch.no_grad():
        assert found["loss"] == pytest.approx(float(F.cross_entropy(model(INPUTS), TARGETS)), rel=1e-5)


def test_a_measure_that_counts_nothing_is_an_error() -> None:
    """With every target marked as none, there is no accuracy to tell."""
    samples = as_samples((INPUTS, torch.full_like(TARGETS, -100)), what="valid")
    with pytest.raises(RunFailed, match="loss counted nothing in 37 samples"):
        evaluate(step_of(tiny_job()), samples, 10)


@pytest.mark.parametrize(
    ("name", "value", "than", "expected"),
    [
        ("accuracy", 0.5, 0.4, True),
        ("accuracy", 0.4, 0.4, False),
        ("loss", 0.4, 0.5, True),
        ("mse", 0.6, 0.5, False),
        ("l1", 0.4, 0.5, True),
        ("accuracy", 0.1, None, True),
        ("accuracy", math.nan, None, True),
        ("accuracy", math.nan, 0.1, False),
        ("loss", math.nan, 0.1, False),
        ("loss", 5.0, math.nan, True),
        ("accuracy", math.nan, math.nan, True),
        ("loss", math.inf, math.nan, True),
    ],
)
def test_which_of_two_values_is_better(name: str, value: float, than: float | None, expected: bool) -> None:
    """Losses fall, metrics rise; any number is better than none or NaN, so that one NaN does not end the search."""
    assert is_better(name, value, than) is expected
