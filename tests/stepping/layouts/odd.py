"""A model with all that wrappers stumble over, and a job that trains it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from stoker.jobs import AdamW, Job, Loss
from stoker.jobs.objective import Objective
from tests.stepping.models import CLASSES, FEATURES, make_job, vectors

WIDTH = 8


class Block(nn.Module):
    """A residual block; its output is a view, and the next one changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        return (x_BW + torch.tanh(self.inner(x_BW))).view(-1, WIDTH)


class Odd(nn.Module):
    """Frozen and unused parameters, a scalar, a single row, tied weights, gradients that are not contiguous.

    Of two experts, the second sees the few samples whose first feature is large: in most batches none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.head = nn.Linear(WIDTH, CLASSES)
        self.row = nn.Parameter(torch.ones(1, WIDTH))
        self.shift = nn.Parameter(torch.zeros(3))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.never = nn.Parameter(torch.ones(WIDTH, 2))

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        x_BW = self.frozen(x_BF) * self.row + self.shift.sum()
        for block in self.blocks:
            x_BW = block(x_BW)
            x_BW *= 1.1
        expert_B = (x_BF[:, 0] > 1.5).long()
        for number, expert in enumerate(self.experts):
            rows = (expert_B == number).nonzero().flatten()
            if len(rows):
                x_BW = x_BW.index_copy(0, rows, expert(x_BW[rows]))
        return self.second(torch.relu(self.first(x_BW)))


def loss(model: Odd, batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
    """Cross-entropy of a head that the model itself never calls, read here by its weights."""
    x_BF, target_B = batch
    logits_BC = model(x_BF) @ model.head.weight.t() / model.temperature + model.head.bias
    return Loss(F.cross_entropy(logits_BC, target_B, reduction="sum"), len(target_B))


def penalty(model: nn.Module) -> torch.Tensor:
    """Of some of the weights."""
    return 1e-2 * sum(p.square().sum() for name, p in model.named_parameters() if name.startswith(("head", "blocks")))


def odd_job() -> Job:
    """Trains `Odd`; weight decay would move what must not move."""
    inputs, labels = vectors(55)
    inputs[:, 0] = -inputs[:, 0].abs()
    inputs[::11, 0] = 2.0
    return make_job(
        Odd,
        data=(inputs, labels),
        loss=Objective(loss, penalty=penalty),
        optimizer=AdamW(lr=1e-2, weight_decay=0.1),
        batch=8,
        clip_norm=0.5,
        average=0.9,
    )
