"""Training habits in one job: a plateau, early stopping, an average of the weights, scores by class.

    stoker train examples/habits.py

Three spirals, learned in seconds on a CPU; the report shows how the scores by class came about, which samples the model
is most wrong about, and why the run ended before its time. The scores are torchmetrics' (`pip install torchmetrics`).
"""

import math

import torch
from torch import nn

import stoker
from stoker import optimizers, schedules


def spirals(num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points [N, 2] on three arms, with a little noise, and the number of their arm [N]."""
    random = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (num_samples,), generator=random)
    along = torch.rand(num_samples, generator=random)
    angle = 2 * math.pi * (arm / 3 + along) + 0.2 * torch.randn(num_samples, generator=random)
    return torch.stack([along * angle.cos(), along * angle.sin()], 1), arm


def net(width: int) -> nn.Module:
    """A perceptron with batch norms, whose running statistics an average of weights needs anew."""
    layers: list[nn.Module] = [nn.Linear(2, width), nn.BatchNorm1d(width), nn.ReLU()]
    layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def job(epochs: float = 60, width: int = 64) -> stoker.Job:
    """A classifier of the arms."""
    from torchmetrics.classification import MulticlassAUROC, MulticlassRecall

    return stoker.Job(
        model=lambda: net(width),
        data=spirals(3000, seed=0),
        valid=stoker.holdout(0.2),
        test=spirals(1000, seed=1),
        loss=stoker.Objective("cross_entropy", penalty=stoker.l2(1e-5)),
        metrics={
            "accuracy": "accuracy",
            "recall": MulticlassRecall(3, average=None),
            "auroc": stoker.probabilities(MulticlassAUROC(3)),
        },
        optimizer=optimizers.NAdam(lr=0.01),
        batch=64,
        until=stoker.epochs(epochs),
        schedule=schedules.warmup(0.02, then=schedules.plateau("loss", factor=0.3, patience=stoker.epochs(4))),
        average=stoker.SWA(start=0.1),
        stop=[stoker.EarlyStopping("loss", patience=stoker.epochs(10)), stoker.Target("accuracy", 0.98)],
    )
