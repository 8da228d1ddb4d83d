"""Whole steps on GPUs that are not here: intervals, depths, and what is left out."""

from __future__ import annotations

import math

import pytest

from bench.forecast.gpu_forecast import SlowAllocator, forecast_step, interval
from bench.forecast.gpu_latency import Forecaster, forecast_all
from bench.forecast.gpu_steps import Step, _counted, step_of
from stoker.errors import BadJob
from stoker.planning.model.gpu_times import GpuTimes
from tests.planning.time.gpu_devices import gpu, product

GPT = {
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 3,
    "n_embd": 64,
    "n_head": 2,
    "n_ctx": 32,
    "vocab_size": 50,
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
}
BERT = {
    "architectures": ["BertLMHeadModel"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 32,
    "vocab_size": 50,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.1,
}


def step(config, **changes) -> Step:
    """A small step of inference."""
    settings = {"is_training": False, "tokens": 16, "batch": 2, "capability": "8.0", **changes}
    return step_of(config, **settings)


def num_products(made: Step) -> int:
    """How many matrix products its forward pass has."""
    return sum(count for one, count in made.forward.items() if one.flops)


def test_what_may_only_be_slower_leaves_the_lower_end() -> None:
    """An allocator's risk is on top: the upper end moves by it, the lower one does not."""
    low, high = interval(1.0, {"product": 0.1}, 0.0)
    assert low * high == pytest.approx(1.0)
    risky_low, risky_high = interval(1.0, {"product": 0.1}, 0.5)
    assert risky_low == low
    assert risky_high == pytest.approx(1 + math.hypot(high - 1, 1.2816 * 0.5))


def test_training_asks_the_allocator_and_inference_does_not() -> None:
    """The risk of a slow driver is above training's forecast, and the expected calls are in its time."""
    work, times, allocator = {product(4096, 4096, 4096): 4}, GpuTimes.of(gpu()), SlowAllocator()
    training = forecast_step(Step(work, work, work, work), times, is_compiled=False, allocator=allocator)
    inference = forecast_step(Step(work, {}, work, {}), times, is_compiled=False, allocator=allocator)
    assert training.forward_s == pytest.approx(inference.forward_s + 4 * allocator.call_s)
    assert training.high_s / training.seconds > training.seconds / training.low_s
    assert inference.high_s / inference.seconds == pytest.approx(inference.seconds / inference.low_s)


def test_a_label_says_how_deep_the_model_is() -> None:
    """Another number of layers than the model's is built: each adds as many products as the one before."""
    one, three, five = (num_products(step(GPT, layers=layers)) for layers in (1, None, 5))
    assert five - three == three - one > 0
    assert step(GPT, layers=3) == step(GPT)


def test_counting_by_two_depths_is_counting_each_layer() -> None:
    """A model of four layers, of which two are traced and the rest repeated, has what all four have."""
    settings = {"is_training": True, "tokens": 16, "batch": 2, "capability": "8.0"}
    made = step_of(GPT, layers=4, **settings)
    assert (made.forward, made.backward, made.fused_forward, made.fused_backward) == _counted(GPT, 4, **settings)


def test_more_tokens_than_positions_are_refused() -> None:
    """Such a step fails on a device, so that no label of it is forecast."""
    assert num_products(step(BERT, tokens=32)) > 0
    with pytest.raises(BadJob, match="33 tokens are longer than the model's 32 positions"):
        step(BERT, tokens=33)


class FakeForecaster(Forecaster):
    """One device and two models, without files."""

    def __init__(self, *, uses_points: bool = False) -> None:
        self.models = {"gpt": GPT, "bert": BERT}
        self.leaves_out, self.uses_points = False, uses_points
        self._times = {"a100": GpuTimes.of(gpu()), "l4": GpuTimes.of(gpu(compute_capability="8.9"))}
        self._steps = {}


def row(**changes: str) -> dict[str, str]:
    """A label of a model of three layers."""
    label = {"device": "A100", "model": "gpt", "mode": "inf", "seqlen": "16", "batch": "2", "e2e_ms": "1.0"}
    return {**label, **changes}


def test_what_is_left_out_is_named_with_its_reason() -> None:
    """A label that cannot be modelled neither fails the others nor disappears."""
    rows = [row(), row(model="bert", seqlen="64.0"), row(model="unknown"), row(option="tp4")]
    document = forecast_all(rows, FakeForecaster())
    assert [case["model"] for case in document["cases"]] == ["gpt"]
    reasons = " ".join(one["reason"] for one in document["skipped"])
    assert len(document["skipped"]) == 3
    assert all(why in reasons for why in ("32 positions", "not in models.json", "several devices"))


def test_means_are_told_without_the_labels_that_a_constant_was_judged_from() -> None:
    """Such a label is marked, is in the mean of all, and not in the other."""
    forecaster = FakeForecaster()
    v100 = "tesla v100 pcie 32gb"
    forecaster._times[v100] = forecaster._times["a100"]
    forecaster.models["bert_large"] = {**BERT, "max_position_embeddings": 512}
    judged = row(device=v100, model="bert_large", mode="train", seqlen="512", batch="2", num_layer="1")
    document = forecast_all([row(), judged], forecaster)
    assert [case["is_judged_on"] for case in document["cases"]] == [False, True]
    assert (document["overall"]["cases"], document["overall_without_judged_on"]["cases"]) == (2, 1)
    assert len(document["means"]) == 2
    assert len(document["means_without_judged_on"]) == 1
    assert len(document["constants_judged_on_labels"]) == 3


def test_steps_are_kept_by_capability_and_depth() -> None:
    """Which kernels run depends on the chip, so that a step of one is none of another."""
    forecaster = FakeForecaster()
    for label in (row(), row(), row(device="L4"), row(num_layer="2")):
        document = forecast_all([label], forecaster)
        assert not document["skipped"]
    assert len(forecaster._steps) == 3


def test_constants_that_know_the_device_are_listed() -> None:
    """Only a fit without the device says that something was fitted again."""
    shipped, refitted = (FakeForecaster(uses_points=uses_points).constants for uses_points in (True, False))
    assert shipped["refitted"] == []
    assert set(refitted["refitted"]) < set(shipped["not_refitted"])
    assert not set(refitted["refitted"]) & set(refitted["not_refitted"])
