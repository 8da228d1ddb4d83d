"""What is trained, the same for all contenders: models, batches, optimiser, lengths. Fixed before anything was tuned.

Every contender trains with AdamW (weight decay 0.01, constant learning rate, no clipping) in fp32 weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from bench.train.models import ByteLSTM, ResNet50, Scaled
from stoker.zoo import GPT, MLP, ResNet9

WEIGHT_DECAY = 0.01

Architecture = Literal["resnet9", "resnet50", "gpt", "lstm", "mlp"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its data and how it is trained.

    `sizes` are the architecture's arguments; `context` is the bytes of a sample of text (None: images); `epochs` is how
    long the run is that Stoker plans for, since planning may take a share of it and no more. After `compared_samples`
    what was learned is compared with fp32. `most_samples` cuts the data short. With `random_samples` there are so many
    random ones, tokens or images of that shape in uint8: speed is all that is measured of them.
    """

    name: str
    title: str
    architecture: Architecture
    sizes: Mapping[str, int] = field(default_factory=dict)
    batch: int
    lr: float = 1e-3
    threads: int = 2
    context: int | None = None
    epochs: int = 10
    compared_samples: int = 120_000
    most_samples: int | None = None
    random_samples: int | None = None
    image: tuple[int, int, int] = (1, 28, 28)

    @property
    def is_text(self) -> bool:
        """Whether samples are bytes and their successors, rather than images and labels."""
        return self.context is not None

    @property
    def loss_name(self) -> str:
        """Stoker's name of the loss that `loss` is."""
        return "token_cross_entropy" if self.is_text else "cross_entropy"


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            name="resnet9_w32",
            title="ResNet-9 32 wide, batch 128",
            architecture="resnet9",
            sizes={"width": 32},
            batch=128,
            compared_samples=60_000,
        ),
        Case(
            name="resnet9_w16",
            title="ResNet-9 16 wide, batch 512",
            architecture="resnet9",
            sizes={"width": 16},
            batch=512,
        ),
        Case(
            name="gpt",
            title="GPT 6 × 384, context 256",
            architecture="gpt",
            sizes={"layers": 6, "width": 384, "heads": 6, "context": 256},
            batch=8,
            lr=3e-4,
            context=256,
            epochs=1,
            compared_samples=1_200,
        ),
        Case(
            name="lstm",
            title="LSTM 2 × 256, sequence 128",
            architecture="lstm",
            sizes={"layers": 2, "width": 256},
            batch=64,
            context=128,
            compared_samples=12_800,
        ),
        Case(
            name="mlp",
            title="MLP 784-256-128-10, batch 64, one thread",
            architecture="mlp",
            batch=64,
            threads=1,
            epochs=200,
            compared_samples=300_000,
        ),
    )
}
"""Cases by name."""

_QUICK_SIZES: dict[Architecture, dict[str, int]] = {
    "resnet9": {"width": 4},
    "resnet50": {"width": 4},
    "gpt": {"layers": 2, "width": 32, "heads": 2, "context": 32},
    "lstm": {"layers": 2, "width": 16},
    "mlp": {},
}


def quick(case: Case) -> Case:
    """The case so small that its figures mean nothing: shows that everything runs."""
    return replace(
        case,
        sizes=_QUICK_SIZES[case.architecture],
        batch=16,
        context=32 if case.is_text else None,
        epochs=100,
        compared_samples=1600,
        most_samples=1600,
        threads=1,
        random_samples=320 if case.random_samples else None,
        image=(case.image[0], 28, 28),
    )


def build(case: Case) -> nn.Module:
    """The case's plain PyTorch module, with weights that PyTorch's generator draws now."""
    makers: dict[Architecture, type[nn.Module]] = {
        "resnet9": ResNet9,
        "resnet50": ResNet50,
        "gpt": GPT,
        "lstm": ByteLSTM,
    }
    if case.architecture == "mlp":
        return MLP(784)
    model = makers[case.architecture](**case.sizes)
    return nn.Sequential(Scaled(), model) if case.random_samples and not case.is_text else model


def loss_of(case: Case, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over samples, of text over all bytes: logits [B, K] or [B, T, V], targets [B] or [B, T]."""
    if case.is_text:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return F.cross_entropy(logits, targets)
