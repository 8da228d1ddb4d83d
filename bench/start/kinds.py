"""Kinds of job for cold starts: models that people train, small enough that a run takes less than a minute.

Eight are those by which the start was made; `OTHER_KINDS` were written afterwards, to see how it does elsewhere.

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


class Separable(nn.Module):
    """An inverted residual block of MobileNetV2: [B, C, H, W] to [B, out, H / stride, W / stride]."""

    def __init__(self, channels: int, out: int, stride: int, expand: int = 4) -> None:
        super().__init__()
        inner = channels * expand
        self.layers = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(),
            nn.Conv2d(inner, inner, 3, stride=stride, padding=1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.adds = stride == 1 and channels == out

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The features [B, out, H / stride, W / stride]."""
        y_BCHW: torch.Tensor = self.layers(x_BCHW)
        return x_BCHW + y_BCHW if self.adds else y_BCHW


class ConvNeXtBlock(nn.Module):
    """Depthwise 7 x 7, LayerNorm over channels, two linear layers: [B, C, H, W] to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.mix = nn.Sequential(
            nn.LayerNorm(channels), nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The features [B, C, H, W]."""
        y_BHWC: torch.Tensor = self.mix(self.depthwise(x_BCHW).permute(0, 2, 3, 1))
        return x_BCHW + y_BHWC.permute(0, 3, 1, 2)


class TemporalConv(nn.Module):
    """bytes_BT to logits_BTV by dilated causal convolutions over time."""

    def __init__(self, width: int = 128, layers: int = 6, vocab: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.convolutions = nn.ModuleList([nn.Conv1d(width, 2 * width, 3, dilation=2**n) for n in range(layers)])
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of the byte after each."""
        x_BDT = self.tokens(tokens_BT).transpose(1, 2)
        for n, convolution in enumerate(self.convolutions):
            x_BDT = x_BDT + F.glu(convolution(F.pad(x_BDT, (2 ** (n + 1), 0))), 1)
        logits_BTV: torch.Tensor = self.head(x_BDT.transpose(1, 2))
        return logits_BTV


class Recommender(nn.Module):
    """64 features, each as one of 1,000 embeddings, pairwise products and a linear net: table_BF to logits_BK."""

    def __init__(self, features: int = 64, rows: int = 1_000, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(features * rows, width)
        self.register_buffer("first", torch.arange(features) * rows)
        self.rows = rows
        pairs = features * (features - 1) // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + features, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, classes)
        )

    def forward(self, table_BF: torch.Tensor) -> torch.Tensor:
        """Logits [B, K]."""
        bins_BF = (table_BF.sigmoid() * (self.rows - 1)).long() + self.first
        vectors_BFD = self.embeddings(bins_BF)
        products_BFF = vectors_BFD @ vectors_BFD.transpose(1, 2)
        above = torch.triu_indices(products_BFF.shape[1], products_BFF.shape[1], 1)
        logits_BK: torch.Tensor = self.top(torch.cat([products_BFF[:, above[0], above[1]], table_BF], 1))
        return logits_BK


class MixerBlock(nn.Module):
    """An MLP over patches, then one over channels: [B, T, D] to the same."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.over_patches = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.over_channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The patches [B, T, D]."""
        x_BTD = x_BTD + self.over_patches(self.norms[0](x_BTD).transpose(1, 2)).transpose(1, 2)
        y_BTD: torch.Tensor = x_BTD + self.over_channels(self.norms[1](x_BTD))
        return y_BTD


class Mixer(nn.Module):
    """images_B1HW (28 x 28) to logits_BK: patches of 4 x 4 through blocks of linear layers."""

    def __init__(self, width: int = 128, depth: int = 6, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.blocks = nn.Sequential(*[MixerBlock(49, width) for _ in range(depth)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x_B1HW: torch.Tensor) -> torch.Tensor:
        """Logits [B, K]."""
        logits_BK: torch.Tensor = self.head(self.blocks(self.patches(x_B1HW).flatten(2).transpose(1, 2)).mean(1))
        return logits_BK


class Translator(nn.Module):
    """bytes_BT to logits_BTV: an LSTM reads the first half, one with attention to it writes the rest."""

    def __init__(self, width: int = 192, vocab: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.reader = nn.LSTM(width, width, batch_first=True)
        self.writer = nn.LSTM(width, width, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = nn.Linear(2 * width, vocab)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V]: of the first half by what is read, of the second by what is written."""
        first_BTD, second_BTD = self.tokens(tokens_BT).chunk(2, 1)
        read_BTD, state = self.reader(first_BTD)
        written_BTD, _ = self.writer(second_BTD, state)
        looked_BTD, _ = self.attention(written_BTD, read_BTD, read_BTD, need_weights=False)
        halves = torch.cat([read_BTD, read_BTD], 2), torch.cat([written_BTD, looked_BTD], 2)
        logits_BTV: torch.Tensor = self.head(torch.cat(halves, 1))
        return logits_BTV


def _mobilenet() -> nn.Module:
    blocks = [Separable(16, 24, 2), Separable(24, 24, 1), Separable(24, 48, 2), Separable(48, 48, 1)]
    stem = (nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))


def _convnext() -> nn.Module:
    first = [nn.Conv2d(1, 48, 2, stride=2), ConvNeXtBlock(48), ConvNeXtBlock(48)]
    second = [nn.Conv2d(48, 96, 2, stride=2), ConvNeXtBlock(96), ConvNeXtBlock(96)]
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))


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

OTHER_KINDS = {
    kind.name: kind
    for kind in (
        Kind("mobilenet", _mobilenet, "cross_entropy", "images", batch=128, updates=400),
        Kind("convnext", _convnext, "cross_entropy", "images", batch=64, updates=300),
        Kind("temporal_conv", TemporalConv, "token_cross_entropy", "text", batch=32, updates=300),
        Kind("recommender", Recommender, "cross_entropy", "table", batch=256, updates=2000),
        Kind("mixer", Mixer, "cross_entropy", "images", batch=64, updates=400),
        Kind("translator", Translator, "token_cross_entropy", "text", batch=32, updates=300),
    )
}
"""More kinds by name, on the same data."""

ALL_KINDS = KINDS | OTHER_KINDS


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
