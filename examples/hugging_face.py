"""A GPT-2 of Hugging Face's transformers learns to write Python, byte by byte, with nothing around it.

pip install transformers
stoker train examples/hugging_face.py
stoker train examples/hugging_face.py --set layers=6 --set width=384
"""

import stoker


def job(layers: int = 3, width: int = 96, context: int = 64, updates: int = 300, batch: int = 32) -> stoker.Job:
    """GPT-2 with `layers` blocks; each update averages over `batch` windows of `context` bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256, n_positions=context, n_embd=width, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0
    )
    train, test = stoker.data.python_source(context=context, limit_bytes=4_000_000)
    return stoker.Job(
        model=lambda: GPT2LMHeadModel(config),
        data=train,  # bytes and, for each, the next one: the target is shifted already
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
