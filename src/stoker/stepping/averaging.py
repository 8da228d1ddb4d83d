"""The exponential moving average of a model's weights."""

from __future__ import annotations

import torch
from torch import nn

from stoker.jobs import EMA
from stoker.stepping.local_tensors import all_local


class Average:
    """A second set of weights that follows the model's, and lies where they lie; see `stoker.jobs.EMA`."""

    def __init__(self, settings: EMA, model: nn.Module) -> None:
        self.settings = settings
        self._model = model
        self._live = model.state_dict(keep_vars=True)
        self.weights = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        floating = [name for name, tensor in self.weights.items() if tensor.is_floating_point() or tensor.is_complex()]
        buffers = {name for name, _ in model.named_buffers()}
        self._averaged = [name for name in floating if name not in buffers]
        self._copied = [name for name in self.weights if name not in self._averaged]

    @torch.no_grad()
    def update(self, update: int) -> None:
        """Move towards the model's weights after update number `update` (from 0)."""
        decay = min(self.settings.decay, (1 + update) / (10 + update))
        mine = [self.weights[name] for name in self._averaged]
        theirs = [self._live[name].detach() for name in self._averaged]
        torch._foreach_lerp_(all_local(mine), all_local(theirs), 1 - decay)
        buffers = dict(self._model.named_buffers(remove_duplicate=False))  # a model may replace the tensor of a buffer
        for name in self._copied:
            self.weights[name].copy_(buffers.get(name, self._live[name]))

    @torch.no_grad()
    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Take over saved averages."""
        for name, tensor in weights.items():
            self.weights[name].copy_(tensor)
