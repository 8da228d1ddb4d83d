"""Checkpoints put back exactly what was saved, or say what does not fit."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadRun, RunFailed
from stoker.records import Coupling, Plan, Position
from stoker.stepping.step import Step
from stoker.store import CheckpointStore
from stoker.testing import FaultyDisk
from stoker.training.checkpoints import Checkpointer, kept_weights, model_weights, restore
from stoker.training.snapshots import load_weights
from tests.training.builders import PLAN, advance, assert_bit_equal, everything_of, net, saved, step_of, tiny_job


class Doubled(torch.optim.Optimizer):
    """A user's optimiser whose state is of other dtypes than its parameters, with a setting that changes as it goes."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "boldness": 1.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            group["boldness"] *= 1.01
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(
                        exact=parameter.detach().double().clone(), signs=torch.zeros_like(parameter, dtype=torch.int8)
                    )
                    state.update(coarse=torch.zeros_like(parameter, dtype=torch.bfloat16), history=[])
                state["coarse"].lerp_(parameter.grad.bfloat16(), 0.1)
                state["signs"] += parameter.grad.sign().to(torch.int8)
                state["history"].append(float(parameter.grad.norm()))
                state["exact"] -= group["lr"] * group["boldness"] * (parameter.grad + state["coarse"] + state["signs"])
                parameter.copy_(state["exact"])


def lbfgs(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """L-BFGS with a short memory."""
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=3, history_size=3)


OPTIMIZERS: dict[str, Any] = {
    "SGD": stoker.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "SGD without a state": stoker.SGD(lr=0.1),
    "Adam": stoker.Adam(lr=0.01, weight_decay=0.1),
    "AdamW in groups": stoker.AdamW(lr=0.01, groups={"*bias": {"weight_decay": 0.0}}),
    "LBFGS": lbfgs,
    "AMSGrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "a user's own": lambda params: Doubled(params, lr=0.01),
}


def there_and_back(job: stoker.Job, folder: Path, plan: Plan = PLAN) -> Step:
    """Half a run, saved, restored into a fresh step, goes on bit-equal to the run that went through; that step."""
    whole = step_of(job, plan)
    advance(whole, 0, 8)
    found = saved(whole, folder, 8)
    fresh = step_of(job, plan)
    restore(fresh, *found)
    assert_bit_equal(everything_of(fresh), everything_of(whole))
    advance(whole, 8, 15)
    advance(fresh, 8, 15)
    assert_bit_equal(everything_of(fresh), everything_of(whole))
    return fresh


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimiser_goes_on_bit_equal_after_a_checkpoint(tmp_path: Path, name: str) -> None:
    """Weights, optimiser state in its own dtypes, and the average: equal when restored, equal when trained on."""
    there_and_back(tiny_job(optimizer=OPTIMIZERS[name], average=0.9, clip_norm=1.0), tmp_path)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW in groups"])
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_every_implementation_goes_on_bit_equal(tmp_path: Path, name: str, implementation: str) -> None:
    """Fused and foreach optimisers keep their state in the same form."""
    plan = Plan(device="cpu", micro_batch=16, optimizer_implementation=implementation)
    there_and_back(tiny_job(optimizer=OPTIMIZERS[name]), tmp_path, plan)


def test_a_channels_last_model_with_statistics_goes_on_bit_equal(tmp_path: Path) -> None:
    """Memory layout of weights and momentum, running statistics and their int64 count are restored as they were."""
    images = torch.rand(80, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    job = tiny_job(model=model, data=(images, (images.mean((1, 2, 3)) > 0.5).long()))
    coupling = Coupling(kind="batch_norm", group=16, causes=("BatchNorm2d",), evidence="known")
    plan = Plan(device="cpu", micro_batch=16, memory_format="channels_last")
    whole, fresh = step_of(job, plan, coupling), step_of(job, plan, coupling)
    advance(whole, 0, 5)
    restore(fresh, *saved(whole, tmp_path, 5))
    assert_bit_equal(everything_of(fresh), everything_of(whole))
    advance(whole, 5, 9)
    advance(fresh, 5, 9)
    assert_bit_equal(everything_of(fresh), everything_of(whole))


@pytest.mark.slow  # its products are emulated on a CPU; all else of a checkpoint is tested above
def test_products_in_fp8_go_on_bit_equal(tmp_path: Path) -> None:
    """Their scales are of the tensors themselves, so that a checkpoint needs none of them; bf16 ends elsewhere."""
    tokens = torch.randint(96, (80, 9), generator=torch.Generator().manual_seed(0))
    job = tiny_job(
        model=functools.partial(
            stoker.zoo.Llama, layers=2, width=256, heads=4, kv_heads=2, hidden=256, context=8, vocab=96
        ),
        data=(tokens[:, :-1], tokens[:, 1:]),
        loss="token_cross_entropy",
        optimizer=stoker.AdamW(lr=1e-3),
        metrics=[],
        numerics=["fp8"],
    )
    in_fp8 = there_and_back(job, tmp_path, Plan(device="cpu", micro_batch=16, precision="fp8"))
    in_bf16 = step_of(job, Plan(device="cpu", micro_batch=16, precision="bf16"))
    advance(in_bf16, 0, 15)
    assert not torch.equal(in_fp8.model.state_dict()["head.weight"], in_bf16.model.state_dict()["head.weight"])


def test_pythons_and_numpys_generators_go_on_where_they_were(tmp_path: Path) -> None:
    """Models that draw from them resume exactly, though they are not seeded at every update."""

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.random()), float(np.random.normal())]  # noqa: NPY002

    step = step_of(tiny_job())
    draw()
    found = saved(step, tmp_path, 1)
    expected = draw()
    draw()
    restore(step_of(tiny_job()), *found)
    assert draw() == expected


class Weighted:
    """A loss with a factor that training raises to its cap."""

    def __init__(self) -> None:
        self.beta = 0.0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, reduction="none") * (1 + self.beta)


def test_values_that_a_checkpoint_held_are_in_the_next_one(tmp_path: Path) -> None:
    """Resumed in the same process, the loss has them from the start: in a fresh one it will not."""
    loss = Weighted()
    job = tiny_job(loss=loss)
    first = step_of(job)
    advance(first, 0, 2)
    loss.beta = 1.0
    again = step_of(job)
    restore(again, *saved(first, tmp_path / "first", 2))
    found = saved(again, tmp_path / "again", 2)
    loss.beta = 0.0
    restore(step_of(job), *found)
    assert loss.beta == 1.0


def test_progress_comes_back_with_its_numbers(tmp_path: Path) -> None:
    """What is kept with a checkpoint is read back as it was, a best value of NaN included."""
    step = step_of(tiny_job())
    progress = {"wall_s": 2.5, "best": {"name": "accuracy", "value": math.nan, "samples": 80}}
    found = restore(step_of(tiny_job()), *saved(step, tmp_path, 5, progress))
    assert isinstance(found["best"]["value"], float)
    assert math.isnan(found["best"]["value"])
    assert (found["wall_s"], found["best"]["samples"]) == (2.5, 80)


def test_settings_of_an_optimiser_are_the_jobs_and_only_its_state_the_checkpoints(tmp_path: Path) -> None:
    """A fork under another weight decay trains with that one, from the momentum that was saved."""
    before = step_of(tiny_job(optimizer=stoker.SGD(lr=0.1, momentum=0.9, weight_decay=0.5)))
    advance(before, 0, 3)
    after = step_of(
        tiny_job(optimizer=stoker.SGD(lr=0.2, momentum=0.8)),
        Plan(device="cpu", micro_batch=16, optimizer_implementation="fused"),
    )
    restore(after, *saved(before, tmp_path, 3))
    group = after.optimizer.param_groups[0]
    assert (group["momentum"], group["weight_decay"], group["fused"]) == (0.8, 0.0, True)
    assert_bit_equal(everything_of(after), everything_of(before))


def test_an_average_that_was_not_saved_begins_at_the_weights(tmp_path: Path) -> None:
    """A fork that adds an average does not average the initial weights in."""
    before = step_of(tiny_job())
    advance(before, 0, 3)
    after = step_of(tiny_job(average=0.99))
    restore(after, *saved(before, tmp_path, 3))
    assert_bit_equal(after.kept_weights(), before.model.state_dict())


def test_kept_weights_are_the_averages_where_there_is_one(tmp_path: Path) -> None:
    """What is evaluated is what is kept; the weights trained on stay readable."""
    step = step_of(tiny_job(average=0.99))
    advance(step, 0, 5)
    found = saved(step, tmp_path, 5)
    assert_bit_equal(kept_weights(*found), step.average.weights)
    assert_bit_equal(model_weights(*found), dict(step.model.state_dict()))
    assert not torch.equal(kept_weights(*found)["0.weight"], model_weights(*found)["0.weight"])


def test_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    """Names and shapes that differ are reported, three of them, and how many more there are."""
    found = saved(step_of(tiny_job()), tmp_path, 1)
    other = step_of(tiny_job(model=nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2))))
    with pytest.raises(BadRun) as caught:
        restore(other, *found)
    assert "holds another model: 0.weight is [9, 6] in the model, [8, 6] in the file" in caught.value.message
    assert "1.weight is [2, 9] in the model, absent in the file (and 3 more)" in caught.value.message


def test_weights_are_loaded_only_if_all_of_them_fit() -> None:
    """A mismatch leaves the model as it was."""
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = {**before, "0.weight": torch.ones(8, 6), "3.bias": torch.zeros(5)}
    with pytest.raises(BadRun, match=r"3\.bias is \[2\] in the model, \[5\] in the file"):
        load_weights(model, weights, Path("weights"))
    assert_bit_equal(dict(model.state_dict()), before)


def test_another_optimiser_is_refused(tmp_path: Path) -> None:
    """State for one group does not fit two."""
    found = saved(step_of(tiny_job(optimizer=stoker.AdamW(lr=0.01))), tmp_path, 1)
    with pytest.raises(BadRun, match="does not fit this job's optimiser") as caught:
        restore(step_of(tiny_job(optimizer=OPTIMIZERS["AdamW in groups"])), *found)
    assert caught.value.remedy is not None


class WithHook(torch.optim.SGD):
    """An optimiser that keeps a function in its state."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["on_step"] = print


def test_a_function_in_the_optimisers_state_is_refused(tmp_path: Path) -> None:
    """What cannot be kept without pickle fails the save, in words, and leaves no checkpoint."""
    step = step_of(tiny_job(optimizer=lambda params: WithHook(params, lr=0.1)))
    advance(step, 0, 1)
    with pytest.raises(RunFailed, match=r"on_step, which a checkpoint cannot keep"):
        saved(step, tmp_path, 1)
    assert CheckpointStore(tmp_path).names() == ()


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """The checkpoint before stays the newest."""
    step = step_of(tiny_job())
    saved(step, tmp_path, 1)
    with torch.no_grad():
        step.model[3].bias[0] = math.nan
    with pytest.raises(RunFailed, match=r"3\.bias is not finite after 32 samples") as caught:
        saved(step, tmp_path, 2)
    assert "the last checkpoint is intact" in (caught.value.remedy or "")
    assert CheckpointStore(tmp_path).names() == ("000000000016",)


def test_a_buffer_of_infinities_is_saved(tmp_path: Path) -> None:
    """A mask of attention holds them on purpose."""
    model = net()
    model.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
    step = step_of(tiny_job(model=model))
    assert_bit_equal(model_weights(*saved(step, tmp_path, 1)), dict(step.model.state_dict()))


def test_a_full_disk_fails_the_next_save_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """Writing happens behind training's back; what went wrong comes out at the next save or at the end."""
    step, store = step_of(tiny_job()), CheckpointStore(tmp_path)
    saved(step, tmp_path, 1)
    checkpointer = Checkpointer(store, spec_digest="s", version="0")
    with FaultyDisk.full(tmp_path, after_bytes=100):
        checkpointer.save(step, Position(samples=32, updates=2), {}, best=False)
        with pytest.raises(RunFailed, match="the disk is full"):
            checkpointer.close()
    assert store.names() == ("000000000016",)
    assert store.newest() is not None


def test_what_was_written_is_told_once(tmp_path: Path) -> None:
    """`save` and `close` return the checkpoints that reached the disk since, with their sizes and times."""
    step, store = step_of(tiny_job()), CheckpointStore(tmp_path)
    checkpointer = Checkpointer(store, spec_digest="s", version="0")
    assert checkpointer.save(step, Position(samples=16, updates=1), {}, best=True) == []
    (first,) = checkpointer.save(step, Position(samples=32, updates=2), {}, best=False)
    (second,) = checkpointer.close()
    assert checkpointer.close() == []
    assert [(one.position.samples, one.best) for one in (first, second)] == [(16, True), (32, False)]
    assert first.num_bytes == sum(file.stat().st_size for file in first.path.iterdir())
    assert min(first.blocked_s, first.write_s) > 0
    best = store.best()
    assert best is not None
    assert best[1].position.samples == 16
