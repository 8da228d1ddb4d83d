"""Carbon intensity of power grids, and power usage effectiveness of buildings.

Figures are in `grid.json`, each with its source. Emissions cover the life cycle of the plants, averaged over a country
and a year; they differ by hour and by contract.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib.resources import files

from stoker.errors import BadJob, nearest

PUE_DATA_CENTRE = 1.54
"""Power usage effectiveness: power of a data centre over power of its machines [1].

Source: Uptime Institute, Global Data Center Survey 2025 (weighted average; 1.56 in 2024). The largest operators report
about 1.1 for their newest sites.
"""

PUE_HERE = 1.0
"""The same for this machine, whose building is not known: its own energy only [1]."""

WORLD = "world"


@dataclass(frozen=True)
class Grid:
    """A grid. `code` is `world` or a country's ISO 3166 code; `g_co2_per_kwh` grams of CO2 equivalent over `year`."""

    code: str
    name: str
    g_co2_per_kwh: float
    year: int
    source: str


@functools.cache
def grids() -> tuple[Grid, ...]:
    """All known grids, the world's average first."""
    document = json.loads(files("stoker.devices").joinpath("grid.json").read_text(encoding="utf-8"))
    return tuple(Grid(source=document["sources"][row.pop("source")], **row) for row in document["grids"])


def grid_of(code: str = WORLD) -> Grid:
    """The grid with that code, in any case.

    Raises:
        BadJob: there is none; the remedy names the nearest code.
    """
    by_code = {grid.code: grid for grid in grids()}
    if code.lower() not in by_code:
        raise BadJob(f"There is no grid {code!r}.", remedy=nearest(code.lower(), list(by_code)))
    return by_code[code.lower()]
