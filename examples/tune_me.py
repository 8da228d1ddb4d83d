"""A job with a space to search: a small convolutional network on the handwritten digits inside the package.

    stoker tune examples/tune_me.py --space examples/tune_me.toml --trials 40

Each parameter of `job` that the space names is searched; the others keep their defaults, or what --set gives them.
"""

from torch import nn

import stoker


def network(width: int, dropout: float) -> nn.Module:
    """Images [B, 1, 8, 8] to scores of 10 classes [B, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(32 * width, 10),
    )


def job(
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    width: int = 16,
    dropout: float = 0.1,
    batch: int = 64,
    epochs: float = 9,
    seed: int = 0,
) -> stoker.Job:
    """A classifier of 8 × 8 digits, judged after each epoch on a fifth of the training data."""
    train, test = stoker.data.digits()
    return stoker.Job(
        model=lambda: network(width, dropout),
        data=train,
        valid=stoker.holdout(0.2),
        test=test,
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.SGD(lr=lr, momentum=momentum, weight_decay=weight_decay),
        batch=batch,
        until=stoker.epochs(epochs),
        seed=seed,
    )
