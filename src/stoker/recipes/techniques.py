"""Recipes that change one setting of a Job each: schedule, label smoothing, EMA, Muon, mirror averaging."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import EMA, AdamW, Job, Muon, Optimizer, schedules
from stoker.stepping.model_copies import copied


def one_cycle(job: Job, *, warmup: float = 0.25) -> Job:
    """The job under the one-cycle schedule: up over the share `warmup` of the run, then down along a cosine to 0.

    Source: Smith and Topin 2018, https://arxiv.org/abs/1708.07120; momentum is not cycled.

    Args:
        job: what is learned.
        warmup: share of the run that rises [0 to 1].
    """
    return dataclasses.replace(job, schedule=schedules.one_cycle(warmup=warmup))


def label_smoothing(job: Job, share: float = 0.1) -> Job:
    """The job with `share` of each target spread over all classes.

    Source: Szegedy et al. 2016, https://arxiv.org/abs/1512.00567, section 7.

    Args:
        job: what is learned.
        share: of each target that all classes share [0 to 1].

    Raises:
        BadJob: the loss has no classes.
    """
    return dataclasses.replace(job, loss=dataclasses.replace(job.objective, label_smoothing=share))


def ema(job: Job, decay: float = 0.999) -> Job:
    """The job with an exponential moving average of its weights, which is evaluated and kept in their place.

    Source: Polyak and Juditsky 1992, https://doi.org/10.1137/0330046; in this form Tarvainen and Valpola 2017,
    https://arxiv.org/abs/1703.01780.

    Args:
        job: what is learned.
        decay: of late updates, between 0 and 1; see `stoker.EMA`.

    Raises:
        BadJob: the decay is out of range, or spans more updates than the run makes (where its length is in updates).
    """
    average, updates = EMA(decay), job.until.value if job.until.unit == "updates" else None
    if updates is not None and updates * (1 - decay) < 1:
        raise BadJob(
            f"an average of decay {decay:g} spans {1 / (1 - decay):.0f} updates; the run makes {updates:.0f}",
            remedy=f"Take a decay of at most {max(0.0, 1 - 5 / updates):.3g}, or train longer.",
        )
    return dataclasses.replace(job, average=average)


def muon(job: Job, lr: float = 0.02, *, rest: Optimizer | None = None) -> Job:
    """The job with Muon for its hidden matrices and convolutions, and `rest` for the other parameters.

    `rest` is by default the job's own optimiser if that is one of Stoker's, else AdamW with a rate of 3e-4.
    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.

    Args:
        job: what is learned.
        lr: Muon's learning rate [1].
        rest: the optimiser of the other parameters; None: see above.
    """
    if rest is None:
        own = job.optimizer
        rest = own if isinstance(own, Optimizer) and not isinstance(own, Muon) else AdamW(lr=3e-4)
    return dataclasses.replace(job, optimizer=Muon(lr=lr, rest=rest))


class MirrorAveraged(nn.Module):
    """In evaluation, the mean of `model`'s outputs for an image and its mirror image; in training, `model` as it is.

    What: averaging over a transform that leaves the label. Use when: training mirrors its images. Costs: evaluation and
    use take twice as long. Does not combine with: data whose label a mirror changes, such as digits or text.
    Source: Krizhevsky et al. 2012 (crops and reflections at test time); K. Jordan 2024,
    https://arxiv.org/abs/2404.00498, section 3.5, "multi-crop evaluation".
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_BCHW: torch.Tensor) -> Any:
        """The output of `model`; in evaluation its mean over the image and its mirror image."""
        if self.training:
            return self.model(x_BCHW)
        if x_BCHW.dim() != 4:
            raise BadJob(f"MirrorAveraged takes images [B, C, H, W], got a tensor of shape {list(x_BCHW.shape)}")
        return (self.model(x_BCHW) + self.model(x_BCHW.flip(-1))) / 2


def mirror_averaged(job: Job) -> Job:
    """The job with its model wrapped in MirrorAveraged; the trained model is wrapped too.

    Args:
        job: what is learned.
    """
    return dataclasses.replace(job, model=_Mirrored(job.model))


@dataclass(frozen=True)
class _Mirrored:
    """Makes a job's model and wraps it."""

    model: nn.Module | Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        return MirrorAveraged(copied(self.model) if isinstance(self.model, nn.Module) else self.model())
