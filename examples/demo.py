"""The demo: a small convolutional network learns to tell real images apart, in a few minutes on two cores.

    stoker train examples/demo.py                       # or: make demo
    stoker train examples/demo.py --set epochs=10 --set width=32

The images are Fashion-MNIST (70,000 of 28x28) where it can be had, else the handwritten digits inside the package.
"""

import stoker


def job(width: int = 16, lr: float = 0.2, epochs: float = 6, batch: int = 256, seed: int = 0) -> stoker.Job:
    """A ResNet-9 trained with SGD under a one-cycle schedule."""
    train, test = stoker.data.images()
    is_small = train.fields[0].shape[-1] < 16
    return stoker.Job(
        model=lambda: stoker.zoo.ResNet9(width=width, pools=1 if is_small else 3),
        data=train,
        valid=stoker.holdout(0.1),
        test=test,
        loss=stoker.Objective("cross_entropy", label_smoothing=0.1),
        metrics=["accuracy"],
        optimizer=stoker.SGD(
            lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4, groups={"*bias": {"weight_decay": 0.0}}
        ),
        schedule=stoker.schedules.one_cycle(),
        batch=64 if is_small else batch,
        until=stoker.epochs(30 if is_small else epochs),
        augment=[stoker.transforms.RandomShift(1 if is_small else 2)]
        + ([] if is_small else [stoker.transforms.RandomFlip()]),
        seed=seed,
    )
