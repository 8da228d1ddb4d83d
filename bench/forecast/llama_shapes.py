"""Jobs of Llama-3's shapes over 4,096 tokens a sample, as in examples/llama8b.py, to time planning with."""

import stoker

SHAPES = {
    "8b": {"layers": 32},
    "70b": {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672},
    "405b": {"layers": 126, "width": 16384, "heads": 128, "kv_heads": 8, "hidden": 53248},
}


def job(size: str = "8b", batch: int = 512, context: int = 4096) -> stoker.Job:
    """AdamW over a billion tokens."""
    train, test = stoker.data.python_source(context=context)
    return stoker.Job(
        model=lambda: stoker.zoo.Llama(context=context, **SHAPES[size]),
        data=train,
        valid=test,
        loss="token_cross_entropy",
        optimizer=stoker.AdamW(lr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.1),
        batch=batch,
        until=stoker.samples(10**9 // context),
        clip_norm=1.0,
        name="llama",
        seed=0,
    )
