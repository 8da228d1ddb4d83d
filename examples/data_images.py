"""Images in folders, one for each class: `stoker train examples/data_images.py --set path=pets`."""

from torch import nn

import stoker


def job(path: str, size: int = 32, epochs: float = 10) -> stoker.Job:
    """A small convolutional network; a tenth of each class for validation, another for testing."""
    source = stoker.data.image_folder(path, size=size, mean=0.5, std=0.25)
    train, valid, test = source.split(valid=0.1, test=0.1)
    return stoker.Job(
        model=lambda: nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, len(source.classes)),
        ),
        data=train,
        valid=valid,
        test=test,
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.SGD(lr=0.05, momentum=0.9, nesterov=True),
        schedule=stoker.schedules.one_cycle(),
        augment=[stoker.transforms.RandomShift(2), stoker.transforms.RandomFlip()],
        batch=64,
        until=stoker.epochs(epochs),
    )
