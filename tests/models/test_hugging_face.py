"""Models of Hugging Face's transformers, as they come: dicts in, objects with logits and a loss out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import stoker
from stoker.errors import BadJob
from stoker.loading.batches import in_order
from stoker.loading.datasets import datasets_of
from stoker.profiling.tracing.update import trace_update
from stoker.records import Layout
from stoker.stepping.coupling import find_coupling
from stoker.stepping.model import build_model, num_parameters
from stoker.stepping.step import Step
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from tests.models.loops import UPDATES, largest_gap, ours, theirs
from tests.optional import optional
from tests.profiling.tracing.jobs import settings
from tests.stepping.driving import SEPARABLE, largest_difference, plan_of, trained
from tests.stepping.layouts.conformance import Learned, largest_loss_difference, taught, trained_with
from tests.stepping.models import samples_of

transformers = optional("transformers")

VOCAB, TOKENS, LABELS = 19, 8, 3
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": TOKENS,
    "num_labels": LABELS,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_positions": TOKENS,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 2,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def texts(count: int = 48, *, masked: bool = True) -> dict[str, torch.Tensor]:
    """Tokens of several lengths, padded, with their mask."""
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, VOCAB, (count, TOKENS), generator=draw)
    lengths = torch.randint(3, TOKENS + 1, (count, 1), generator=draw)
    mask = (torch.arange(TOKENS) < lengths).long() if masked else torch.ones(count, TOKENS, dtype=torch.int64)
    return {"input_ids": tokens * mask, "attention_mask": mask}


def classified(**changed: Any) -> stoker.Job:
    """A classifier of texts."""
    data = texts()
    given: dict[str, Any] = {
        "model": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**BERT)),
        "data": {**data, "labels": data["input_ids"][:, 0] % LABELS},
        "loss": "own",
        "batch": 12,
        "optimizer": stoker.AdamW(lr=3e-3),
        "until": stoker.updates(UPDATES),
    }
    return stoker.Job(**{**given, **changed})


def language(**changed: Any) -> stoker.Job:
    """A causal language model, its labels the input's tokens, padding left out, as Hugging Face has them."""
    data = texts()
    labels = data["input_ids"].masked_fill(data["attention_mask"] == 0, -100)
    given = {
        "model": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
        "data": {**data, "labels": labels},
    }
    return classified(**{**given, **changed})


def with_next(job: stoker.Job) -> dict[str, torch.Tensor]:
    """The data of a language model with each token's label."""
    shifted = F.pad(job.data["labels"][:, 1:], (0, 1), value=-100)
    return {**job.data, "labels": shifted}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimiser of the jobs here, by hand."""
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01)


@pytest.mark.parametrize(
    "loss", ["own", "cross_entropy", pytest.param(torch.nn.CrossEntropyLoss(), marks=pytest.mark.slow)]
)
def test_a_classifier_learns_as_in_a_loop_of_its_own(loss: Any) -> None:
    """By its own loss, by ours, by PyTorch's module: to 1e-5 over 50 updates."""
    job = classified(loss=loss)
    expected = theirs(job, lambda model, batch: model(**batch).loss, adamw)
    assert largest_gap(ours(job), expected) < 1e-5
    assert expected[-1] < expected[0]


def test_a_language_model_learns_as_in_a_loop_of_its_own() -> None:
    """Its own loss is a mean over all labels but each sample's first; whole batches, to 1e-5 over 50 updates."""
    job = language()
    expected = theirs(job, lambda model, batch: model(**batch).loss, adamw)
    assert largest_gap(ours(job), expected) < 1e-5


@pytest.mark.parametrize(("make", "limit"), [(classified, 1e-9), (language, 1e-5)])
def test_its_own_mean_loss_adds_up_over_micro_batches(make: Any, limit: float) -> None:
    """Though samples have different numbers of labels: equal weights, and the probe calls it separable.

    In float64; but for the language model's own loss, which rounds its logits to float32 whatever they come in.
    """
    job = make()
    assert find_coupling(job, samples_of(job)).kind == "separable"
    assert largest_difference(trained(job, 5, updates=10), trained(job, 12, updates=10)) < limit


def test_a_loss_of_another_count_is_never_cut() -> None:
    """A model whose mean is over something that labels do not tell: parts do not add up, so batches stay whole."""

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, LABELS)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layer(x)
            weights = x.squeeze(1).abs()
            return {"loss": (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / weights.sum()}

    data = {"x": torch.randn(48, 1), "labels": torch.randint(LABELS, (48,))}
    job = classified(model=Odd, data=data)
    assert find_coupling(job, samples_of(job)).kind == "whole_group"


def test_labels_that_are_the_inputs_are_refused_where_each_would_be_compared_with_itself() -> None:
    """With token_cross_entropy, and the remedy."""
    job = language(loss="token_cross_entropy")
    with pytest.raises(BadJob, match="given its own input tokens as labels") as refused:
        find_coupling(job, samples_of(job))
    assert 'loss="own"' in str(refused.value)


@pytest.mark.parametrize("plan", [{}, {"loss_chunks": 3}, {"checkpointed_blocks": 3}, {"micro_batch": 5}])
def test_labels_beside_their_tokens_are_the_same_loss(plan: dict[str, Any]) -> None:
    """Token cross-entropy of the logits, in chunks, with blocks computed twice, cut: each what its own loss is."""
    own = language()
    job = language(loss="token_cross_entropy", data=with_next(own))
    assert largest_gap(ours(job, updates=8, **plan), ours(own, updates=8)) < 1e-5


def test_metrics_see_the_logits_beside_their_labels() -> None:
    """With its own loss, labels are shifted for metrics as the model shifts them: the same accuracy either way."""
    own = language(metrics=("token_accuracy",))
    beside = language(metrics=("token_accuracy",), loss="token_cross_entropy", data=with_next(own))
    found = []
    for job in (own, beside):
        step = trained(job, 12, updates=2)
        samples = datasets_of(job).train
        batch = next(iter(step_batches(step, samples)))
        with step.evaluation() as measure:
            measures = measure(batch.cut(0, batch.size), batch.size)
        found.append({name: (float(one.sum), float(one.count)) for name, one in measures.items()})
    assert found[0]["token_accuracy"] == found[1]["token_accuracy"]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"])


def test_functions_of_ones_own_get_what_the_model_returns() -> None:
    """The output's object, attributes and all, also in half precision; or the model itself."""
    seen = []

    def of_output(output: Any, target: torch.Tensor) -> torch.Tensor:
        seen.append((type(output).__name__, output.logits.dtype, output["logits"].dtype))
        return F.cross_entropy(output.logits, target, reduction="none")

    def of_model(model: Any, batch: Any) -> stoker.Loss:
        count = len(batch["labels"])
        return stoker.Loss(model(**batch).loss * count, count)

    expected = ours(classified(), updates=4)
    assert largest_gap(ours(classified(loss=of_output), updates=4), expected) < 1e-5
    assert largest_gap(ours(classified(loss=of_model), updates=4), expected) < 1e-5
    ours(classified(loss=of_output), updates=1, precision="bf16")
    assert set(seen) == {("SequenceClassifierOutput", torch.float32, torch.float32)}


def test_tied_weights_are_one_parameter_trained_kept_and_loaded_once(tmp_path: Path) -> None:
    """Counted once, in the optimiser once, equal in what the run keeps."""
    job = language(until=stoker.updates(3), evaluation=stoker.Evaluation(every=stoker.updates(3)))
    model: Any = build_model(job)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert num_parameters(model) == sum(p.numel() for p in model.parameters())
    run = stoker.train(job, run_dir=tmp_path / "run", plan=plan_of(12), sink=lambda event: None)
    weights = run.weights()
    assert torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"])
    again: Any = run.model()
    assert again.lm_head.weight is again.transformer.wte.weight
    assert torch.equal(again.lm_head.weight, weights["lm_head.weight"])


def test_what_generates_is_left_as_it_was() -> None:
    """The cache is off in training alone: the configuration of generation is not touched, and generating works."""
    model: Any = build_model(language())
    fresh = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    assert model.config.use_cache is False
    assert model.generation_config.to_dict() == fresh.generation_config.to_dict()
    made = model.eval().generate(torch.tensor([[1, 2]]), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert made.shape == (1, 5)


def test_a_model_within_another_module_trains_without_its_cache_too() -> None:
    """A block that is computed again in the backward pass would fill the cache a second time, and be refused."""

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))

        def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
            logits_BTV: torch.Tensor = self.inner(input_ids=tokens_BT).logits
            return logits_BTV

    def wrapped() -> stoker.Job:
        tokens = torch.randint(3, VOCAB, (12, TOKENS), generator=torch.Generator().manual_seed(0))
        return language(model=Logits, data=(tokens, tokens.roll(-1, 1)), loss="token_cross_entropy")

    model: Any = build_model(wrapped())
    assert model.inner.config.use_cache is False
    assert largest_gap(ours(wrapped(), updates=2, checkpointed_blocks=2), ours(wrapped(), updates=2)) < 1e-6


def test_a_dict_is_needed_for_its_own_loss() -> None:
    """A tuple has no names to hand entries over by."""
    job = classified(data=tuple(classified().data.values()))
    with pytest.raises(BadJob, match="by name, labels included, and these are no dicts"):
        ours(job, updates=1)


def test_a_model_without_a_loss_says_so() -> None:
    """One that was given no labels, or never returns a loss."""
    bare = transformers.BertModel(transformers.BertConfig(**BERT))
    with pytest.raises(BadJob, match="needs a model that returns its mean loss"):
        ours(classified(model=bare, data=texts()), updates=1)


@pytest.mark.slow
def test_a_whole_run_plans_trains_and_exports(tmp_path: Path) -> None:
    """From a job to an artifact, by one name: inputs are the dict's, and so are the outputs' names."""
    job = classified(until=stoker.epochs(2), valid=stoker.holdout(0.25), metrics=("accuracy",))
    run = stoker.train(job, run_dir=tmp_path / "run", plan=plan_of(12), sink=lambda event: None)
    assert 0 <= run.metrics["valid/accuracy"] <= 1
    artifact = stoker.export(run, tmp_path / "models" / "texts")
    assert [spec.name for spec in artifact.manifest.inputs] == ["input_ids", "attention_mask"]


def step_batches(step: Any, samples: Any) -> Any:
    """All samples of a job in their order, as one batch."""
    return in_order(samples, step.pipeline(samples, augmented=False), len(samples))


def test_training_does_not_depend_on_the_seed_of_the_process() -> None:
    """Weights of a model made by a function are drawn by the job's seed."""
    torch.manual_seed(1)
    first = build_model(classified()).state_dict()
    torch.manual_seed(2)
    assert all(torch.equal(tensor, first[name]) for name, tensor in build_model(classified()).state_dict().items())


QWEN3 = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": TOKENS,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


class InDouble(TorchFunctionMode):
    """Computes in float64 what models ask for in float32 whatever their dtype: `.float()`, softmax, norms, rotations.

    Without it, "float64" rounds to 1e-7, and a comparison with one process shows no fault that is smaller.
    """

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args, kwargs = tree_map(lambda one: torch.float64 if one is torch.float32 else one, (args, kwargs or {}))
        return func(*args, **kwargs)


def gpt2_layouts_job() -> stoker.Job:
    """GPT-2 with its own loss; input and output share their embedding."""
    return language(clip_norm=1.0)


def qwen3_layouts_job() -> stoker.Job:
    """Qwen3, with shared keys and values and normalised queries; labels are the next tokens."""
    job = language()
    make = lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**QWEN3))  # noqa: E731 - a setting
    return language(model=make, data=with_next(job), loss="token_cross_entropy", clip_norm=1.0)


def qwen3_unpadded_job() -> stoker.Job:
    """Qwen3 as above, on samples of one length: without a mask its attention is causal, and nothing else."""
    tokens = torch.randint(VOCAB, (64, TOKENS + 1), generator=torch.Generator().manual_seed(3))
    data = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    return dataclasses.replace(qwen3_layouts_job(), data=data)


MIXTRAL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}


def mixtral_layouts_job() -> stoker.Job:
    """Mixtral, whose experts are called in a loop, which takes float64; labels are the next tokens."""
    job, shape = language(), {**MIXTRAL, "num_hidden_layers": 2, "experts_implementation": "eager"}
    make = lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**shape))  # noqa: E731 - a setting
    return language(model=make, data=with_next(job), loss="token_cross_entropy", clip_norm=1.0)


LAYOUTS_JOBS = {
    "gpt2": gpt2_layouts_job,
    "qwen3": qwen3_layouts_job,
    "qwen3 unpadded": qwen3_unpadded_job,
    "mixtral": mixtral_layouts_job,
}


def learned_in_double(world: World, layout: Layout, names: list[str], fault: float = 0.0) -> dict[str, Learned]:
    """What a process learns of each job in ten updates; with a fault the last layer of rank 0 is off by that part."""
    learned = {}
    for name in names:
        job = LAYOUTS_JOBS[name]()
        if fault and world.rank == 0:
            job = dataclasses.replace(job, model=functools.partial(_faulty, job.model, fault))
        plan = plan_of(4 if layout.world_size > 1 else 12, layout=layout)
        with InDouble():
            learned[name] = taught(world, job, plan, SEPARABLE, torch.float64, 10)
    return learned


def _faulty(make: Any, fault: float) -> torch.nn.Module:
    model: torch.nn.Module = make()
    model.get_submodule("lm_head").register_forward_hook(lambda *given: given[-1] * (1 + fault))
    return model


def differences(layout: Layout, names: list[str], fault: float = 0.0) -> dict[str, float]:
    """The largest difference of any process from one process, in losses or weights, by job."""
    alone = learned_in_double(ALONE, Layout(), names)
    return {
        name: max(
            max(
                largest_loss_difference(each[name], alone[name]),
                largest_difference(each[name].weights, alone[name].weights),
            )
            for each in together
        )
        for together in [on_ranks(layout, learned_in_double, layout, names, fault)]
        for name in names
    }


@pytest.mark.slow  # each process imports transformers
@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Layout(replicas=2), ["gpt2", "qwen3"]),
        (Layout(shards=2), ["gpt2", "qwen3"]),
        (Layout(tensor=2), ["qwen3"]),
        (Layout(shards=2, tensor=2), ["qwen3"]),
        (Layout(experts=2), ["mixtral"]),
        (Layout(shards=2, experts=2), ["mixtral"]),
        (Layout(context=2), ["qwen3 unpadded"]),
    ],
    ids=str,
)
def test_two_processes_learn_what_one_does(layout: Layout, names: list[str]) -> None:
    """To 1e-9, losses and weights, with all of the model in float64."""
    found = differences(layout, names)
    assert max(found.values()) < 1e-9, found


def mixtral_compiled(world: World, way: str) -> tuple[Learned, str | None, int]:
    """What a process learns of Mixtral in ten updates, compiled over several processes (without kernels).

    Batched products of experts take float64; others are in bf16, recomputed (where `InDouble` does not reach). With why
    a part is not compiled, and the number of graphs that were captured.
    """
    from torch._dynamo.utils import counters

    is_alone = world is ALONE
    if not is_alone:  # a process of its own
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
    is_double = way == "batched_mm"
    shape = {**MIXTRAL, "num_hidden_layers": 3, "experts_implementation": way}
    job = language(
        model=lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**shape)),
        data=with_next(language()),
        loss="token_cross_entropy",
        clip_norm=1.0,
    )
    plan = plan_of(
        12 if is_alone else 4,
        layout=world.layout,
        compile=not is_alone,
        precision="fp32" if is_double else "bf16",
        checkpointed_blocks=0 if is_alone or is_double else 3,
    )
    with InDouble() if is_double else contextlib.nullcontext():
        step = Step(job, plan, SEPARABLE, dtype=torch.float64 if is_double else None, world=world)
        learned = trained_with(step, 10)
    problem = None if step.compilation is None else step.compilation.problem
    return learned, problem, counters["stats"]["unique_graphs"]


@pytest.mark.slow  # each process imports transformers
@pytest.mark.parametrize(
    ("way", "says", "limit"),
    [("batched_mm", "None", 1e-9), ("grouped_mm", "None", 1e-2), ("eager", "a part of the model cannot", 1e-2)],
)
def test_mixtral_is_compiled_over_processes_with_different_experts(way: str, says: str, limit: float) -> None:
    """Attention, norms, routers and experts of all three layers by the same code, and what one process learns.

    Experts in a loop over those that were chosen cannot be captured; the rest of their blocks is.
    """
    expected, *_ = mixtral_compiled(ALONE, way)
    for learned, problem, num_graphs in on_ranks(Layout(experts=2), mixtral_compiled, way):
        assert says in str(problem)
        assert 4 <= num_graphs < 20
        assert largest_loss_difference(learned, expected) < limit


@pytest.mark.slow  # each process imports transformers
def test_a_fault_of_a_tenth_of_a_millionth_is_seen() -> None:
    """Logits of one of two replicas off by 1e-7, which is less than float32 rounds to, are off by more than 1e-9."""
    found = differences(Layout(replicas=2), ["gpt2", "qwen3"], fault=1e-7)
    assert min(found.values()) > 1e-9, found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_mixture_of_experts_is_traced_for_a_gpu_that_is_not_here(precision: str) -> None:
    """Its grouped products are not part of autocast, so they stay in fp32, which PyTorch's fakes of them refuse."""
    job = language(model=lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTRAL)))
    where = dataclasses.replace(settings("cuda"), precision=precision)
    trace = trace_update(job, datasets_of(job), SEPARABLE, where)
    grouped = [one for one in trace.operations if one.name == "_grouped_mm"]
    assert len(grouped) >= 6  # two products forward, four backward
