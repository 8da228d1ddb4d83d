"""Jobs on random data, in three sizes, which the benchmarks of forecasts and of choices train.

`tiny` ones take a few milliseconds an update anywhere, `here` ones 20 to 100 ms on two cores of a CPU, and `gpu` ones
fill a data-centre GPU without needing more than 40 GiB at their largest.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

import stoker

Size = Literal["tiny", "here", "gpu", "start"]

BATCHES = 4
"""Optimiser batches in a job's data."""


def images(count: int, side: int, channels: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [N, C, side, side] of noise, and labels [N]."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, channels, side, side, generator=generator)
    return inputs, torch.randint(0, classes, (count,), generator=generator)


def tokens(count: int, context: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [N, T] and those that follow them [N, T]."""
    text = torch.randint(0, vocab, (count, context + 1), generator=torch.Generator().manual_seed(0))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def cnn(*, width: int, side: int, batch: int) -> stoker.Job:
    """ResNet-9 with SGD; BatchNorm over a quarter of the batch, so that micro-batches may be cut."""
    return stoker.Job(
        model=lambda: stoker.zoo.ResNet9(width=width, in_channels=3),
        data=images(BATCHES * batch, side, 3, 10),
        loss="cross_entropy",
        optimizer=stoker.SGD(lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4),
        batch=batch,
        coupling_group=batch // 4,
        until=stoker.updates(1000),
    )


def mlp(*, inputs: int, hidden: tuple[int, ...], batch: int) -> stoker.Job:
    """A multi-layer perceptron with AdamW: more weights than activations."""
    generator = torch.Generator().manual_seed(0)
    return stoker.Job(
        model=lambda: stoker.zoo.MLP(inputs, hidden),
        data=(
            torch.randn(BATCHES * batch, inputs, generator=generator),
            torch.randint(0, 10, (BATCHES * batch,), generator=generator),
        ),
        loss="cross_entropy",
        optimizer=stoker.AdamW(lr=1e-3),
        batch=batch,
        until=stoker.updates(1000),
    )


def gpt(*, layers: int, width: int, heads: int, context: int, vocab: int, batch: int) -> stoker.Job:
    """A decoder with AdamW and clipping."""
    return _language_job(
        lambda: stoker.zoo.GPT(layers=layers, width=width, heads=heads, context=context, vocab=vocab),
        context=context,
        vocab=vocab,
        batch=batch,
        clip_norm=1.0,
    )


def lstm(*, layers: int, width: int, context: int, vocab: int, batch: int) -> stoker.Job:
    """A recurrent language model with AdamW and clipping."""
    return _language_job(
        lambda: RecurrentLanguageModel(layers, width, vocab), context=context, vocab=vocab, batch=batch, clip_norm=0.5
    )


def experts(*, layers: int, width: int, num_experts: int, context: int, vocab: int, batch: int) -> stoker.Job:
    """A decoder whose MLPs are mixtures of experts, all of which are computed."""
    return _language_job(
        lambda: MixtureLanguageModel(layers, width, num_experts, vocab), context=context, vocab=vocab, batch=batch
    )


def vit(*, layers: int, width: int, heads: int, side: int, patch: int, batch: int) -> stoker.Job:
    """A vision transformer with AdamW."""
    return stoker.Job(
        model=lambda: VisionTransformer(layers, width, heads, (side // patch) ** 2, patch),
        data=images(BATCHES * batch, side, 3, 10),
        loss="cross_entropy",
        optimizer=stoker.AdamW(lr=1e-3),
        batch=batch,
        until=stoker.updates(1000),
        clip_norm=1.0,
    )


def encoder(*, layers: int, width: int, heads: int, context: int, vocab: int, batch: int) -> stoker.Job:
    """A bidirectional encoder that predicts each token from its neighbours; Adam."""
    return _language_job(
        lambda: Encoder(layers, width, heads, context, vocab), context=context, vocab=vocab, batch=batch
    )


def unet(*, width: int, side: int, batch: int) -> stoker.Job:
    """A U-Net with skip connections and GroupNorm that removes noise; Adam, and an average of the weights."""
    inputs, _ = images(BATCHES * batch, side, 3, 10)
    return stoker.Job(
        model=lambda: UNet(width),
        data=(inputs, inputs.flip(0)),
        loss="mse",
        optimizer=stoker.Adam(lr=1e-3),
        batch=batch,
        until=stoker.updates(1000),
        average=0.999,
    )


def _language_job(
    model: Callable[[], nn.Module], *, context: int, vocab: int, batch: int, clip_norm: float | None = None
) -> stoker.Job:
    return stoker.Job(
        model=model,
        data=tokens(BATCHES * batch, context, vocab),
        loss="token_cross_entropy",
        optimizer=stoker.AdamW(lr=1e-3, weight_decay=0.1),
        batch=batch,
        until=stoker.updates(1000),
        clip_norm=clip_norm,
    )


class RecurrentLanguageModel(nn.Module):
    """tokens_BT to logits_BTV by LSTM layers of `width` units."""

    def __init__(self, layers: int, width: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.recurrence = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of the next tokens."""
        hidden_BTD, _ = self.recurrence(self.tokens(tokens_BT))
        logits_BTV: torch.Tensor = self.head(hidden_BTD)
        return logits_BTV


class VisionTransformer(nn.Module):
    """images_BCHW to logits_BK: patches, learned positions, PyTorch's own encoder layers, the mean over patches."""

    def __init__(self, layers: int, width: int, heads: int, num_patches: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(num_patches, width))
        self.blocks = nn.ModuleList(_encoder_layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits [B, K]."""
        x_BTD = self.patches(images_BCHW).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BK: torch.Tensor = self.head(x_BTD.mean(1))
        return logits_BK


class Encoder(nn.Module):
    """tokens_BT to logits_BTV; every token sees all others."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(_encoder_layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V]."""
        x_BTD = self.tokens(tokens_BT) + self.positions
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: torch.Tensor = self.head(x_BTD)
        return logits_BTV


class MixtureLanguageModel(nn.Module):
    """tokens_BT to logits_BTV; mixtures of experts between running means over the past, which stand for attention."""

    def __init__(self, layers: int, width: int, num_experts: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(_Mixture(width, num_experts) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of the next tokens."""
        x_BTD = self.tokens(tokens_BT)
        length_T = torch.arange(1, x_BTD.shape[1] + 1, device=x_BTD.device)
        for block in self.blocks:
            x_BTD = block(x_BTD + x_BTD.cumsum(1) / length_T[:, None])
        logits_BTV: torch.Tensor = self.head(x_BTD)
        return logits_BTV


class _Mixture(nn.Module):
    """Every expert computes every token; their outputs are added with the router's weights."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, num_experts)
        self.into_XDF = nn.Parameter(0.02 * torch.randn(num_experts, width, 2 * width))
        self.out_XFD = nn.Parameter(0.02 * torch.randn(num_experts, 2 * width, width))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        normed_BTD = self.norm(x_BTD)
        weights_BTX = self.router(normed_BTD).softmax(-1)
        hidden_XBTF = F.silu(torch.einsum("btd,xdf->xbtf", normed_BTD, self.into_XDF))
        return x_BTD + torch.einsum("xbtf,xfd,btx->btd", hidden_XBTF, self.out_XFD, weights_BTX)


class UNet(nn.Module):
    """images_BCHW to images_BCHW; two halvings, skip connections, H and W multiples of 4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = _convolutions(3, width)
        self.down = nn.ModuleList([_convolutions(width, 2 * width), _convolutions(2 * width, 4 * width)])
        self.up = nn.ModuleList([_convolutions(6 * width, 2 * width), _convolutions(3 * width, width)])
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """What is left without the noise [B, C, H, W]."""
        kept = [self.enter(images_BCHW)]
        for block in self.down:
            kept.append(block(F.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), kept.pop()], dim=1))
        out_BCHW: torch.Tensor = self.leave(x)
        return out_BCHW


def _convolutions(channels: int, out_channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for ins in (channels, out_channels):
        layers += [nn.Conv2d(ins, out_channels, 3, padding=1), nn.GroupNorm(4, out_channels), nn.SiLU()]
    return nn.Sequential(*layers)


def _encoder_layer(width: int, heads: int) -> nn.Module:
    return nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


JOBS: dict[Size, dict[str, Callable[[], stoker.Job]]] = {
    "tiny": {
        "cnn": partial(cnn, width=4, side=8, batch=16),
        "mlp": partial(mlp, inputs=32, hidden=(64, 64), batch=32),
        "gpt": partial(gpt, layers=2, width=32, heads=2, context=16, vocab=64, batch=8),
        "lstm": partial(lstm, layers=1, width=16, context=8, vocab=64, batch=8),
        "vit": partial(vit, layers=2, width=32, heads=2, side=16, patch=4, batch=8),
        "encoder": partial(encoder, layers=2, width=32, heads=2, context=16, vocab=64, batch=8),
        "unet": partial(unet, width=4, side=8, batch=8),
        "experts": partial(experts, layers=2, width=16, num_experts=2, context=8, vocab=64, batch=8),
    },
    "here": {
        "cnn": partial(cnn, width=12, side=24, batch=48),
        "mlp": partial(mlp, inputs=784, hidden=(1024, 1024), batch=512),
        "gpt": partial(gpt, layers=3, width=128, heads=4, context=96, vocab=256, batch=12),
        "lstm": partial(lstm, layers=2, width=128, context=48, vocab=256, batch=32),
    },
    "gpu": {
        "cnn": partial(cnn, width=64, side=64, batch=1024),
        "mlp": partial(mlp, inputs=1024, hidden=(8192, 8192, 8192), batch=8192),
        "gpt": partial(gpt, layers=12, width=768, heads=12, context=1024, vocab=50304, batch=16),
        "lstm": partial(lstm, layers=2, width=1024, context=256, vocab=10000, batch=128),
        "vit": partial(vit, layers=12, width=768, heads=12, side=224, patch=16, batch=128),
        "encoder": partial(encoder, layers=24, width=1024, heads=16, context=512, vocab=30522, batch=16),
        "unet": partial(unet, width=64, side=128, batch=64),
        "experts": partial(experts, layers=6, width=1024, num_experts=8, context=512, vocab=32000, batch=8),
    },
}
"""Jobs on random data by size and name."""

START_DATA = "BENCH_START_DATA"
"""Variable that names the folder with the arrays of `bench.start`, whose kinds are the jobs of size `start`."""


def make_job(size: Size, name: str) -> stoker.Job:
    """The job of that size and name."""
    if size != "start":
        return JOBS[size][name]()
    from bench.start.kinds import ALL_KINDS, job_of  # noqa: PLC0415 - of this size alone

    return job_of(ALL_KINDS[name], Path(os.environ[START_DATA]))
