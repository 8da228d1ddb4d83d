"""Recipes that are one setting of a Job each."""

from __future__ import annotations

import dataclasses

from stoker.errors import BadJob
from stoker.jobs import EMA, AdamW, Job, Muon, Optimizer, schedules


def one_cycle(job: Job, *, warmup: float = 0.25) -> Job:
    """The job under the one-cycle schedule: up over the share `warmup` of the run, then down along a cosine to 0.

    Source: Smith and Topin 2018, https://arxiv.org/abs/1708.07120; momentum is not cycled.
    """
    return dataclasses.replace(job, schedule=schedules.one_cycle(warmup=warmup))


def label_smoothing(job: Job, share: float = 0.1) -> Job:
    """The job with `share` of each target spread over all classes.

    Source: Szegedy et al. 2016, https://arxiv.org/abs/1512.00567, section 7.

    Raises:
        BadJob: the loss has no classes.
    """
    return dataclasses.replace(job, label_smoothing=share)


def ema(job: Job, decay: float = 0.999) -> Job:
    """The job with an exponential moving average of its weights, which is what is evaluated and kept.

    Source: Polyak and Juditsky 1992, https://doi.org/10.1137/0330046; in this form Tarvainen and Valpola 2017,
    https://arxiv.org/abs/1703.01780.

    Raises:
        BadJob: there is no such decay, or the run makes fewer updates than it spans, where that can be told.
    """
    average, updates = EMA(decay), job.until.value if job.until.unit == "updates" else None
    if updates is not None and updates * (1 - decay) < 1:
        raise BadJob(
            f"an average of decay {decay:g} spans {1 / (1 - decay):.0f} updates; the run makes {updates:.0f}",
            remedy=f"Take a decay of at most {max(0.0, 1 - 5 / updates):.3g}, or train longer.",
        )
    return dataclasses.replace(job, ema=average)


def muon(job: Job, lr: float = 0.02, *, rest: Optimizer | None = None) -> Job:
    """The job with Muon for its hidden matrices and convolutions, and `rest` for all else.

    `rest` is by default the job's own optimiser if that is one of Stoker's, else AdamW with a rate of 3e-4.
    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """
    if rest is None:
        own = job.optimizer
        rest = own if isinstance(own, Optimizer) and not isinstance(own, Muon) else AdamW(lr=3e-4)
    return dataclasses.replace(job, optimizer=Muon(lr=lr, rest=rest))
