"""The host of a GPU, as far as what is offloaded to it needs it: link, memory, and time that a GPU waits for them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from stoker.planning.model.update_time import UpdateTime
from stoker.records import Estimate, Hardware, Share
from stoker.units import format_bytes

LINK_SHARE = 0.85
"""Share of the link's printed rate that copies of pinned memory sustain [0 to 1], after the protocol's overhead."""

USUAL_LINK_BYTES_PER_S = 15.75e9
"""The link of a GPU without one in the catalogue [bytes/s]: PCIe 3.0 x16, one way."""

PROCESS_BYTES = 3e9
"""Memory of a process that trains on a GPU, besides its data and what is offloaded [bytes]. A judgement."""

_OFF_BY, _OFF_BY_HERE = 2.0, 1.4
"""Factor that the host's rates may be off by to either side in 8 cases of 10: assumed, and of the machine here."""


def link_rate(hardware: Hardware) -> float:
    """Sustained rate between host and device, one way [bytes/s]."""
    return LINK_SHARE * (hardware.host_link_bytes_per_s or USUAL_LINK_BYTES_PER_S)


def rate_error(hardware: Hardware) -> float:
    """Factor that the host's rates may be off by to either side in 8 cases of 10."""
    return _OFF_BY if hardware.host_memory_bytes is None else _OFF_BY_HERE


def with_waiting(
    time: UpdateTime, waits: Sequence[Share], low_s: float, high_s: float, hardware: Hardware
) -> UpdateTime:
    """The time of an update in which the device also waits for its host, doing nothing.

    Args:
        time: of the device.
        waits: for what, and how long [s].
        low_s: all of them together, at the low end of their interval [s].
        high_s: at its high end [s].
        hardware: the device.
    """
    step, more_s = time.step_s, sum(item.value for item in waits)
    # The errors of device and host are independent.
    up = math.hypot(step.high - step.value, high_s - more_s)
    down = math.hypot(step.value - step.low, more_s - low_s)
    value = step.value + more_s
    power = time.power_w
    if power is not None:
        idle = hardware.idle_w or 0.0
        power = power.scaled((power.value * step.value + idle * more_s) / (power.value * value))
    return dataclasses.replace(
        time,
        step_s=Estimate(value=value, low=value - down, high=value + up, unit="s", basis=step.basis),
        power_w=power,
        shares=tuple(sorted((*time.shares, *(item for item in waits if item.value > 0)), key=lambda item: -item.value)),
    )


def host_problem(needed_bytes: float, what: str, hardware: Hardware) -> str | None:
    """Why the host's memory does not hold what is offloaded; None if it does, or is not known.

    Args:
        needed_bytes: what is needed of it [bytes].
        what: is kept there, in words.
        hardware: the device.
    """
    there = hardware.host_memory_bytes
    if there is None or needed_bytes <= there:
        return None
    return f"{what}, need {format_bytes(needed_bytes)} of the host's memory, and it has {format_bytes(there)}"
