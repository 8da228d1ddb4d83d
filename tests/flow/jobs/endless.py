"""A small job that trains for very long: no `--deadline` or `--max-cost` of a normal size is met by any device."""

import torch

import stoker


def job(epochs: float = 1e9) -> stoker.Job:
    """A thousand points, a billion times: 1e12 samples."""
    inputs = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    return stoker.Job(
        model=lambda: stoker.zoo.MLP(64, (256, 256), 2),
        data=(inputs, (inputs.sum(1) > 0).long()),
        loss="cross_entropy",
        optimizer=stoker.AdamW(lr=1e-3),
        batch=100,
        until=stoker.epochs(epochs),
    )
