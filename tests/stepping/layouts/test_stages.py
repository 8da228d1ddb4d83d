"""Where models are cut, without any process."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stoker.errors import BadJob
from stoker.layouts.stages import AXIS
from stoker.profiling.job_profile import model_parts
from stoker.records import Layout
from stoker.stepping.layouts.pipeline_cut import balanced_spans, block_costs, cut_into_stages, stage_problem
from stoker.stepping.layouts.stages import EXECUTION
from stoker.zoo import GPT


def gpt(layers: int = 4, vocab: int = 12, *, tied: bool = False) -> GPT:
    """A small one."""
    return GPT(layers=layers, width=16, heads=2, context=8, vocab=vocab, tied=tied)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_the_costliest_stage_costs_the_least_there_is(costs: list[int], stages: int) -> None:
    """No other cut into runs of neighbours, none empty, has a smaller largest sum."""
    stages = min(stages, len(costs))
    found = balanced_spans(costs, stages)
    assert [item for span in found for item in span] == list(range(len(costs)))
    assert all(len(span) for span in found)
    others = (
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *ends, len(costs))))
        for ends in itertools.combinations(range(1, len(costs)), stages - 1)
    )
    assert max(sum(costs[at] for at in span) for span in found) == min(others)


def test_what_is_outside_of_blocks_goes_with_the_first_and_the_last_stage() -> None:
    """Embeddings come before the blocks, the last norm and the output layer after them; every entry has one stage."""
    model = gpt()
    found = cut_into_stages(model, 2)
    assert found.spans == (range(2), range(2, 4))
    assert list(found.owners) == list(model.state_dict())
    assert {name.split(".")[0] for name, stage in found.owners.items() if stage == 0} == {
        "tokens",
        "positions",
        "blocks",
    }
    assert found.owners["blocks.1.mlp.out.bias"] == 0
    assert found.owners["blocks.2.attention_norm.weight"] == 1
    assert found.owners["head.weight"] == 1


def test_a_large_output_layer_leaves_the_last_stage_fewer_blocks() -> None:
    """Costs are those of matrices, embeddings left out."""
    model = gpt(vocab=600)
    blocks = [12 * 16 * 16] * 4
    assert block_costs(model) == [*blocks[:3], blocks[3] + 600 * 16]
    assert cut_into_stages(model, 2).spans == (range(3), range(3, 4))


def test_a_sequential_is_cut_between_its_modules() -> None:
    """Where nothing is repeated, modules of a Sequential are what follows each other."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    found = cut_into_stages(model, 2)
    assert found.blocks == ("0", "1", "2", "3", "4")
    assert found.owners["0.weight"] == 0
    assert found.owners["4.weight"] == 1


class Recoding(nn.Module):
    """Begins and ends with one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.last = self.first


def test_an_output_layer_that_is_tied_is_computed_in_the_last_stage() -> None:
    """Its matrix costs time there, as if it were not tied; both stages hold it, under the name that each has."""
    model = gpt(vocab=600, tied=True)
    assert block_costs(model) == block_costs(gpt(vocab=600))
    cut = cut_into_stages(model, 2)
    assert cut.tied == {"head.weight": "tokens.weight"}
    assert cut.holders("tokens.weight") == (0, 1)
    parts = EXECUTION.divided_parts(model_parts(model), model, Layout(stages=2))
    assert [one.name for one in parts.parameters if one.name in ("tokens.weight", "head.weight")] == [
        "tokens.weight",
        "head.weight",
    ]
    assert parts.tied_bytes == 600 * 16 * 4
    assert [one.name for one in AXIS.held(parts, Layout(stages=2), 1).parameters][-1] == "head.weight"


@pytest.mark.parametrize(
    ("model", "stages", "said"),
    [
        (gpt(2), 3, "3 stages need 3 blocks at least, but GPT has 2 blocks in a row"),
        (nn.Bilinear(2, 2, 2), 2, "no repeated blocks"),
        (Recoding(), 2, "first and last of Recoding are one module, but stages 1 and 2 of 2 would each call it"),
        (nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Linear(2, 2)), 3, "stage 1 of 3 .* nothing to train"),
    ],
)
def test_what_cannot_be_cut_is_said_with_numbers(model: nn.Module, stages: int, said: str) -> None:
    """Too few blocks, weights tied over a cut, stages without weights: which number, and what would do."""
    found = stage_problem(model, Layout(stages=stages))
    assert found is not None
    assert re.search(said, found), found
    with pytest.raises(BadJob, match=said):
        cut_into_stages(model, stages)
    assert stage_problem(model, Layout()) is None
