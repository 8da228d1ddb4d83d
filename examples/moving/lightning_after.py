"""A small net learns handwritten digits, by Stoker: `stoker train lightning_after.py`. Before: lightning_before.py."""

from material import digits, net

import stoker


def job(lr: float = 1e-3, epochs: float = 20) -> stoker.Job:
    """What is learned; how it is executed is planned."""
    train, valid, test = digits()
    return stoker.Job(
        model=net,
        data=train,
        valid=valid,
        test=test,
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.AdamW(lr=lr),
        schedule=stoker.schedules.warmup_cosine(warmup=0.0),
        clip_norm=1.0,
        stop=[stoker.EarlyStopping("loss", patience=stoker.epochs(3))],
        batch=64,
        until=stoker.epochs(epochs),
    )
