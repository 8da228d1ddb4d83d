"""A training that lasts as long as it is told, for measuring what watching it costs."""

from __future__ import annotations

from torch import nn

import stoker


def job(seconds: float = 120.0, width: int = 512) -> stoker.Job:
    """A small network on handwritten digits."""
    train, test = stoker.data.digits()
    return stoker.Job(
        model=lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        ),
        data=train,
        valid=stoker.holdout(0.1),
        test=test,
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.SGD(lr=0.001),
        batch=256,
        until=stoker.seconds(seconds),
        evaluation=stoker.Evaluation(every=stoker.epochs(400)),
    )
