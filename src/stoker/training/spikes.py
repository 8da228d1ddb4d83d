"""Loss spikes: a loss far above what it was just before, by a measure that outliers do not move.

What: the mean loss of an interval between two progress events against the median of the last ones, in robust standard
deviations (1.4826 times the median absolute deviation). Use when: always; a spike is told, and nothing is done.
Costs: a sort of 32 numbers twice a second. Does not see: a loss that rises slowly.
Source: B. Iglewicz and D. Hoaglin, "How to Detect and Handle Outliers" (1993); there 3.5 marks an outlier, here 10: a
loss curve has a trend and heavy tails.
"""

from __future__ import annotations

import statistics
from collections import deque

_WINDOW = 32
_FEWEST = 8
_FAR = 10.0
_LEAST_SHARE = 0.02
"""A deviation is taken to be at least this share of the median: on a plateau it can be next to nothing."""


class SpikeDetector:
    """Told one loss after another, says which ones jump."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._is_up = False

    def look(self, loss: float) -> str | None:
        """What to tell of `loss`, the mean over an interval: None unless it begins a spike."""
        sentence = None
        if len(self._losses) >= _FEWEST:
            middle = statistics.median(self._losses)
            spread = 1.4826 * statistics.median(abs(one - middle) for one in self._losses)
            score = (loss - middle) / max(spread, _LEAST_SHARE * abs(middle), 1e-12)
            if score > _FAR and not self._is_up:
                sentence = (
                    f"the loss jumped to {loss:.4g} from a median of {middle:.4g} over the last {len(self._losses)} "
                    f"reports, {score:.0f} robust standard deviations; nothing was changed"
                )
            self._is_up = score > _FAR
        self._losses.append(loss)
        return sentence
