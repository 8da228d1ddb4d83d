"""A model with a user's own operation that PyTorch can run and differentiate, but whose shapes are not registered.

Without `register_fake` its output is known only by running it.
"""

import torch
from torch import nn

import stoker


@torch.library.custom_op("stoker_tests::squash", mutates_args=())
def squash(x: torch.Tensor) -> torch.Tensor:
    """Softsign: x / (1 + |x|)."""
    return x / (1 + x.abs())


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return grad / (1 + x.abs()).square()


squash.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Squashed(nn.Module):
    """Two linear layers with `squash` between them."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(squash(self.into(x)))


def job() -> stoker.Job:
    """100 points."""
    inputs = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))
    return stoker.Job(
        model=Squashed,
        data=(inputs, (inputs.sum(1) > 0).long()),
        loss="cross_entropy",
        optimizer=stoker.SGD(lr=0.1),
        batch=20,
        until=stoker.epochs(2),
    )
