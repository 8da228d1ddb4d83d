"""Every layout learns what one process learns."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from stoker.jobs import SGD, AdamW, Job
from stoker.records import Layout, Plan
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from tests.stepping.driving import SEPARABLE, largest_difference
from tests.stepping.layouts.conformance import JOBS, UPDATES, Learned, largest_loss_difference, learned, taught
from tests.stepping.models import VOCAB, make_job, texts

LAYOUTS = {"replicated": Layout(replicas=2), "sharded": Layout(shards=2), "gathered": Layout(shards=2, reshard=False)}
"""Layouts by name; each over two processes."""

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-6, None: 1e-3}
"""How far losses may be from one process's, relative to them, by the dtype of everything; None: bf16.

One process and replicas compute in bf16 by autocast, shards throughout, with norms and the residual stream in bf16.
"""

CASES: dict[str, tuple[str, torch.dtype | None, dict[str, Any]]] = {
    "gpt": ("gpt", torch.float64, {"micro_batch": 3}),
    "gpt in fp32": ("gpt", torch.float32, {"micro_batch": 8}),
    "gpt in bf16": ("gpt", None, {"micro_batch": 8, "precision": "bf16"}),
    "gpt checkpointed in bf16": ("gpt", None, {"micro_batch": 4, "precision": "bf16", "checkpointed_blocks": 2}),
    "gpt in chunks in bf16": ("gpt", None, {"micro_batch": 8, "precision": "bf16", "loss_chunks": 2}),
    "cnn in bf16": ("cnn", None, {"micro_batch": 8, "precision": "bf16"}),
    "gpt checkpointed": ("gpt", torch.float64, {"micro_batch": 8, "checkpointed_blocks": 2}),
    "gpt checkpointed selectively": (
        "gpt",
        torch.float64,
        {"micro_batch": 8, "checkpointed_blocks": 2, "checkpointing": "selective"},
    ),
    "gpt in chunks": ("gpt", torch.float64, {"micro_batch": 8, "loss_chunks": 2}),
    "momentum": ("momentum", torch.float64, {"micro_batch": 8, "optimizer_implementation": "fused"}),
    "cnn": ("cnn", torch.float64, {"micro_batch": 8, "optimizer_implementation": "fused"}),
    "cnn in fp32": ("cnn", torch.float32, {"micro_batch": 8, "memory_format": "channels_last"}),
    "cnn in groups": ("cnn in groups", torch.float64, {"micro_batch": 3}),
    "8-bit states": ("few bits", torch.float64, {"micro_batch": 8, "optimizer_states": "8bit"}),
    "bf16 states": ("few bits", torch.float64, {"micro_batch": 8, "optimizer_states": "bf16"}),
    "8-bit states in fp32": ("few bits", torch.float32, {"micro_batch": 8, "optimizer_states": "8bit"}),
    "experts": ("experts", torch.float64, {"micro_batch": 8}),
    "odd": ("odd", torch.float64, {"micro_batch": 3}),
    "odd, fused": ("odd", torch.float64, {"micro_batch": 3, "optimizer_implementation": "fused"}),
}
"""Job, dtype and plan of what is trained, by name."""

LONG = ("gpt",)
"""The case of twelve updates; the others, which are that but for a model or a setting, have half of them."""

GATHERED = ["gpt", "gpt in bf16", "odd"]

SLOW = ("gpt checkpointed in bf16", "gpt in chunks in bf16", "8-bit states in fp32", "cnn in fp32", "odd, fused")
"""Cases that join settings of others."""

EVERYWHERE = [
    pytest.param(layout, case, marks=pytest.mark.slow if case in SLOW else ())
    for layout in ("replicated", "sharded")
    for case in CASES
]


def all_learned(world: World, layout: Layout, cases: list[str]) -> dict[str, Learned]:
    """What is learned of each case in this process."""
    return {case: _learned(world, layout, case) for case in cases}


def _learned(world: World, layout: Layout, case: str, **changed: Any) -> Learned:
    job, dtype, settings = CASES[case]
    plan = Plan(device="cpu", layout=layout, **{**settings, **changed})
    return learned(world, job, plan, dtype, UPDATES if case in LONG else UPDATES // 2)


@functools.cache
def alone(case: str) -> Learned:
    """What one process learns, with each batch in one piece."""
    make, _ = JOBS[CASES[case][0]]
    return _learned(ALONE, Layout(), case, micro_batch=make().batch)


@functools.cache
def in_two(layout: str, *, is_slow: bool = False) -> list[dict[str, Learned]]:
    """What each of two processes learns of all cases, one after the other; of the slow ones, or of the others."""
    cases = GATHERED if layout == "gathered" else [case for case in CASES if (case in SLOW) is is_slow]
    return on_ranks(LAYOUTS[layout], all_learned, LAYOUTS[layout], cases)


@pytest.mark.parametrize(("layout", "case"), [*EVERYWHERE, *(("gathered", case) for case in GATHERED)])
def test_two_processes_learn_what_one_does(layout: str, case: str) -> None:
    """Losses of all updates, the weights after them and their averages are one process's."""
    dtype, expected = CASES[case][1], alone(case)
    for each in in_two(layout, is_slow=case in SLOW):
        one = each[case]
        assert largest_loss_difference(one, expected) < LIMITS[dtype]
        if dtype == torch.float64:
            assert largest_difference(one.weights, expected.weights) < LIMITS[dtype]
            assert largest_difference(one.averages, expected.averages) < LIMITS[dtype]


@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_a_run_repeated_at_one_world_size_is_the_same_to_the_bit(layout: str) -> None:
    """Losses and weights of all processes, and of those of another start, are equal."""
    first, *others = [
        one["gpt in fp32"]
        for one in (*in_two(layout), *on_ranks(LAYOUTS[layout], all_learned, LAYOUTS[layout], ["gpt in fp32"]))
    ]
    for one in others:
        assert one.losses == first.losses
        assert all(torch.equal(one.weights[name], tensor) for name, tensor in first.weights.items())


@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_samples_and_their_order_do_not_depend_on_the_layout(layout: str) -> None:
    """What the processes take of each batch, one after the other, is the batch."""
    found = in_two(layout)
    parts = {LAYOUTS[layout].data_rank(rank): one["gpt"].indices for rank, one in enumerate(found)}
    for update, batch in enumerate(alone("gpt").indices):
        assert [index for part in sorted(parts) for index in parts[part][update]] == batch


class EncoderDecoder(nn.Module):
    """PyTorch's transformer; the biases of its keys have no influence on the softmax over them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, VOCAB)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(tokens_BT)
        mask_TT = nn.Transformer.generate_square_subsequent_mask(tokens_BT.shape[1], dtype=x_BTD.dtype)
        return self.out(self.transformer(x_BTD, x_BTD, tgt_mask=mask_TT))


OPTIMIZERS: dict[str, Any] = {"adamw": AdamW(lr=3e-3), "large eps": AdamW(lr=3e-3, eps=1e-4), "sgd": SGD(lr=0.05)}


def in_single(world: World, layout: Layout, micro_batch: int) -> dict[str, Learned]:
    """What an encoder-decoder learns in fp32 by each of OPTIMIZERS."""

    def job(name: str) -> Job:
        return make_job(EncoderDecoder, data=texts(64), loss="token_cross_entropy", optimizer=OPTIMIZERS[name])

    plan = Plan(device="cpu", micro_batch=micro_batch, layout=layout)
    return {name: taught(world, job(name), plan, SEPARABLE, torch.float32, 10) for name in OPTIMIZERS}


def largest_gaps(one: Learned, other: Learned) -> tuple[float, float]:
    """The largest difference of two processes' biases of keys, and of all other weights."""
    keys, others = [0.0], [0.0]
    for name, tensor in one.weights.items():
        gap = (tensor - other.weights[name]).abs()
        if name.endswith("in_proj_bias"):  # of queries, keys and values
            keys.append(float(gap[16:32].max()))
            gap[16:32] = 0
        others.append(float(gap.max()))
    return max(keys), max(others)


@pytest.mark.slow  # an explanation, which changes seldom
def test_what_differs_in_fp32_has_no_gradient_but_rounding() -> None:
    """AdamW divides rounding by its own size: the biases of keys differ, in one process cut otherwise as in two.

    All other weights do not, nor do any with an eps above rounding or by SGD.
    """
    two = Layout(replicas=2)
    alone = in_single(ALONE, Layout(), 16)
    for other in (in_single(ALONE, Layout(), 4), on_ranks(two, in_single, two, 8)[0]):
        gaps = {name: largest_gaps(one, other[name]) for name, one in alone.items()}
        keys, others = gaps.pop("adamw")
        assert keys > 1e-4, keys
        assert others < 1e-5, others
        assert all(max(each) < 1e-6 for each in gaps.values()), gaps
