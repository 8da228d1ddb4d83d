from __future__ import annotations

import pytest

from stoker.devices import PUE_DATA_CENTRE, PUE_HERE, grid_of, grids
from stoker.errors import BadJob


def test_grids_are_believable_and_sourced():
    """Between hydropower and coal; each with its year and source; codes are unique."""
    assert len(grids()) >= 25
    for grid in grids():
        assert 10 < grid.g_co2_per_kwh < 1000, grid
        assert grid.year >= 2022, grid
        assert grid.source, grid
    assert len({grid.code for grid in grids()}) == len(grids())


def test_the_world_stands_first_and_between_the_extremes():
    """It is the grid that is assumed where none is said."""
    world = grid_of()
    assert grids()[0] == world
    assert grid_of("NO").g_co2_per_kwh < world.g_co2_per_kwh < grid_of("in").g_co2_per_kwh


def test_an_unknown_grid_gets_the_nearest():
    """In words, with exit code 2."""
    with pytest.raises(BadJob, match="no grid 'worlds'") as caught:
        grid_of("worlds")
    assert "Did you mean 'world'?" in caught.value.remedy


def test_a_building_takes_more_than_its_machines():
    """A PUE is at least one."""
    assert PUE_DATA_CENTRE > PUE_HERE == 1
