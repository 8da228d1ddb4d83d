"""How a data set is checked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What `stoker data check` may be told.

    Attributes:
        target: the column of a table to be predicted; found by its name where it is empty (see `tables.roles`).
        text: columns whose values are prose; such are told from their length as well.
        ignore: columns that two rows need not share to count as the same.
        near: whether to look for near duplicates.
        labels: whether to hold labels against those of neighbours.
        least_correlation: how alike the pixels of near duplicates are (Pearson's r, after decoding both).
        most_z: how far out a number is no outlier yet, in robust standard deviations.
        workers: processes that decode; 0 is as many as the process may use cores.
    """

    target: str = ""
    text: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    near: bool = True
    labels: bool = True
    least_correlation: float = 0.97
    most_z: float = 12.0
    workers: int = 0
