"""Sites that train apart: each makes its own update of its part of a batch, and hears nothing of the others meanwhile.

What: the gradient is the mean over this process's own samples, and clipped by its own norm. Use when: the job says how
sites come together (`Job(sync=…)`, see `stoker.jobs.sync`), which `stepping/outer/` does after the update.
Costs: nothing within an update. Does not combine with: shards, tensor parallel, stages.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.jobs import Loss
from stoker.loading import Pass
from stoker.stepping.layouts.base import Alone, LossOf


class Apart(Alone):
    """See `stoker.stepping.layouts.base.Spread`; losses and norms are this process's own."""

    def accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        """As `Spread.accumulate`, of the passes that count; there is one at least."""
        return super().accumulate([one for one in passes if one.counts], loss_of)
