"""A job file: a function `job` that returns a Job. Its parameters become settings on the command line."""

from torch import nn

import stoker


def block(inputs: int, outputs: int) -> nn.Module:
    """Channels [B, inputs, H, W] to [B, outputs, H/2, W/2]."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))


class MyNet(nn.Sequential):
    """Images [B, 1, 28, 28] to scores of 10 classes [B, 10]."""

    def __init__(self, width: int) -> None:
        super().__init__(block(1, width // 2), block(width // 2, width), nn.Flatten(), nn.Linear(49 * width, 10))


def job(width: int = 64, lr: float = 0.01, epochs: float = 5) -> stoker.Job:
    """What is learned: the model, its data, and everything else that changes the mathematics."""
    train, test = stoker.data.fashion_mnist()  # lazy: planning reads only what it tries
    return stoker.Job(
        model=lambda: MyNet(width),
        data=train,
        valid=stoker.holdout(0.1),
        test=test,
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.SGD(lr=lr, momentum=0.9, nesterov=True),
        schedule=stoker.schedules.one_cycle(),
        batch=512,
        until=stoker.epochs(epochs),
        augment=[stoker.transforms.RandomShift(2), stoker.transforms.RandomFlip()],
        seed=0,
    )
