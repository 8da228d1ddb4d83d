"""A small CNN with everything that could break exact resuming, and ways to kill itself in chosen places.

Loader workers whose items draw from three generators, shuffling, augmentation, BatchNorm, dropout, momentum, an
average, clipping, a ragged last batch. With KILL_IN_PLANNING in the environment the process sends itself SIGKILL there;
with KILL_IN_TEST_IF it does when it evaluates the test set and that path exists.
"""

import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from torch import nn

import stoker

NUM_TEST = 37


class NoisyItems(torch.utils.data.Dataset):
    """Images whose items draw from Python's, NumPy's and PyTorch's global generators."""

    def __init__(self, num_samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 3, (num_samples,), generator=generator)
        self.images = torch.randn(num_samples, 1, 8, 8, generator=generator) + self.labels.view(-1, 1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        brightness = random.uniform(0.8, 1.2) + np.random.normal(0.0, 0.05)  # noqa: NPY002 - what users write
        image = self.images[index] * brightness
        return image + 0.05 * torch.randn_like(image), self.labels[index]


def net() -> nn.Module:
    """Two convolutions, BatchNorm and dropout."""
    if "KILL_IN_PLANNING" in os.environ:
        net.calls += 1
        if net.calls == 3:  # the first is for the job's identity
            os.kill(os.getpid(), signal.SIGKILL)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(128, 3),
    )


net.calls = 0


def right(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Whether each sample is classified right."""
    if len(target) == NUM_TEST and Path(os.environ.get("KILL_IN_TEST_IF", "/nowhere")).exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return (output.argmax(1) == target).float()


def job(epochs: float = 30) -> stoker.Job:
    """Seven updates an epoch, the last of 30 samples."""
    return stoker.Job(
        model=net,
        data=NoisyItems(300, 0),
        valid=stoker.holdout(0.1),
        test=NoisyItems(NUM_TEST, 1),
        loss="cross_entropy",
        metrics=[right],
        optimizer=stoker.SGD(lr=0.05, momentum=0.9, nesterov=True),
        average=0.98,
        batch=40,
        schedule=stoker.schedules.one_cycle(),
        until=stoker.epochs(epochs),
        evaluation=stoker.Evaluation(every=stoker.epochs(2)),
        augment=[stoker.transforms.RandomShift(1)],
        clip_norm=1.0,
    )
