from pathlib import Path

import pytest

from stoker.tracking.base import RunDescription, output_path


def about(folder: Path, run: str = "r") -> RunDescription:
    """A run whose trackers keep their files in `folder`."""
    return RunDescription(run=run, job="job", folder=folder, created_at=100.0, parameters={})


def test_a_run_that_was_moved_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    """A copy of a run, or one that is continued from elsewhere, does not write into where it was before."""
    there, here = tmp_path / "there", tmp_path / "here"
    known = str(output_path(about(there), None, None, name="metrics", ending=".csv"))
    assert output_path(about(here), None, known, name="metrics", ending=".csv") == here / "metrics.csv"
    assert output_path(about(here), None, "runs/r/tracking/metrics-2.csv", name="metrics", ending=".csv") == (
        here / "metrics-2.csv"
    )


@pytest.mark.parametrize("run", ["r", "conv-1.5"])
def test_another_run_of_the_same_name_has_a_file_of_its_own(run: str, tmp_path: Path) -> None:
    """Of two runs of one name, in two folders of runs or after one was deleted, neither goes on in the other's."""
    places = []
    for _ in range(3):
        places.append(output_path(about(tmp_path / "own", run), str(tmp_path), None, name="metrics", ending=".csv"))
        places[-1].touch()
    assert [place.name for place in places] == [f"{run}.csv", f"{run}-2.csv", f"{run}-3.csv"]
    known = str(places[1])
    assert output_path(about(tmp_path / "moved", run), str(tmp_path), known, name="metrics", ending=".csv") == places[1]
