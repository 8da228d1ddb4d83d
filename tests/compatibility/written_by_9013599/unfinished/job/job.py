"""A tiny job: what the fixture's runs were trained from."""

from torch import nn

import stoker


def job(lr: float = 0.1, epochs: float = 2) -> stoker.Job:
    """A small network on handwritten digits."""
    train, test = stoker.data.digits()
    return stoker.Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)),
        data=train,
        valid=stoker.holdout(0.1),
        test=test,
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.SGD(lr=lr, momentum=0.9),
        batch=64,
        until=stoker.epochs(epochs),
    )
