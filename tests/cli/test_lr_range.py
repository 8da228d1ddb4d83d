"""`stoker lr-range`: one JSON document, or a page with the suggestion first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.cli.jobs import blocks, render_lr_range
from stoker.records import from_json
from stoker.tuning.lr_range_test import LrRange, Sweep
from tests.cli.page import Page
from tests.flow.command import job_file, plan_file, stoker_here


def found(*, is_clear: bool = True) -> LrRange:
    """A result of two sweeps over six rates."""
    rates = tuple(10.0 ** (i - 6) for i in range(6))
    losses = (2.0, 2.0, 1.5, 1.0, 3.0)
    sweeps = (Sweep(seed=0, losses=losses, edge=1e-3), Sweep(seed=1, losses=losses[:4], edge=None))
    return LrRange(
        lr=2.5e-4,
        low=1e-5,
        high=1e-3,
        is_clear=is_clear,
        why="a quarter of 0.001",
        edge=1e-3,
        spread=1.0,
        stated_lr=0.1,
        batch=64,
        rates=rates,
        sweeps=sweeps,
        num_updates=11,
        took_s=1.5,
    )


def shown(result: LrRange) -> str:
    """What the terminal shows."""
    console = Page(100)
    render_lr_range("digits", result, console)
    return console.text


def test_the_page_says_the_rate_its_reason_and_its_spread() -> None:
    """The suggestion comes first; edges that were not seen are reported as such."""
    text = shown(found())
    assert "lr 0.00025   a quarter of 0.001" in text
    assert "good progress from 1e-05 to 0.001; the job says 0.1" in text
    assert "not seen" in text
    assert "11 updates of 64 samples, thrown away" in text


def test_the_picture_is_a_row_of_blocks() -> None:
    """As wide as asked at most; what has run away is full, the lowest empty."""
    row = blocks(tuple(float(i) for i in range(100, 0, -1)), 20)
    assert len(row) == 20
    assert row[-1] == "▁"
    assert blocks((1.0, 0.5, 0.75, 50.0), 10) == "█▁▄█"
    assert blocks((1.0, 1.0), 10) == "▁▁"
    assert blocks((), 10) == ""


@pytest.mark.usefixtures("place")
def test_the_command_prints_one_document() -> None:
    """`--json` gives the record and nothing else."""
    outcome = stoker_here("lr-range", job_file(), "--plan", plan_file(), "--updates", "30", "--json")
    assert outcome.code == 0
    assert from_json(json.loads(outcome.out), LrRange).batch == 16


@pytest.mark.usefixtures("place")
def test_the_command_shows_the_page() -> None:
    """Without `--json` it is the page; a setting out of range is the user's error."""
    outcome = stoker_here("lr-range", job_file(), "--plan", plan_file(), "--updates", "30")
    assert outcome.code == 0
    assert "learning rates it bears at batch 16" in outcome.out
    assert stoker_here("lr-range", job_file(), "--updates", "3").code == 2


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    return tmp_path
