"""Token cross-entropy in chunks: the same mathematics and the same products, without all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import stoker
from stoker.errors import BadJob
from stoker.loading.datasets import datasets_of
from stoker.planning.model.memory import forecast_memory
from stoker.profiling.tracing.update import trace_update
from stoker.records import Plan, TraceSettings
from stoker.stepping.chunked_loss import ChunkedLoss, output_layer, worthwhile_chunks
from stoker.stepping.model import meta_model
from stoker.stepping.step import Step
from stoker.zoo import GPT, Llama
from tests.stepping.driving import SEPARABLE, plan_of, source_of, tensors_of, train, trained

VOCAB, TOKENS, BATCH = 37, 6, 4


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve samples of six tokens; some targets are not counted, in one sample none is."""
    drawn = torch.randint(0, VOCAB, (12, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    targets = drawn[:, 1:].clone()
    targets[::3, 4:] = -100
    targets[5] = -100
    return drawn[:, :-1].clone(), targets


def _gpt(**changes: Any) -> nn.Module:
    return GPT(**({"layers": 1, "width": 8, "heads": 2, "context": TOKENS, "vocab": VOCAB} | changes))


def _job(**changes: Any) -> stoker.Job:
    settings: dict[str, Any] = {
        "model": _gpt,
        "data": _tokens(),
        "loss": "token_cross_entropy",
        "batch": BATCH,
        "until": stoker.epochs(3),
        "optimizer": stoker.SGD(lr=0.1, momentum=0.9),
    }
    return stoker.Job(**(settings | changes))


_MODELS = {
    "gpt": _gpt,
    "tied": lambda: _gpt(tied=True),
    "llama": lambda: Llama(layers=1, width=8, heads=2, kv_heads=1, hidden=16, vocab=VOCAB, context=TOKENS),
    "biased": lambda: nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)),
}


@pytest.mark.parametrize("model", _MODELS.values(), ids=_MODELS)
@pytest.mark.parametrize("chunks", [2, 5, 1000])
def test_the_same_mathematics(model: Any, chunks: int) -> None:
    """In float64, weights agree to 1e-9 over twelve updates, whatever is left in the last chunk, micro-batches too."""
    job = _job(model=model, loss=stoker.Objective("token_cross_entropy", label_smoothing=0.1), clip_norm=1.0)
    whole, parts = trained(job, BATCH), trained(job, 3, loss_chunks=chunks)
    for name, tensor in tensors_of(whole).items():
        assert torch.allclose(tensors_of(parts)[name], tensor, rtol=1e-9, atol=1e-9), name


def test_frozen_weights_get_no_gradient() -> None:
    """An output layer that is not trained passes the gradient on to what is before it, and has none itself."""

    def model() -> nn.Module:
        made = _gpt()
        made.head.requires_grad_(False)  # type: ignore[union-attr]
        return made

    gradients = []
    for chunks in (1, 3):
        job = _job(model=model)
        step = Step(job, plan_of(BATCH, loss_chunks=chunks), SEPARABLE, dtype=torch.float64)
        step.gradients(_first(job, step), 0)
        assert step.model.head.weight.grad is None  # type: ignore[union-attr]
        gradients.append(step.model.blocks[0].mlp.out.weight.grad)  # type: ignore[union-attr, index]
    assert torch.allclose(*gradients, rtol=1e-12)


def _first(job: stoker.Job, step: Step) -> Any:
    return next(iter(source_of(job, step).batches(datasets_of(job).extent(job).position(0), 1)))


class _Largest(TorchDispatchMode):
    """The most elements of a tensor that has the vocabulary as a dimension and is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and VOCAB in tensor.shape and 8 not in tensor.shape:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize(("chunks", "tokens"), [(1, 24), (2, 12), (4, 6), (5, 5)])
def test_no_tensor_has_more_than_a_chunks_logits(chunks: int, tokens: int) -> None:
    """Logits, softmax and their gradients are those of a chunk, in the backward pass too; and so in evaluation."""
    job = _job()
    step = Step(job, plan_of(BATCH, loss_chunks=chunks), SEPARABLE)
    batch = _first(job, step)
    with _Largest() as training:
        step.gradients(batch, 0)
    assert training.elements == tokens * VOCAB
    with step.evaluation() as measure, _Largest() as evaluating:
        measure(batch.cut(0, batch.size), batch.size)
    assert evaluating.elements == tokens * VOCAB


def test_no_product_is_computed_twice() -> None:
    """FLOPs are those of the loss in one piece."""
    flops = []
    for chunks in (1, 4):
        job = _job()
        step = Step(job, plan_of(BATCH, loss_chunks=chunks), SEPARABLE)
        with FlopCounterMode(display=False) as counter:
            step.gradients(_first(job, step), 0)
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0


def test_evaluation_gives_the_same_values() -> None:
    """With metrics of logits and without them."""
    found = []
    for chunks, metrics in ((1, ["token_accuracy"]), (3, ["token_accuracy"]), (3, [])):
        job = _job(metrics=metrics)
        step = Step(job, plan_of(BATCH, loss_chunks=chunks), SEPARABLE, dtype=torch.float64)
        batch = _first(job, step)
        with step.evaluation() as measure:
            found.append({name: float(one.sum / one.count) for name, one in measure(batch.cut(0, 4), 4).items()})
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert found[0]["loss"] == pytest.approx(found[2]["loss"], rel=1e-12)


def test_under_bf16_and_checkpointing_the_gradient_is_as_close_as_in_one_piece() -> None:
    """The layer's products are in bf16, its loss and the sum of its weight's gradient in fp32."""
    job = _job(model=lambda: _gpt(layers=2))
    gradients = []
    for plan in (
        plan_of(BATCH),
        plan_of(BATCH, precision="bf16", checkpointed_blocks=2),
        plan_of(BATCH, precision="bf16", checkpointed_blocks=2, loss_chunks=4),
    ):
        step = Step(job, plan, SEPARABLE)
        step.gradients(_first(job, step), 0)
        gradients.append(torch.cat([p.grad.reshape(-1) for p in step.model.parameters() if p.grad is not None]))
    errors = [float((one - gradients[0]).norm() / gradients[0].norm()) for one in gradients[1:]]
    assert 0 < errors[1] < 1.5 * errors[0] < 0.05


class _Scaled(nn.Module):
    """A model that does something to its logits; `how` says what."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.into, self.head = how, nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.into(tokens))
        if self.how == "new":
            return logits * 0.5
        if self.how == "in place":
            return logits.add_(1.0)
        if self.how == "twice":
            return logits + self.head(self.into(tokens))
        return logits.view(*tokens.shape, VOCAB)


@pytest.mark.parametrize(
    ("how", "words"),
    [("new", "is changed before"), ("in place", "is changed before"), ("twice", "called 2 times"), ("view", "invalid")],
)
def test_logits_that_are_changed_are_refused(how: str, words: str) -> None:
    """What is between the layer and the loss would be left out: seen at the first pass, and reported."""
    job = _job(model=lambda: _Scaled(how))
    step = Step(job, plan_of(BATCH, loss_chunks=2), SEPARABLE)
    with pytest.raises(BadJob, match=words) as told:
        train(job, step, 1)
    assert "loss_chunks 1" in str(told.value.remedy)
    content = _first(job, step).cut(0, BATCH)
    assert step.model(content[0]).shape == (BATCH, TOKENS, VOCAB)  # the layer is itself again


def test_what_cannot_be_computed_in_chunks_is_refused() -> None:
    """Another loss, a model without such a layer, targets of another shape."""
    with pytest.raises(BadJob, match="token_cross_entropy"):
        Step(_job(loss="cross_entropy"), plan_of(BATCH, loss_chunks=2), SEPARABLE)
    with pytest.raises(BadJob, match=r"no plain nn\.Linear"):
        Step(_job(model=lambda: nn.Embedding(VOCAB, VOCAB)), plan_of(BATCH, loss_chunks=2), SEPARABLE)
    job = _job(data=(_tokens()[0], _tokens()[1][:, :3]))
    with pytest.raises(BadJob, match=r"targets are torch\.int64 \[4, 3\]"):
        train(job, Step(job, plan_of(BATCH, loss_chunks=2), SEPARABLE), 1)


def test_a_problem_of_the_models_own_comes_through() -> None:
    """What happens before the layer, out of memory above all, is not taken for something between layer and loss."""

    class Full(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

        def forward(self, _tokens: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("out of memory")

    job = _job(model=Full)
    with pytest.raises(torch.OutOfMemoryError):
        train(job, Step(job, plan_of(BATCH, loss_chunks=2), SEPARABLE), 1)


def test_a_layer_with_hooks_is_no_output_layer() -> None:
    """A hook may look at logits, or change them."""
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    assert output_layer(model) is model[1]
    model[1].register_forward_hook(lambda _module, _args, output: output)
    assert output_layer(model) is None


def test_a_second_backward_pass_is_told() -> None:
    """The gradients were made in the forward pass, and are given away once."""
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    inputs, targets = _tokens()
    loss = ChunkedLoss(model, 2)(lambda: model(inputs), targets)
    assert loss.item() == pytest.approx(
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum").item(), rel=1e-5
    )
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


def test_the_plan_says_so() -> None:
    """In its words, within its bounds."""
    assert "loss in 8 chunks" in Plan(device="cpu", micro_batch=1, loss_chunks=8).in_words()
    with pytest.raises(ValueError, match="loss_chunks must be at least 1"):
        Plan(device="cpu", micro_batch=1, loss_chunks=0)


@pytest.mark.parametrize(
    ("changes", "chunks"),
    [
        ({}, 8),
        ({"model": lambda: _gpt(width=16)}, 1),
        ({"loss": "cross_entropy"}, 1),
        ({"model": lambda: _Scaled("new")}, 1),
        ({"model": lambda: _Scaled("in place")}, 1),
        ({"model": nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))}, 8),
    ],
    ids=["large vocabulary", "small", "another loss", "scaled logits", "changed logits", "a module"],
)
def test_chunks_are_thought_of_where_they_can_be_and_save_something(changes: dict[str, Any], chunks: int) -> None:
    """Seen on an outline, before anything is planned: nothing of the model or of the generators moves."""
    job = _job(**changes)
    state = torch.get_rng_state()
    assert worthwhile_chunks(job, meta_model(job), datasets_of(job).train) == chunks
    assert torch.equal(torch.get_rng_state(), state)


def test_the_forecast_sees_a_chunk_of_logits() -> None:
    """Traced through the same step: at the peak, at least what seven of eight parts of the logits take is saved."""
    job = _job(model=lambda: _gpt(vocab=4096), batch=12)
    peaks = []
    for chunks in (1, 8):
        settings = TraceSettings(target="cpu", capability="", micro_batch=12, loss_chunks=chunks)
        trace = trace_update(job, datasets_of(job), SEPARABLE, settings)
        peaks.append(forecast_memory(trace).allocated)
    assert peaks[0] - peaks[1] > 2 * 7 / 8 * (12 * TOKENS * 4096 * 4)  # logits and their softmax


def test_an_evaluation_computes_no_gradient() -> None:
    """Without gradients a chunked loss takes the products of its forward pass and no other; its value is the same."""
    model, (inputs, targets) = _gpt(), _tokens()
    chunked = ChunkedLoss(model, 4)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        found = chunked(lambda: model(inputs), targets)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        logits = model(inputs)
    assert counted.get_total_flops() == forward.get_total_flops()
    assert torch.allclose(found, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
