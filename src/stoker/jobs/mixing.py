"""Mixing pairs of samples and of their losses: settings of a Job, carried out in `loading/mixing.py`.

What: every sample of an optimiser batch is mixed with a partner from the same batch, its input and its loss in the same
proportion. Use when: image classifiers learn their training data by heart. Costs: two losses for one output; each
sample is made ready twice where a batch is cut. Does not combine with: losses of the form loss(model, batch), or that
are no sum over samples; several inputs; a step of the job's own; token_cross_entropy in chunks.
Sources: H. Zhang et al., "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412, equation 1; S. Yun et al.,
"CutMix", arXiv:1905.04899, equation 1 and its boxes. There one proportion is drawn for a batch; here each pair has its
own, as in the equations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.errors import BadSetting
from stoker.jobs.numeric_settings import is_number


@dataclass(frozen=True)
class Mix:
    """What both ways have; see `Mixup` and `CutMix`."""

    alpha: float = 1.0
    p: float = 1.0

    def __post_init__(self) -> None:
        if not (is_number(self.alpha) and 0 < self.alpha < float("inf")):
            raise BadSetting(f"alpha shapes the proportions (Beta(alpha, alpha)), above 0, got {self.alpha!r}")
        if not (is_number(self.p) and 0 <= self.p <= 1):
            raise BadSetting(f"p is a probability, in [0, 1], got {self.p!r}")


@dataclass(frozen=True)
class Mixup(Mix):
    """Inputs as weighted means of two samples, pixel by pixel.

    Args:
        alpha: shares are drawn from Beta(alpha, alpha): 1 is all alike, less is mostly one of the two samples.
        p: how likely a sample is mixed at all.
    """

    alpha: float = 0.2


@dataclass(frozen=True)
class CutMix(Mix):
    """A box of one image pasted into another; the share is what is left of the area.

    Args:
        alpha: shares are drawn from Beta(alpha, alpha) before boxes are cut off at the edge.
        p: how likely a sample is mixed at all.
    """


def mixes_of(given: Mix | Sequence[Mix] | None) -> tuple[Mix, ...]:
    """What Job(mix=…) says, as a tuple: for each batch one of them is drawn."""
    if given is None:
        return ()
    return (given,) if isinstance(given, Mix) else tuple(given)


def problems_with_mix(job: Any) -> Iterator[str]:
    """Why Job(mix=…) cannot be meant, beside the other settings of `job`."""
    given = job.mix
    if given is None:
        return
    is_list = isinstance(given, list | tuple) and len(given) > 0
    if not (isinstance(given, Mix) or (is_list and all(isinstance(one, Mix) for one in given))):
        yield f"wanted stoker.transforms.Mixup(…), CutMix(…) or a list of these, got {given!r}"
        return
    if job.step is not None:
        yield "a step of the job's own mixes its batches itself"
    if job.loss_scope == "batch":
        yield "a loss over the whole batch is no sum over samples, which is what is mixed"
    if job.loss == "own":
        yield 'samples are mixed with the loss of each, which a model with loss="own" does not give'
    if isinstance(job.inputs, list | tuple) and len(job.inputs) > 1:
        yield f"goes with one input, and this job has {len(job.inputs)}: {', '.join(map(repr, job.inputs))}"
