"""Small jobs of several kinds on handwritten digits, for benchmarks of the pool: `--set kind=cnn --set updates=500`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import stoker


class Recurrent(nn.Module):
    """An LSTM over the rows of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells, self.classes = nn.LSTM(8, width, num_layers=2, dropout=0.1, batch_first=True), nn.Linear(width, 10)

    def forward(self, image_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.classes(self.cells(image_BCHW.flatten(1, 2))[0][:, -1])


class Attention(nn.Module):
    """A transformer over the rows of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.rows, self.encoder = nn.Linear(8, width), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classes = nn.Linear(width, 10)

    def forward(self, image_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.classes(self.encoder(self.rows(image_BCHW.flatten(1, 2))).mean(1))


def network(kind: str, width: int) -> nn.Module:
    """A model of a kind."""
    if kind == "lstm":
        return Recurrent(width)
    if kind == "attention":
        return Attention(width)
    if kind in ("cnn", "cnn_average"):
        return nn.Sequential(
            nn.Conv2d(1, width // 2, 3, padding=1),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width // 2, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(16 * width, 10),
        )
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10))


def job(
    kind: str = "mlp",
    updates: int = 500,
    width: int = 64,
    seed: int = 0,
    batch: int = 64,
    rows: int = 0,
    sync: str = "",
) -> stoker.Job:
    """A job; kinds differ in model, update rule, schedule and what a state consists of.

    `rows`: so many of noise. `sync`: interval of exchanges between sites [updates], overlap and fragments: `40,20,1`.
    """
    every, overlap, fragments = map(int, (sync or "0,0,1").split(","))
    train: Any
    train, test = stoker.data.digits()
    if rows:
        draw = torch.Generator().manual_seed(1)
        train = (torch.rand(rows, 1, 8, 8, generator=draw), torch.randint(0, 10, (rows,), generator=draw))
        test = (train[0][:64], train[1][:64])
    optimizers = {
        "mlp": stoker.AdamW(lr=1e-3),
        "cnn": stoker.SGD(lr=0.05, momentum=0.9),
        "cnn_average": stoker.AdamW(lr=1e-3),
        "lstm": stoker.Adam(lr=2e-3),
        "attention": stoker.AdamW(lr=1e-3),
        "mlp_sgd": stoker.SGD(lr=0.1),
    }
    return stoker.Job(
        model=lambda: network(kind, width),
        data=train,
        test=test,
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=optimizers[kind],
        batch=batch,
        until=stoker.updates(updates),
        seed=seed,
        schedule=stoker.schedules.one_cycle() if kind in ("mlp", "cnn") else stoker.schedules.constant(),
        clip_norm=1.0 if kind in ("lstm", "attention") else None,
        average=stoker.EMA(0.99) if kind == "cnn_average" else None,
        sync=stoker.DiLoCo(every=stoker.updates(every), overlap=overlap, fragments=fragments) if every else None,
    )
