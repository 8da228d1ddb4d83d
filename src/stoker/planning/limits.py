"""What a plan is chosen for, and the limits it must keep."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from stoker.errors import BadJob
from stoker.records import Candidate
from stoker.units import format_money, format_seconds

Objective = Literal["time", "money", "energy"]

_BYTES = {"mb": 1e6, "gb": 1e9, "tb": 1e12, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
_SECONDS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most a run may cost [USD] and last [s]; None where there is no limit."""

    max_cost_usd: float | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_cost_usd", self.max_cost_usd), ("deadline_s", self.deadline_s)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise BadJob(f"{name} must be a positive number, got {value}")

    @property
    def objective(self) -> Objective:
        """What is wanted where nobody says: with a deadline the least money, else the least time."""
        return "time" if self.deadline_s is None else "money"

    def broken_by(self, candidate: Candidate) -> tuple[str, ...]:
        """The limits a candidate exceeds, in words; a device that is here costs nothing, an unknown price too much."""
        total_s, cost = candidate.forecast.total_s.value, candidate.forecast.cost_usd
        words: list[str] = []
        if self.deadline_s is not None and total_s > self.deadline_s:
            words.append(f"takes {format_seconds(total_s)}, the deadline is {format_seconds(self.deadline_s)}")
        if self.max_cost_usd is not None and not candidate.is_here:
            if cost is None:
                words.append("nobody in the price list offers it")
            elif cost.value > self.max_cost_usd:
                words.append(f"costs {format_money(cost.value)}, the limit is {format_money(self.max_cost_usd)}")
        return tuple(words)

    def excess(self, candidate: Candidate) -> float:
        """How far beyond its limits a candidate is: the largest ratio of need to limit, 1 if it keeps them."""
        cost = candidate.forecast.cost_usd
        ratios = [1.0]
        if self.deadline_s is not None:
            ratios.append(candidate.forecast.total_s.value / self.deadline_s)
        if self.max_cost_usd is not None and not candidate.is_here:
            ratios.append(float("inf") if cost is None else cost.value / self.max_cost_usd)
        return max(ratios)

    def in_words(self) -> str:
        """`at most $20.00, within 12 h`."""
        words = []
        if self.max_cost_usd is not None:
            words.append(f"at most {format_money(self.max_cost_usd)}")
        if self.deadline_s is not None:
            words.append(f"within {format_seconds(self.deadline_s)}")
        return ", ".join(words) or "no limits"


def parse_money(text: str) -> float:
    """US dollars.

    >>> [parse_money(text) for text in ("20usd", "$3.50", "7")]
    [20.0, 3.5, 7.0]
    """
    match = re.fullmatch(r"\$?\s*(\d+(?:\.\d+)?)\s*(?:usd|\$)?", text.strip().lower())
    if not match:
        raise BadJob(f"--max-cost {text}: wanted US dollars, such as 20usd", remedy="Other currencies are not known.")
    return _positive(float(match.group(1)), f"--max-cost {text}", "20usd")


def parse_memory(text: str) -> float:
    """Bytes.

    >>> [parse_memory(text) for text in ("6GB", "512 MiB")]
    [6000000000.0, 536870912.0]
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match.group(2) not in _BYTES:
        raise BadJob(f"--memory {text}: wanted an amount with its unit (MB, GB, TB, MiB, GiB or TiB), such as 6GB")
    return _positive(float(match.group(1)) * _BYTES[match.group(2)], f"--memory {text}", "6GB")


def parse_duration(text: str, option: str = "--deadline") -> float:
    """Seconds; `option` is what the text was given for.

    >>> [parse_duration(text) for text in ("12h", "90 min", "1d", "2h30min")]
    [43200.0, 5400.0, 86400.0, 9000.0]
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(min|[smhd])", text.strip().lower())
    rest = re.sub(r"(\d+(?:\.\d+)?)\s*(min|[smhd])", "", text.strip().lower()).strip()
    total = sum(float(value) * _SECONDS[unit] for value, unit in parts)
    if rest or not parts:
        raise BadJob(f"{option} {text}: wanted a time with its unit (s, min, h or d), such as 12h or 90min")
    return _positive(total, f"{option} {text}", "12h")


def _positive(value: float, what: str, example: str) -> float:
    if not value > 0:
        raise BadJob(f"{what}: wanted more than nothing, such as {example}")
    return value
