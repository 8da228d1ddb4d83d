"""`stoker.profile`: of a Job, and of any function that trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stoker
from stoker.errors import BadJob, NoDevice
from stoker.planning import planner
from tests.flow.builders import blobs_job

BATCH = (torch.ones(32, 64), torch.zeros(32, dtype=torch.int64))
PARAMETERS = 64 * 48 + 48 + 48 * 10 + 10
FORWARD_FLOPS = 2 * 32 * (64 * 48 + 48 * 10)


def training_step() -> tuple[Callable[[Any], None], nn.Module, torch.optim.Optimizer]:
    """A plain PyTorch step over two layers, and what it closes over."""
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        inputs, labels = batch
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


@pytest.mark.parametrize("on", ["here", "h100"])
def test_a_step_function_is_profiled_for_any_device(on: str) -> None:
    """FLOPs are the products' of forward and backward, less the gradient of the input; the state is AdamW's."""
    step, _, _ = training_step()
    found = stoker.profile(step, BATCH, on=on)
    assert found.device == ("cpu" if on == "here" else "h100")
    assert found.plan is None
    assert found.flops == 3 * FORWARD_FLOPS - 2 * 32 * 64 * 48
    categories = {share.what: share.value for share in found.peak_shares}
    assert categories["parameter"] >= 4 * PARAMETERS
    assert categories["optimizer state"] >= 8 * PARAMETERS
    assert 16 * PARAMETERS <= found.peak_bytes <= found.reserved_bytes
    assert 0 < found.step_s.low < found.step_s.value < found.step_s.high
    assert sum(share.value for share in found.step_shares) >= 0.3 * found.step_s.value
    lines = {share.where.partition(":")[0] for share in (*found.peak_shares, *found.step_shares)}
    assert "test_profiles.py" in lines


def test_what_a_step_trains_is_left_as_it_was() -> None:
    """Weights, gradients and the optimiser's state."""
    step, model, optimizer = training_step()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stoker.profile(step, BATCH, on="l4")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state


def test_sizes_that_depend_on_data_are_taken_from_hints() -> None:
    """Without one the line is named; with it, the size counts."""
    model = nn.Linear(64, 10)

    def step(batch: Any) -> None:
        inputs, _ = batch
        rows = inputs[inputs[:, 0] > 0]
        model(rows).sum().backward()

    with pytest.raises(BadJob, match=r"`index` at test_profiles\.py:\d+ has a result whose size") as error:
        stoker.profile(step, BATCH, on="h100")
    line = str(error.value.message).split(" at ")[1].split()[0]
    few, many = (stoker.profile(step, BATCH, on="h100", hints={line: size}).flops for size in (4, 16))
    assert many == 4 * few > 0


@pytest.mark.parametrize("on", ["here", "h100"])
def test_a_job_is_profiled_under_its_likeliest_plan(on: str) -> None:
    """The whole batch at once where there is room; nothing of the job is run."""
    found = stoker.profile(blobs_job(), on=on)
    assert found.plan is not None
    assert found.plan.device == ("cpu" if on == "here" else "cuda:0")
    assert found.plan.micro_batch <= 16
    assert found.trace.settings.micro_batch == found.plan.micro_batch
    assert found.flops > 2 * 16 * (6 * 8 + 8 * 2)
    assert sum(share.value for share in found.peak_shares) == pytest.approx(found.peak_bytes, rel=0.01)
    assert "trace" not in repr(found)


@pytest.mark.slow
def test_flops_of_an_update_do_not_depend_on_its_micro_batches() -> None:
    """Only two of them are in a trace; the second counts for all but the first. Memory goes down, time up."""
    whole, parts = (stoker.profile(blobs_job(batch=64, model=_wide), on="h100", micro_batch=n) for n in (64, 8))
    assert whole.flops == parts.flops
    assert parts.trace.flops < parts.flops
    assert parts.peak_bytes < whole.peak_bytes
    assert parts.step_s.value > whole.step_s.value


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4096), nn.ReLU(), nn.Linear(4096, 2))


def test_a_job_that_fits_nowhere_is_profiled_all_the_same() -> None:
    """To say what it would need is what a profile is for: here, 320 GB with AdamW's state on the host."""
    huge = blobs_job(
        model=lambda: nn.Sequential(nn.Linear(6, 200_000), nn.Linear(200_000, 200_000)),
        optimizer=stoker.AdamW(lr=1e-3),
        loss="cross_entropy",
        metrics=[],
    )
    found = stoker.profile(huge, on="t4")
    assert found.peak_bytes > 8 * 200_000**2
    assert found.plan is not None
    assert found.plan.micro_batch == 1


def test_a_micro_batch_that_changes_what_is_learned_is_refused() -> None:
    """The legal ones are reported."""
    coupled = blobs_job(model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    with pytest.raises(BadJob, match=r"micro_batch=4: samples are coupled in groups of 16") as error:
        stoker.profile(coupled, micro_batch=4)
    assert "16" in str(error.value.remedy)


WRONG = {
    "no batch": (lambda: stoker.profile(lambda batch: None), "takes its batch as it is given"),  # type: ignore[call-overload]
    "a micro-batch of a function": (
        lambda: stoker.profile(lambda batch: None, BATCH, micro_batch=2),  # type: ignore[call-overload]
        "takes its batch as it is given",
    ),
    "a batch for a job": (lambda: stoker.profile(blobs_job(), BATCH), "brings its own batches"),  # type: ignore[call-overload]
    "neither": (lambda: stoker.profile(3, BATCH), "was given a int"),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_go_together_are_refused(name: str) -> None:
    """In words, before anything is traced."""
    call, says = WRONG[name]
    with pytest.raises(BadJob, match=says):
        call()


def test_one_device_at_a_time() -> None:
    """Several words, or one that leaves the memory open, are refused with the names to choose from."""
    with pytest.raises(NoDevice, match=r"means 2 devices: h100, l4") as error:
        stoker.profile(blobs_job(), on="h100,l4")
    assert "on='h100'" in str(error.value.remedy)


@pytest.mark.slow
def test_nothing_large_is_run_here_to_profile_it_for_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """How samples of a model above 64 MiB are coupled is reported by the types of its layers, as when it is planned."""

    def refuse(*_: object) -> None:
        raise AssertionError("the model was run")

    monkeypatch.setattr(planner, "find_coupling", refuse)
    job = blobs_job(model=lambda: nn.Sequential(nn.Linear(6, 3_000_000), nn.Linear(3_000_000, 2)))
    assert stoker.profile(job, on="h100", micro_batch=16).device == "h100"
