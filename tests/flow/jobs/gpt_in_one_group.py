"""A GPT whose samples are coupled, so that its batch cannot be cut: memory is saved by checkpointing alone."""

import torch

import stoker


def job() -> stoker.Job:
    """64 texts of 256 tokens, all of them one batch."""
    tokens = torch.zeros((64, 257), dtype=torch.int64)
    return stoker.Job(
        model=lambda: stoker.zoo.GPT(vocab=256, context=256, width=256, layers=4, heads=4),
        data=(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        loss=stoker.Objective("token_cross_entropy", scope="batch"),
        optimizer=stoker.AdamW(lr=1e-3),
        batch=64,
        coupling_group=64,
        until=stoker.epochs(1),
    )
