"""A job: handwritten digits, which come with Stoker."""

from torch import nn

import stoker


def job(lr: float = 0.1, epochs: float = 20) -> stoker.Job:
    """A small network on 1,437 images of 8 x 8 pixels."""
    train, test = stoker.data.digits()
    return stoker.Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        data=train,
        valid=stoker.holdout(0.1),
        test=test,
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.SGD(lr=lr, momentum=0.9),
        schedule=stoker.schedules.one_cycle(),
        batch=64,
        until=stoker.epochs(epochs),
    )
