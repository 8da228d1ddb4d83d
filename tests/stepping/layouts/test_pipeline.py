"""Stages of a pipeline learn what one process learns."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import SGD, AdamW, Job, Muon
from stoker.jobs.objective import Objective
from stoker.loading.batches import in_order
from stoker.records import Coupling, Layout, Schedule
from stoker.stepping.layouts.pipeline import turns
from stoker.stepping.step import Step
from stoker.stepping.step_failures import NotFinite
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import RankFailed, on_ranks
from stoker.training.named_state import names_of
from stoker.units import Duration
from stoker.zoo import GPT, Llama
from tests.stepping.driving import SEPARABLE, grouped, largest_difference, plan_of
from tests.stepping.layouts.conformance import (
    JOBS,
    UPDATES,
    Learned,
    cnn_job,
    largest_loss_difference,
    learned,
    taught,
    trained_with,
)
from tests.stepping.models import VOCAB, make_job, samples_of, texts
from tests.training.legs import losses_of_leg

STAGES, GPIPE = Layout(stages=2), Layout(stages=2, schedule="gpipe")
INTERLEAVED = Layout(stages=2, chunks=2)

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-6}


def text_job(model: Any, **changed: Any) -> Job:
    """A job over texts whose last batch has 7 samples."""
    given = {"optimizer": AdamW(lr=1e-3), "loss": "token_cross_entropy", "clip_norm": 1.0}
    return make_job(model, **{"data": texts(23, masked=0.3), **given, **changed})


def gpt(**changed: Any) -> GPT:
    """Two blocks."""
    return GPT(**{"layers": 2, "width": 16, "heads": 2, "context": 8, "vocab": VOCAB, **changed})


class Layered(nn.Module):
    """An embedding, four blocks and an output layer; `way` says what is odd about its forward pass."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.center = nn.BatchNorm1d(16, affine=False)
        self.embedding = nn.Embedding(VOCAB, 16)
        with torch.no_grad():
            self.embedding.weight[0] = 0
        self.blocks = nn.ModuleList(Masked(way) for _ in range(4))
        self.last = nn.Linear(16, VOCAB)
        self.passes = 0

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        first_BTD = x_BTD = self.embedding(tokens_BT)
        mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        is_even = self.way == "some masks" and tokens_BT[0, 0] % 2 == 0
        if is_even or self.way == "mask" or (self.way == "late mask" and self.passes > 12):
            mask_BT = (first_BTD != 0).any(-1)
        elif self.way == "finite":
            mask_BT = first_BTD.isfinite().all(-1) & (tokens_BT > 0)
        blocks = list(self.blocks)
        order = {
            "reversed": blocks[::-1],
            "recycled": blocks * 2,
            "skipped": [*blocks[:2], blocks[3]],
            "swapped": [blocks[0], blocks[2], blocks[1], blocks[3]],
            "ended": blocks[:2],
        }
        for block in order.get(self.way, blocks):
            x_BTD = block(x_BTD, mask_BT)
        if self.way == "balance":
            x_BTD = x_BTD + sum(block.balance for block in self.blocks)
        if self.way == "center":
            x_BTD = self.center(x_BTD.flatten(0, 1)).view_as(x_BTD)
        return self.last(x_BTD)


class Masked(nn.Module):
    """Adds to positions that are not masked."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.way = way
        self.balance: float | torch.Tensor = 0.0

    def forward(self, x_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        added_BTD = torch.tanh(self.inner(x_BTD))
        if self.way == "balance":
            self.balance = added_BTD.square().mean()
        return x_BTD + added_BTD * mask_BT[..., None]


WAYS = {
    "late mask": "a stage needs what another one has and does not pass on",
    "balance": "stage 2 needs a tensor that blocks.0 makes and does not return, which stage 1 has",
    "center": "center.running_mean is registered with one stage, but changed by another",
    "reversed": "in another order than registered",
    "recycled": "blocks.0 is called twice in a pass",
    "skipped": "blocks.3 is called before blocks.2",
    "swapped": "is called before",
    "ended": "blocks.2 is not called in every pass",
}
"""What is said of each."""


def _layered(world: World, layout: Layout, way: str) -> tuple[list[float], int]:
    """The losses of nine updates of `Layered`, and how many passes it counted."""
    torch.manual_seed(0)
    model = Layered(way)
    job = text_job(lambda: model, optimizer=SGD(lr=0.1), clip_norm=None)
    found = taught(world, job, plan_of(8, layout=layout), SEPARABLE, torch.float64, 9)
    return found.losses, model.passes


@pytest.mark.parametrize("way", WAYS)
def test_what_a_stage_cannot_know_is_refused_with_its_cause(way: str) -> None:
    """Another way through the model in a later update, losses kept aside, and blocks in another order."""
    with pytest.raises(RankFailed, match="BadJob: .*" + WAYS[way]):
        on_ranks(STAGES, _layered, STAGES, way)


@pytest.mark.parametrize("way", ["plain", "mask", "finite", "some masks"])
def test_rehearsals_leave_no_trace(way: str) -> None:
    """A model that counts its passes counts each once, and learns what one process does; masks of embeddings, too.

    Some models take another way for other numbers of the same shape.
    """
    expected, num_passes = _layered(ALONE, Layout(), way)
    for losses, counted in on_ranks(STAGES, _layered, STAGES, way):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert counted == num_passes


CASES = (
    ("gpt", torch.float64),
    ("gpt", torch.float32),
    ("momentum", torch.float64),
    ("passing", torch.float64),
    ("tied", torch.float64),
)


def _learned(world: World, layout: Layout, micro_batch: int) -> list[Learned]:
    """What a process learns of each of CASES in six updates; under GPipe, which is but another order, of the first."""
    plan = plan_of(micro_batch, layout=layout)
    cases = CASES[:1] if layout == GPIPE else CASES
    return [learned(world, name, plan, dtype, UPDATES // 2) for name, dtype in cases]


@functools.cache
def alone() -> list[Learned]:
    """As `_learned`, in one process, with each batch in one piece."""
    return _learned(ALONE, Layout(), 16)


@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 5), st.integers(1, 9))
def test_every_micro_batch_goes_forward_and_back_once_and_few_wait(
    schedule: Schedule, stages: int, passes: int
) -> None:
    """Backward after forward, in order; under 1F1B a stage holds as many as there are stages from it on."""
    for stage in range(stages):
        order = turns(Layout(stages=stages, schedule=schedule), stage, passes)
        done = [(kind, number) for kind, number, _ in order]
        for kind in ("forward", "backward"):
            assert [number for turn, number in done if turn == kind] == list(range(passes))
        waiting = [sum(1 if turn == "forward" else -1 for turn, _ in done[: at + 1]) for at in range(len(done))]
        assert min(waiting) >= 0
        assert all(done.index(("forward", n)) < done.index(("backward", n)) for n in range(passes))
        assert max(waiting) == (passes if schedule == "gpipe" else min(passes, stages - stage))


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 11))
def test_interleaved_stages_never_all_wait_for_each_other(processes: int, chunks: int, passes: int) -> None:
    """Messages arrive in the order in which they are taken, and passes end, whatever the number of micro-batches."""
    layout = Layout(stages=processes, chunks=chunks)
    orders = [turns(layout, place, passes) for place in range(processes)]
    last = layout.num_stages - 1
    for place, order in enumerate(orders):
        assert sorted(order) == sorted(
            (kind, number, stage)
            for kind in ("forward", "backward")
            for number in range(passes)
            for stage in range(place, layout.num_stages, processes)
        )
        after = orders[(place + 1) % processes]
        sent = [(number, stage + 1) for kind, number, stage in order if kind == "forward" and stage < last]
        assert sent == [
            one[1:] for one in after if one[0] == "forward" and (one[2] - 1) % processes == place and one[2]
        ]
        back = [(number, stage - 1) for kind, number, stage in after if kind == "backward" and stage > 0]
        assert back == [one[1:] for one in order if one[0] == "backward" and one[2] < last]
        for stage in range(place, layout.num_stages, processes):
            assert [number for kind, number, of in order if (kind, of) == ("backward", stage)] == list(range(passes))
    assert _idle_turns(orders, last) >= 0  # which fails if they never end
    if passes % processes == 0:
        assert _idle_turns(orders, last) == 2 * (processes - 1)


def _idle_turns(orders: list[Any], last: int) -> int:
    """The turns for which the process that waits the longest waits, if each pass takes one turn."""
    ends: dict[tuple[str, int, int], int] = {}
    left, now = [list(order) for order in orders], [0] * len(orders)
    while any(left):
        is_stuck = True
        for place, order in enumerate(left):
            while order:
                kind, number, stage = order[0]
                step, end = (-1, 0) if kind == "forward" else (1, last)
                needed = [] if stage == end else [(kind, number, stage + step)]
                needed += [("forward", number, stage)] if kind == "backward" else []
                if any(one not in ends for one in needed):
                    break
                now[place] = max([now[place], *(ends[one] for one in needed)]) + 1
                ends[order.pop(0)] = now[place]
                is_stuck = False
        assert not is_stuck
    return max(now) - len(orders[0])


OF_FOUR_BLOCKS = ("deep", "passing")


def _of_four_blocks(world: World, layout: Layout, micro_batch: int) -> list[Learned]:
    """What a process learns of jobs of four blocks in six updates."""
    plan = plan_of(micro_batch, layout=layout)
    return [learned(world, name, plan, torch.float64, UPDATES // 2) for name in OF_FOUR_BLOCKS]


def test_interleaved_stages_learn_what_one_process_does() -> None:
    """With tied weights and several tensors, and numbers of micro-batches that leave a remainder, and that do not."""
    expected = _of_four_blocks(ALONE, Layout(), 16)
    for found in on_ranks(INTERLEAVED, _of_four_blocks, INTERLEAVED, 3):
        for one, other in zip(found, expected, strict=True):
            assert largest_loss_difference(one, other) < LIMITS[torch.float64]
            assert one.indices == other.indices
            assert largest_difference(one.weights, other.weights) < LIMITS[torch.float64]
            assert largest_difference(one.averages, other.averages) < LIMITS[torch.float64]


def _goes_on(world: World, folder: Path, layout: Layout, stop: int) -> list[float]:
    return losses_of_leg(world, folder, "deep", plan_of(4, layout=layout), torch.float64, stop)


def test_a_run_goes_on_in_interleaved_stages_and_out_of_them(tmp_path: Path) -> None:
    """One process, stages of two chunks, stages of one, one process again: losses are those of one run."""
    expected = _goes_on(ALONE, tmp_path / "whole", Layout(), 8)
    losses = _goes_on(ALONE, tmp_path / "parts", Layout(), 2)
    for layout, stop in ((INTERLEAVED, 4), (STAGES, 6)):
        losses += on_ranks(layout, _goes_on, tmp_path / "parts", layout, stop)[0]
    losses += _goes_on(ALONE, tmp_path / "parts", Layout(), 8)
    assert losses == pytest.approx(expected, rel=1e-9)


def _measured(world: World, layout: Layout) -> list[dict[str, float]]:
    """What evaluations of several sizes find."""
    job = text_job(lambda: gpt(layers=4), metrics=["token_accuracy"])
    step = Step(job, plan_of(8, layout=layout), SEPARABLE, dtype=torch.float64, world=world)
    samples = samples_of(job)
    pipeline = step.pipeline(samples, augmented=False)
    sums = []
    for size in (23, 6):
        with step.evaluation() as measure:
            batches = list(in_order(samples, pipeline, size, world.split(SEPARABLE)))
            found = [measure(batch.cut(0, batch.size), batch.size) for batch in batches]
        sums.append({name: sum(float(one[name].sum) for one in found) for name in found[0]})
    return sums


def test_interleaved_stages_evaluate_as_one_process_does() -> None:
    """All processes know the measures, which the last one computes."""
    expected = _measured(ALONE, Layout())
    for found in on_ranks(INTERLEAVED, _measured, INTERLEAVED):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-12)


def _tied(world: World, layout: Layout) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tied weights of this process after three updates, and the names of what its optimiser moves."""
    make, coupling = JOBS["tied"]
    step = Step(make(), plan_of(4, layout=layout), coupling, world=world)
    trained_with(step, 3)
    held = {n: p.detach() for n, p in step.model.named_parameters() if n in ("tokens.weight", "head.weight")}
    return held, [str(name) for name in names_of(step)]


def test_tied_weights_are_equal_in_both_stages() -> None:
    """Bit for bit after each of them has made its update; the optimiser has them under one name."""
    (first, names), (last, others) = on_ranks(STAGES, _tied, STAGES)
    assert list(first) == ["tokens.weight"]
    assert list(last) == ["head.weight"]
    assert torch.equal(first["tokens.weight"], last["head.weight"])
    assert "tokens.weight" in names
    assert "tokens.weight" in others
    assert "head.weight" not in others


def _thawing(world: World, layout: Layout) -> Learned:
    """What is learned in five updates with tied weights of which the name in the first stage is frozen for three."""
    make, coupling = JOBS["tied"]
    job = dataclasses.replace(make(), freeze={"tokens.*": Duration(3, "updates")})
    return taught(world, job, plan_of(4, layout=layout), coupling, torch.float64, 5)


def test_tied_weights_thaw_in_both_stages_at_once() -> None:
    """Also in the stage in which they have another name, of which nothing is said."""
    expected = _thawing(ALONE, Layout())
    for found in on_ranks(STAGES, _thawing, STAGES):
        assert largest_loss_difference(found, expected) < LIMITS[torch.float64]
        assert largest_difference(found.weights, expected.weights) < LIMITS[torch.float64]


@pytest.mark.parametrize("layout", [STAGES, GPIPE], ids=Layout.in_words)
def test_stages_learn_what_one_process_does(layout: Layout) -> None:
    """Losses of all updates, and the weights after them, are one process's, micro-batches of two sizes included."""
    for found in on_ranks(layout, _learned, layout, 3):
        assert len(found) == (1 if layout == GPIPE else len(CASES))
        for one, expected, (_, dtype) in zip(found, alone(), CASES, strict=False):
            assert largest_loss_difference(one, expected) < LIMITS[dtype]
            assert one.indices == expected.indices
            if dtype == torch.float64:
                assert largest_difference(one.weights, expected.weights) < LIMITS[dtype]
                assert largest_difference(one.averages, expected.averages) < LIMITS[dtype]


def llama_job() -> Job:
    """Rotary positions, computed in every stage; a group of the optimiser that has weights in both."""
    optimizer = AdamW(lr=1e-3, weight_decay=0.1, groups={"*norm.weight": {"weight_decay": 0.0}})
    return text_job(lambda: Llama(2, 16, 4, 2, 24, VOCAB, 8), optimizer=optimizer)


class InDicts:
    """Samples whose one input is a dict."""

    def __init__(self) -> None:
        self.tokens, self.targets = texts(23, masked=0.3)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return {"tokens": self.tokens[index]}, self.targets[index]


class OfDicts(GPT):
    """Takes its tokens out of a dict, so that no size shows among the model's own arguments."""

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(inputs["tokens"])


def of_dicts() -> OfDicts:
    """Two blocks."""
    return OfDicts(layers=2, width=16, heads=2, context=8, vocab=VOCAB)


OTHERS: dict[str, tuple[Any, Coupling, dict[str, Any]]] = {
    "cnn": (cnn_job, grouped(16), {"micro_batch": 16}),
    "llama": (llama_job, SEPARABLE, {"micro_batch": 5}),
    "dicts": (lambda: text_job(of_dicts, data=InDicts()), SEPARABLE, {"micro_batch": 5}),
    "checkpointed": (lambda: text_job(gpt), SEPARABLE, {"micro_batch": 8, "checkpointed_blocks": 2}),
    "in chunks": (lambda: text_job(gpt), SEPARABLE, {"micro_batch": 8, "loss_chunks": 2}),
}
"""Batch norm in a Sequential, blocks that take more than activations, inputs in a dict, plans that change passes."""


def _others(world: World, layout: Layout) -> dict[str, Learned]:
    """What each of OTHERS learns in six updates."""
    return {
        name: taught(world, make(), plan_of(layout=layout, **plan), coupling, torch.float64, 6)
        for name, (make, coupling, plan) in OTHERS.items()
    }


@pytest.mark.slow
def test_other_models_and_plans_learn_what_one_process_does() -> None:
    """Weights and running statistics after six updates are one process's, whatever the plan."""
    expected = _others(ALONE, Layout())
    for found in on_ranks(STAGES, _others, STAGES):
        for name, one in found.items():
            assert largest_loss_difference(one, expected[name]) < LIMITS[torch.float64], name
            assert largest_difference(one.weights, expected[name].weights) < LIMITS[torch.float64], name


def _looked_at(world: World, layout: Layout) -> dict[str, Any]:
    """What a process holds, what evaluation finds there, and what is raised when a weight is not finite."""
    job = text_job(lambda: gpt(dropout=0.5), metrics=["token_accuracy"])
    step = Step(job, plan_of(8, layout=layout), SEPARABLE, dtype=torch.float64, world=world)
    samples = samples_of(job)
    pipeline = step.pipeline(samples, augmented=False)
    held = {name: tensor.numel() for name, tensor in step.model.state_dict().items()}
    drawn = []
    for block in step.model.blocks:
        block.dropout.register_forward_hook(lambda *_: drawn.append(torch.initial_seed()))
    sums = []
    for size in (23, 6, 6):
        with step.evaluation() as measure:
            batches = list(in_order(samples, pipeline, size, world.split(SEPARABLE)))
            found = [measure(batch.cut(0, batch.size), batch.size) for batch in batches]
        sums.append({name: sum(float(one[name].sum) for one in found) for name in found[0]})
    drawn.clear()
    batch = next(iter(in_order(samples, pipeline, 16)))
    loss = float(step.update(batch, 0, 0.0))
    seeds = sorted(set(drawn))
    with torch.no_grad():
        for name, parameter in step.model.named_parameters():
            if name == "head.weight":
                parameter[0, 0] = torch.inf
    try:
        step.update(batch, 1, 0.0)
    except NotFinite as problem:
        return {"held": held, "sums": sums, "loss": loss, "raised": problem.message, "seeds": seeds}
    return {"raised": None}


def test_each_stage_holds_its_own_and_all_know_the_same() -> None:
    """Weights are one stage's each; measures, loss and a loss that is not finite reach all; draws differ."""
    expected = _looked_at(ALONE, Layout())
    first, last = on_ranks(STAGES, _looked_at, STAGES)
    assert not first["held"].keys() & last["held"].keys()
    assert first["held"] | last["held"] == expected["held"]
    assert first["sums"] == last["sums"]
    for mine, theirs in zip(last["sums"], expected["sums"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12)
    assert first["loss"] == last["loss"]
    assert first["raised"] == last["raised"] == expected["raised"]
    assert not set(first["seeds"]) & set(last["seeds"])


def _refusals(world: World) -> list[str]:
    """What is said of jobs that stages do not go with."""
    from_model = text_job(gpt, loss=_of_model)
    jobs = [
        (from_model, {}),
        (text_job(gpt, loss=Objective("token_cross_entropy", penalty=lambda model: model.norm.weight.sum())), {}),
        (text_job(gpt, optimizer=Muon(lr=0.01, rest=AdamW(lr=1e-3))), {}),
        (text_job(gpt, optimizer=AdamW(lr=1e-3, groups={"tokens*": {"lr": 0.1}})), {}),
        (text_job(gpt), {"compile": True}),
    ]
    said = []
    for job, plan in jobs:
        try:
            taught(world, job, plan_of(8, layout=STAGES, **plan), SEPARABLE, None, 1)
        except BadJob as problem:
            said.append(problem.message)
    return said


def _of_model(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model(batch[0]).flatten(1).square().mean(1)


def test_what_stages_do_not_go_with_is_refused_in_all_processes() -> None:
    """Losses of the model, penalties and the like."""
    first, last = on_ranks(STAGES, _refusals)
    assert first == last
    parts = ["_of_model", "penalty", "Muon", "stage 2 of 2.*tokens", "compile"]
    assert len(first) == len(parts)
    for said, part in zip(first, parts, strict=True):
        assert part.split(".*", maxsplit=1)[0] in said
