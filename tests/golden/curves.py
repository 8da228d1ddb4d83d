"""Three small trainings whose losses are committed: any change of what Stoker computes shows in them.

Weights, data and augmentation come from keys in whole-number arithmetic, so that they are the same on every machine,
and everything is computed in float64 on one thread. The losses are compared to 1e-12, not for equality: libraries of
linear algebra choose their kernels by the processor, and those add in different orders.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from stoker import data, transforms
from stoker.jobs import SGD, AdamW, Job
from stoker.jobs.objective import Objective
from stoker.jobs.schedules import one_cycle, warmup_cosine
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.loading.order import RandomStream, key_of, keys_of_samples
from stoker.records import Coupling, Plan, Position
from stoker.stepping.step import Step
from stoker.units import updates
from stoker.zoo import GPT, MLP, ResNet9

FILE = Path(__file__).with_name("curves.json")
UPDATES = 30
SAMPLES, CONTEXT, VOCAB = 100, 12, 16


def uniform(shape: tuple[int, ...], key: int) -> torch.Tensor:
    """float64 in [-1, 1), multiples of 2^-52, the same on every machine."""
    keys = keys_of_samples(key_of(RandomStream.PROBE, key), np.arange(math.prod(shape), dtype=np.int64))
    whole = (keys >> np.uint64(11)).astype(np.int64) - 2**52
    return torch.from_numpy(whole.astype(np.float64) / 2**52).view(shape)


def keyed(model: nn.Module) -> nn.Module:
    """The model with matrices drawn uniformly within 1 / sqrt(inputs), and biases of zero."""
    model.double()
    with torch.no_grad():
        for key, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() > 1:
                parameter.copy_(uniform(tuple(parameter.shape), key) * parameter[0].numel() ** -0.5)
    return model


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that repeat with a shift, and the next ones; the ends of some are masked."""
    start = (uniform((SAMPLES, 1), 100) * VOCAB).to(torch.int64).abs()
    tokens = (start + torch.arange(CONTEXT + 1) * (1 + start % 3)) % VOCAB
    targets = tokens[:, 1:].clone()
    targets[::4, -5:] = -100
    return tokens[:, :-1].contiguous(), targets


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The embedded digits, from 0 to 1 in exact steps: their usual preparation rounds in fp32, by the processor."""
    images, labels = data.digits()[0].arrays()
    return images.double() / 16, labels


def mlp() -> tuple[Job, Plan, Coupling]:
    """A perceptron on digits: AdamW, warm-up, label smoothing, an average; the micro-batch leaves a rest."""
    job = Job(
        model=lambda: keyed(MLP(64, hidden=(32,), classes=10)),
        data=digits(),
        loss=Objective("cross_entropy", label_smoothing=0.1),
        batch=60,
        optimizer=AdamW(lr=1e-2),
        schedule=warmup_cosine(warmup=0.2),
        average=0.9,
        until=updates(UPDATES),
    )
    return job, Plan(device="cpu", micro_batch=25), Coupling(kind="separable", group=None, causes=(), evidence="known")


def cnn() -> tuple[Job, Plan, Coupling]:
    """A residual network with batch norm on shifted digits: SGD with momentum, one cycle; two groups at once."""
    job = Job(
        model=lambda: keyed(ResNet9(width=4, pools=2)),
        data=digits(),
        loss="cross_entropy",
        batch=48,
        coupling_group=12,
        optimizer=SGD(lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4),
        schedule=one_cycle(),
        augment=[transforms.RandomShift(1)],
        until=updates(UPDATES),
    )
    return job, Plan(device="cpu", micro_batch=24), Coupling(kind="batch_norm", group=12, causes=(), evidence="known")


def gpt() -> tuple[Job, Plan, Coupling]:
    """A transformer on masked texts: AdamW with groups, clipping; ragged batches."""
    job = Job(
        model=lambda: keyed(GPT(layers=2, width=16, heads=2, context=CONTEXT, vocab=VOCAB)),
        data=texts(),
        loss="token_cross_entropy",
        batch=32,
        clip_norm=0.5,
        until=updates(UPDATES),
        optimizer=AdamW(lr=3e-3, weight_decay=0.1, groups={"*norm*": {"weight_decay": 0.0}}),
    )
    return job, Plan(device="cpu", micro_batch=7), Coupling(kind="separable", group=None, causes=(), evidence="known")


CURVES: dict[str, Callable[[], tuple[Job, Plan, Coupling]]] = {"mlp": mlp, "cnn": cnn, "gpt": gpt}


def losses(name: str) -> list[float]:
    """The loss of each of 30 updates."""
    job, plan, coupling = CURVES[name]()
    samples = datasets_of(job).train
    step = Step(job, plan, coupling, dtype=torch.float64)
    extent = datasets_of(job).extent(job)
    total = extent.position(UPDATES).samples
    batches = BatchSource(samples, step.pipeline(samples, augmented=True), extent, job.seed, plan).batches(
        Position(), UPDATES
    )
    return [
        float(step.update(batch, update, extent.position(update).samples / total))
        for update, batch in enumerate(batches)
    ]


def committed() -> dict[str, list[float]]:
    """The losses in the repository, exact to the last bit."""
    found: dict[str, list[float]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found
