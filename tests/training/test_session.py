"""What a session begins with."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import stoker
from stoker.store import CheckpointStore
from stoker.training.session import _unsaved_s, slowest_s
from tests.flow.builders import PLAN, blobs_job

pytestmark = pytest.mark.usefixtures("place")


def test_the_time_since_the_last_checkpoint_is_the_runs(tmp_path: Path) -> None:
    """Of this command: not that of a checkpoint saved long before it began. Without one, it is the command's age."""
    store = CheckpointStore(tmp_path)
    assert _unsaved_s(store, age_s=7.0) == 7.0
    for name, age_s in (("000000000016", 500.0), ("000000000032", 5.0)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    assert _unsaved_s(store, age_s=60.0) == pytest.approx(5.0, abs=2.0)
    assert _unsaved_s(store, age_s=3.0) == 3.0
    os.utime(tmp_path / "000000000032", (time.time() + 900.0,) * 2)  # of a host whose clock is ahead
    assert _unsaved_s(store, age_s=60.0) == 0.0


def test_the_slowest_phase_of_sites_is_an_interval() -> None:
    """Between two exchanges one may be slower than another all the time."""
    decision = stoker.train(blobs_job(), plan=PLAN, sink=lambda _: None).directory.read_decision()
    assert decision is not None
    step_s = decision.chosen.forecast.step_s.value
    alone = slowest_s(blobs_job(), decision)
    assert alone >= step_s
    sync = stoker.DiLoCo(every=stoker.updates(10_000))
    assert slowest_s(blobs_job(sync=sync), decision) == pytest.approx(10_000 * step_s)
