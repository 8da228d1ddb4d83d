"""Eight kinds of job for cold starts: models that people train, small enough that a run takes less than a minute.

Shapes: B samples; C channels, H height, W width of an image; T tokens or bytes; V vocabulary; F features; K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

Arrays = tuple[torch.Tensor, torch.Tensor]
"""Inputs [N, ...] and targets [N, ...]."""

WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Kind:
    """A model, its loss by Stoker's name, its data, and how it is trained.

    `data` names the arrays that `prepare` writes; a run has `updates` updates of `batch` samples each.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: str
    data: str
    batch: int
    updates: int
    lr: float = 1e-3

    @property
    def num_samples(self) -> int:
        """Training samples of a run; some kinds have fewer, and pass over them several times."""
        return self.batch * self.updates


class ConvBlock(nn.Module):
    """Two 3 x 3 convolutions, each with GroupNorm and SiLU: [B, C, H, W] to [B, out, H, W]."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, out, 3, padding=1),
            nn.GroupNorm(8, out),
            nn.SiLU(),
            nn.Conv2d(out, out, 3, padding=1),
            nn.GroupNorm(8, out),
            nn.SiLU(),
        )

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The features [B, out, H, W]."""
        y_BCHW: torch.Tensor = self.layers(x_BCHW)
        return y_BCHW


class UNet(nn.Module):
    """images_B1HW to images_B1HW: three levels, transposed convolutions on the way up, skips between."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([ConvBlock(1, width), ConvBlock(width, 2 * width)])
        self.middle = ConvBlock(2 * width, 4 * width)
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2), nn.ConvTranspose2d(2 * width, width, 2, stride=2)]
        )
        self.joined = nn.ModuleList([ConvBlock(4 * width, 2 * width), ConvBlock(2 * width, width)])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x_B1HW: torch.Tensor) -> torch.Tensor:
        """The picture [B, 1, H, W]."""
        skips = []
        x = x_B1HW
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat([up(x), skips.pop()], 1))
        y_B1HW: torch.Tensor = self.head(x)
        return y_B1HW


class ViT(nn.Module):
    """images_B1HW (28 x 28) to logits_BK: patches of 4 x 4, pre-norm encoder layers, mean over patches."""

    def __init__(self, width: int = 128, depth: int = 6, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.positions = nn.Parameter(torch.randn(1, 49, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x_B1HW: torch.Tensor) -> torch.Tensor:
        """Logits [B, K]."""
        tokens_BTD = self.patches(x_B1HW).flatten(2).transpose(1, 2) + self.positions
        logits_BK: torch.Tensor = self.head(self.encoder(tokens_BTD).mean(1))
        return logits_BK


class GRUModel(nn.Module):
    """bytes_BT (int64) to logits_BTV."""

    def __init__(self, width: int = 192, layers: int = 2, vocab: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.gru = nn.GRU(width, width, num_layers=layers, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of the byte after each."""
        logits_BTV: torch.Tensor = self.head(self.gru(self.tokens(tokens_BT))[0])
        return logits_BTV


class Autoencoder(nn.Module):
    """images_B1HW to images_B1HW through 32 numbers: strided convolutions and their transposes, BatchNorm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(98 * width, 32),
            nn.Linear(32, 98 * width),
            nn.Unflatten(1, (2 * width, 7, 7)),
            nn.ConvTranspose2d(2 * width, width, 2, stride=2),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 2, stride=2),
        )

    def forward(self, x_B1HW: torch.Tensor) -> torch.Tensor:
        """The picture again [B, 1, H, W]."""
        y_B1HW: torch.Tensor = self.layers(x_B1HW)
        return y_B1HW


class HFClassifier(nn.Module):
    """bytes_BT to logits_BK by a BERT of transformers, newly initialised."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415 - of one kind alone

        self.bert = BertForSequenceClassification(
            BertConfig(
                vocab_size=256,
                hidden_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=512,
                max_position_embeddings=128,
                num_labels=10,
            )
        )

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, K]."""
        logits_BK: torch.Tensor = self.bert(input_ids=tokens_BT).logits
        return logits_BK


def _resnet9() -> nn.Module:
    from stoker.zoo import ResNet9  # noqa: PLC0415 - Lightning's process imports Stoker for this kind and the GPT

    return ResNet9(width=16)


def _gpt() -> nn.Module:
    from stoker.zoo import GPT  # noqa: PLC0415 - likewise

    return GPT(layers=4, width=192, heads=6, context=128)


def _tabular() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(256, 256),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


KINDS = {
    kind.name: kind
    for kind in (
        Kind("convolutions", _resnet9, "cross_entropy", "images", batch=128, updates=700),
        Kind("unet", UNet, "mse", "pictures", batch=64, updates=400),
        Kind("vit", ViT, "cross_entropy", "images", batch=64, updates=400),
        Kind("gpt", _gpt, "token_cross_entropy", "text", batch=16, updates=250),
        Kind("gru", GRUModel, "token_cross_entropy", "text", batch=32, updates=350),
        Kind("tabular", _tabular, "cross_entropy", "table", batch=256, updates=6000),
        Kind("autoencoder", Autoencoder, "mse", "pictures", batch=128, updates=1500),
        Kind("text_classifier", HFClassifier, "cross_entropy", "lines", batch=32, updates=300),
    )
}
"""The kinds by name."""


def loss_of(kind: Kind, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean loss, as Stoker's of that name."""
    if kind.loss == "mse":
        return F.mse_loss(output, target)
    if kind.loss == "token_cross_entropy":
        return F.cross_entropy(output.flatten(0, 1), target.flatten())
    return F.cross_entropy(output, target)


def prepare(folder: Path) -> None:
    """Write the arrays of all kinds: Fashion-MNIST, and the standard library's source as bytes."""
    from stoker import data  # noqa: PLC0415 - the contenders read files

    source, _ = data.fashion_mnist()
    images, labels = source.prepare(source.arrays())
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    text, _ = data.python_source(context=128, limit_bytes=4_000_000)
    tokens, following = text.prepare(text.arrays())
    arrays: dict[str, Arrays] = {
        "images": (images, labels),
        "pictures": ((images + 0.3 * noise), images),
        "text": (tokens, following),
        "table": (F.adaptive_avg_pool2d(images, 8).flatten(1), labels),
        "lines": (tokens, tokens.sum(1) % 10),
    }
    for name, (inputs, targets) in arrays.items():
        np.savez(folder / f"{name}.npz", inputs=inputs.numpy(), targets=targets.numpy())


def job_of(kind: Kind, folder: Path) -> Any:
    """The kind as a `stoker.Job`, on the arrays in `folder`."""
    import stoker  # noqa: PLC0415 - the other contenders do not import it

    return stoker.Job(
        model=kind.model,
        data=read(kind, folder),
        loss=kind.loss,
        batch=kind.batch,
        name=kind.name,
        optimizer=stoker.AdamW(lr=kind.lr, weight_decay=WEIGHT_DECAY),
        until=stoker.updates(kind.updates),
    )


def read(kind: Kind, folder: Path) -> Arrays:
    """The kind's samples: as many as a run has, or fewer, in whole batches."""
    with np.load(folder / f"{kind.data}.npz") as arrays:
        loaded: dict[str, Any] = {name: arrays[name] for name in ("inputs", "targets")}
    num = min(kind.num_samples, len(loaded["inputs"]) // kind.batch * kind.batch)
    return torch.from_numpy(loaded["inputs"][:num]), torch.from_numpy(loaded["targets"][:num])
