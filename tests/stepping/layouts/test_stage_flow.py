"""What stages pass on, found without any process and without values."""

from __future__ import annotations

from collections import UserDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.loading.fields import tensors_of
from stoker.profiling.job_profile import model_parts
from stoker.records import Layout
from stoker.stepping.layouts.pipeline_cut import cut_into_stages
from stoker.stepping.layouts.stage_flow import StageFlow, StageFollower, outline_of, with_tensors
from stoker.stepping.layouts.stages import EXECUTION
from stoker.zoo import GPT, Llama
from tests.stepping.layouts.passing import WIDTH, Passing, passing_job
from tests.stepping.models import VOCAB

TOKENS = torch.arange(16).reshape(2, 8) % VOCAB


def flow_of(model: nn.Module, stages: int, *given: Any) -> StageFlow:
    """The flow of a pass of `given`, by default of tokens."""
    cut = cut_into_stages(model, stages)
    follower = StageFollower(outline_of(model), cut.blocks)
    followed = follower.follow(lambda outline: outline(*(given or (TOKENS,))), model)
    return followed.flow(cut.first_blocks, cut.homes)


@pytest.mark.parametrize("model", [GPT(4, 16, 2, 8, VOCAB), GPT(4, 16, 2, 8, VOCAB, tied=True)])
def test_a_plain_transformer_passes_on_the_output_of_its_blocks(model: nn.Module) -> None:
    """Masks and positions, computed from the samples, are not passed on."""
    assert flow_of(model, 4).passed == tuple(((f"blocks.{number}", 0, 0),) for number in range(3))
    assert flow_of(Llama(2, 16, 4, 2, 24, VOCAB, 8), 2).passed == ((("blocks.0", 0, 0),),)


def test_what_several_stages_read_is_passed_on_to_the_last_one_that_does() -> None:
    """A skip connection, an encoder's output, and masks, positions and a bias that blocks return as well."""
    passed = flow_of(Passing(), 4).passed
    skip = ("squash", 0, 0)
    bias, positions = ("encoder.0", 0, 2), ("encoder.0", 0, 3)
    memory, decoded = ("norm", 0, 0), ("decoder_embedding", 0, 0)
    assert set(passed[0]) == {("encoder.0", 0, 0), ("encoder.0", 0, 1), bias, positions, skip}
    assert set(passed[1]) == {("encoder.1", 0, 1), bias, positions, skip, memory, decoded}
    assert set(passed[2]) == {("decoder.0", 0, 0), ("decoder.0", 0, 1), bias, positions, skip, memory, decoded}


def test_the_size_of_what_is_passed_on_is_in_the_parts_that_forecasts_take() -> None:
    """By stage, in sizes of the activations between blocks."""
    model, job = Passing(), passing_job()
    parts = EXECUTION.divided_parts(
        model_parts(model), model, Layout(stages=4), lambda outline: job.fields.call(outline, (TOKENS, TOKENS))
    )
    activations = TOKENS.numel() * WIDTH * 4
    mask, positions, bias = TOKENS.numel(), TOKENS.numel() * 8, TOKENS.shape[1] * WIDTH * 4
    others = (mask + positions + bias) / activations
    assert parts.passed == pytest.approx((2 + others, 3 + others, 4 + others))
    assert EXECUTION.divided_parts(model_parts(model), model, Layout(stages=4)).passed == ()


def test_a_model_is_followed_once_for_all_numbers_of_stages() -> None:
    """A cut changes which stage reads what, not the pass: each number of stages gives what it gives alone."""
    model, job, passes = Passing(), passing_job(), list[int]()
    model.register_forward_pre_hook(lambda *_: passes.append(1))

    def passed(of: nn.Module, stages: int) -> tuple[float, ...]:
        def call(outline: nn.Module) -> Any:
            return job.fields.call(outline, (TOKENS, TOKENS))

        return EXECUTION.divided_parts(model_parts(of), of, Layout(stages=stages), call).passed

    found = {stages: passed(model, stages) for stages in (2, 4)}
    assert len(passes) == 1
    assert found == {stages: passed(Passing(), stages) for stages in (4, 2)}


class Skipping(nn.Module):
    """Leaves out the last block of the first of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V]."""
        x_BTD = self.embedding(tokens_BT)
        for number in (0, 2, 3):
            x_BTD = self.blocks[number](x_BTD)
        return self.last(x_BTD)


def test_a_block_that_is_left_out_does_not_change_what_is_passed_on() -> None:
    """The activations between blocks, once."""
    model, job = Skipping(), passing_job()
    parts = EXECUTION.divided_parts(
        model_parts(model), model, Layout(stages=2), lambda outline: job.fields.call(outline, (TOKENS, TOKENS))
    )
    assert parts.passed == (1.0,)


class Odd(nn.Module):
    """Two blocks between an embedding and an output layer; `way` says what stages cannot do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.early = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(tokens_BT)
        if self.way == "branch" and x_BTD.detach().numpy().any():
            x_BTD = -x_BTD
        for block in self.blocks:
            x_BTD = block(x_BTD)
        if self.way == "weight":
            x_BTD = x_BTD * self.scale
        if self.way == "late":
            x_BTD = self.early(x_BTD)
        return self.last(x_BTD)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("weight", "stage 2 needs the weight scale, which stage 1 has"),
        ("late", "early is registered with stage 1, and called in stage 2"),
        ("branch", "its pass cannot be followed on tensors without values"),
    ],
)
def test_what_cannot_be_passed_on_is_said_before_a_run(way: str, said: str) -> None:
    """By name and stage, to whoever plans a run as well as in the run."""
    with pytest.raises(BadJob, match=said):
        flow_of(Odd(way), 2)
    job = passing_job()
    problem = EXECUTION.data_problem(job, Odd(way), (TOKENS, TOKENS), Layout(stages=2))
    assert problem is not None
    assert said in problem
    assert EXECUTION.data_problem(job, Odd("none"), (TOKENS, TOKENS), Layout(stages=2)) is None


class Counting(nn.Module):
    """A block whose sizes depend on values, which tensors without values do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        rows = x_BTD.sum(-1).flatten().nonzero().flatten()
        return x_BTD + self.inner(x_BTD.flatten(0, 1)[rows]).sum(0)


def test_a_block_whose_sizes_depend_on_values_is_taken_to_return_activations() -> None:
    """As experts do, whose numbers of rows are known only in a real pass."""
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *(Counting() for _ in range(3)))
    assert flow_of(model, 3).passed == ((("1", 0, 0),), (("2", 0, 0),))


class Numbered(nn.Module):
    """A block that also returns a number, of what its weights compute or of a shape."""

    def __init__(self, *, is_computed: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.is_computed = is_computed

    def forward(self, given: Any) -> tuple[torch.Tensor, float]:
        x_BTD = given[0] if isinstance(given, tuple) else given
        x_BTD = self.inner(x_BTD)
        return x_BTD, x_BTD.mean().item() if self.is_computed else x_BTD.shape[1]


def test_numbers_that_weights_compute_are_not_passed_on() -> None:
    """They would be those of a pass without values; numbers such as sizes are the same in all stages."""
    tokens = nn.Embedding(VOCAB, WIDTH)
    sized, computed = ([Numbered(is_computed=way) for _ in range(3)] for way in (False, True))
    assert flow_of(nn.Sequential(tokens, *sized), 3).passed == ((("1", 0, 0),), (("2", 0, 0),))
    with pytest.raises(BadJob, match="1 returns a number that it computes with weights"):
        flow_of(nn.Sequential(tokens, *computed), 3)


class OfInputs(nn.Module):
    """Looks at its inputs in Python, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(tokens_BT)
        if self.way == "number" and tokens_BT[0, 0] > 3:
            x_BTD = -x_BTD
        if self.way == "list" and tokens_BT[0].tolist()[0] > 3:
            x_BTD = -x_BTD
        if self.way == "positions":
            x_BTD = x_BTD[torch.arange(len(tokens_BT))]
        if self.way == "rows":
            x_BTD = x_BTD[tokens_BT > 3]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD


@pytest.mark.parametrize(
    ("way", "is_read"), [("none", False), ("positions", False), ("number", True), ("list", True), ("rows", True)]
)
def test_a_pass_that_looks_at_its_inputs_stands_for_no_other_one(way: str, *, is_read: bool) -> None:
    """Another one of such shapes may take another way, or pass on other sizes."""
    flow = flow_of(OfInputs(way), 2)
    assert flow.reads_inputs == is_read
    assert flow.passed == ((("blocks.0", 0, 0),),)
    rows = int((TOKENS > 3).sum()) if way == "rows" else TOKENS.numel()
    assert flow.num_bytes(0) == rows * WIDTH * 4


def test_following_a_pass_changes_nothing() -> None:
    """Neither the model, whose batch norm would count the pass, nor the generators."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    state, before = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    flow_of(model, 2, torch.rand(3, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("kind", [dict, UserDict, MappingProxyType])
def test_tensors_that_parts_return_have_one_order_of_places(kind: Any) -> None:
    """What is read of an output by its place and what is put at the place is one tensor, whatever holds it."""
    output = kind({"hidden": torch.zeros(1), "others": [torch.zeros(2)]}), torch.zeros(3)
    places = iter(range(3))
    numbered = with_tensors(output, lambda tensor: (next(places), len(tensor)))
    assert (numbered[0]["hidden"], numbered[0]["others"]) == ((0, 1), [(1, 2)])
    assert numbered[1] == (2, 3)
    assert [len(tensor) for tensor in tensors_of(output)] == [1, 2, 3]
    assert isinstance(output[0]["hidden"], torch.Tensor)  # a copy was changed
