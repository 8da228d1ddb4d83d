"""Batch statistics over groups of samples, when a micro-batch holds several groups.

What: each group is normalised by its own statistics and updates the running ones, in order, as if it came alone.
Use when: a micro-batch is several coupling groups. Costs: one call a group and a copy of the output.
Does not combine with: tensors whose first dimension is not the batch (or batch-major multiples of it).
Source: Hoffer, Hubara and Soudry 2017 ("ghost batch normalisation"), https://arxiv.org/abs/1705.08741; here the group
belongs to the Job, so that it is part of what is learned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class GroupedBatchNorm:
    """Makes every batch-norm module of a model normalise over groups of `group` samples."""

    def __init__(self, model: nn.Module, group: int) -> None:
        self.group = group
        self.micro_batch = group
        for module in batch_norms(model):
            module.forward = self._grouped(module, module.forward)

    def _grouped(
        self, module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def grouped(inputs: torch.Tensor) -> torch.Tensor:
            if not module.training or self.micro_batch <= self.group:
                return forward(inputs)
            rows_per_sample, rest = divmod(inputs.shape[0], self.micro_batch)
            if rest:
                raise ValueError(
                    f"batch norm got {inputs.shape[0]} rows for {self.micro_batch} samples; groups of samples cannot "
                    "be told apart: use a micro-batch of one coupling group"
                )
            return torch.cat([forward(part) for part in inputs.split(self.group * rows_per_sample)])

        return grouped


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The modules that use batch statistics in training."""
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001
