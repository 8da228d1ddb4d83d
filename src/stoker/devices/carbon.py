"""What a kilowatt-hour of a grid emits, and what a building takes on top of what its machines draw.

Figures are in `grid.json`, each with its source. Emissions are over the life cycle of the plants, a country's average
over a year: at a given hour, or under a contract for clean power, they differ.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib.resources import files

from stoker.errors import BadJob, nearest

PUE_DATA_CENTRE = 1.54
"""Power usage effectiveness: what a data centre draws for each watt of its machines [fraction].

Source: Uptime Institute, Global Data Center Survey 2025 (weighted average; 1.56 in 2024). The largest operators report
about 1.1 for their newest sites.
"""

PUE_HERE = 1.0
"""The same for a machine that is here, of whose building nothing is known: its own energy alone."""

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
    """Every grid that is known, the world's average first."""
    document = json.loads(files("stoker.devices").joinpath("grid.json").read_text(encoding="utf-8"))
    return tuple(Grid(source=document["sources"][row.pop("source")], **row) for row in document["grids"])


def grid_of(code: str = WORLD) -> Grid:
    """The grid with that code, capitals or not.

    Raises:
        BadJob: there is none; the nearest code is told.
    """
    found = next((grid for grid in grids() if grid.code == code.lower()), None)
    if found is None:
        raise BadJob(f"There is no grid {code!r}.", remedy=nearest(code.lower(), [grid.code for grid in grids()]))
    return found
