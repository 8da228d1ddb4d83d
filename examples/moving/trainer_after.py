"""A small Llama learns Python, by Stoker: `stoker train trainer_after.py`. Before: trainer_before.py."""

from material import llama, source

import stoker


def job(lr: float = 1e-3, epochs: float = 5) -> stoker.Job:
    """What is learned; how it is executed is planned."""
    tokens = source()
    train, valid = tokens[:1280], tokens[1280:]
    return stoker.Job(
        model=llama,
        data={"input_ids": train, "labels": train},
        valid={"input_ids": valid, "labels": valid},
        loss="own",  # the model's own, which shifts the labels
        optimizer=stoker.AdamW(lr=lr, weight_decay=0.01, groups={"*norm.weight": {"weight_decay": 0.0}}),
        schedule=stoker.schedules.warmup_cosine(warmup=0.1),
        clip_norm=1.0,
        stop=[stoker.EarlyStopping("loss", patience=stoker.epochs(3))],
        batch=32,
        until=stoker.epochs(epochs),
    )
