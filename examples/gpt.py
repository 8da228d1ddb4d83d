"""A small GPT learns to write Python, byte by byte, from the source of Python's own library.

stoker train examples/gpt.py
stoker train examples/gpt.py --on 2xhere            # two processes, which learn what one does
stoker plan examples/gpt.py --on 8xh100             # layouts compared; no GPU needed
"""

import stoker


def job(layers: int = 4, width: int = 128, context: int = 128, updates: int = 400, batch: int = 32) -> stoker.Job:
    """A GPT of `layers` blocks trained with AdamW; each update averages over `batch` windows of `context` bytes."""
    train, test = stoker.data.python_source(context=context, limit_bytes=4_000_000)
    return stoker.Job(
        model=lambda: stoker.zoo.GPT(layers=layers, width=width, heads=4, context=context),
        data=train,
        valid=stoker.holdout(0.02),
        test=test,
        loss="token_cross_entropy",
        metrics=["token_accuracy"],
        optimizer=stoker.AdamW(lr=1e-3),
        schedule=stoker.schedules.warmup_cosine(),
        clip_norm=1.0,
        batch=batch,
        until=stoker.updates(updates),
    )
