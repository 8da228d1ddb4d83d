"""What may be spread over processes, and what is refused, with its numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import SGD, Muon
from stoker.records import Coupling, Layout, Plan
from stoker.stepping.layouts.compatibility import micro_batch_problem, require_legal, require_no_closure
from stoker.stepping.layouts.sharded import separate_blocks
from tests.stepping.driving import SEPARABLE, grouped
from tests.stepping.models import make_job, mlp

WHOLE = Coupling(kind="whole_group", group=16, causes=("the loss",), evidence="known")
TWO = Layout(replicas=2)


@pytest.mark.parametrize(
    ("coupling", "micro_batch", "layout", "words"),
    [
        (SEPARABLE, 1, TWO, None),
        (SEPARABLE, 17, TWO, "1 to 16 samples, not 17"),
        (grouped(16), 8, TWO, None),
        (grouped(16), 16, TWO, None),
        (grouped(16), 7, TWO, "at least 8 samples, not 7"),
        (grouped(16), 5, Layout(shards=3), "at least 6 samples, not 5"),
        (grouped(6), 3, TWO, None),
        (grouped(6), 2, TWO, "at least 3 samples, not 2"),
        (grouped(16), 8, Layout(tensor=2), "whole number of groups, not 8"),
        (WHOLE, 16, TWO, "which one process has to see whole: replicas × shards must be 1, not 2 × 1"),
        (WHOLE, 16, Layout(tensor=2), None),
    ],
)
def test_a_group_of_coupled_samples_stays_in_one_pass(
    coupling: Coupling, micro_batch: int, layout: Layout, words: str | None
) -> None:
    """Over processes that share a batch its part of a group, and of a group that cannot be divided all."""
    problem = micro_batch_problem(coupling, micro_batch, 16, layout)
    assert problem is None if words is None else words in (problem or "")


@pytest.mark.parametrize(
    ("changed", "layout", "words"),
    [
        ({"loss": None, "step": lambda model, optimizer, batch: 0.0, "optimizer": torch.optim.SGD}, TWO, "own step"),
        ({"optimizer": Muon(lr=0.02, rest=SGD(lr=0.1))}, Layout(shards=2), "2 shards: Muon needs whole matrices"),
        ({}, Layout(replicas=17), "17 processes cannot take parts of a batch of 16"),
    ],
)
def test_what_is_done_in_one_piece_is_not_spread(changed: dict[str, object], layout: Layout, words: str) -> None:
    """A step of the job's own, whole matrices, and fewer samples than processes."""
    job = make_job(mlp, **changed)
    with pytest.raises(BadJob, match=words):
        require_legal(job, Plan(device="cpu", micro_batch=16, layout=layout), SEPARABLE)
    require_legal(job, Plan(device="cpu", micro_batch=16), SEPARABLE)


def test_closures_are_one_process_own() -> None:
    """An optimiser that computes the loss again is refused under several processes."""
    closure = torch.optim.LBFGS(mlp().parameters())
    with pytest.raises(BadJob, match="LBFGS computes the loss again"):
        require_no_closure(closure, TWO)
    require_no_closure(closure, Layout())


def test_compiled_plans_are_for_replicas_shards_and_experts() -> None:
    """Of tensor groups and stages it is not shown yet that a compiled model learns the same."""
    job = make_job(mlp)
    for legal in (TWO, Layout(shards=2), Layout(replicas=2, shards=2), Layout(experts=2), Layout(shards=2, experts=2)):
        require_legal(job, Plan(device="cpu", micro_batch=16, layout=legal, compile=True), SEPARABLE)
    for layout in (Layout(tensor=2), Layout(stages=2), Layout(shards=2, tensor=2)):
        with pytest.raises(BadJob, match="compiled plans are for one process, replicas, shards and experts so far"):
            require_legal(job, Plan(device="cpu", micro_batch=16, layout=layout, compile=True), SEPARABLE)


def test_a_selective_checkpoint_of_blocks_compiled_in_parts_is_refused() -> None:
    """It would have to be within the code of a whole block; checkpoints in full are around the parts."""
    plan = Plan(device="cpu", micro_batch=8, checkpointed_blocks=2, checkpointing="selective", compile=True)
    with pytest.raises(BadJob, match="under 2-way experts blocks are compiled in parts"):
        require_legal(make_job(mlp), dataclasses.replace(plan, layout=Layout(experts=2)), SEPARABLE)
    require_legal(make_job(mlp), dataclasses.replace(plan, layout=Layout(shards=2)), SEPARABLE)
    full = dataclasses.replace(plan, layout=Layout(experts=2), checkpointing="full")
    require_legal(make_job(mlp), full, SEPARABLE)


class Tied(nn.Module):
    """Blocks one of whose weights is also the head's."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))
        self.head = nn.Linear(4, 4)
        if is_tied:
            self.head.weight = self.blocks[1][0].weight


def test_blocks_that_share_weights_are_not_gathered_by_themselves() -> None:
    """FSDP2 would train two weights in place of one."""
    model = Tied(is_tied=False)
    assert separate_blocks(model) == list(model.blocks)
    assert separate_blocks(Tied(is_tied=True)) == []
