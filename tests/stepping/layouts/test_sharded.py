"""Fully sharded data parallel outside of training: evaluation, errors within a pass, and where state is held."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import AdamW, Loss
from stoker.jobs.objective import Objective
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Layout, Plan
from stoker.stepping.distributed_tensors import local
from stoker.stepping.layouts.sharded import Sharded
from stoker.stepping.step import Step
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from tests.stepping.driving import SEPARABLE
from tests.stepping.layouts.odd import Block
from tests.stepping.models import CLASSES, FEATURES, make_job

TWO = Layout(shards=2)


class Stack(nn.Module):
    """Equal blocks between two layers; the first parameter has 9 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 9)
        self.between = nn.Linear(9, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        x = self.between(torch.relu(self.first(x_BF)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def reads_weights(model: Stack, batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
    """A metric that calls parts of a model and reads its weights."""
    inputs, _ = batch
    found = model.first(inputs).sum() + model.head.weight.sum()
    return Loss(found * len(inputs), len(inputs))


def stack_job(**changed: object):
    """Trains a `Stack`, with an average of its weights."""
    return make_job(
        changed.pop("model", Stack),
        optimizer=AdamW(lr=1e-2),
        metrics=["accuracy", reads_weights],
        average=0.5,
        **changed,
    )


class Stumbles(Exception):
    """What goes wrong in a pass."""


def update_with(step: Step, update: int, *, stumbles: bool = False) -> float:
    """Make an update; it may fail after the forward pass of the second block, in every process."""
    job = step.job
    data = datasets_of(job)
    source = BatchSource(
        data.train, step.pipeline(data.train, augmented=True), data.extent(job), job.seed, step.plan, split=step.split()
    )
    batch = next(source.batches(data.extent(job).position(update), update + 1))
    blocks: Any = getattr(step.model, "blocks", None)
    if stumbles:
        handle = blocks[1].register_forward_pre_hook(_stumble)
        try:
            return float(step.update(batch, update, update / 30))
        finally:
            handle.remove()
    return float(step.update(batch, update, update / 30))


def _stumble(*_: Any) -> None:
    raise Stumbles


def life(world: World, layout: Layout, *, stumbles: bool) -> dict[str, Any]:
    """Three updates with an evaluation in between, and an error in the second; what came out."""
    step = Step(
        stack_job(), Plan(device="cpu", micro_batch=8, layout=layout), SEPARABLE, dtype=torch.float64, world=world
    )
    losses = [update_with(step, 0)]
    if stumbles:
        with pytest.raises(Stumbles):
            update_with(step, 1, stumbles=True)
        step.forget_gradients()
    losses.append(update_with(step, 1))
    measured = _measured(step)
    losses.append(update_with(step, 2))
    held = {name: tuple(local(p).shape) for name, p in step.model.named_parameters()}
    moments = {tuple(local(one["exp_avg"]).shape) for one in step.optimizer.state.values()}
    return {"losses": losses, "measured": measured, "weights": step.whole_weights(), "held": held, "moments": moments}


def _measured(step: Step) -> dict[str, float]:
    """Every measure of the first eight samples, under the averaged weights."""
    data = datasets_of(step.job).train
    source = step.pipeline(data, augmented=False)
    with step.evaluation() as measure:
        indices = torch.arange(8).numpy()
        found = measure(source(data.fetch(indices, 0), 0, indices), 8)
    return {name: float(one.sum) / float(one.count) for name, one in found.items()}


def life_in_two(world: World) -> dict[str, Any]:
    """`life` with an error."""
    return life(world, TWO, stumbles=True)


@pytest.fixture(scope="module")
def in_two() -> list[dict[str, Any]]:
    """The lives of two processes."""
    return on_ranks(TWO, life_in_two)


def test_evaluation_sees_whole_weights(in_two: list[dict[str, Any]]) -> None:
    """Losses, and metrics that read weights or call parts of the model, are those of one process, under the average."""
    expected = life(ALONE, Layout(), stumbles=False)
    for one in in_two:
        assert one["measured"] == pytest.approx(expected["measured"], rel=1e-9)


def test_an_error_in_a_pass_leaves_nothing_behind(in_two: list[dict[str, Any]]) -> None:
    """The update is made again, and training goes on, as if nothing had happened."""
    expected = life(ALONE, Layout(), stumbles=False)
    for one in in_two:
        assert one["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        for name, tensor in expected["weights"].items():
            torch.testing.assert_close(one["weights"][name], tensor, rtol=1e-9, atol=1e-12)


def test_each_process_holds_its_rows_of_weights_and_state(in_two: list[dict[str, Any]]) -> None:
    """Half of them, of an odd number one more in the first process."""
    assert [one["held"]["first.weight"] for one in in_two] == [(5, FEATURES), (4, FEATURES)]
    for rank, one in enumerate(in_two):
        whole = Stack().state_dict()
        rows = {name: -(-len(p) // 2) if rank == 0 else len(p) // 2 for name, p in whole.items()}
        assert one["held"] == {name: (rows[name], *p.shape[1:]) for name, p in whole.items()}
        assert one["moments"] == set(one["held"].values())


def far_from_orthogonal(model: nn.Module) -> torch.Tensor:
    """A penalty that compares a weight with another tensor."""
    weight = model.blocks[0].inner.weight
    return (weight @ weight.t() - torch.eye(len(weight), dtype=weight.dtype)).square().sum()


def refused(world: World) -> list[str]:
    """What is said of a model whose layers differ in dtype, and of a penalty that needs whole weights."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64))
    with pytest.raises(BadJob) as dtypes:
        Sharded(model, world)
    plan = Plan(device="cpu", micro_batch=8, layout=TWO)
    step = Step(stack_job(loss=Objective("cross_entropy", penalty=far_from_orthogonal)), plan, SEPARABLE, world=world)
    with pytest.raises(BadJob) as penalty:
        update_with(step, 0)
    return [str(dtypes.value), str(penalty.value)]


def test_what_cannot_be_sharded_is_said_in_plain_words() -> None:
    """Parameters of two dtypes, which are gathered together, and a penalty that mixes parts of weights with others."""
    for dtypes, penalty in on_ranks(TWO, refused):
        assert "torch.float32" in dtypes
        assert "torch.float64" in dtypes
        assert "mixes weights, of which several processes hold parts" in penalty


class Skips(Stack):
    """Passes through the blocks that `order` says, in every pass."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order = order

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        x = self.between(torch.relu(self.first(x_BF)))
        for number in self.order:
            x = self.blocks[number](x)
        return self.head(x)


Orders = list[tuple[list[int], list[int]]]
"""The blocks that ranks 0 and 1 pass through, in each update."""

EQUAL_SKIPS: Orders = [([0, 1, 2], [0, 1, 2]), ([0, 2], [0, 2]), ([1], [1]), ([0, 1, 2], [0, 1, 2]), ([2, 1], [2, 1])]

REFUSED: dict[str, tuple[Orders, list[str]]] = {
    "as many": ([([0, 2], [0, 1])], ["rank 0 at blocks.2", "rank 1 at blocks.1"]),
    "fewer": ([([0, 1], [0, 1, 2])], ["rank 0 at the end of its pass", "rank 1 at blocks.2"]),
    "later": ([*EQUAL_SKIPS, ([0, 2], [0, 1])], ["rank 0 at blocks.2", "rank 1 at blocks.1"]),
}
"""Skips that differ, and what is said of them; the sixth update is one whose blocks are compared after its passes."""


def _passing_through(world: World, orders: Orders, layout: Layout) -> tuple[dict[str, torch.Tensor], int, str]:
    """Weights after the updates, how many were made, and what was said of the one that was not."""
    step = Step(
        stack_job(model=lambda: Skips([])),
        Plan(device="cpu", micro_batch=8, layout=layout),
        SEPARABLE,
        dtype=torch.float64,
        world=world,
    )
    for update, by_rank in enumerate(orders):
        step.model.order = by_rank[world.rank]
        try:
            update_with(step, update)
        except BadJob as problem:
            return {}, update, problem.message
    return step.whole_weights(), len(orders), ""


def _through_all(world: World, layout: Layout) -> dict[str, tuple[dict[str, torch.Tensor], int, str]]:
    """`_passing_through` of equal skips and of each that is refused."""
    cases = {"equal": EQUAL_SKIPS, **{name: orders for name, (orders, _) in REFUSED.items()}}
    return {name: _passing_through(world, orders, layout) for name, orders in cases.items()}


@pytest.mark.parametrize("layout", [TWO, Layout(shards=2, reshard=False)], ids=["resharded", "gathered"])
def test_blocks_that_some_ranks_skip_are_refused_by_name(layout: Layout) -> None:
    """In all processes, before the optimiser's step; what all skip trains as in one process."""
    alone, _, _ = _passing_through(ALONE, EQUAL_SKIPS, Layout())
    for outcome in on_ranks(layout, _through_all, layout):
        weights, _, _ = outcome["equal"]
        for name, tensor in alone.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-12)
        for name, (orders, said) in REFUSED.items():
            _, update, message = outcome[name]
            assert update == len(orders) - 1, name
            assert all(part in message for part in said), message


BF16 = Plan(device="cpu", micro_batch=4, precision="bf16", layout=TWO)


def in_bf16(world: World) -> dict[str, Any]:
    """What a block computes with, what is kept, and gradients; then the same in fp32, and in bf16 again."""
    step = Step(stack_job(), BF16, SEPARABLE, world=world)
    seen: list[torch.dtype] = []
    block: Any = step.model.blocks[1]
    block.inner.register_forward_hook(lambda m, i, o: seen.extend((m.weight.dtype, i[0].dtype, o.dtype)))
    gradients: dict[str, list[torch.Tensor]] = {}
    for name, plan in {"bf16": BF16, "fp32": dataclasses.replace(BF16, precision="fp32"), "bf16 again": BF16}.items():
        step.change_to(plan)
        step.gradients(first_batch(step), 0)
        gradients[name] = [whole_gradient(p) for p in step.model.parameters()]
        seen.append(torch.uint8)
        step.forget_gradients()
    update_with(step, 0)
    kept = {local(p).dtype for p in step.model.parameters()}
    kept |= {local(one["exp_avg"]).dtype for one in step.optimizer.state.values()}
    with step.evaluation() as measure:
        data = datasets_of(step.job).train
        content = step.pipeline(data, augmented=False)(data.fetch(torch.arange(8).numpy(), 0), 0, None)
        measure(content, 8)
    return {"seen": seen, "gradients": gradients, "kept": kept}


def first_batch(step: Step) -> Any:
    """The first batch of its job, this process's part."""
    data = datasets_of(step.job)
    source = BatchSource(
        data.train,
        step.pipeline(data.train, augmented=True),
        data.extent(step.job),
        step.job.seed,
        step.plan,
        split=step.split(),
    )
    return next(source.batches(data.extent(step.job).position(0), 1))


def whole_gradient(parameter: Any) -> torch.Tensor:
    """The gradient of a parameter, put together over processes."""
    return parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad


def test_in_bf16_weights_are_gathered_so_and_all_that_is_kept_is_fp32() -> None:
    """Blocks see bf16 weights and inputs; masters, moments and sums of gradients are fp32; the precision may change."""
    exact = Step(stack_job(), dataclasses.replace(BF16, precision="fp32", layout=Layout(), micro_batch=16), SEPARABLE)
    exact.gradients(first_batch(exact), 0)
    expected = torch.cat([p.grad.flatten() for p in exact.model.parameters()])
    for one in on_ranks(TWO, in_bf16):
        assert one["kept"] == {torch.float32}
        bf16, fp32 = {torch.bfloat16}, {torch.float32}
        passes = " ".join(str(dtype)[6:] for dtype in one["seen"]).split("uint8")
        assert [set(each.split()) for each in passes[:3]] == [{"bfloat16"}, {"float32"}, {"bfloat16"}], (bf16, fp32)
        flat = {name: torch.cat([g.flatten() for g in each]) for name, each in one["gradients"].items()}
        assert torch.equal(flat["bf16"], flat["bf16 again"])
        torch.testing.assert_close(flat["fp32"], expected, rtol=1e-5, atol=1e-7)
        error = float((flat["bf16"] - expected).norm() / expected.norm())
        assert 1e-4 < error < 0.02
        assert flat["bf16"].dtype == torch.float32
        assert not torch.equal(flat["bf16"], flat["bf16"].bfloat16().float())  # sums of micro-batches are not rounded


class Mixes(Stack):
    """Multiplies its activations by an fp32 matrix of its own."""

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        x = self.between(torch.relu(self.first(x_BF)))
        return self.head(x @ torch.eye(8))  # the line that is named


def mixed(world: World) -> str:
    """What is said of such a model in bf16."""
    step = Step(stack_job(model=Mixes), BF16, SEPARABLE, world=world)
    with pytest.raises(BadJob) as problem:
        update_with(step, 0)
    return str(problem.value)


def test_models_that_mix_dtypes_are_refused_under_bf16_shards() -> None:
    """With the line, and what would do."""
    for said in on_ranks(TWO, mixed):
        assert "Mixes mixes it with another dtype at test_sharded.py" in said
        assert "x @ torch.eye(8)" in said
        assert "fp32 or tf32" in said
