"""Whether contenders did the same work: the losses of their first updates, on the same weights and batches.

The first loss is the same if weights and batch are; the second, if the first update was. In fp32 they agree to
rounding. Under bf16 autocast a loss of some units is off by thousandths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

FP32_ERROR, BF16_ERROR = 1e-5, 2e-2
"""Relative differences of losses that are allowed."""

OTHER_FORM_ERROR = 1e-3
"""Of the loss after an update of another form: Keras's AdamW adds its epsilon before it corrects the moments, and its
LSTM has one bias for each gate where PyTorch's has two, each of which moves."""

COMPARED = 2
"""Updates whose losses are compared: the first, and the one after it."""


def disagreements(
    losses: Mapping[str, Sequence[float]],
    reference: str,
    fp32: AbstractSet[str],
    other_form: AbstractSet[str] = frozenset(),
) -> dict[str, float]:
    """Contenders whose losses are not those of `reference` (fp32), with their largest relative difference.

    `fp32` names those that must agree to rounding; the others may differ by what bf16 loses. After the first update,
    those in `other_form` may differ by a little more than rounding.

    >>> disagreements({"plain": [2.0, 1.9], "same": [2.0, 1.9], "other": [2.0, 1.8]}, "plain", {"plain", "same"})
    {'other': 0.0526}
    """
    found: dict[str, float] = {}
    for name, of in losses.items():
        first = FP32_ERROR if name in fp32 else BF16_ERROR
        allowed = (first, max(first, OTHER_FORM_ERROR) if name in other_form else first)
        pairs = zip(of[:COMPARED], losses[reference][:COMPARED], strict=True)
        errors = [abs(mine / its - 1) for mine, its in pairs]
        if not all(error <= most for error, most in zip(errors, allowed, strict=True)):
            found[name] = math.inf if any(map(math.isnan, errors)) else float(f"{max(errors):.3g}")
    return found
