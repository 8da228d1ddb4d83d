"""Moments of Adam and AdamW in bf16 and in 8 bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import SGD, Adam, AdamW, Job
from stoker.planning.model.optimizer_states import stored_share
from stoker.records import Layout, Plan
from stoker.stepping import low_bit_states
from stoker.stepping.low_bit_states import LowBitAdam, dequantized, dynamic_map, quantized, rounded_at_random
from stoker.stepping.step import Step
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import RankFailed, on_ranks
from tests.stepping.driving import SEPARABLE, are_equal, largest_difference, plan_of, train
from tests.stepping.layouts.conformance import JOBS, Learned, few_bits_job, largest_loss_difference, taught
from tests.stepping.models import make_job
from tests.training.legs import Leg, leg

STATES = ("bf16", "8bit")


def random_values(rows: int, columns: int, *, seed: int = 0) -> torch.Tensor:
    """Values of many sizes [rows, columns]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.randn(rows, columns, generator=generator).exp()


def test_the_map_is_that_of_bitsandbytes() -> None:
    """256 numbers in order, a few of which were read from its 0.50; without a sign the lowest is in the place of 0."""
    signed, unsigned = dynamic_map(is_signed=True), dynamic_map(is_signed=False)
    for numbers in (signed, unsigned):
        assert len(numbers) == 256
        assert list(numbers) == sorted(numbers)
    assert (signed[0], signed[20], signed[127], signed[255]) == pytest.approx((-0.99296875, -0.71171874, 0.0, 1.0))
    assert (unsigned[0], unsigned[1], unsigned[70]) == pytest.approx((3.25e-7, 3.25e-7, 0.02054687))


@settings(max_examples=30)
@given(rows=st.integers(0, 4), columns=st.integers(1, 700), is_signed=st.booleans(), seed=st.integers(0, 9))
def test_a_value_is_rounded_to_an_entry_as_near_as_any(rows: int, columns: int, is_signed: bool, seed: int) -> None:
    """To 0.1 % of it; a block's largest comes back as it was where it is positive."""
    values = random_values(rows, columns, seed=seed)
    values = values if is_signed else values.abs()
    codes, scale = quantized(values, is_signed=is_signed)
    assert (codes.shape, codes.dtype, scale.shape) == (values.shape, torch.uint8, (rows, -(-columns // 256)))
    found, numbers = dequantized(codes, scale, is_signed=is_signed), torch.tensor(dynamic_map(is_signed=is_signed))
    of_value = scale.repeat_interleave(256, 1)[:, :columns]
    nearest = (values[..., None] / of_value[..., None] - numbers).abs().amin(-1) * of_value
    assert bool(((found - values).abs() <= nearest + 1e-3 * values.abs()).all())
    for block in range(scale.shape[1]):
        span = slice(256 * block, 256 * (block + 1))
        largest = values[:, span].abs().argmax(1, keepdim=True)
        expected = values[:, span].gather(1, largest)
        assert torch.equal(found[:, span].gather(1, largest)[expected > 0], expected[expected > 0])


def test_zeros_and_tiny_second_moments() -> None:
    """A block of zeros is zeros; a second moment far below its block's largest is never 0."""
    codes, scale = quantized(torch.zeros(2, 300), is_signed=False)
    assert not dequantized(codes, scale, is_signed=False).any()
    values = torch.tensor([[1.0, 1e-12, 0.0]])
    found = dequantized(*quantized(values, is_signed=False), is_signed=False)
    assert found.tolist() == [[1.0, pytest.approx(3.25e-7), pytest.approx(3.25e-7)]]


def test_bf16_is_rounded_up_and_down_in_proportion() -> None:
    """A second moment falls as it should in the mean, which to the nearest it never would."""
    places = low_bit_states._Places(torch.arange(64, dtype=torch.int32), torch.arange(64, dtype=torch.int32), 64)
    values = torch.full((64, 64), 1.0)
    for update in range(200):
        values = rounded_at_random(values * 0.999, places.draws(slice(0, 64), 12345 + 7919 * update)).float()
    assert float(values.mean()) == pytest.approx(0.999**200, rel=3e-3)
    assert float(torch.tensor(0.999 * 1.0078125).bfloat16()) == 1.0078125


def states_of(step: Step) -> dict[str, dict[str, Any]]:
    """The optimiser's state by parameter."""
    names = {parameter: name for name, parameter in step.model.named_parameters()}
    return {names[parameter]: state for parameter, state in step.optimizer.state.items()}


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("optimizer", [AdamW(lr=1e-3, weight_decay=0.1), Adam(lr=1e-3, weight_decay=0.1)])
def test_an_update_is_pytorchs_but_for_the_rounding(states: Any, optimizer: Any) -> None:
    """The first is equal, and later ones are close; matrices have moments of fewer bits, norms have whole ones."""
    job = dataclasses.replace(few_bits_job(), optimizer=optimizer)
    mine, theirs = (
        Step(job, plan_of(16, optimizer_states=one), SEPARABLE, dtype=torch.float64) for one in (states, "full")
    )
    train(job, mine, 1)
    train(job, theirs, 1)
    assert largest_difference(mine, theirs) < 1e-9
    train(job, mine, 8, begin=1)
    train(job, theirs, 8, begin=1)
    assert 1e-6 < largest_difference(mine, theirs) < 0.3
    dtypes = {name: state["exp_avg"].dtype for name, state in states_of(mine).items()}
    few = torch.bfloat16 if states == "bf16" else torch.uint8
    for name, parameter in mine.model.named_parameters():
        assert dtypes[name] == (few if parameter.dim() > 1 and parameter.numel() >= 4096 else torch.float64)


def test_moments_take_the_bytes_that_are_forecast() -> None:
    """Of a matrix whose rows are whole blocks: 2 bytes a value in bf16, 1 and a 64th in 8 bits."""
    for states, expected in (("bf16", 4.0), ("8bit", 2 + 2 / 64)):
        weight = nn.Parameter(torch.randn(16, 512))
        weight.grad = torch.randn(16, 512)
        adam = LowBitAdam(
            [{"params": [weight]}],
            states=states,
            names={"w": weight},
            seed=0,
            is_decoupled=True,
            lr=1e-3,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.0,
        )
        adam.step()
        moments = [value for name, value in adam.state[weight].items() if name != "step"]
        assert sum(one.nbytes for one in moments) / weight.numel() == expected == 8 * stored_share(states, "fp32")


@pytest.mark.parametrize("states", STATES)
def test_pieces_and_memory_formats_change_no_bit(states: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many values are updated at once, and in whatever order a convolution's weights lie in memory."""
    job = make_job(
        lambda: nn.Sequential(nn.Conv2d(3, 32, 7), nn.ReLU(), nn.Conv2d(32, 16, 3), nn.Flatten(), nn.Linear(64, 4)),
        data=(torch.rand(48, 3, 10, 10), torch.arange(48) % 4),
        optimizer=AdamW(lr=1e-3),
        numerics=["bf16-states", "8bit-states"],
    )
    steps = []
    for at_once, memory_format in ((2**16, "contiguous"), (500, "contiguous"), (2**16, "channels_last")):
        monkeypatch.setitem(low_bit_states.VALUES_AT_ONCE, "cpu", at_once)
        plan = plan_of(16, optimizer_states=states)
        step = Step(job, plan, SEPARABLE, dtype=torch.float64)
        gradients = torch.Generator().manual_seed(0)
        if memory_format == "channels_last":
            step.model.to(memory_format=torch.channels_last)
        for _ in range(4):
            for parameter in step.model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=gradients, dtype=torch.float64)
            step.optimizer.step()
        steps.append(step)
    assert all(are_equal(steps[0], other) for other in steps[1:])


@pytest.mark.parametrize("states", STATES)
def test_a_small_model_learns_as_well(states: Any) -> None:
    """After 150 updates its loss is that of full moments to a tenth, where it has fallen to a fraction."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 64, generator=generator)
    labels = (inputs @ torch.randn(64, 4, generator=generator)).argmax(1)
    layers = lambda: [nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4)]  # noqa: E731
    job = make_job(
        lambda: nn.Sequential(*layers()),
        data=(inputs, labels),
        optimizer=AdamW(lr=1e-3),
        batch=64,
        numerics=["bf16-states", "8bit-states"],
    )
    losses = {}
    for one in ("full", states):
        step = Step(job, plan_of(64, optimizer_states=one), SEPARABLE)
        of_updates = train(job, step, 150, of=150)
        losses[one] = sum(of_updates[-16:]) / 16
        assert losses[one] < 0.5 * of_updates[0]
    assert losses[states] == pytest.approx(losses["full"], rel=0.1)


SHARDS, TENSOR = Layout(shards=2), Layout(tensor=2)


@pytest.mark.parametrize(
    ("states", "layouts"),
    [
        ("8bit", (SHARDS, Layout(), SHARDS)),
        ("bf16", (Layout(), Layout(replicas=2), Layout(stages=2))),
        pytest.param("bf16", (SHARDS, Layout(), SHARDS), marks=pytest.mark.slow),
        pytest.param("8bit", (Layout(), Layout(replicas=2), Layout(stages=2)), marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_under_another_layout(states: Any, layouts: tuple[Layout, ...], tmp_path: Path) -> None:
    """Codes, scales and draws belong to places of whole parameters: losses are those of one process throughout."""
    expected: list[float] = []
    found: list[float] = []
    for number, layout in enumerate(layouts, 1):
        plan = plan_of(4, optimizer_states=states)
        expected += leg(ALONE, tmp_path / "alone", "few bits", plan, torch.float64, 3 * number).losses
        found += _leg_on(layout, tmp_path / "moved", dataclasses.replace(plan, layout=layout), 3 * number).losses
    assert found == pytest.approx(expected, rel=1e-9)


def _leg_on(layout: Layout, folder: Path, plan: Plan, stop: int) -> Leg:
    if layout.world_size == 1:
        return leg(ALONE, folder, "few bits", plan, torch.float64, stop)
    return on_ranks(layout, leg, folder, "few bits", plan, torch.float64, stop)[0]


@pytest.mark.parametrize(
    ("before", "after", "layout"),
    [
        ("full", "8bit", Layout()),
        ("8bit", "full", Layout()),
        ("bf16", "8bit", Layout()),
        ("full", "bf16", Layout()),
        ("bf16", "full", Layout()),
        ("full", "8bit", SHARDS),
        ("8bit", "full", SHARDS),
        ("8bit", "full", TENSOR),
        *(
            pytest.param(*changed, marks=pytest.mark.slow)
            for changed in (
                ("bf16", "8bit", SHARDS),
                ("full", "bf16", SHARDS),
                ("bf16", "full", SHARDS),
                ("full", "bf16", TENSOR),
                ("bf16", "full", TENSOR),
            )
        ),
    ],
)
def test_a_run_goes_on_with_other_states(before: Any, after: Any, layout: Layout, tmp_path: Path) -> None:
    """Moments are converted, not lost: the next losses are those of going on as before, but for the rounding.

    Also where a process holds parts of the blocks that were saved.
    """
    plan = plan_of(4, optimizer_states=before)
    leg(ALONE, tmp_path / "kept", "few bits", plan, torch.float64, 4)
    leg(ALONE, tmp_path / "changed", "few bits", plan, torch.float64, 4)
    expected = leg(ALONE, tmp_path / "kept", "few bits", plan, torch.float64, 8).losses
    changed = dataclasses.replace(plan, optimizer_states=after, layout=layout)
    found = _leg_on(layout, tmp_path / "changed", changed, 8).losses
    assert found == pytest.approx(expected, rel=5e-3)
    assert found != expected


def of_few_rows(world: World, folder: Path, plan: Plan, stop: int) -> Leg:
    """A leg of a job with a matrix of four rows, which three shards divide into two, two and none."""
    data = torch.randn(50, 2048, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 4
    job = make_job(lambda: nn.Linear(2048, 4), data=data, optimizer=AdamW(lr=1e-3), numerics=["8bit-states"], batch=12)
    JOBS["few rows"] = (lambda: job), SEPARABLE
    return leg(world, folder, "few rows", plan, torch.float64, stop)


def test_a_process_without_a_row_gets_its_part_of_scales_too(tmp_path: Path) -> None:
    """When full moments are rounded, and the new ones are saved."""
    of_few_rows(ALONE, tmp_path, plan_of(3), 2)
    layout = Layout(shards=3)
    for stop in (3, 4):
        on_ranks(layout, of_few_rows, tmp_path, plan_of(3, layout=layout, optimizer_states="8bit"), stop)


def in_tensor_group(world: World, layout: Layout, states: Any, width: int) -> Learned:
    """What a model of this width learns in three updates."""
    plan = plan_of(8, layout=layout, optimizer_states=states)
    return taught(world, few_bits_job(width, max(320, width)), plan, SEPARABLE, torch.float64, 3)


@pytest.mark.parametrize(("states", "width"), [("bf16", 64), ("8bit", 512)])
def test_a_tensor_group_learns_what_one_process_does(states: Any, width: int) -> None:
    """Where rows are cut, between blocks, too."""
    expected = in_tensor_group(ALONE, Layout(), states, width)
    for found in on_ranks(TENSOR, in_tensor_group, TENSOR, states, width):
        assert largest_loss_difference(found, expected) < 1e-9
        assert largest_difference(found.weights, expected.weights) < 1e-9


def test_rows_cut_within_a_block_are_refused() -> None:
    """With the numbers, and what goes instead."""
    with pytest.raises(RankFailed, match="holds 32 of the 64 values of each row of"):
        on_ranks(TENSOR, in_tensor_group, TENSOR, "8bit", 64)


def test_what_does_not_go_together_is_refused() -> None:
    """A job that does not allow it, an optimiser without such moments, an unknown value; each with what would go."""
    job = few_bits_job()
    with pytest.raises(BadJob, match=r'numerics=\["8bit-states"\]'):
        Step(dataclasses.replace(job, numerics=["bf16-states"]), plan_of(16, optimizer_states="8bit"), SEPARABLE)
    with pytest.raises(BadJob, match=r"stoker\.AdamW and Adam, .* not for a SGD"):
        dataclasses.replace(job, optimizer=SGD(lr=0.1))
    with pytest.raises(BadJob, match="without amsgrad"):
        dataclasses.replace(job, optimizer=Adam(lr=0.1, amsgrad=True))
    with pytest.raises(BadJob, match="without amsgrad"):
        dataclasses.replace(job, optimizer=AdamW(lr=0.1, groups={"*": {"amsgrad": True}}))
    with pytest.raises(BadJob, match="'fp16', 'fp8', 'bf16-states', '8bit-states', got"):
        dataclasses.replace(job, numerics=["4bit-states"])
    with pytest.raises(ValueError, match="8bit optimizer_states have one implementation, default"):
        plan_of(16, optimizer_states="8bit", optimizer_implementation="fused")


def test_a_job_without_a_weight_that_is_large_enough_has_full_moments() -> None:
    """Below 4,096 values nothing is gained."""
    job: Job = make_job(lambda: nn.Linear(6, 4), optimizer=AdamW(lr=1e-3), numerics=["8bit-states"])
    mine, full = (Step(job, plan_of(16, optimizer_states=one), SEPARABLE) for one in ("8bit", "full"))
    train(job, mine, 3)
    train(job, full, 3)
    assert largest_difference(mine, full) < 1e-6
