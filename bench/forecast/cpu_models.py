"""The cases on which the step time of a CPU is forecast: models and batches that no calibration has seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

import stoker
from bench.forecast.models import ExpertList, FromTransformers
from stoker.zoo import GPT, MLP, ResNet9

Tensors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A job of one kind at one batch, under one precision and number of threads."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], Tensors]
    batch: int
    loss: Any = "cross_entropy"
    threads: int = 2
    precision: Literal["fp32", "bf16"] = "fp32"
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    micro_batch: int | None = None

    def job(self) -> stoker.Job:
        """The job, of two batches of random data."""
        return stoker.Job(
            model=self.model,
            data=self.data(2 * self.batch),
            loss=self.loss,
            optimizer=stoker.AdamW(lr=1e-4),
            batch=self.batch,
            until=stoker.epochs(100),
            seed=1,
        )


def images(channels: int, size: int, classes: int = 10) -> Callable[[int], Tensors]:
    """Random images [N, C, S, S] and classes [N]."""
    return lambda n: (torch.randn(n, channels, size, size), torch.randint(0, classes, (n,)))


def windows(length: int, vocab: int) -> Callable[[int], Tensors]:
    """Random tokens [N, T] and targets [N, T]."""
    return lambda n: (torch.randint(0, vocab, (n, length)), torch.randint(0, vocab, (n, length)))


def next_token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each sample's tokens: [B]."""
    return F.cross_entropy(output.transpose(1, 2), target, reduction="none").mean(1)


def per_pixel_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error of each image: [B]."""
    return (output - target).square().flatten(1).mean(1)


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions and a shortcut, as in ResNet-18."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [B, C, H, W]."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18(width: int = 64) -> nn.Module:
    """ResNet-18 with its 7 × 7 stem and pooling."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = width
    for stage in range(4):
        out = width * 2**stage
        layers += [BasicBlock(channels, out, 1 if stage == 0 else 2), BasicBlock(out, out, 1)]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class InvertedResidual(nn.Module):
    """Expand, convolve each channel alone, project, as in MobileNetV2."""

    def __init__(self, channels: int, out: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = channels * expand
        self.is_residual = stride == 1 and channels == out
        self.layers = nn.Sequential(
            nn.Conv2d(channels, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [B, C, H, W]."""
        y: torch.Tensor = self.layers(x)
        return x + y if self.is_residual else y


def mobilenet() -> nn.Module:
    """A short MobileNetV2."""
    plan = ((16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 80, 2), (80, 80, 1), (80, 112, 1))
    stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
    blocks = [InvertedResidual(channels, out, stride, 4) for channels, out, stride in plan]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(112, 10))


class Encoder(nn.Module):
    """A transformer encoder on tokens, BERT's layout: norm after each block, GELU."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocab: int, classes: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [B, T]."""
        x = self.norm(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        output: torch.Tensor = self.head(self.blocks(x)[:, 0])
        return output


class ViT(nn.Module):
    """A vision transformer: patches, a class token, norm before each block."""

    def __init__(self, layers: int, width: int, heads: int, size: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [B, 3, S, S]."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.first.expand(len(x), -1, -1), patches], 1) + self.positions
        output: torch.Tensor = self.head(self.norm(self.blocks(y)[:, 0]))
        return output


class Recurrent(nn.Module):
    """An LSTM over tokens, and the next token from each state."""

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [B, T]."""
        output: torch.Tensor = self.head(self.lstm(self.tokens(tokens))[0])
        return output


class UNet(nn.Module):
    """Two levels down, two up, with shortcuts between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1, self.down2 = self._twice(3, width), self._twice(width, 2 * width)
        self.middle = self._twice(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.back2 = self._twice(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.back1 = self._twice(2 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [B, 3, H, W]."""
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        y = self.middle(F.max_pool2d(two, 2))
        y = self.back2(torch.cat([self.up2(y), two], 1))
        y = self.back1(torch.cat([self.up1(y), one], 1))
        output: torch.Tensor = self.head(y)
        return output

    @staticmethod
    def _twice(channels: int, out: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, out, 3, padding=1),
            nn.GroupNorm(8, out),
            nn.SiLU(),
            nn.Conv2d(out, out, 3, padding=1),
            nn.GroupNorm(8, out),
            nn.SiLU(),
        )


def audio() -> nn.Module:
    """Convolutions over a waveform."""
    layers: list[nn.Module] = []
    for channels, out, kernel in ((1, 32, 15), (32, 64, 9), (64, 64, 9), (64, 128, 5)):
        layers += [
            nn.Conv1d(channels, out, kernel, stride=2, padding=kernel // 2),
            nn.BatchNorm1d(out),
            nn.ReLU(),
            nn.MaxPool1d(2),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 10))


class MixtureOfExperts(nn.Module):
    """Blocks whose MLP is a soft mixture of experts, each on all tokens: shapes do not depend on data."""

    def __init__(self, width: int, experts: int, layers: int) -> None:
        super().__init__()
        self.into = nn.Linear(64, width)
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers))
        self.up = nn.ParameterList(nn.Parameter(torch.randn(experts, width, 2 * width) * 0.02) for _ in range(layers))
        self.down = nn.ParameterList(nn.Parameter(torch.randn(experts, 2 * width, width) * 0.02) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [B, 64]."""
        h = F.relu(self.into(x))
        for gate, up, down in zip(self.gates, self.up, self.down, strict=True):
            weights = F.softmax(gate(h), -1)
            inner = F.gelu(torch.bmm(h.expand(len(up), -1, -1), up))
            h = h + torch.einsum("ebd,be->bd", torch.bmm(inner, down), weights)
        output: torch.Tensor = self.head(h)
        return output


def _vectors(features: int, classes: int = 10) -> Callable[[int], Tensors]:
    return lambda n: (torch.randn(n, features), torch.randint(0, classes, (n,)))


def _pictures(size: int) -> Callable[[int], Tensors]:
    return lambda n: (torch.randn(n, 3, size, size), torch.randn(n, 3, size, size))


def _waves(length: int) -> Callable[[int], Tensors]:
    return lambda n: (torch.randn(n, 1, length), torch.randint(0, 10, (n,)))


def _stacked_experts() -> nn.Module:
    sizes = {"hidden_size": 224, "intermediate_size": 448, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "num_local_experts": 4}
    return FromTransformers("MixtralForCausalLM", "MixtralConfig", **sizes, **more)


CASES = (
    Case("mlp", lambda: MLP(784, (1000, 1000, 10)), _vectors(784), 512),
    Case("mlp small", lambda: MLP(64, (128, 128, 10)), _vectors(64), 64, threads=1),
    Case("resnet9", lambda: ResNet9(24, 3, 10), images(3, 32), 96),
    Case(
        "resnet9 bf16", lambda: ResNet9(32, 3, 10), images(3, 32), 128, precision="bf16", memory_format="channels_last"
    ),
    Case("resnet9 1 thread", lambda: ResNet9(16, 1, 10), images(1, 28), 200, threads=1, memory_format="channels_last"),
    Case("resnet18", lambda: resnet18(48), images(3, 112), 12),
    Case("mobilenet", mobilenet, images(3, 96), 24),
    Case("mobilenet channels-last", mobilenet, images(3, 80), 40, threads=1, memory_format="channels_last"),
    Case("vit", lambda: ViT(4, 192, 3, 112, 14), images(3, 112), 24),
    Case("vit bf16", lambda: ViT(6, 256, 4, 96, 12), images(3, 96), 20, precision="bf16"),
    Case("gpt", lambda: GPT(4, 256, 4, 192, 300), windows(192, 300), 10, loss=next_token_loss),
    Case("gpt wide", lambda: GPT(2, 640, 10, 128, 2000), windows(128, 2000), 6, loss=next_token_loss, threads=1),
    Case("gpt bf16", lambda: GPT(5, 320, 5, 256, 500), windows(256, 500), 8, loss=next_token_loss, precision="bf16"),
    Case(
        "gpt accumulating", lambda: GPT(3, 192, 3, 96, 256), windows(96, 256), 32, loss=next_token_loss, micro_batch=8
    ),
    Case(
        "encoder",
        lambda: Encoder(4, 288, 6, 100, 5000, 4),
        windows(100, 5000),
        14,
        loss=lambda o, t: F.cross_entropy(o, t[:, 0] % 4, reduction="none"),
    ),
    Case("lstm", lambda: Recurrent(500, 160, 2), windows(48, 500), 32, loss=next_token_loss),
    Case("lstm 1 thread", lambda: Recurrent(200, 288, 1), windows(40, 200), 24, loss=next_token_loss, threads=1),
    Case("u-net", lambda: UNet(24), _pictures(64), 8, loss=per_pixel_loss),
    Case("audio", audio, _waves(8000), 16),
    Case("mixture of experts", lambda: MixtureOfExperts(192, 4, 3), _vectors(64), 200),
    Case("experts in a list", lambda: ExpertList(3, 224, 4), windows(96, 2000), 10, loss=next_token_loss),
    Case("stacked experts", _stacked_experts, windows(96, 2000), 10, loss=next_token_loss),
)
"""Widths, lengths and batches are chosen off the micro-benchmark's own shapes."""
