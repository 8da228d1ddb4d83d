"""Tensor groups learn what one process learns."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stoker import optimizers
from stoker.errors import BadJob
from stoker.jobs import SGD, AdamW, Job, Muon
from stoker.jobs.objective import Objective
from stoker.loading.batches import in_order
from stoker.records import Layout
from stoker.stepping.layouts.tensor_plans import Rules
from stoker.stepping.step import Step
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import RankFailed, on_ranks
from stoker.zoo import GPT, Llama
from tests.stepping.driving import SEPARABLE, largest_difference, plan_of
from tests.stepping.layouts.conformance import UPDATES, Learned, gpt_job, largest_loss_difference, learned, taught
from tests.stepping.models import VOCAB, make_job, samples_of, texts

TENSOR, SEQUENCE = Layout(tensor=2), Layout(tensor=2, sequence=True)

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-6}


class NormalisedQueries(nn.Module):
    """A block with its norms, an attention that normalises its queries head by head, and a gated MLP."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.query_norm = nn.LayerNorm(self.head_dim)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        normed_BTD = self.norm(x_BTD)
        q, k, v = (
            one(normed_BTD).view(B, T, -1, self.head_dim).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(self.query_norm(q), k, v, is_causal=True)
        return x_BTD + self.out(mixed.transpose(1, 2).reshape(B, T, -1))


class OwnPlan(nn.Module):
    """A language model of such blocks that says itself how it is divided."""

    def __init__(self, queries: str = "summed") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(NormalisedQueries() for _ in range(2))
        self.last = nn.Linear(16, VOCAB)
        self.last.weight = self.embedding.weight
        self.tensor_plan: Rules = {
            "layers.*.query": "colwise",
            "layers.*.key": "colwise",
            "layers.*.value": "colwise",
            "layers.*.out": "rowwise",
            "last": "output",
        }
        if queries == "summed":
            self.tensor_plan["layers.*.query_norm"] = "summed"

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.last(x_BTD)


def text_job(model: Any, **changed: Any) -> Job:
    """A job over texts whose last batch has 7 samples."""
    given = {"optimizer": AdamW(lr=1e-3), "loss": "token_cross_entropy", "clip_norm": 1.0}
    return make_job(model, data=texts(23, masked=0.3), **{**given, **changed})


def llama_job() -> Job:
    """Query heads that share keys and values, and smoothed labels, for which logits are put together."""
    return text_job(
        lambda: Llama(layers=2, width=16, heads=4, kv_heads=2, hidden=24, vocab=VOCAB, context=8),
        loss=Objective("token_cross_entropy", label_smoothing=0.1),
    )


def own_plan_job() -> Job:
    """A model with a plan of its own, whose output layer shares the embedding's weight."""
    return text_job(OwnPlan)


def odd_vocabulary_job() -> Job:
    """A vocabulary that two processes do not divide, and dropout that is silenced."""
    return text_job(lambda: GPT(layers=2, width=16, heads=2, context=8, vocab=VOCAB + 1, dropout=0.0))


def frequencies_job() -> Job:
    """A table whose gradients are divided by how often a token is there."""

    def model() -> nn.Module:
        made = GPT(layers=2, width=16, heads=2, context=8, vocab=VOCAB)
        made.tokens.scale_grad_by_freq = True
        return made

    return text_job(model)


OTHERS = {
    "llama": llama_job,
    "own plan": own_plan_job,
    "odd vocabulary": odd_vocabulary_job,
    "frequencies": frequencies_job,
}


CASES = (("gpt", torch.float64), ("gpt", torch.float32), ("momentum", torch.float64))


def _learned(world: World, layout: Layout, micro_batch: int) -> list[Learned]:
    """What a process learns of each of CASES in six updates."""
    plan = plan_of(micro_batch, layout=layout)
    return [learned(world, name, plan, dtype, UPDATES // 2) for name, dtype in CASES]


@functools.cache
def alone() -> list[Learned]:
    """As `_learned`, in one process, with each batch in one piece."""
    return _learned(ALONE, Layout(), 16)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(TENSOR, marks=pytest.mark.slow), SEQUENCE],  # four learn without sequence below
    ids=Layout.in_words,
)
def test_a_tensor_group_learns_what_one_process_does(layout: Layout) -> None:
    """Losses of all updates, and the weights after them, are one process's, and so is the average of weights."""
    for found in on_ranks(layout, _learned, layout, 8):
        for one, expected, (_, dtype) in zip(found, alone(), CASES, strict=True):
            assert largest_loss_difference(one, expected) < LIMITS[dtype]
            assert one.indices == expected.indices
            if dtype == torch.float64:
                assert largest_difference(one.weights, expected.weights) < LIMITS[dtype]
                assert largest_difference(one.averages, expected.averages) < LIMITS[dtype]


def _in_six_updates(world: World, layout: Layout) -> Learned:
    """What a process learns of a GPT with four heads."""
    return learned(world, "gpt", plan_of(8, layout=layout), torch.float64, 6)


@pytest.mark.parametrize(
    "layout",
    [Layout(tensor=4), pytest.param(Layout(tensor=4, sequence=True), marks=pytest.mark.slow)],
    ids=Layout.in_words,
)
def test_a_tensor_group_of_four_learns_what_one_process_does(layout: Layout) -> None:
    """Losses and weights, to 1e-9: a head and a quarter of each matrix for each process."""
    expected = _in_six_updates(ALONE, Layout())
    for one in on_ranks(layout, _in_six_updates, layout):
        assert largest_loss_difference(one, expected) < LIMITS[torch.float64]
        assert largest_difference(one.weights, expected.weights) < LIMITS[torch.float64]


def _others(world: World, layout: Layout) -> dict[str, Learned]:
    """What each of OTHERS learns in six updates; the plan of the model's own knows nothing of sequences."""
    return {
        name: taught(world, make(), plan_of(8, layout=layout), SEPARABLE, torch.float64, 6)
        for name, make in OTHERS.items()
        if not (layout.sequence and name == "own plan")
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TENSOR, SEQUENCE], ids=Layout.in_words)
def test_other_models_and_plans_learn_what_one_process_does(layout: Layout) -> None:
    """Shared keys and values, a model's own plan, tied weights, an odd vocabulary, frequencies: weights are equal."""
    expected = _others(ALONE, Layout())
    for found in on_ranks(layout, _others, layout):
        for name, one in found.items():
            assert largest_loss_difference(one, expected[name]) < LIMITS[torch.float64], name
            assert largest_difference(one.weights, expected[name].weights) < LIMITS[torch.float64], name


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "foreach": (optimizers.RMSprop(lr=1e-3), "foreach"),
    "PyTorch's choice": (AdamW(lr=1e-3), "default"),
    "amsgrad": (AdamW(lr=1e-3, amsgrad=True), "fused"),
    "no kernel for parts": (optimizers.Adagrad(lr=1e-3), "fused"),
    "a user's": (functools.partial(torch.optim.AdamW, lr=1e-3, fused=True), "default"),
}
"""Optimisers, and the implementation that a plan asks for."""


def _by_each_optimizer(world: World, layout: Layout) -> dict[str, Learned]:
    """What a GPT learns by each of OPTIMIZERS in six updates; PyTorch's choice is the one it makes on a GPU."""
    results = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["torch.optim.optimizer"], "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
        for name, (optimizer, implementation) in OPTIMIZERS.items():
            plan = plan_of(8, layout=layout, optimizer_implementation=implementation)
            job = dataclasses.replace(gpt_job(), optimizer=optimizer)
            results[name] = taught(world, job, plan, SEPARABLE, torch.float64, 6)
    return results


@pytest.mark.slow
def test_optimizers_over_lists_learn_in_a_tensor_group_what_they_learn_alone() -> None:
    """Although no list may mix divided matrices with whole norms: losses of six updates are one process's."""
    expected = _by_each_optimizer(ALONE, Layout())
    for found in on_ranks(TENSOR, _by_each_optimizer, TENSOR):
        for name, one in found.items():
            assert largest_loss_difference(one, expected[name]) < LIMITS[torch.float64], name


def _measured(world: World, layout: Layout) -> dict[str, float]:
    """Loss and metric of all samples, as evaluation finds them, and how many scalars of the model are held here."""
    job = text_job(lambda: GPT(layers=2, width=16, heads=2, context=8, vocab=VOCAB), metrics=["token_accuracy"])
    step = Step(job, plan_of(8, layout=layout), SEPARABLE, dtype=torch.float64, world=world)
    samples = samples_of(job)
    with step.evaluation() as measure:
        batches = in_order(samples, step.pipeline(samples, augmented=False), 23, world.split(SEPARABLE))
        [found] = [measure(batch.cut(0, batch.size), batch.size) for batch in batches]
    held = sum(getattr(p, "_local_tensor", p).numel() for p in step.model.parameters())
    return {name: float(loss.sum) for name, loss in found.items()} | {"held": held}


def test_evaluation_sees_all_logits_and_matrices_are_held_in_parts() -> None:
    """Sums of loss and metric are one process's on every rank, which holds half of each matrix."""
    expected = _measured(ALONE, Layout())
    matrices = 2 * 12 * 16 * 16 + 2 * VOCAB * 16  # of two blocks, the embedding and the output layer
    into = 2 * 4 * 16  # biases of the MLP's first layers
    for found in on_ranks(TENSOR, _measured, TENSOR):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)
        assert found["token_accuracy"] == expected["token_accuracy"]
        assert found["held"] == expected["held"] - (matrices + into) // 2


def _with_dropout(world: World) -> dict[str, Any]:
    """Losses and weights of a model that drops, what of this rank's tokens was kept, and seeds in and after heads."""
    model = GPT(layers=2, width=16, heads=2, context=8, vocab=VOCAB, dropout=0.5)
    job = text_job(lambda: model)
    kept: list[bool] = []
    seeds: dict[str, list[int]] = {"among heads": [], "after heads": []}

    def note(_module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        kept.extend((output[inputs[0] != 0] != 0).flatten()[:64].tolist())

    step = Step(job, plan_of(8, layout=world.layout), SEPARABLE, world=world)
    step.model.blocks[1].dropout.register_forward_hook(note)
    for layer, place in (("qkv", "among heads"), ("out", "after heads")):
        layers = (block.attention.get_submodule(layer) for block in step.model.blocks)
        for one in layers:
            one.register_forward_hook(lambda *_, place=place: seeds[place].append(torch.initial_seed()))
    samples = samples_of(job)
    batch = next(iter(in_order(samples, step.pipeline(samples, augmented=False), 16)))
    losses = [float(step.update(batch, update, 0.0)) for update in range(2)]
    return {"losses": losses, "weights": step.whole_weights(), "kept": kept, **seeds}


def test_ranks_drop_other_heads_and_tokens_and_keep_equal_weights() -> None:
    """Each rank draws for its own heads and tokens; the weights that all hold stay equal to the bit."""
    one, other = on_ranks(SEQUENCE, _with_dropout)
    assert one["losses"] == other["losses"]
    assert all(torch.equal(other["weights"][name], tensor) for name, tensor in one["weights"].items())
    assert one["kept"] != other["kept"]
    assert 0.3 < sum(one["kept"]) / len(one["kept"]) < 0.7
    assert len({*one["among heads"], *other["among heads"]}) == 2 * len(one["among heads"])
    assert one["after heads"] == other["after heads"]


def test_a_gradient_that_every_rank_has_a_part_of_has_to_be_said() -> None:
    """A norm of divided heads that the plan does not call summed is found at the first update, by name."""
    with pytest.raises(RankFailed, match=r"(?s)layers\.0\.query_norm.*summed"):
        on_ranks(TENSOR, _unsaid)


def _unsaid(world: World) -> Learned:
    """As `own plan`, with the norm of queries left out."""
    return taught(world, text_job(lambda: OwnPlan("unsaid")), plan_of(8, layout=TENSOR), SEPARABLE, torch.float64, 1)


class FromZero(NormalisedQueries):
    """As LoRA begins: a second path from the divided queries' inputs, whose last matrix is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        # Each process keeps its own part of what the branch adds, so that each has a part of its gradients.
        own = self.query.weight.shape[0] if not hasattr(self.query.weight, "to_local") else 8
        first = 0 if own == 16 else 8 * torch.distributed.get_rank()
        added_BTD = F.pad(self.up(self.down(x_BTD))[..., first : first + own], (first, 16 - first - own))
        return super().forward(x_BTD) + (added_BTD if own == 16 else self.summed(added_BTD))

    def summed(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Over the processes; the gradient of each part is one process's."""
        total_BTD = x_BTD.detach().clone()
        torch.distributed.all_reduce(total_BTD)
        return x_BTD + (total_BTD - x_BTD.detach())


def _from_zero(world: World) -> str:
    """What is said of `FromZero` when it trains under a small learning rate, and the update at which it is."""
    model = OwnPlan()
    model.layers = nn.ModuleList(FromZero() for _ in range(2))
    try:
        taught(
            world,
            text_job(lambda: model, optimizer=SGD(lr=1e-2)),
            plan_of(8, layout=TENSOR),
            SEPARABLE,
            torch.float64,
            6,
        )
    except BadJob as problem:
        return problem.message
    return "nothing"


def test_a_branch_that_begins_at_zero_is_compared_when_it_is_zero_no_more() -> None:
    """At the first update the gradient of what is before the zero is equal in all processes, and says nothing."""
    for said in on_ranks(TENSOR, _from_zero):
        assert "different gradients" in said


@pytest.mark.parametrize(
    ("changed", "plan", "named"),
    [
        (
            {"loss": Objective("token_cross_entropy", penalty=lambda model: model.head.weight.square().sum())},
            {},
            "penalty",
        ),
        ({"optimizer": Muon(lr=0.01, rest=AdamW(lr=1e-3))}, {}, "Muon"),
        ({}, {"loss_chunks": 2}, "loss_chunks 2"),
    ],
)
def test_what_does_not_go_with_divided_matrices_is_refused(
    changed: dict[str, Any], plan: dict[str, Any], named: str
) -> None:
    """Before anything is divided, with what does not go along."""
    world = World(TENSOR, 0)
    job = text_job(lambda: GPT(layers=2, width=16, heads=2, context=8, vocab=VOCAB), **changed)
    with pytest.raises(BadJob, match=named):
        Step(job, plan_of(8, layout=TENSOR, **plan), SEPARABLE, world=world)


def _in_other_ways(world: World, layout: Layout) -> list[Learned]:
    """A few updates under autocast, and with blocks checkpointed, in full and selectively."""
    ways = ("full", "selective")
    checkpointed = [plan_of(16, layout=layout, checkpointed_blocks=2, checkpointing=way) for way in ways]
    return [
        taught(world, gpt_job(), plan_of(16, layout=layout, precision="bf16"), SEPARABLE, None, 6),
        *(taught(world, gpt_job(), plan, SEPARABLE, torch.float64, 3) for plan in checkpointed),
    ]


@pytest.mark.slow
def test_autocast_and_checkpointed_blocks_go_along() -> None:
    """Under bf16 losses are within 1e-3 of one process's under bf16; recomputation changes nothing."""
    expected = _in_other_ways(ALONE, Layout())
    for in_bf16, *checkpointed in on_ranks(TENSOR, _in_other_ways, TENSOR):
        assert largest_loss_difference(in_bf16, expected[0]) < 1e-3
        for ours, alone in zip(checkpointed, expected[1:], strict=True):
            assert largest_difference(ours.weights, alone.weights) < LIMITS[torch.float64]
