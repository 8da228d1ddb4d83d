"""Jobs of many kinds, whose memory is forecast and then measured: small enough for seconds, of 100 MB to 1 GB.

Shapes: B samples, C channels, H × W pixels, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

import stoker
from stoker.records import Coupling, Malloc, Plan
from stoker.zoo import GPT, MLP, ResNet9

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="known")
NUM_SAMPLES = 256


@dataclass(frozen=True)
class Case:
    """A job and the plan it runs under. `use` says whether constants may be fitted on it, or it only tests them."""

    name: str
    use: Literal["calibration", "held out"]
    job: Callable[[], stoker.Job]
    plan: dict[str, Any]

    def plan_with(self, malloc: Malloc) -> Plan:
        """The plan under one malloc setting."""
        return Plan(device="cpu", threads=1, malloc=malloc, **self.plan)


class UNet(nn.Module):
    """x_BCHW to logits_BKHW: three levels down, three up, each up level joined with its counterpart."""

    def __init__(self, width: int = 32, classes: int = 4) -> None:
        super().__init__()
        w = width
        self.down = nn.ModuleList([_two_convs(3, w), _two_convs(w, 2 * w), _two_convs(2 * w, 4 * w)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(4 * w, 2 * w, 2, 2), nn.ConvTranspose2d(2 * w, w, 2, 2)])
        self.after = nn.ModuleList([_two_convs(4 * w, 2 * w), _two_convs(2 * w, w)])
        self.head = nn.Conv2d(w, classes, 1)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits of each pixel."""
        kept = []
        for number, level in enumerate(self.down):
            x_BCHW = level(F.max_pool2d(x_BCHW, 2) if number else x_BCHW)
            kept.append(x_BCHW)
        for up, after, skipped in zip(self.up, self.after, reversed(kept[:-1]), strict=True):
            x_BCHW = after(torch.cat([up(x_BCHW), skipped], 1))
        logits_BKHW: torch.Tensor = self.head(x_BCHW)
        return logits_BKHW


class LSTMTagger(nn.Module):
    """tokens_BT to logits_BTV through an embedding and two layers of LSTM."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits of each token."""
        logits_BTV: torch.Tensor = self.head(self.lstm(self.tokens(tokens_BT))[0])
        return logits_BTV


class Encoder(nn.Module):
    """Images cut into patches, a transformer encoder over them, their mean classified."""

    def __init__(self, width: int = 192, layers: int = 6, patch: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        layer = nn.TransformerEncoderLayer(width, 3, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits of each image."""
        x_BTD = self.patches(x_BCHW).flatten(2).transpose(1, 2)
        logits_BK: torch.Tensor = self.head(self.blocks(x_BTD).mean(1))
        return logits_BK


class BottleneckNet(nn.Module):
    """A residual network of bottlenecks with groups: 1×1, grouped 3×3, 1×1 convolutions."""

    def __init__(self, width: int = 64, blocks: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2 * width, 3, 2, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(2 * width, width, 1),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, groups=8),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, 2 * width, 1),
                nn.BatchNorm2d(2 * width),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits of each image."""
        x_BCHW = self.stem(x_BCHW)
        for block in self.blocks:
            x_BCHW = F.relu(x_BCHW + block(x_BCHW))
        logits_BK: torch.Tensor = self.head(x_BCHW.mean((2, 3)))
        return logits_BK


def _two_convs(channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, 3, padding=1),
        nn.GroupNorm(8, out_channels),
        nn.SiLU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1),
        nn.GroupNorm(8, out_channels),
        nn.SiLU(),
    )


def _job(model: Callable[[], nn.Module], data: tuple[torch.Tensor, torch.Tensor], **settings: object) -> stoker.Job:
    chosen: dict[str, Any] = {"loss": "cross_entropy", "optimizer": stoker.AdamW(lr=1e-4), "until": stoker.epochs(9)}
    return stoker.Job(model=model, data=data, **(chosen | settings))


def images(side: int, channels: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images [B, C, H, W] and their classes [B]."""
    return torch.rand(NUM_SAMPLES, channels, side, side), torch.randint(0, 10, (NUM_SAMPLES,))


def masks(side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images [B, C, H, W] and the class of each pixel [B, H, W]."""
    return torch.rand(NUM_SAMPLES, 3, side, side), torch.randint(0, 4, (NUM_SAMPLES, side, side))


def rows(features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows [B, D] and their classes [B]."""
    return torch.rand(NUM_SAMPLES * 16, features), torch.randint(0, 10, (NUM_SAMPLES * 16,))


def tokens(length: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens [B, T] and those that follow."""
    ids = torch.randint(0, vocab, (NUM_SAMPLES, length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def pixel_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each image, the mean over its pixels."""
    return F.cross_entropy(output, target, reduction="none").mean((1, 2))


def _mlp(widths: tuple[int, ...], features: int, batch: int) -> stoker.Job:
    return _job(lambda: MLP(features, widths, 10), rows(features), batch=batch)


def _resnet(width: int, side: int, batch: int) -> stoker.Job:
    return _job(
        lambda: ResNet9(width, in_channels=3), images(side), batch=batch, optimizer=stoker.SGD(lr=0.01, momentum=0.9)
    )


def _gpt(layers: int, width: int, context: int, vocab: int, batch: int) -> stoker.Job:
    return _job(
        lambda: GPT(layers, width, width // 64, context, vocab),
        tokens(context, vocab),
        batch=batch,
        loss="token_cross_entropy",
    )


def _lstm(width: int, length: int, batch: int) -> stoker.Job:
    return _job(lambda: LSTMTagger(512, width), tokens(length, 512), batch=batch, loss="token_cross_entropy")


def _unet(side: int, batch: int) -> stoker.Job:
    return _job(UNet, masks(side), batch=batch, loss=pixel_loss)


def _encoder(layers: int, side: int, batch: int) -> stoker.Job:
    return _job(lambda: Encoder(layers=layers), images(side), batch=batch)


def _bottlenecks(width: int, side: int, batch: int) -> stoker.Job:
    return _job(lambda: BottleneckNet(width), images(side), batch=batch)


CASES = (
    Case("mlp, two layers", "calibration", lambda: _mlp((3072, 3072), 1024, 256), {"micro_batch": 256}),
    Case("resnet9, width 16", "calibration", lambda: _resnet(16, 64, 64), {"micro_batch": 64}),
    Case("gpt, 3 layers", "calibration", lambda: _gpt(3, 320, 192, 1024, 16), {"micro_batch": 16}),
    Case("encoder, 4 layers", "calibration", lambda: _encoder(4, 80, 32), {"micro_batch": 32}),
    Case("u-net, 48 pixels, bf16", "calibration", lambda: _unet(48, 16), {"micro_batch": 16, "precision": "bf16"}),
    Case("lstm, width 256", "calibration", lambda: _lstm(256, 96, 32), {"micro_batch": 32}),
    Case("mlp", "held out", lambda: _mlp((4096, 4096), 2048, 1024), {"micro_batch": 1024}),
    Case("mlp, 4 micro-batches", "held out", lambda: _mlp((4096, 1024, 512), 4096, 2048), {"micro_batch": 512}),
    Case("resnet9", "held out", lambda: _resnet(32, 64, 64), {"micro_batch": 64}),
    Case(
        "resnet9, bf16, channels last",
        "held out",
        lambda: _resnet(32, 64, 64),
        {"micro_batch": 64, "precision": "bf16", "memory_format": "channels_last"},
    ),
    Case("bottlenecks", "held out", lambda: _bottlenecks(64, 96, 32), {"micro_batch": 32}),
    Case("gpt", "held out", lambda: _gpt(4, 384, 256, 2048, 8), {"micro_batch": 8}),
    Case("gpt, bf16", "held out", lambda: _gpt(4, 384, 256, 2048, 8), {"micro_batch": 8, "precision": "bf16"}),
    Case("gpt, 4 micro-batches", "held out", lambda: _gpt(6, 256, 256, 512, 16), {"micro_batch": 4}),
    Case("lstm", "held out", lambda: _lstm(384, 128, 32), {"micro_batch": 32}),
    Case("u-net", "held out", lambda: _unet(64, 8), {"micro_batch": 8}),
    Case("encoder", "held out", lambda: _encoder(6, 96, 32), {"micro_batch": 32}),
)
"""Every case; those to fit on differ from those that test in size, and where they can in kind of plan."""
