"""What a layout does for a Step: carry a model's passes and gradients over the processes of a world."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from stoker.jobs import Loss
from stoker.loading import Content, Pass
from stoker.stepping.world import World, unmarked

LossOf = Callable[[Pass], Loss]
"""The loss of one pass, through the layout's `model`."""

MeasuresOf = Callable[[Any, Content, int], dict[str, Loss]]
"""The measures that a model reaches on so many samples."""


class Spread(Protocol):
    """A model spread over the processes of a world.

    Parameters of the module it was made from are this process's: whole ones, or DTensors.
    """

    @property
    def model(self) -> Callable[..., Any]:
        """What losses and metrics call."""
        ...

    def accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        """Leave the gradient of the sum of losses, over all processes, in the parameters.

        A pass that does not count is made, and its loss left out. Returns sum and count over all processes, detached.
        """
        ...

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Scale gradients to a global norm of at most `max_norm`; returns the norm before, over all processes."""
        ...

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Named tensors of the model, as `state_dict` gives them here, put together over all processes."""
        ...

    def measures(self, content: Content, size: int, measure: MeasuresOf) -> dict[str, Loss]:
        """What `measure(model, content, size)` finds, with the model's parameters where it looks for them.

        Every process calls it equally often, with its own part of what is evaluated.
        """
        ...


class Alone:
    """A world of one process: everything is here."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        """As `Spread.accumulate`."""
        losses = [backward(loss_of(one)) for one in passes]
        return Loss(torch.as_tensor(sum(loss.sum for loss in losses)), sum(loss.count for loss in losses))

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """As `Spread.clip`."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Spread.whole`."""
        return dict(tensors)

    def measures(self, content: Content, size: int, measure: MeasuresOf) -> dict[str, Loss]:
        """As `Spread.measures`."""
        return measure(self.model, content, size)


def backward(loss: Loss, scale: float = 1.0) -> Loss:
    """Add the gradient of `scale` times the loss's sum to the parameters; the loss, detached."""
    loss.sum.backward(None if scale == 1 else torch.full_like(loss.sum, scale))
    return Loss(loss.sum.detach(), loss.count)


def noted(loss: Loss, world: World) -> Loss:
    """The loss, with a mark for when its last gradient is ready here and others' are not yet waited for.

    PyTorch calls what is queued within a backward pass at its end, in order; DistributedDataParallel and FSDP2 queue
    their waiting later than this, in hooks of what the loss was computed from.
    """
    if world.mark is not unmarked and loss.sum.requires_grad:
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - as FSDP2 does
        loss.sum.register_hook(lambda _: engine.queue_callback(lambda: world.mark("computed")))
    return loss


def summed(losses: Sequence[Loss], world: World, beside: torch.Tensor | None = None) -> Loss:
    """Sum and count over all passes that count, of all processes, in float64, in one message with the signals.

    The numbers `beside` (float64) go with them, and are replaced by their sums over all processes.
    """
    world.mark("summing")
    device = losses[0].sum.device
    parts = [torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in (one.sum, one.count)])
             for one in losses]  # fmt: skip
    own = torch.stack(parts).sum(0)
    words = world.signals.words(own)
    total = world.total(torch.cat([own, words] if beside is None else [own, words, beside]))
    if beside is not None:
        beside.copy_(total[len(own) + len(words) :])
    if world.is_all_data:
        world.signals.hear(total[len(own) : len(own) + len(words)])
    else:
        world.share_signals(own)
    world.mark("agreed")
    return Loss(total[0].to(losses[0].sum.dtype), total[1])
