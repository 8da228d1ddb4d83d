"""A small GPT without dropout, so that its weights are those of one process however many train it, up to rounding."""

import stoker


def job(updates: int = 300) -> stoker.Job:
    """Two blocks of width 64 over 64 bytes of context; batches of 24."""
    train, test = stoker.data.python_source(context=64, limit_bytes=2_000_000)
    return stoker.Job(
        model=lambda: stoker.zoo.GPT(layers=2, width=64, heads=2, context=64),
        data=train,
        valid=stoker.holdout(0.02),
        test=test,
        loss="token_cross_entropy",
        metrics=["token_accuracy"],
        optimizer=stoker.AdamW(lr=3e-4),
        batch=24,
        schedule=stoker.schedules.warmup_cosine(),
        until=stoker.updates(updates),
        clip_norm=1.0,
    )
