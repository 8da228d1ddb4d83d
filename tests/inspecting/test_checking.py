from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from bench.data.planted import PLANTERS, Planted, false_alarms, is_found, picture_of, plant_csv, plant_images
from stoker.errors import BadJob
from stoker.inspecting import Checked, CheckOptions, check, image_signatures


def quietly(_what: str, _done: int, _total: int) -> None:
    """Reports to no one."""


def checked(path: Path, options: CheckOptions | None = None, *, against: tuple[Path, ...] = ()) -> Checked:
    """A check in this process."""
    return check(path, against, options or CheckOptions(), workers=1, tell=quietly)


@pytest.mark.parametrize("kind", sorted(PLANTERS))
def test_every_planted_fault_is_found_and_nothing_else(kind: str, tmp_path: Path) -> None:
    """In a generated set of each kind, all that was planted is found, and nothing that was not."""
    planted = PLANTERS[kind](tmp_path / kind)
    found = checked(tmp_path / kind)
    assert [one for one in planted if not is_found(one, found.findings)] == []
    assert false_alarms(planted, found.findings) == []
    assert sum(split.num_samples for split in found.splits) > 0


def test_a_planted_fault_can_be_missed(tmp_path: Path) -> None:
    """The test above fails for a fault that is not there, and for a finding that was not planted."""
    planted = plant_csv(tmp_path / "csv")
    findings = checked(tmp_path / "csv").findings
    assert not is_found(Planted("outlier", ("train.csv:0",), "is none"), findings)
    assert false_alarms(planted[1:], findings) != []


def test_the_source_is_not_touched(tmp_path: Path) -> None:
    """Names, bytes and times of all files are the same after a check."""
    plant_images(tmp_path / "set", per_class=50, copies=1)

    def state() -> dict[str, tuple[str, int]]:
        files = sorted(path for path in (tmp_path / "set").rglob("*") if path.is_file())
        return {str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}

    before = state()
    checked(tmp_path / "set")
    assert state() == before


@pytest.mark.slow
def test_processes_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found does not depend on how many processes decode."""
    plant_images(tmp_path / "set", per_class=50, copies=1)
    monkeypatch.setattr(image_signatures, "_FEWEST_FOR_PROCESSES", 0)
    alone = checked(tmp_path / "set")
    many = check(tmp_path / "set", (), CheckOptions(), workers=2, tell=quietly)
    assert many.findings == alone.findings
    assert many.splits == alone.splits


def test_another_set_is_held_against(tmp_path: Path) -> None:
    """A sample that is in the other set leaks, is named there, and the other set's own faults are not reported."""
    plant_images(tmp_path / "set", per_class=50, copies=1)
    other = tmp_path / "other" / "cross"
    other.mkdir(parents=True)
    source = tmp_path / "set" / "train" / "cross" / "00049.png"
    (other / "same.png").write_bytes(source.read_bytes())
    (other / "twice.png").write_bytes(source.read_bytes())
    (other / "broken.png").write_bytes(b"no")
    before = set(checked(tmp_path / "set").findings)
    after = set(checked(tmp_path / "set", against=(tmp_path / "other",)).findings)
    (leak,) = after - before
    assert (leak.fault, leak.id) == ("leak", "train/cross/00049.png")
    assert leak.related == (f"{tmp_path / 'other'}/cross/same.png",)


def test_tables_are_held_against_tables(tmp_path: Path) -> None:
    """A row that another table has leaks, whatever its row is called there."""
    (tmp_path / "mine.csv").write_text("id,a,b\n" + "".join(f"{n},{n * n},x{n}\n" for n in range(9)))
    (tmp_path / "theirs.csv").write_text("id,a,b\n77,16,x4\n78,5,y\n")
    (leak,) = checked(tmp_path / "mine.csv", against=(tmp_path / "theirs.csv",)).findings
    assert (leak.fault, leak.id) == ("leak", "mine.csv:4")


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    """Pixels are not held against rows."""
    plant_csv(tmp_path / "csv")
    (tmp_path / "images").mkdir()
    picture_of("cross", random.Random(1)).save(tmp_path / "images" / "one.png")
    with pytest.raises(BadJob, match="one of them has pixels"):
        checked(tmp_path / "images", against=(tmp_path / "csv",))


@pytest.mark.parametrize("name", ["no", "empty"])
def test_nothing_to_check_is_an_error(name: str, tmp_path: Path) -> None:
    """A path that is not there, and a folder without data, are said to be so."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadJob, match=r"is not there|holds nothing"):
        checked(tmp_path / name)
