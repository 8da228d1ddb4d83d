"""Small jobs of every family that is traced, and what the real allocator does in one of their updates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from stoker.jobs import AdamW, Job
from stoker.loading.batches import Batch
from stoker.loading.datasets import Datasets, datasets_of
from stoker.profiling.tracing.update import trace_update
from stoker.records import Coupling, Plan, Trace, TraceSettings
from stoker.stepping.step import Step
from stoker.units import updates
from stoker.zoo import GPT, MLP, ResNet9

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="known")
BATCH, TOKENS, VOCAB, CLASSES = 8, 32, 64, 10


class Encoder(nn.Module):
    """PyTorch's own transformer encoder with dropout, and a class for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.embedding = nn.Embedding(VOCAB, 32)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens_BT)).mean(1))


class Patches(nn.Module):
    """A vision transformer whose patches are cut by `unfold`, so that there is no convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3 * 8 * 8, 32)
        self.positions = nn.Parameter(torch.zeros(16, 32))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        patches_BPF = F.unfold(x_BCHW, 8, stride=8).transpose(1, 2)
        x_BPD = self.project(patches_BPF) + self.positions
        for block in self.blocks:
            x_BPD = block(x_BPD)
        return self.head(x_BPD.mean(1))


class Experts(nn.Module):
    """A soft mixture of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(48, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, CLASSES)) for _ in range(4)
        )

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        weights_BE = self.gate(x_BF).softmax(-1)
        return sum(weights_BE[:, e : e + 1] * expert(x_BF) for e, expert in enumerate(self.experts))


class Recurrent(nn.Module):
    """A recurrent classifier of sequences."""

    def __init__(self, kind: type[nn.RNNBase] = nn.GRU) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.recurrent = kind(16, 24, batch_first=True)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.embedding(tokens_BT))[0][:, -1])


class UNet(nn.Module):
    """Down, up, and what was put aside on the way, with a class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, CLASSES, 1)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        aside = F.silu(self.down(x_BCHW))
        low = F.silu(self.middle(F.max_pool2d(aside, 2)))
        return self.out(torch.cat([aside, self.up(low)], 1))


def _images(count: int = 2 * BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 32, 32, generator=random), torch.randint(CLASSES, (count,), generator=random)


def _texts() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (2 * BATCH, TOKENS + 1), generator=random)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _classified_texts() -> tuple[torch.Tensor, torch.Tensor]:
    return _texts()[0], _images()[1]


def _vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return _images()[0].flatten(1)[:, :48].contiguous(), _images()[1]


def _labelled_pixels() -> tuple[torch.Tensor, torch.Tensor]:
    return _images()[0], torch.randint(CLASSES, (2 * BATCH, 32, 32), generator=torch.Generator().manual_seed(2))


def make_job(model: Callable[[], nn.Module] | nn.Module, data: object, **changed: object) -> Job:
    """A job with AdamW whose settings are replaced by `changed`."""
    given = {"loss": "cross_entropy", "optimizer": AdamW(lr=1e-3), "batch": BATCH, "until": updates(10)}
    return Job(model=model, data=data, **{**given, **changed})  # type: ignore[arg-type]


JOBS: dict[str, Callable[[], Job]] = {
    "mlp": lambda: make_job(lambda: MLP(48, dropout=0.1), _vectors(), clip_norm=1.0),
    "gpt": lambda: make_job(lambda: GPT(3, 32, 4, TOKENS, VOCAB), _texts(), loss="token_cross_entropy", clip_norm=1.0),
    "cnn": lambda: make_job(lambda: ResNet9(4, 3), _images(), average=0.9),
    "encoder": lambda: make_job(Encoder, _classified_texts()),
    "vit": lambda: make_job(Patches, _images()),
    "moe": lambda: make_job(Experts, _vectors()),
    "gru": lambda: make_job(Recurrent, _classified_texts()),
    "lstm": lambda: make_job(lambda: Recurrent(nn.LSTM), _classified_texts()),
    "unet": lambda: make_job(UNet, _labelled_pixels()),
}


def settings(target: str = "cpu", **changed: object) -> TraceSettings:
    """Settings for a batch of `BATCH`."""
    capability = "8.0" if target == "cuda" else ""
    given = {"target": target, "capability": capability, "micro_batch": BATCH}
    return TraceSettings(**{**given, **changed})  # type: ignore[arg-type]


@functools.cache
def traced(name: str, target: str = "cpu", **changed: object) -> Trace:
    """The trace of one of `JOBS`."""
    job = JOBS[name]()
    return trace_update(job, datasets_of(job), SEPARABLE, settings(target, **changed))


def sizes_of(trace: Trace) -> list[int]:
    """The sizes of what is allocated (positive) and freed (negative) during the update, in order [bytes]."""
    return [
        trace.storages[abs(event) - 1].num_bytes * (1 if event > 0 else -1)
        for event in trace.events
        if event < 0 or trace.storages[event - 1].born >= 0
    ]


def peak_of(sizes: list[int]) -> int:
    """The most that is allocated at once [bytes]."""
    most = held = 0
    for size in sizes:
        held += size
        most = max(most, held)
    return most


def allocator_sizes(run: Callable[[], object]) -> list[int]:
    """What PyTorch's CPU allocator is really asked for, and gives back, while `run` runs [bytes]."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True, acc_events=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def real_sizes(name: str, chosen: TraceSettings) -> list[int]:
    """As `sizes_of`, of the second real update of one of `JOBS` on the CPU."""
    job = JOBS[name]()
    data: Datasets = datasets_of(job)
    size = chosen.micro_batch * chosen.parts
    plan = Plan(
        device="cpu",
        micro_batch=chosen.micro_batch,
        precision=chosen.precision,
        loader="inline",
        optimizer_implementation=chosen.optimizer_implementation,
        checkpointed_blocks=chosen.checkpointed_blocks,
        checkpointing=chosen.checkpointing,
    )
    step = Step(dataclasses.replace(job, batch=size), plan, SEPARABLE)
    indices = np.arange(size, dtype=np.int64)
    batch = Batch(data.train.fetch(indices, 0), indices, 0, step.pipeline(data.train, augmented=True))
    step.update(batch, 0, 0.5)

    def update() -> None:
        step.update(batch, 1, 0.5)

    return allocator_sizes(update)
