"""The look at loss and gradient before the weights move: both finite, the global norm clipped once."""

from __future__ import annotations

import math

import torch
from torch import nn

from stoker.jobs import Job
from stoker.records import Plan
from stoker.stepping.layouts.base import Strategy
from stoker.stepping.step_failures import not_finite


class GradientClipping:
    """Refuses a loss or gradient that is not finite, and clips the gradient's global norm as the job says.

    A GPU would have to be waited for: there the loss is looked at only where the job skips updates that are not finite,
    and there the gradient always.
    """

    looks_at_norm = False
    """Whether to measure the norm where it is not clipped, too."""
    gradient_norm: torch.Tensor | None = None
    """Global norm of the last update that measured it, before clipping [1]."""

    def __init__(self, job: Job, plan: Plan, strategy: Strategy, parameters: list[nn.Parameter]) -> None:
        skips = job.on_non_finite == "skip"
        self._is_watched = skips or torch.device(plan.device).type == "cpu"
        self._max_norm = math.inf if job.clip_norm is None and skips else job.clip_norm
        # Where each process has the whole gradient, no message is needed to measure it.
        self._is_whole = plan.layout.is_replicated and job.sync is None
        self._strategy, self._parameters = strategy, parameters

    @property
    def is_clipping(self) -> bool:
        """Whether the gradient's norm has to be known before every step."""
        return self._max_norm is not None

    def __call__(self, loss: torch.Tensor, update: int) -> None:
        """Check the mean loss and the gradients of update number `update`, and clip them.

        Raises:
            NotFinite: one of them is not finite; the weights are unchanged.
        """
        if self._is_watched and not math.isfinite(loss):
            raise not_finite("loss", float(loss), update)
        if self._max_norm is None:
            if self.looks_at_norm and self._is_whole:
                self.gradient_norm = self._strategy.norm(self._parameters)
            return
        norm = self._strategy.clip(self._parameters, self._max_norm)
        if self.looks_at_norm:
            self.gradient_norm = norm.detach()
        if self._is_watched and not math.isfinite(norm):
            raise not_finite("gradient's norm", float(norm), update)
