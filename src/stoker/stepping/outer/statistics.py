"""Running statistics of batch norms, which each site gathers over its own samples, as one row of numbers."""

from __future__ import annotations

import torch
from torch import nn

from stoker.stepping.batch_norm import batch_norms

_NAMES = ("running_mean", "running_var")


class Statistics:
    """The running means and variances of a model's batch norms."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._norms = [norm for norm in batch_norms(model) if getattr(norm, _NAMES[0], None) is not None]
        self._dtype, self._device = dtype, device

    def read(self) -> torch.Tensor:
        """A copy of all of them, one after the other."""
        rows = [tensor.detach().reshape(-1).to(self._dtype) for tensor in self._tensors()]
        return torch.cat(rows) if rows else torch.empty(0, dtype=self._dtype, device=self._device)

    def write(self, values: torch.Tensor) -> None:
        """Put values in their places."""
        tensors = self._tensors()
        rows = self.parted(values)
        for tensor in tensors:
            tensor.copy_(rows[id(tensor)].view(tensor.shape))

    def parted(self, values: torch.Tensor) -> dict[int, torch.Tensor]:
        """Values such as `read` gives, cut into one row for each buffer, by the buffers' ids."""
        tensors = self._tensors()
        rows = values.split([one.numel() for one in tensors])
        return {id(tensor): row for tensor, row in zip(tensors, rows, strict=True)}

    def _tensors(self) -> list[torch.Tensor]:
        # Asked for anew each time: a model may replace the tensor of a buffer.
        return [getattr(norm, name) for norm in self._norms for name in _NAMES]
