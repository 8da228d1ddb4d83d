"""Evaluating a set: whole-set values for any batch size, and which of two values is better."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stoker
from stoker.errors import BadJob, RunFailed
from stoker.jobs.optimizers import ScheduleFreeAdamW
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling
from stoker.stepping.python_state import python_state
from stoker.training.evaluation import CHECKED, check_held_out, evaluate, is_better
from tests.training.builders import PLAN, advance, blobs, net, step_of, tiny_job

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


class Lengths(torch.utils.data.Dataset):
    """Points of 1 to 9 rows, and their class."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return INPUTS[index].repeat(1 + index * 7 % 9, 1), TARGETS[index]


class Mean(nn.Module):
    """The mean over rows, padding included: what a sample gives depends on the longest of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x_BTF: torch.Tensor) -> torch.Tensor:
        """Logits [B, 2]."""
        logits_B2: torch.Tensor = self.layer(x_BTF.mean(1))
        return logits_B2


def test_held_out_samples_are_padded_as_many_together_under_any_plan() -> None:
    """A smaller micro-batch cuts a batch that is padded already, as in training; else a plan would choose the best."""
    step = step_of(tiny_job(model=Mean, data=Lengths(), fields=stoker.Fields(collate=stoker.lengths.padded())))
    samples = datasets_of(step.job).train
    whole = evaluate(step, samples, 16)
    for size in (1, 3, 8):
        assert evaluate(step, samples, size) == pytest.approx(whole, rel=1e-5)


def test_norms_without_running_statistics_are_evaluated_in_coupling_groups() -> None:
    """They normalise by what passes at once: that is what belongs together, not what a plan has at once."""
    coupling = Coupling(kind="batch_norm", group=4, causes=("norm",), evidence="known")
    model = functools.partial(nn.Sequential, nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False))
    step = step_of(tiny_job(model=model, coupling_group=4), PLAN, coupling)
    samples = as_samples((INPUTS[:36], TARGETS[:36]), what="valid")
    assert evaluate(step, samples, 16) == pytest.approx(evaluate(step, samples, 4), rel=1e-6)


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


CALLS = 0


def counting(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that counts its calls, as one that is annealed does."""
    global CALLS  # noqa: PLW0603 - as users do
    CALLS += 1
    return F.cross_entropy(output, target, reduction="none")


def test_evaluating_leaves_what_a_loss_counts() -> None:
    """Otherwise training would depend on how many samples the plan evaluates at once."""
    step = step_of(tiny_job(loss=counting))
    advance(step, 0, 2)
    before = CALLS
    evaluate(step, as_samples((INPUTS, TARGETS), what="valid"), 7)
    assert before == CALLS


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


class Counts(nn.Module):
    """A classifier that counts its passes in a buffer and in Python, normalises by batch, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.register_buffer("passes", torch.zeros(()))
        self.num_passes = 0

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        """Logits [B, 2]."""
        self.passes += 1
        self.num_passes += 1
        np.random.rand()  # noqa: NPY002 - the generator that users draw from
        logits_B2: torch.Tensor = self.layers(x_BF) + 1e-3 * torch.randn(2)
        return logits_B2


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"average": 0.9}, id="average"),
        pytest.param({"average": stoker.SWA()}, id="swa"),
        pytest.param({"optimizer": ScheduleFreeAdamW(lr=1e-3)}, id="schedule-free"),
    ],
)
def test_checking_held_out_sets_changes_nothing_that_training_goes_on_from(changes: dict) -> None:
    """Weights, buffers, the optimiser's state, generators, plain attributes and mode are bit for bit as before."""
    step = step_of(tiny_job(model=Counts, **changes))
    kept, values = copy.deepcopy(step.model.state_dict()), python_state(step.model, None).values
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002 - as above
    drawn = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002 - as above
    check_held_out(step, {"valid": as_samples((INPUTS, TARGETS), what="valid")}, 16)
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert np.array_equal(np.random.get_state()[1], drawn[1])  # noqa: NPY002 - as above
    assert all(torch.equal(tensor, kept[name]) for name, tensor in step.model.state_dict().items())
    assert python_state(step.model, None).values == values
    assert not step.optimizer.state
    assert step.model.training


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        pytest.param(torch.randn(37, 5), TARGETS, "shapes cannot be multiplied", id="columns"),
        pytest.param(INPUTS.double(), TARGETS, "dtype", id="dtype"),
        pytest.param(INPUTS, torch.cat([TARGETS[:36], torch.tensor([7])]), "labels go from 0 to 7", id="labels"),
    ],
)
def test_a_held_out_set_that_does_not_fit_is_named(
    split: str, inputs: torch.Tensor, targets: torch.Tensor, message: str
) -> None:
    """Also where the one label out of range is the last of many."""
    with pytest.raises((BadJob, RuntimeError), match=message) as error:
        check_held_out(step_of(tiny_job()), {split: as_samples((inputs, targets), what=split)}, 16)
    text = error.value.message if isinstance(error.value, BadJob) else "".join(error.value.__notes__)
    assert f"evaluating {split}=" in text


class Scored:
    """A metric that keeps outputs, and computes what `result` makes of the number of samples seen."""

    lower_is_better = False

    def __init__(self, result: Callable[[int], Any]) -> None:
        self.result, self.seen = result, 0

    def reset(self) -> None:
        """Forget all samples."""
        self.seen = 0

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """See a batch."""
        self.seen += len(output)

    def compute(self) -> Any:
        """The result."""
        return self.result(self.seen)


def needs(least: int) -> Callable[[int], float]:
    """A result of at least so many samples; of fewer it raises, as where a class is missing."""

    def result(seen: int) -> float:
        if seen < least:
            raise ValueError("only one class is present")
        return 0.5

    return result


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        pytest.param(lambda seen: seen.mean, AttributeError, "no attribute 'mean'", id="attribute"),
        pytest.param(lambda seen: "0.5" + seen, TypeError, "concatenate", id="type"),
        pytest.param(lambda _seen: torch.zeros(2, 2), BadJob, r"metric score computed \[2, 2\]", id="matrix"),
    ],
)
def test_a_metric_that_computes_no_number_is_found_before_the_first_update(
    result: Callable[[int], Any], error: type[Exception], message: str
) -> None:
    """And not by the first evaluation, hours later."""
    step = step_of(tiny_job(metrics={"score": Scored(result)}))
    with pytest.raises(error, match=message):
        check_held_out(step, {"valid": as_samples((INPUTS, TARGETS), what="valid")}, 16)


def test_a_metric_that_may_need_more_samples_is_a_doubt_and_no_error() -> None:
    """A few samples, or a model that has learned nothing, may lack what the set has; a batch is tried first."""
    valid = {"valid": as_samples((INPUTS, TARGETS), what="valid")}
    assert check_held_out(step_of(tiny_job(metrics={"score": Scored(needs(30))})), valid, 32) == []
    [doubt] = check_held_out(step_of(tiny_job(metrics={"score": Scored(needs(33))})), valid, 32)
    assert doubt.startswith(
        "metric score's compute() raised ValueError: only one class is present for 32 samples of valid"
    )


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(lambda seen: None if seen < 40 else 0.5, id="none"),
        pytest.param(lambda seen: (None if seen < 40 else 0.5) * 2, id="arithmetic"),
        pytest.param(lambda seen: (None if seen < 40 else torch.tensor(0.5)).mean(), id="attribute"),
    ],
)
def test_a_metric_that_has_none_until_it_has_seen_enough_is_a_doubt(result: Callable[[int], Any]) -> None:
    """Such as one of a rare class, that is None before the first sample of it."""
    valid = {"valid": as_samples((INPUTS, TARGETS), what="valid")}
    [doubt] = check_held_out(step_of(tiny_job(metrics={"score": Scored(result)})), valid, 32)
    assert "NoneType" in doubt
    assert "for 32 samples of valid" in doubt


def test_a_model_for_one_size_of_batch_is_checked_at_that_size() -> None:
    """A few samples are no reason to refuse what evaluates as it is used."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
            logits_B2: torch.Tensor = self.layer(x_BF.view(2 * CHECKED, 6))
            return logits_B2

    step = step_of(tiny_job(model=Fixed))
    check_held_out(step, {"valid": as_samples(blobs(4 * CHECKED), what="valid")}, 2 * CHECKED)
    with pytest.raises(RuntimeError, match="invalid for input"):
        check_held_out(step, {"valid": as_samples(blobs(4 * CHECKED), what="valid")}, CHECKED)


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


class Adapter(nn.Linear):
    """A frozen layer with an adapter of rank 1, which is merged into its weight in evaluation, as by loralib."""

    def __init__(self) -> None:
        super().__init__(6, 2)
        self.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.ones(1, 6)), nn.Parameter(torch.zeros(2, 1))
        self.is_merged = False

    def train(self, mode: bool = True) -> Adapter:
        """As of any module; merges, or undoes it."""
        if self.is_merged is mode:
            with torch.no_grad():
                self.weight += (self.up @ self.down) * (-1 if mode else 1)
            self.is_merged = not mode
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = super().forward(x)
        return own if self.is_merged else own + x @ self.down.T @ self.up.T


def test_evaluating_leaves_weights_that_a_module_merges_for_it() -> None:
    """The mode was put back without `train()`, so that the adapter stayed in the weight, and was added once more."""
    step = step_of(tiny_job(model=lambda: nn.Sequential(Adapter())))
    before = step.model[0].weight.clone()
    for start in (0, 2):
        advance(step, start, start + 2)
        evaluate(step, as_samples((INPUTS, TARGETS), what="valid"), 7)
    assert not step.model[0].is_merged
    assert float(step.model[0].up.detach().abs().sum()) > 0
    torch.testing.assert_close(step.model[0].weight, before)
