"""A job for places: a small network on digits, on which a run of minutes depends on `epochs` alone."""

from torch import nn

import stoker


def job(epochs: float = 400, width: int = 256) -> stoker.Job:
    """A two-layer network on 1,437 images of 8 x 8 pixels, with dropout and AdamW: state in every part."""
    train, test = stoker.data.digits()
    return stoker.Job(
        model=lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10)
        ),
        data=train,
        valid=stoker.holdout(0.1),
        test=test,
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.AdamW(lr=1e-3),
        schedule=stoker.schedules.one_cycle(),
        batch=64,
        until=stoker.epochs(epochs),
    )
