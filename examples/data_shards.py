"""Images in shards, as other trainers' data often are.

    stoker train examples/data_shards.py --set "shards=t-{000..009}.tar"

A name that ends in .tar means WebDataset, with members KEY.jpg or KEY.png and KEY.cls; any other means TFRecord, with
the features image and label.
"""

from torch import nn

import stoker


def job(shards: str, classes: int = 10, size: int = 32, epochs: float = 5) -> stoker.Job:
    """A small network on what lies in the shards; a tenth is held out."""
    if shards.endswith(".tar"):
        source = stoker.data.webdataset(shards, fields=["jpg;png", "cls"], size=size)
    else:
        source = stoker.data.tfrecord(shards, {"image": "image", "label": "int64"}, size=size)
    return stoker.Job(
        model=lambda: nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(16 * 32, classes),
        ),
        data=source,
        valid=stoker.holdout(0.1),
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.SGD(lr=0.05, momentum=0.9),
        batch=32,
        until=stoker.epochs(epochs),
    )
