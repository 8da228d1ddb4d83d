"""What a schedule makes of the learning rates, looked at before it is used."""

from __future__ import annotations

import math
from collections.abc import Callable

from stoker.errors import BadJob


def factor_at(schedule: Callable[[float], float], progress: float) -> float:
    """The factor of the learning rates at `progress`, the share of the run in [0, 1].

    Raises:
        BadJob: it is negative, which climbs the loss, or no number.
    """
    factor = schedule(progress)
    if not 0 <= factor < math.inf:
        raise BadJob(
            f"the schedule gives {factor} at {100 * progress:.4g} % of the run, wanted a factor of the learning rate, "
            "0 or more",
            remedy="A schedule takes the share of the run that is done, from 0 to 1: lambda progress: 1 - progress.",
        )
    return factor
