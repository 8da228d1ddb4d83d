from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import stoker
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.datasets import Datasets
from stoker.planning.model.trace_extrapolation import NotDerivable, derived
from stoker.profiling.tracing.repetition import trace_with_repetition
from stoker.records import Coupling, Trace, TraceSettings
from stoker.zoo import GPT

V, T = 17, 10
SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="")
IN_BATCHES = Coupling(kind="batch_norm", group=2, causes=("BatchNorm2d",), evidence="")


def language_job() -> stoker.Job:
    """A decoder of repeated blocks."""
    tokens = torch.zeros(8, T, dtype=torch.int64)
    return stoker.Job(
        model=lambda: GPT(layers=6, width=24, heads=3, context=T, vocab=V),
        data=(tokens, tokens),
        batch=8,
        loss="token_cross_entropy",
        until=stoker.epochs(1),
        optimizer=stoker.SGD(lr=1e-3, momentum=0.9),
        clip_norm=1.0,
    )


def image_job(*, norm: bool = True) -> stoker.Job:
    """A small convolutional network, with batch statistics or without."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU(), nn.MaxPool2d(2)]
    data = (torch.zeros(8, 3, 8, 8), torch.zeros(8, dtype=torch.int64))
    return stoker.Job(
        model=lambda: nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 5)),
        data=data,
        batch=8,
        loss="cross_entropy",
        until=stoker.epochs(1),
        optimizer=stoker.SGD(lr=0.1, momentum=0.9),
    )


def pairwise_job() -> stoker.Job:
    """A loss over all pairs of samples: sizes go with the square of the batch."""

    def contrast(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        return (output @ output.T).logsumexp(dim=1)

    data = (torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64))
    return stoker.Job(
        model=lambda: nn.Linear(4, 3),
        data=data,
        batch=8,
        loss=contrast,
        until=stoker.epochs(1),
        optimizer=stoker.SGD(lr=0.1),
    )


def traced(job: stoker.Job, micro_batch: int, coupling: Coupling = SEPARABLE, **settings) -> Trace:
    """The job's update at one micro-batch."""
    data = Datasets(train=as_samples(job.data, what="data"), held_out={}, test=None)
    chosen = {"target": "cpu", "capability": "", "micro_batch": micro_batch} | settings
    return dataclasses.replace(trace_with_repetition(job, data, coupling, TraceSettings(**chosen)), took_s=0.0)


@pytest.mark.parametrize(
    ("job", "settings"),
    [
        pytest.param(language_job, {"precision": "bf16"}, id="decoder"),
        pytest.param(
            language_job,
            {"target": "cuda", "capability": "8.0", "parts": 2},
            id="decoder elsewhere",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda: image_job(norm=False), {"memory_format": "channels_last"}, id="cnn"),
    ],
)
def test_a_derived_trace_equals_one_made_directly(job, settings):
    """Every shape, byte and FLOP of operations and storages, larger and smaller than the two it comes from."""
    traces = {size: traced(job(), size, **settings) for size in (2, 3, 5)}
    assert derived(traces[2], traces[3], 5) == traces[5]
    assert derived(traces[3], traces[5], 2) == traces[2]


def test_products_whose_factors_have_one_shape_at_one_size_are_derived():
    """Two samples of 16 tokens are 32 rows of 32 numbers, as the weights; one sample is traced."""
    job = dataclasses.replace(
        language_job(),
        model=lambda: GPT(layers=2, width=32, heads=2, context=16, vocab=V),
        data=(torch.zeros(8, 16, dtype=torch.int64),) * 2,
    )
    sizes = {size: traced(job, size, target="cuda", capability="8.0") for size in (2, 4, 6)}
    products = [one for one in sizes[2].operations if one.name in ("mm", "addmm")]
    assert any(one.attribute("num_outside") for one in products)
    assert derived(sizes[2], sizes[4], 6) == sizes[6]
    with pytest.raises(NotDerivable, match="addmm at 2 samples is not the same at 4"):
        derived(sizes[2], sizes[4], 1)


def test_batch_statistics_over_the_micro_batch_are_derived():
    """A network with BatchNorm whose micro-batch is one group does the same at every size."""
    sizes = {size: traced(image_job(), size, dataclasses.replace(IN_BATCHES, group=size)) for size in (2, 4, 6)}
    assert derived(sizes[2], sizes[4], 6) == sizes[6]


def test_batch_statistics_of_several_groups_are_refused():
    """A micro-batch of two groups passes through the norms once for each: there is more to do, not larger things."""
    small, large = traced(image_job(), 4, IN_BATCHES), traced(image_job(), 6, IN_BATCHES)
    with pytest.raises(NotDerivable, match="executions differ"):
        derived(small, large, 8)


def test_a_size_that_was_traced_is_not_derived():
    """At the two sizes traced, the traces themselves are given."""
    small, large = traced(image_job(norm=False), 2), traced(image_job(norm=False), 4)
    assert derived(small, large, 2) is small
    assert derived(small, large, 4) is large


def test_squares_of_the_batch_are_refused():
    """With a similarity of all pairs, two sizes do not tell a third."""
    with pytest.raises(NotDerivable, match="more than one dimension"):
        derived(traced(pairwise_job(), 2), traced(pairwise_job(), 4), 6)


def test_sizes_that_are_no_whole_numbers_are_refused():
    """Bytes that would be a fraction are no bytes: the two traces do not lie on a line of the batch."""
    small, large = traced(image_job(norm=False), 2), traced(image_job(norm=False), 4)
    storages = (dataclasses.replace(large.storages[0], num_bytes=large.storages[0].num_bytes + 1), *large.storages[1:])
    with pytest.raises(NotDerivable, match="no whole size at 3"):
        derived(small, dataclasses.replace(large, storages=storages), 3)


def test_other_settings_are_refused():
    """A trace in another precision is no second size of the same."""
    small, large = traced(image_job(norm=False), 2), traced(image_job(norm=False), 4, precision="bf16")
    with pytest.raises(NotDerivable, match="more settings"):
        derived(small, large, 3)
