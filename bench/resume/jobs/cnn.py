"""A CNN with everything that could break exact resuming.

Loader workers whose items draw from three generators, shuffling, augmentation on the device, BatchNorm, dropout,
momentum, an average, a ragged last batch.
"""

import random

import numpy as np
import torch
from torch import nn

import stoker


class NoisyItems(torch.utils.data.Dataset):
    """Images whose items draw from Python's, NumPy's and PyTorch's global generators."""

    def __init__(self, source: stoker.data.ArraySource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = self.source[index]
        brightness = random.uniform(0.8, 1.2) + np.random.normal(0.0, 0.05)  # noqa: NPY002 - what users write
        return image * brightness + 0.05 * torch.randn_like(image), label


def net() -> nn.Module:
    """Two convolutions, BatchNorm and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(128, 10),
    )


def job(epochs: float = 40) -> stoker.Job:
    """Some 40 passes over the embedded digits."""
    train, test = stoker.data.digits()
    return stoker.Job(
        model=net,
        data=NoisyItems(train),
        valid=stoker.holdout(0.1),
        test=test,
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.SGD(lr=0.05, momentum=0.9, nesterov=True),
        average=0.99,
        batch=100,
        schedule=stoker.schedules.one_cycle(),
        until=stoker.epochs(epochs),
        evaluation=stoker.Evaluation(every=stoker.epochs(5)),
        augment=[stoker.transforms.RandomShift(1)],
        clip_norm=1.0,
    )
