"""Compiled plans under expert parallel: blocks in parts, around what they exchange, and what one process learns."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stoker.jobs import Job
from stoker.loading.batches import Batch, BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Layout, Plan, Position
from stoker.stepping.step import Step
from stoker.stepping.torch_compile import Compilation, compiled_part, parts_around
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from tests.stepping.driving import SEPARABLE, largest_difference
from tests.stepping.experts import Layer, StackedExperts
from tests.stepping.layouts.conformance import Learned, experts_job, largest_loss_difference, trained_with
from tests.training.legs import Leg, leg

UPDATES = 4
TWO = Layout(experts=2)
SAVING = {"micro_batch": 4, "checkpointed_blocks": 2}

CASES: dict[str, tuple[str, Layout, dict[str, Any], bool]] = {
    "recomputed": ("batched", TWO, SAVING, True),
    "in shards": ("batched", Layout(experts=2, shards=2), {"micro_batch": 4}, True),
    "in shards kept": ("batched", Layout(experts=2, shards=2, reshard=False), {"micro_batch": 2}, True),
    "no token for a process": ("looped", TWO, SAVING, False),
    "sizes as numbers": ("grouped", TWO, SAVING, False),
}
"""Kind of experts, layout, plan, and whether the experts can be captured."""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiled plans need g++ on a CPU")


@dataclass(frozen=True)
class Compiled:
    """What a process learned, the number of parts, why some were not compiled, and the number of graphs captured."""

    learned: Learned
    num_parts: int
    problem: str | None
    num_graphs: int


def by(backend: str) -> None:
    """In a process of its own: let `torch.compile` take a backend, such as one that writes no kernels."""
    torch.compile = functools.partial(torch.compile, backend=backend)


def num_graphs() -> int:
    """Number of graphs that this process has captured."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compiled(world: World, kind: str, settings: dict[str, Any], backend: str = "aot_eager") -> Compiled:
    """What a compiled plan learns in this process, in float64."""
    if backend != "inductor":
        by(backend)
    plan = Plan(device="cpu", layout=world.layout, compile=True, **settings)
    step = Step(experts_job(kind), plan, SEPARABLE, dtype=torch.float64, world=world)
    learned = trained_with(step, UPDATES)
    assert step.compilation is not None
    return Compiled(learned, len(step.compilation.regions), step.compilation.problem, num_graphs())


@functools.cache
def alone(kind: str) -> Learned:
    """What one process learns that is not compiled."""
    plan = Plan(device="cpu", micro_batch=16)
    return trained_with(Step(experts_job(kind), plan, SEPARABLE, dtype=torch.float64), UPDATES)


def batches(job: Job, step: Step, count: int) -> Iterator[Batch]:
    """This process's part of the first batches of a job."""
    data = datasets_of(job)
    source = BatchSource(
        data.train, step.pipeline(data.train, augmented=True), data.extent(job), job.seed, step.plan, split=step.split()
    )
    return source.batches(Position(), count)


def require_equal(found: Compiled, kind: str) -> None:
    """Losses of all updates, weights and averages are one process's, to 1e-9."""
    assert largest_loss_difference(found.learned, alone(kind)) < 1e-9
    assert largest_difference(found.learned.weights, alone(kind).weights) < 1e-9
    assert largest_difference(found.learned.averages, alone(kind).averages) < 1e-9


_SLOW = ("in shards", "in shards kept", "no token for a process", "sizes as numbers")
"""The code of the first, but for messages; what cannot be captured is tested in one process below."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in _SLOW else ()) for case in CASES]
)
def test_compiled_processes_with_different_experts_learn_what_one_does(case: str) -> None:
    """The experts of both blocks are compiled; where they cannot be, that is said, and a block is recomputed as it was.

    A block's norm and router are single layers of PyTorch, so that the experts are all that is compiled.
    """
    kind, layout, settings, is_captured = CASES[case]
    ranks = on_ranks(layout, compiled, kind, settings)
    for found in ranks:
        require_equal(found, kind)
        assert found.num_parts == 2
    if is_captured:  # once for all numbers of tokens: the experts, the sum of their results, the loss
        assert [found.problem for found in ranks] == [None] * layout.world_size
        assert max(found.num_graphs for found in ranks) == 3
    else:  # a process whose experts get no tokens captures none
        why = "a part of the model cannot be compiled and runs as it is: Could not"
        assert any((found.problem or "").startswith(why) for found in ranks)


@pytest.mark.slow
def test_kernels_of_experts_learn_what_one_process_does() -> None:
    """By inductor, with shards, recomputed."""
    layout = Layout(experts=2, shards=2)
    for found in on_ranks(layout, compiled, "batched", SAVING, "inductor"):
        require_equal(found, "batched")
        assert found.problem is None


def compiled_leg(world: World, folder: Path, plan: Plan, stop: int) -> Leg:
    """As `leg`, of a plan that may be compiled."""
    by("aot_eager")
    return leg(world, folder, "experts", plan, torch.float64, stop)


@pytest.mark.slow
def test_a_compiled_run_goes_on_under_other_layouts(tmp_path: Path) -> None:
    """Compiled in four processes, not compiled in two shards, compiled in two: as one that was never stopped."""
    whole = leg(ALONE, tmp_path / "whole", "experts", Plan(device="cpu", micro_batch=16), torch.float64, 8)
    losses: list[float] = []
    legs = ((Layout(experts=2, shards=2), True, 3), (Layout(shards=2), False, 5), (TWO, True, 8))
    for layout, is_compiled, stop in legs:
        plan = Plan(device="cpu", micro_batch=4, layout=layout, compile=is_compiled)
        last = on_ranks(layout, compiled_leg, tmp_path / "run", plan, stop)[0]
        losses += last.losses
    assert max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(losses, whole.losses, strict=True)) < 1e-9
    for key, weight in whole.weights.items():
        torch.testing.assert_close(last.weights[key], weight, rtol=0, atol=1e-9)


def changed(world: World) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The kinds of the experts' pass under a plan that is compiled, then not, then again; weights after an update each.

    The batch is the same in all three.
    """
    by("aot_eager")
    plans = [Plan(device="cpu", micro_batch=4, layout=TWO, compile=is_compiled) for is_compiled in (True, False, True)]
    job = experts_job("batched")
    step = Step(job, plans[0], SEPARABLE, dtype=torch.float64, world=world)
    kinds, layer = list[str](), step.model[1]
    for update, (plan, batch) in enumerate(zip(plans, batches(job, step, 3), strict=True)):
        step.change_to(plan)
        kinds.append(type(layer.experts.forward._forward).__name__)  # type: ignore[union-attr]
        step.update(batch, update, update / UPDATES)
    return kinds, step.whole_weights()


@pytest.mark.slow
def test_a_run_may_stop_compiling_and_begin_again() -> None:
    """The experts' own pass is put back in its place, and what is learned stays one process's."""
    job, plan = experts_job("batched"), Plan(device="cpu", micro_batch=16)
    step = Step(job, plan, SEPARABLE, dtype=torch.float64)
    for update, batch in enumerate(batches(job, step, 3)):
        step.update(batch, update, update / UPDATES)
    for kinds, weights in on_ranks(TWO, changed):
        assert kinds == ["_Region", "method", "_Region"]
        assert largest_difference(weights, step.whole_weights()) < 1e-9


class Attention(nn.Module):
    """A module of several layers before the experts of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.after(self.before(x_BTD).tanh())


def test_parts_are_the_outermost_modules_without_experts() -> None:
    """A list has no pass of its own, so what is in it counts; norm and router are a kernel each as they are."""
    experts = StackedExperts(4, 8, 16)
    block: Any = nn.Sequential(nn.ModuleList([Attention()]), Layer(experts, 4, 8, is_even=False), nn.LayerNorm(8))
    assert list(parts_around([experts], block)) == [block[0][0], experts]
    dense: Any = Attention()  # a block without experts, as the first ones of some models
    assert list(parts_around([experts], experts)) == [experts]
    assert list(parts_around([experts], dense)) == [dense]


def rows(*sizes: int) -> list[torch.Tensor]:
    """Matrices of so many rows."""
    return [torch.ones(size, 3) for size in sizes]


def graphs_of(function: Callable[..., Any], inputs: list[torch.Tensor], *, is_for_any: bool) -> int:
    """Number of graphs that are compiled for a function of these inputs, one after the other."""
    numbers = itertools.count()

    def counting(graph: Any, _: Any) -> Any:
        next(numbers)
        return graph

    before = torch.compile
    torch.compile = functools.partial(torch.compile, backend=counting)
    try:
        part = compiled_part(function, Compilation((), is_in_parts=True), has_any_rows=is_for_any)
    finally:
        torch.compile = before
    for tensor in inputs:
        torch.testing.assert_close(part(tensor), function(tensor))
    return next(numbers)


def test_a_part_for_any_number_of_rows_is_compiled_once() -> None:
    """None and one row run as they are, since the compiler takes those for constants."""

    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    def halved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor / 2

    assert graphs_of(doubled, rows(0, 5, 1, 7, 2, 64, 0), is_for_any=True) == 1
    assert graphs_of(halved, rows(5, 7, 64), is_for_any=False) == 3


def test_a_part_that_fails_leaves_the_others_compiled() -> None:
    """Each by itself: what a checkpointed block did compiled it does compiled again."""
    compilation = Compilation((), is_in_parts=True)
    before = torch.compile
    torch.compile = functools.partial(torch.compile, backend="eager")
    try:
        fails = compiled_part(lambda tensor: tensor * 6 if tensor.sum() > 0 else tensor, compilation)
        works: Any = compiled_part(lambda tensor: tensor * 3, compilation)
    finally:
        torch.compile = before
    (three,) = rows(2)
    torch.testing.assert_close(fails(three), three * 6)
    torch.testing.assert_close(works(three), three * 3)
    assert works._is_compiled
    assert "a part of the model cannot be compiled" in (compilation.problem or "")


def test_a_part_that_takes_its_number_of_rows_for_a_constant_runs_as_it_is() -> None:
    """As one that loops over its rows: the error of the compiler ended the run."""

    def looping(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor[row] * 2 for row in range(len(tensor))])

    compilation = Compilation((), is_in_parts=True)
    part = compiled_part(looping, compilation, has_any_rows=True)
    for tensor in rows(4, 5):
        torch.testing.assert_close(part(tensor), tensor * 2)
    assert "a part of the model cannot be compiled and runs as it is" in (compilation.problem or "")
