"""Context parallel: processes that hold parts of each sample's tokens learn what one process does."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Loss
from stoker.jobs.fields import Fields
from stoker.loading.datasets import datasets_of
from stoker.records import Layout, Plan
from stoker.stepping.layouts.context import EXECUTION, _DividedPass, _PartMode
from stoker.stepping.layouts.context_attention import _seen
from stoker.stepping.layouts.context_locality import Positions, TokenFollower
from stoker.stepping.step import Step
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import RankFailed, on_ranks
from stoker.testing.simulated_gpu import is_simulated
from stoker.training.evaluation import evaluate
from stoker.units import MIB
from stoker.zoo import GPT, Llama
from tests.stepping.driving import SEPARABLE, largest_difference
from tests.stepping.layouts.conformance import JOBS, Learned, few_bits_job, largest_loss_difference, learned, taught
from tests.stepping.models import TOKENS, VOCAB, make_job, texts
from tests.training.legs import leg

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-6, None: 1e-3}
UPDATES = 5  # the fourth is of the 7 samples that end an epoch

CASES: dict[str, tuple[str, torch.dtype | None, dict[str, Any]]] = {
    "gpt": ("gpt", torch.float64, {"micro_batch": 6}),
    "checkpointed": ("few bits", torch.float64, {"micro_batch": 8, "checkpointed_blocks": 2}),
    "checkpointed selectively": (
        "gpt",
        torch.float64,
        {"micro_batch": 8, "checkpointed_blocks": 2, "checkpointing": "selective"},
    ),
    "in chunks": ("momentum", torch.float64, {"micro_batch": 8, "loss_chunks": 2}),
    "8-bit states": ("few bits", torch.float64, {"micro_batch": 16, "optimizer_states": "8bit"}),
    "fp32": ("gpt", torch.float32, {"micro_batch": 16, "optimizer_implementation": "fused"}),
    "bf16": ("few bits", None, {"micro_batch": 8, "precision": "bf16"}),
}
LAYOUTS = {
    "2-way": Layout(context=2),
    "2-way, kept gathered": Layout(context=2, reshard=False),
}
LARGE = {"4-way": Layout(context=4), "2 shards x 2-way": Layout(shards=2, context=2)}


KEPT = ("gpt", "bf16")
"""Cases of weights that are kept gathered: all else is as in the layout that gathers them again."""


def all_learned(world: World, layout: Layout) -> dict[str, Learned]:
    """What is learned of each case in this process."""
    return {case: _learned(world, layout, case) for case in (CASES if layout.reshard else KEPT)}


def _learned(world: World, layout: Layout, case: str) -> Learned:
    job, dtype, settings = CASES[case]
    return learned(world, job, Plan(device="cpu", layout=layout, **settings), dtype, UPDATES)


@functools.cache
def alone(case: str) -> Learned:
    """What one process learns."""
    return _learned(ALONE, Layout(), case)


@functools.cache
def together(layout: str) -> list[dict[str, Learned]]:
    """What each process of a layout learns of all cases."""
    chosen = (LAYOUTS | LARGE)[layout]
    return on_ranks(chosen, all_learned, chosen)


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        pytest.param(layout, case, marks=pytest.mark.slow if layout in LARGE else ())
        for layout, chosen in (LAYOUTS | LARGE).items()
        for case in (CASES if chosen.reshard else KEPT)
    ],
)
def test_processes_with_parts_of_samples_learn_what_one_does(layout: str, case: str) -> None:
    """Losses of all updates and, in float64, the weights after them are one process's; all take the same samples."""
    dtype, expected = CASES[case][1], alone(case)
    for each in together(layout):
        assert largest_loss_difference(each[case], expected) < LIMITS[dtype]
        if dtype == torch.float64:
            assert largest_difference(each[case].weights, expected.weights) < LIMITS[dtype]
            assert largest_difference(each[case].averages, expected.averages) < LIMITS[dtype]
        if "shards" not in layout:
            assert each[case].indices == expected.indices


@pytest.mark.slow
def test_a_run_goes_on_under_other_layouts(tmp_path: Path) -> None:
    """Four processes, two shards, two parts of samples: as one that was never stopped."""
    whole = leg(ALONE, tmp_path / "whole", "gpt", Plan(device="cpu", micro_batch=16), torch.float64, 8)
    losses: list[float] = []
    for layout, stop in ((Layout(context=2, shards=2), 3), (Layout(shards=2), 5), (Layout(context=2), 8)):
        plan = Plan(device="cpu", micro_batch=16, layout=layout)
        last = on_ranks(layout, leg, tmp_path / "run", "gpt", plan, torch.float64, stop)[0]
        losses += last.losses
    assert max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(losses, whole.losses, strict=True)) < 1e-9
    for key, weight in whole.weights.items():
        torch.testing.assert_close(last.weights[key], weight, rtol=0, atol=1e-9)


def evaluated(world: World, layout: Layout) -> dict[str, float]:
    """Loss and accuracy of a fresh model over 55 samples, some targets of which are ignored."""
    job = make_job(
        lambda: GPT(layers=2, width=32, heads=4, context=8, vocab=VOCAB),
        data=texts(55, masked=0.3),
        loss="token_cross_entropy",
        metrics=["token_accuracy"],
    )
    step = Step(job, Plan(device="cpu", micro_batch=8, layout=layout), SEPARABLE, dtype=torch.float64, world=world)
    return evaluate(step, datasets_of(job).train, 8)


def test_evaluation_sums_over_all_tokens() -> None:
    """As in one process, in each of the processes."""
    expected = evaluated(ALONE, Layout())
    for found in on_ranks(Layout(context=2), evaluated, Layout(context=2)):
        assert found == pytest.approx(expected, rel=1e-9)


class Tokenwise(nn.Module):
    """An embedding, a function of [B, T, 16], and an output layer."""

    def __init__(self, inner: Callable[[torch.Tensor], torch.Tensor] | nn.Module) -> None:
        super().__init__()
        self.embedding, self.inner, self.out = nn.Embedding(VOCAB, 16), inner, nn.Linear(16, VOCAB)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits of every token."""
        return self.out(self.inner(self.embedding(tokens_BT)))


class Transposed(nn.Conv1d):
    """A convolution over tokens."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Each token with its neighbours."""
        return super().forward(x_BTD.transpose(1, 2)).transpose(1, 2)


def _masked(x: torch.Tensor) -> torch.Tensor:
    mask_TT = torch.zeros(x.shape[1], device=x.device)
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask_TT)


CONTENT = torch.zeros(4, 64, dtype=torch.long), torch.zeros(4, 64, dtype=torch.long)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "convolution": (lambda: Transposed(16, 16, 3, padding=1), "conv1d in Transposed 'inner' mixes tokens"),
    "running sum": (lambda: lambda x: x.cumsum(1), "cumsum in Tokenwise mixes tokens"),
    "mean": (lambda: lambda x: x - x.mean(1, keepdim=True), "mean in Tokenwise takes tokens together"),
    "last token": (lambda: lambda x: x + x[:, -1:], "__getitem__ in Tokenwise takes tokens together"),
    "shift": (lambda: lambda x: F.pad(x[:, :-1], (0, 0, 1, 0)), "__getitem__ in Tokenwise has [2, 63, 16]"),
    "scores": (lambda: lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x, "matmul in Tokenwise pairs each token"),
    "mask": (lambda: _masked, "scaled_dot_product_attention in Tokenwise has a mask of its own"),
    "statistics": (lambda: nn.BatchNorm1d(64), "does not take 16 tokens"),
    "one draw": (lambda: lambda x: x * torch.rand(len(x), 1, 1, device=x.device), "rand in Tokenwise draws once"),
    "values": (lambda: lambda x: x * torch.eye(x.shape[1], 16, device=x.device), "makes values for each token"),
    "number": (
        lambda: lambda x: x * max(1.0, math.log(x.shape[1], 32)),
        "is given numbers that depend on how many tokens there are",
    ),
    "number of positions": (
        lambda: lambda x: x * (1 + torch.arange(x.shape[1]).max() // 32),
        "is given numbers that depend on how many tokens there are",
    ),
    "loop": (
        lambda: lambda x: torch.stack([x[:, place] for place in range(x.shape[1])], 1),
        "does not do the same with each number of tokens",
    ),
    "threshold": (lambda: lambda x: x.exp() if x.shape[1] > 32 else x, "does not do the same with each number"),
    "read": (lambda: lambda x: x if x.sum() > 0 else -x, "cannot be followed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operations_in_which_tokens_meet_are_refused_by_name(name: str) -> None:
    """From shapes alone, with operation and module."""
    make, says = REFUSED[name]
    found = TokenFollower(Fields().call, Tokenwise(make()), CONTENT).sites(4)
    assert says in str(found)


def test_recurrent_layers_are_refused() -> None:
    """They pass a state from token to token."""
    layer = nn.GRU(16, 16, batch_first=True)
    found = TokenFollower(Fields().call, Tokenwise(FirstOf(layer)), CONTENT).sites(4)
    assert "gru in GRU 'inner.layer' mixes tokens" in str(found)


class FirstOf(nn.Module):
    """The first of a layer's two results."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The first of two results."""
        return self.layer(x)[0]


@pytest.mark.parametrize(
    ("model", "sites"),
    [
        (lambda: GPT(layers=2, width=64, heads=4, context=64, vocab=VOCAB), 1),
        (lambda: Llama(layers=2, width=64, heads=4, kv_heads=2, hidden=64, context=64, vocab=VOCAB), 1),
        (lambda: Tokenwise(lambda x: x * torch.arange(16, device=x.device)), 0),
        (lambda: Tokenwise(lambda x: x * torch.arange(x.shape[1], device=x.device)[:, None]), 1),
        (lambda: Tokenwise(lambda x: x.reshape(-1, 16).exp().view(x.shape)), 0),
    ],
    ids=["slice of a parameter", "slice of a buffer", "of features", "of tokens", "rows of samples"],
)
def test_calls_that_count_tokens_are_found(model: Callable[[], nn.Module], sites: int) -> None:
    """A table's first rows, or `arange`; not as many other things, although they are as many as a part's tokens."""
    found = TokenFollower(Fields().call, model(), CONTENT).sites(4)
    assert not isinstance(found, str), found
    assert len(found) == sites


def test_a_number_of_tokens_is_followed_once_for_all_numbers_of_processes() -> None:
    """Also for further sets of data of the same shapes."""
    job, model, lengths = make_job(GPT), GPT(layers=2, width=64, heads=4, context=64, vocab=VOCAB), list[int]()
    model.register_forward_pre_hook(lambda _model, given: lengths.append(given[0].shape[1]))
    for parts in (2, 4, 8):
        for content in (CONTENT, CONTENT):
            assert EXECUTION.data_problem(job, model, content, Layout(context=parts)) is None
    assert sorted(lengths) == [4, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (((4, 12), (4, 12)), "12 tokens, which 4 processes do not divide"),
        (((4, 64), (4,)), "they are [4, 64], [4]"),
        (((4, 64), (4, 63)), "they are [4, 64], [4, 63]"),
    ],
    ids=str,
)
def test_samples_that_cannot_be_divided_are_refused(shapes: Any, says: str) -> None:
    """With their shapes, or the number that would divide."""
    content = tuple(torch.zeros(shape, dtype=torch.long) for shape in shapes)
    assert says in str(TokenFollower(Fields().call, Tokenwise(nn.Identity()), content).sites(4))


class _Coupled(torch.autograd.Function):
    """Gives what it gets; its gradient is summed up over tokens."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.cumsum(1)


def _mean_of_samples(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) == target).all(1).float()


def _first_loss(output: torch.Tensor, target: torch.Tensor) -> Loss:
    values = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    return Loss(values[:, 0].sum(), len(values))


def _few_targets(*samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens whose targets are ignored but for those of a few samples."""
    inputs, targets = texts(16)
    is_counted = torch.zeros(16, dtype=torch.bool)
    is_counted[list(samples)] = True
    return inputs, targets.where(is_counted[:, None], -100)


UNSEEN: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "softmax over tokens": (lambda: Tokenwise(lambda x: x.softmax(1)), {}, "softmax in Tokenwise gives something else"),
    "gradient": (lambda: Tokenwise(_Coupled.apply), {}, "the gradient of embedding.weight from parts"),
    "gradient of a sample's targets": (
        lambda: Tokenwise(_Coupled.apply),
        {"data": _few_targets(5)},
        "the gradient of embedding.weight from parts",
    ),
    "metric": (
        lambda: Tokenwise(nn.Identity()),
        {"metrics": [_mean_of_samples]},
        "_mean_of_samples may do with",
    ),
    "loss": (lambda: Tokenwise(nn.Identity()), {"loss": _first_loss}, "_first_loss may do with"),
}


def updated(world: World, layout: Layout, name: str) -> str:
    """What an update says."""
    make, changed, _ = UNSEEN[name]
    job = make_job(make, **{"data": texts(16), "loss": "token_cross_entropy", **changed})
    try:
        taught(world, job, Plan(device="cpu", micro_batch=8, layout=layout), SEPARABLE, torch.float64, 1)
    except BadJob as problem:
        return problem.message
    return ""


@pytest.mark.parametrize("name", UNSEEN)
def test_what_shapes_do_not_show_is_found_by_values_before_the_first_update(name: str) -> None:
    """In all processes, with the call or parameter, a user's loss or metric at once; each is trained by one process."""
    assert not updated(ALONE, Layout(), name)
    for message in on_ranks(Layout(context=2), updated, Layout(context=2), name):
        assert UNSEEN[name][2] in message


def drawn(world: World, layout: Layout) -> torch.Tensor:
    """The factors of a dropout of ones in the first update."""
    seen: list[torch.Tensor] = []

    class Dropping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factors = F.dropout(torch.ones_like(x), 0.5, self.training)
            seen.append(factors.detach())
            return x * factors

    job = make_job(lambda: Tokenwise(Dropping()), data=texts(16), loss="token_cross_entropy")
    taught(world, job, Plan(device="cpu", micro_batch=16, layout=layout), SEPARABLE, None, 1)
    return seen[-1]


def test_each_part_of_a_sample_has_dropout_of_its_own() -> None:
    """Equal draws would drop the same of each part's tokens, which one process never does."""
    first, second = on_ranks(Layout(context=2), drawn, Layout(context=2))
    assert first.shape == second.shape == (16, TOKENS // 2, 16)
    assert not torch.equal(first, second)
    assert float(first.mean()) == pytest.approx(1.0, abs=0.15)


def sent_bytes(world: World, layout: Layout) -> Counter[str]:
    """Bytes of messages of an update along the axis of context, by collective: each process's own part."""
    from stoker.stepping.layouts import experts, tensor_layers

    step = Step(few_bits_job(), Plan(device="cpu", micro_batch=16, layout=layout), SEPARABLE, world=world)
    sent: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., Any], place: int) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            sent[name] += args[place].nbytes
            return call(*args, **named)

        return counted

    batches = _batches(step)
    step.update(next(batches), 0, 0.0)
    changed = {
        (tensor_layers, "_ALL_GATHER"): counting("all-gather", tensor_layers._ALL_GATHER, 0),
        (tensor_layers, "_REDUCE_SCATTER"): counting("reduce-scatter", tensor_layers._REDUCE_SCATTER, 1),
        (experts.dist, "all_to_all_single"): counting("all-to-all", dist.all_to_all_single, 1),
    }
    with pytest.MonkeyPatch.context() as patch:
        for (holder, name), call in changed.items():
            patch.setattr(holder, name, call)
        step.update(next(batches), 1, 0.0)
    return sent


def _batches(step: Step) -> Any:
    from stoker.loading.batches import BatchSource
    from stoker.records import Position

    data = datasets_of(step.job)
    pipeline = step.pipeline(data.train, augmented=True)
    split = step.world.split(SEPARABLE)
    source = BatchSource(data.train, pipeline, data.extent(step.job), step.job.seed, step.plan, split=split)
    return itertools.islice(source.batches(Position(), 3), 3)


def test_executed_messages_have_the_bytes_of_the_forecast() -> None:
    """Keys and values gathered and their gradients scattered, queries there and back, each way."""
    from tests.layouts.test_context import update_of

    layout = Layout(context=2)
    expected = update_of(layout)
    for found in on_ranks(layout, sent_bytes, layout):
        assert dict(found) == expected


class _Group:
    """A group of so many processes, of which this one is the last; messages are its own memory."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        """Number of processes."""
        return self._size

    def rank(self) -> int:
        """That of this process, which needs the most memory."""
        return self._size - 1


class _Attention(torch.autograd.Function):
    """Takes no memory but for its result and its gradients, and keeps what a fused kernel keeps."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result = torch.empty(q.shape, device=q.device)
        ctx.save_for_backward(q, k, v, result)
        return result

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty(one.shape, device=one.device) for one in ctx.saved_tensors[:3])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("is_causal", [True, False])
def test_memory_of_gathered_keys_is_as_forecast(
    size: int, heads: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an attention keeps, and the peaks of both passes."""
    from stoker.layouts.context import GatheredBytes
    from stoker.records import Operation, TensorShape
    from stoker.stepping.layouts import experts, tensor_layers
    from stoker.stepping.layouts.context_attention import attention_over

    def received(found: torch.Tensor, *_: Any, **__: Any) -> None:
        found.zero_()

    monkeypatch.setattr(tensor_layers, "_ALL_GATHER", received)
    monkeypatch.setattr(tensor_layers, "_REDUCE_SCATTER", received)
    monkeypatch.setattr(experts.dist, "all_to_all_single", received)
    shapes = [TensorShape(shape=(1, count, 1024 * size, 64), dtype="fp32") for count in (heads, 2, 2)]
    attention = Operation(
        name="_scaled_dot_product_flash_attention",
        inputs=tuple(shapes),
        outputs=(),
        flops=0,
        bytes_read=0,
        bytes_written=0,
        attributes=(("is_causal", is_causal),),
    )
    expected = GatheredBytes.of(attention, size)

    def allocated() -> int:
        return torch.cuda.memory_allocated(0)

    def peak() -> int:
        return torch.cuda.max_memory_allocated(0)

    q, k, v = (torch.ones(1, one.shape[1], 1024, 64, device="cuda:0", requires_grad=True) * 1 for one in shapes)
    given, results = allocated(), q.nbytes
    torch.cuda.reset_peak_memory_stats(0)
    group: Any = _Group(size)
    out = attention_over(group, lambda *qkv, **_: _Attention.apply(*qkv[:3]), q, k, v, is_causal=is_causal)
    assert peak() - given == expected.kept + expected.forward
    del q, k, v  # which a trace without layout keeps, with the result
    assert allocated() - given - results == expected.kept
    gradient = torch.zeros_like(out)
    started = allocated()
    torch.cuda.reset_peak_memory_stats(0)
    out.backward(gradient)
    # `out` is still here, which a model lets go of before.
    backward = expected.backward + (results if is_causal else 0)
    # The allocator of a real GPU leaves up to a MiB of a large block unused.
    assert backward <= peak() - started <= backward + (0 if is_simulated() else MIB)


def untouched(world: World, layout: Layout) -> bool:
    """Whether the comparison before the first update leaves weights, gradients and generators as they were."""
    step = Step(JOBS["gpt"][0](), Plan(device="cpu", micro_batch=8, layout=layout), SEPARABLE, world=world)
    before, state = step.whole_weights(), torch.get_rng_state()
    batch = next(_batches(step))
    step._strategy.check(batch.cut(0, batch.size), step.objective)
    is_same = all(torch.equal(one, before[name]) for name, one in step.whole_weights().items())
    return (
        is_same and all(p.grad is None for p in step.model.parameters()) and torch.equal(state, torch.get_rng_state())
    )


def _last_target() -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of 12 tokens, of which the target of the last one counts."""
    inputs, targets = (torch.cat([one, one], 1)[:, :12] for one in texts(16))
    return inputs, targets.where(torch.arange(12) == 11, -100)


def compared_at_the_end(world: World, layout: Layout) -> bool:
    """Whether the comparison is done by a batch of such samples."""
    job = make_job(lambda: Tokenwise(nn.Identity()), data=_last_target(), loss="token_cross_entropy")
    step = Step(job, Plan(device="cpu", micro_batch=8, layout=layout), SEPARABLE, world=world)
    step._strategy.check(_last_target(), step.objective)
    return step._strategy.is_checked


def test_samples_of_which_the_last_token_counts_are_compared() -> None:
    """As answers of few tokens; the samples are no whole number of the parts that are compared."""
    assert on_ranks(Layout(context=2), compared_at_the_end, Layout(context=2)) == [True] * 2


def compared(world: World, layout: Layout) -> list[bool]:
    """Whether the comparison is done, after a batch without a target that counts, and after one with some."""
    job = make_job(lambda: Tokenwise(nn.Identity()), data=_few_targets(), loss="token_cross_entropy")
    step = Step(job, Plan(device="cpu", micro_batch=8, layout=layout), SEPARABLE, world=world)
    done = []
    for content in (_few_targets(), _few_targets(3)):
        step._strategy.check(content, step.objective)
        done.append(step._strategy.is_checked)
    return done


def test_a_batch_without_targets_is_not_compared() -> None:
    """0 is 0 however they are made: the next one is."""
    assert on_ranks(Layout(context=2), compared, Layout(context=2)) == [[False, True]] * 2


def test_the_comparison_leaves_no_trace() -> None:
    """Weights, gradients and generators are as before."""
    assert on_ranks(Layout(context=2), untouched, Layout(context=2)) == [True, True]


def test_the_mask_of_a_gpus_kernel_is_taken_within_a_pass_of_parts(monkeypatch) -> None:
    """PyTorch looks for its causal masks by the function's name, which is another one's during such a pass."""
    q, k, v = torch.rand(3, 2, 2, 8, 16).unbind()
    q = q[..., :4, :]
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(4, 8, dtype=torch.bool).tril(4))

    def on_gpu(mode: _PartMode, *tensors: torch.Tensor, **_: Any) -> torch.Tensor:
        return mode._before(*tensors, attn_mask=_seen(4, 8))

    monkeypatch.setattr(_PartMode, "_divided", on_gpu)
    passes = _DividedPass(None, Positions(length=4))  # type: ignore[arg-type]
    with passes.on():
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        again = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(found, again)
    assert torch.allclose(found, expected)


def test_a_mask_at_run_time_is_refused() -> None:
    """Where samples become longer than those that were compared, say: attention never silently leaves a mask out."""
    with pytest.raises(RankFailed, match="attention with a mask of its own cannot be divided"):
        on_ranks(Layout(context=2), _with_mask, Layout(context=2))


def _with_mask(world: World, layout: Layout) -> None:
    job = make_job(lambda: Tokenwise(nn.Identity()), data=texts(16), loss="token_cross_entropy")
    step = Step(job, Plan(device="cpu", micro_batch=8, layout=layout), SEPARABLE, world=world)
    x = torch.zeros(1, 1, 4, 4)
    with step._strategy.conditions():
        F.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(4, 4))
