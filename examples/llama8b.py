"""A language model of Llama-3-8B's shape, to plan with: what would training it take, and on which device?

    stoker plan examples/llama8b.py --on all
    stoker plan examples/llama8b.py --on h100,h200,b200 --set context=8192

The configuration only: the weights (8.03 billion, 30 GiB) are never made where it is planned. The text is the standard
library's source in windows of `context` bytes, which stand for tokens: a step costs the same whatever they say.
"""

import stoker


def job(context: int = 2048, batch: int = 32, lr: float = 3e-4, tokens: float = 1e9, layers: int = 32) -> stoker.Job:
    """AdamW over `tokens` tokens in updates of `batch` windows of `context` tokens."""
    train, test = stoker.data.python_source(context=context)
    return stoker.Job(
        model=lambda: stoker.zoo.Llama(layers=layers, context=context),
        data=train,
        valid=test,
        loss="token_cross_entropy",
        optimizer=stoker.AdamW(lr=lr, betas=(0.9, 0.95), weight_decay=0.1, groups={"*norm*": {"weight_decay": 0.0}}),
        schedule=stoker.schedules.warmup_cosine(warmup=0.02, final=0.1),
        batch=batch,
        until=stoker.samples(round(tokens / context)),
        clip_norm=1.0,
        name="llama-8b",
        seed=0,
    )
