"""A job for places: two convolutions on digits."""

from torch import nn

import stoker


def job(epochs: float = 20) -> stoker.Job:
    """Convolutions of 32 and 64 channels on 1,437 images of 8 x 8 pixels, with a batch norm and momentum."""
    train, test = stoker.data.digits()
    return stoker.Job(
        model=lambda: nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        ),
        data=train,
        valid=stoker.holdout(0.1),
        test=test,
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.SGD(lr=0.05, momentum=0.9),
        batch=128,
        until=stoker.epochs(epochs),
    )
