"""Regularization settings of a Job: penalties on weights, and mixing of samples (mixup, CutMix).

Penalties (`stoker.Objective(penalty=…)`) are added once per update, for any micro-batches.

An optimiser's `weight_decay` differs: for SGD it is the gradient of L2, for AdamW it is decoupled.

Mixing (`Job(mix=…)`) is carried out in `loading/mixing.py`.

What: every sample of an optimiser batch is mixed with a partner from the same batch, its input and its loss in the same
proportion.
Use when: image classifiers overfit. Costs: two losses for one output; each sample is loaded twice where a batch is cut.
Does not combine with: losses of the form loss(model, batch), or that are not a sum over samples; several inputs; a step
of the job's own; token_cross_entropy in chunks.
Sources: H. Zhang et al., "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412, equation 1; S. Yun et al.,
"CutMix", arXiv:1905.04899, equation 1 and its boxes. Their code draws one proportion for a batch; here each pair has
its own, as in the equations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from stoker.errors import BadSetting
from stoker.jobs.numeric_settings import is_number, require_probability

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Penalty:
    """`weight` times the sum of squares ("l2") or absolute values ("l1") of trained weights.

    All weights with two or more dimensions count, which leaves out biases and the gains of norms; or, with `of`, those
    whose names match one of these shell patterns.
    """

    weight: float
    kind: Literal["l1", "l2"]
    of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (is_number(self.weight) and 0 <= self.weight < math.inf):
            raise BadSetting(f"a penalty's weight is finite and not negative, got {self.weight!r}")

    def __call__(self, model: nn.Module) -> torch.Tensor:
        """The penalty of the model's weights, a scalar.

        Raises:
            BadSetting: no weight of the model counts.
        """
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if self.of:
            counted = [weight for name, weight in trained if any(fnmatchcase(name, pattern) for pattern in self.of)]
        else:
            counted = [weight for _, weight in trained if weight.dim() >= 2]
        if not counted:
            which = f"names like {', '.join(self.of)}" if self.of else "two or more dimensions"
            raise BadSetting(f"no trained weight of {type(model).__name__} has {which}")
        total = sum(weight.square().sum() if self.kind == "l2" else weight.abs().sum() for weight in counted)
        penalty: torch.Tensor = self.weight * total  # type: ignore[assignment]  # a sum of tensors is one
        return penalty


def l2(weight: float, of: Sequence[str] = ()) -> Penalty:
    """`weight` times the sum of squared weights, as `tf.keras.regularizers.L2`; without biases and norms.

    SGD's `weight_decay=2 * weight` moves all weights, biases included, in the same way.

    Args:
        weight: factor of the sum, 0 or more.
        of: patterns of the names of the weights that count (`head.*`); empty: all with two or more dimensions.

    Raises:
        BadSetting: `weight` is negative or not finite.
    """
    return Penalty(weight, "l2", tuple(of))


def l1(weight: float, of: Sequence[str] = ()) -> Penalty:
    """`weight` times the sum of the weights' sizes, which drives small ones to 0; without biases and norms.

    Args:
        weight: factor of the sum, 0 or more.
        of: patterns of the names of the weights that count (`head.*`); empty: all with two or more dimensions.

    Raises:
        BadSetting: `weight` is negative or not finite.
    """
    return Penalty(weight, "l1", tuple(of))


@dataclass(frozen=True)
class Mix:
    """Base of `Mixup` and `CutMix`."""

    alpha: float = 1.0
    p: float = 1.0

    def __post_init__(self) -> None:
        if not (is_number(self.alpha) and 0 < self.alpha < float("inf")):
            raise BadSetting(f"alpha shapes the proportions (Beta(alpha, alpha)), above 0, got {self.alpha!r}")
        require_probability(self.p)


@dataclass(frozen=True)
class Mixup(Mix):
    """Inputs as weighted means of two samples, pixel by pixel.

    Args:
        alpha: shares are drawn from Beta(alpha, alpha): 1 is uniform, less is mostly one of the two samples.
        p: probability that a sample is mixed.
    """

    alpha: float = 0.2


@dataclass(frozen=True)
class CutMix(Mix):
    """A box of one image pasted into another; the share is the remaining area.

    Args:
        alpha: shares are drawn from Beta(alpha, alpha) before boxes are cut off at the edge.
        p: probability that a sample is mixed.
    """


def mixes_of(given: Mix | Sequence[Mix] | None) -> tuple[Mix, ...]:
    """The value of Job(mix=…) as a tuple; for each batch one of them is drawn."""
    if given is None:
        return ()
    return (given,) if isinstance(given, Mix) else tuple(given)


def mix_checks(job: Any) -> Iterator[tuple[str, bool, str]]:
    """Checks of Job(mix=…) with the other settings: the field, whether it is valid, and the problem if not."""
    mix, inputs = job.mix, job.fields.inputs
    if mix is None:
        return
    is_list = isinstance(mix, list | tuple) and len(mix) > 0
    is_mix = isinstance(mix, Mix) or (is_list and all(isinstance(item, Mix) for item in mix))
    yield "mix", is_mix, f"wanted stoker.transforms.Mixup(…), CutMix(…) or a list of these, got {mix!r}"
    yield "mix", job.step is None, "a step of the job's own mixes its batches itself"
    is_sum = job.objective.scope != "batch"
    yield "mix", is_sum, "a loss over the whole batch is no sum over samples, which is what is mixed"
    why = 'samples are mixed with the loss of each, which a model with loss="own" does not give'
    yield "mix", job.objective.loss != "own", why
    names = inputs if isinstance(inputs, list | tuple) else ()
    listed = ", ".join(map(repr, names))
    yield "mix", len(names) <= 1, f"goes with one input, and this job has {len(names)}: {listed}"
