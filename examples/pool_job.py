"""What `make demo-pool` trains: handwritten digits for about a minute, so that an agent can be lost in between."""

from torch import nn

import stoker


def job(epochs: float = 1500) -> stoker.Job:
    """A small network with dropout on 1,437 images of 8 x 8 pixels."""
    train, test = stoker.data.digits()
    return stoker.Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)),
        data=train,
        test=test,
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.AdamW(lr=1e-3),
        schedule=stoker.schedules.one_cycle(),
        batch=64,
        until=stoker.epochs(epochs),
    )
