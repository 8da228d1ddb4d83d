"""Dynamic loss scaling: the gradients of fp16 activations are made of a loss times a power of two, and divided by it.

What: under precision fp16 each micro-batch's loss is multiplied by the scale before its backward pass; the sum of
gradients, in fp32, is divided by it again: powers of two round nothing. Where a gradient overflows, the scale is halved
and the same update is made again, from the buffers and generators before it, so that no update is left out; after 2,000
updates without one it is doubled. An update that is not finite at any scale leaves it as it was. The scale is kept in
checkpoints, and is the same in all processes.
Use when: `Job(numerics=["fp16"])`, on devices with fast fp16 and no bf16 (V100, T4). Costs: one more reading of the
gradients, for which each update waits; an update's passes again for each overflow.
Does not combine with: captured passes, a step of the job's own, sites with updates of their own (`Job(sync=…)`); state
that is no buffer, such as a count of passes in a plain attribute, on which an update that is made again counts twice.
Source: P. Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, section 3.2; constants are those of
`torch.amp.GradScaler`, which leaves such updates out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_FIRST_EXPONENT, _LARGEST, _SMALLEST = 16, 2.0**32, 2.0**-32
GROWTH_INTERVAL = 2000
"""Updates in a row without an overflow after which the scale is doubled."""


@dataclass
class LossScale:
    """The scale of a run, and what happened to it.

    `value` multiplies sums of losses: it begins at 2^16 for the mean over a batch of `samples`.
    """

    samples: int
    value: float = field(init=False)
    num_good: int = field(default=0, init=False)
    on_overflow: Callable[[int, float], object] | None = field(default=None, init=False)
    """Called with the number of the update, from 0, and the scale at which its gradients overflowed."""

    def __post_init__(self) -> None:
        self.value = 2.0 ** (_FIRST_EXPONENT - math.ceil(math.log2(self.samples)))

    def overflowed(self, update: int) -> bool:
        """Halve the scale; returns whether the update may be made again, at a scale that is not too small."""
        if self.on_overflow is not None:
            self.on_overflow(update, self.value)
        self.value, self.num_good = self.value / 2, 0
        return self.value >= _SMALLEST

    def passed(self) -> None:
        """Count an update without an overflow."""
        self.num_good += 1
        if self.num_good >= GROWTH_INTERVAL:
            self.value, self.num_good = min(_LARGEST, 2 * self.value), 0

    def state(self) -> list[float]:
        """What a checkpoint keeps."""
        return [self.value, float(self.num_good)]

    def load(self, kept: Sequence[float] | None) -> None:
        """Go on from `state`; None: of a checkpoint without one."""
        if kept is not None:
            self.value, self.num_good = float(kept[0]), int(kept[1])
