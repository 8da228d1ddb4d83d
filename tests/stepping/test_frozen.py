"""Frozen layers cost their forward pass and nothing else: no backward, no state, no second pass, no change of mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import stoker
from stoker.loading.datasets import datasets_of
from stoker.stepping.model import in_evaluation, to_training
from stoker.stepping.step import Step
from tests.stepping.driving import SEPARABLE, plan_of, source_of, train

WIDTH, BATCH, LAYERS = 16, 8, 6
PRODUCT = 2 * BATCH * WIDTH * WIDTH
"""FLOPs of one product of a layer: its output, the gradient of its weights, or that of its input."""

POINTS = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))


class Layer(nn.Sequential):
    """A linear layer and its nonlinearity."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())


def _job(frozen: set[int], **changes: Any) -> stoker.Job:
    """Six layers of equal width, those of the given numbers frozen."""

    def model() -> nn.Module:
        layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        for number in frozen:
            layers[number].requires_grad_(False)
        return layers

    settings: dict[str, Any] = {
        "model": model,
        "data": (POINTS, POINTS.roll(1, 0)),
        "loss": "mse",
        "batch": BATCH,
        "until": stoker.updates(3),
        "optimizer": stoker.AdamW(lr=0.01),
    }
    return stoker.Job(**(settings | changes))


def _flops_of_an_update(job: stoker.Job, **plan: Any) -> tuple[int, Step]:
    step = Step(job, plan_of(BATCH, **plan), SEPARABLE)
    train(job, step, 1)  # the optimiser's state is there, and every block has been passed
    batch = next(iter(source_of(job, step).batches(datasets_of(job).extent(job).position(1), 2)))
    with FlopCounterMode(display=False) as counter:
        step.gradients(batch, 1)
    return counter.get_total_flops(), step


@pytest.mark.parametrize("leading", [0, 1, 4, 5])
@pytest.mark.parametrize("checkpointed", [0, LAYERS])
def test_leading_frozen_layers_have_no_backward_and_no_second_pass(leading: int, checkpointed: int) -> None:
    """FLOPs are those of a closed form: L forward, T of weights, T - 1 of inputs, and T again where checkpointed.

    T layers are trained. The first of them needs no gradient of its input; nothing before it is computed again.
    """
    trained = LAYERS - leading
    flops, _ = _flops_of_an_update(_job(set(range(leading))), checkpointed_blocks=checkpointed)
    again = trained if checkpointed else 0
    assert flops == PRODUCT * (LAYERS + trained + (trained - 1) + again)


def test_frozen_layers_between_trained_ones_only_pass_the_gradient_on() -> None:
    """Of a frozen layer in the middle, the gradient of its weights is left out and nothing else."""
    flops, _ = _flops_of_an_update(_job({2, 3}))
    assert flops == PRODUCT * (LAYERS + (LAYERS - 2) + (LAYERS - 1))


def test_frozen_layers_have_neither_gradient_nor_state() -> None:
    """Memory for both is that of the trained parameters."""
    _, step = _flops_of_an_update(_job({0, 1, 2, 4}))
    trained = {p for p in step.model.parameters() if p.requires_grad}
    assert len(trained) == 4
    assert {p for p in step.model.parameters() if p.grad is not None} == trained
    assert set(step.optimizer.state) == trained


def test_a_frozen_block_that_is_checkpointed_changes_its_buffers_once() -> None:
    """Statistics of a frozen batch norm in training mode move as without checkpointing."""

    def model() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)]
        blocks[0].requires_grad_(False)
        return nn.Sequential(*blocks)

    ends = []
    for count in (0, 3):
        job = _job(set(), model=model)
        step = Step(job, plan_of(BATCH, checkpointed_blocks=count), SEPARABLE)
        train(job, step, 3)
        ends.append(step.model.state_dict())
    assert int(ends[0]["0.1.num_batches_tracked"]) == 3
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def _with_backbone(*, is_frozen: bool = True, is_evaluating: bool = True) -> nn.Module:
    backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    if is_frozen:
        backbone.requires_grad_(False)
    if is_evaluating:
        backbone.eval()
    return nn.Sequential(backbone, nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))


@pytest.mark.parametrize(
    ("is_frozen", "is_evaluating", "is_training"),
    [(True, True, False), (True, False, True), (False, True, True), (False, False, True)],
)
def test_a_frozen_part_keeps_the_mode_it_was_given(*, is_frozen: bool, is_evaluating: bool, is_training: bool) -> None:
    """A frozen backbone in evaluation mode stays there; a trained one that was loaded so is put into training mode."""
    model = to_training(_with_backbone(is_frozen=is_frozen, is_evaluating=is_evaluating))
    assert model.training
    assert model[2].training  # type: ignore[index]
    assert {module.training for module in model[0].modules()} == {is_training}  # type: ignore[index]


def test_statistics_of_a_frozen_backbone_do_not_move_in_training_nor_through_evaluation() -> None:
    """In evaluation mode within a run: running statistics stay, and an evaluation in the middle gives the mode back."""
    job = _job(set(), model=_with_backbone)
    step = Step(job, plan_of(BATCH), SEPARABLE)
    before = step.model.state_dict()["0.1.running_mean"].clone()
    train(job, step, 2)
    with step.evaluation():
        assert not any(module.training for module in step.model.modules())
    train(job, step, 1, begin=2)
    assert torch.equal(step.model.state_dict()["0.1.running_mean"], before)
    assert step.model[2].training  # type: ignore[index]
    assert not step.model[0][1].training  # type: ignore[index]


def test_modes_come_back_after_an_error() -> None:
    """Whatever happens in evaluation, each module is in its own mode again."""
    model = _with_backbone()
    with pytest.raises(KeyError), in_evaluation(model):
        raise KeyError
    assert [module.training for module in model.modules()] == [True, False, False, False, False, True, True]
