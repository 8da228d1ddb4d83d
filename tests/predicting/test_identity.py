from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from stoker.predicting.file_sources import find_sources
from stoker.predicting.job_identity import content_digest, cut, differences, stamp_of
from stoker.records import dumps, loads
from stoker.records.prediction import PixelSettings, PredictionJob
from tests.predicting.builders import ASKED, write_lines


def _file(path: Path, *values: str) -> str:
    return str(write_lines(path, ["a", *values]))


def _begun(*names: str) -> PredictionJob:
    sources, parts = cut(find_sources(names), 2)
    return PredictionJob(
        model="m",
        version=1,
        model_digest="0" * 64,
        columns={"x": ("a",)},
        batch_rows=4,
        part_rows=2,
        threads=1,
        sources=sources,
        parts=parts,
        made_on="a test",
        made_at="",
    )


def test_parts_do_not_reach_from_file_to_file(tmp_path: Path) -> None:
    """Three rows and one, in parts of two, are three parts; text parts know where they begin."""
    job = _begun(_file(tmp_path / "a.csv", "1", "2", "3"), _file(tmp_path / "b.csv", "4"))
    assert [(one.source, one.first_row, one.num_rows, one.offset) for one in job.parts] == [
        (0, 0, 2, 2),
        (0, 2, 1, 6),
        (1, 0, 1, 2),
    ]
    assert job.num_rows == 4


def test_the_same_command_is_no_other(tmp_path: Path) -> None:
    """What was chosen for it is taken over; a file that was only touched is the same file."""
    name = _file(tmp_path / "a.csv", "1")
    job = _begun(name)
    assert differences(job, ASKED, find_sources([name])) == ()
    os.utime(name, (1, 1))
    assert differences(job, ASKED, find_sources([name])) == ()


def test_a_file_whose_name_is_no_utf8_is_known_again(tmp_path: Path) -> None:
    """The job's record has its name in escapes."""
    name = _file(tmp_path / "caf\udce9.csv", "1")
    job = loads(dumps(_begun(name)), PredictionJob)
    assert differences(job, ASKED, find_sources([name])) == ()


def test_a_changed_file_is_told(tmp_path: Path) -> None:
    """Also where its size is the same."""
    name = _file(tmp_path / "a.csv", "1")
    job = _begun(name)
    _file(tmp_path / "a.csv", "2")
    os.utime(name, (1, 1))
    assert differences(job, ASKED, find_sources([name])) == (f"{name}: its content has changed",)
    _file(tmp_path / "a.csv", "12")
    assert "4 bytes then, 5 now" in differences(job, ASKED, find_sources([name]))[0]


def test_files_more_fewer_or_in_another_order_are_told(tmp_path: Path) -> None:
    """A file that came into the folder since is not taken in silently."""
    a, b = _file(tmp_path / "a.csv", "1"), _file(tmp_path / "b.csv", "2")
    job = _begun(a, b)
    c = _file(tmp_path / "c.csv", "3")
    assert differences(job, ASKED, find_sources([a, b, c])) == (f"{c} is new",)
    assert differences(job, ASKED, find_sources([a])) == (f"{b} is no longer asked for",)
    assert differences(job, ASKED, find_sources([b, a])) == ("the files come in another order",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_digest": "1" * 64}, "the model's digest"),
        ({"version": 2}, "the model: was m 1, is m 2"),
        ({"columns": {"x": ("b",)}}, "the columns: was x=a, is x=b"),
        ({"keep": ("id",)}, "--keep: was none, is id"),
        ({"allow_nan": True}, "--allow-nan"),
        ({"pixels": PixelSettings(values="0..1")}, "--pixels: was none, is 0..1"),
        ({"batch_rows": 8}, "--batch: was 4, is 8"),
        ({"part_rows": 8}, "--part-rows: was 2, is 8"),
        ({"threads": 2}, "--threads: was 1, is 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_setting_is_told(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """Whatever would give other bits than those that are there."""
    name = _file(tmp_path / "a.csv", "1")
    found = differences(_begun(name), dataclasses.replace(ASKED, **change), find_sources([name]))
    assert len(found) == 1
    assert words in found[0]


def test_a_folder_of_images_is_known_by_names_and_contents(tmp_path: Path) -> None:
    """An image that is renamed or painted over is another folder."""
    for name in ("a.png", "b.png"):
        Image.new("L", (2, 2)).save(tmp_path / name)
    (source,) = find_sources([str(tmp_path)])
    before, stamp = content_digest(source), stamp_of(source)
    (tmp_path / "b.png").rename(tmp_path / "c.png")
    (renamed,) = find_sources([str(tmp_path)])
    assert content_digest(renamed) != before
    assert stamp_of(renamed) != stamp
