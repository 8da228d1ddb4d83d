"""What an hour of a device costs, who said so, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class Price:
    """Price of one device for one hour [USD], host included; `seen_on` is an ISO date, None where the source has none.

    `device` is a name of the catalogue. `is_stale` marks prices too old, or of a source without a date.
    """

    schema: ClassVar[int] = 1
    device: str
    provider: str
    usd_per_hour: float
    market: Literal["on demand", "spot"]
    source: str
    seen_on: str | None
    region: str = ""
    note: str = ""
    is_stale: bool = False
