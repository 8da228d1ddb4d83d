"""What processes note of their time."""

from __future__ import annotations

import pytest

from stoker.records import RankTimes, SampledUpdates, dumps, loads


def test_columns_of_a_sample_have_one_length() -> None:
    """A damaged file is refused where it is read, not where updates are compared."""
    with pytest.raises(ValueError, match="every column must have 2 entries"):
        SampledUpdates(update=(1, 2), began_s=(0.5,))
    whole = RankTimes(rank=1, size=2, worker=3, host="h", began_at=1.0, first_update=40, updates=1)
    damaged = dumps(whole).replace('"update": []', '"update": [7]')
    with pytest.raises(ValueError, match=r"RankTimes\.sample: every column must have 1 entries"):
        loads(damaged, RankTimes)


def test_files_of_all_processes_and_meetings_have_names_of_their_own() -> None:
    """Names sort as processes met."""
    times = [
        RankTimes(rank=rank, size=2, worker=rank, host="h", began_at=1.0, first_update=first, updates=1)
        for first in (0, 40, 1000)
        for rank in (0, 1)
    ]
    names = [one.file_name for one in times]
    assert names == sorted(set(names))
