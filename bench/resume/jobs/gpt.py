"""A small GPT on the interpreter's own standard library, from arrays in memory, with dropout and AdamW."""

import stoker


def job(updates: int = 300) -> stoker.Job:
    """Two blocks of width 64 over 64 bytes of context."""
    train, test = stoker.data.python_source(context=64, limit_bytes=2_000_000)
    return stoker.Job(
        model=lambda: stoker.zoo.GPT(layers=2, width=64, heads=2, context=64, dropout=0.1),
        data=train,
        valid=stoker.holdout(0.02),
        test=test,
        loss="token_cross_entropy",
        metrics=["token_accuracy"],
        optimizer=stoker.AdamW(lr=1e-3, groups={"*bias": {"weight_decay": 0.0}}),
        batch=32,
        schedule=stoker.schedules.warmup_cosine(),
        until=stoker.updates(updates),
        evaluation=stoker.Evaluation(every=stoker.updates(100)),
        clip_norm=1.0,
    )
