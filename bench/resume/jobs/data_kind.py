"""A small network on files of one kind, with what could break exact resuming.

Shuffling, augmentation of images, BatchNorm, dropout, momentum, an average, a ragged last batch.
"""

from pathlib import Path

from torch import nn

import stoker
from tests.data.files.making import SOURCES


def job(kind: str, root: str, epochs: float = 8) -> stoker.Job:
    """Some passes over 480 samples."""
    folder = Path(root)
    folder.mkdir(exist_ok=True)
    source = SOURCES[kind](folder, 480)
    first = source[0]
    inputs = first["image"] if isinstance(first, dict) else first[0]
    return stoker.Job(
        model=lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(inputs.numel(), 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(32, 3),
        ),
        data=source,
        valid=stoker.holdout(0.1),
        loss="cross_entropy",
        metrics=["accuracy"],
        average=0.9,
        optimizer=stoker.SGD(lr=0.05, momentum=0.9),
        batch=20,
        until=stoker.epochs(epochs),
        augment=[stoker.transforms.RandomShift(1)] if inputs.dim() == 3 else [],
    )
