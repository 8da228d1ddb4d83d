"""A loss, a gradient or a weight that is infinite or not a number: the error by which recovery tells it from others."""

from __future__ import annotations

from stoker.errors import RunFailed


class NotFinite(RunFailed):
    """Training met a number that is not finite."""


def not_finite(what: str, value: float, update: int) -> NotFinite:
    """The error for update number `update` (from 0), in which `what` is `value`."""
    remedy = "Lower the learning rate, set clip_norm, or look for bad values in the data."
    if update == 0:
        remedy = "It is so before anything was learned: look at the data, the loss and the initial weights."
    return NotFinite(f"the {what} is {value} at update {update + 1}", remedy=remedy)
