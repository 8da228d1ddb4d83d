"""Runs in fp16: overflows are reported and made again, and a resumed run goes on at the scale that it had."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import stoker
from stoker.errors import BadJob
from stoker.stepping import loss_scale
from tests.flow.builders import PLAN, Heard, Stopping, assert_equal_weights, blobs_job

pytestmark = pytest.mark.usefixtures("place")

IN_FP16 = dataclasses.replace(PLAN, precision="fp16")


def test_overflows_are_told_and_a_resumed_run_keeps_the_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No update is left out, bits are those of an uninterrupted run, and it does not search the scale again."""
    monkeypatch.setattr(loss_scale, "_FIRST_EXPONENT", 40)
    job, straight = blobs_job(numerics=["fp16"]), Heard()
    expected = stoker.train(job, plan=IN_FP16, run_dir=tmp_path / "straight", sink=straight)
    told = straight.of("recovered", what="loss scale")
    assert told[0]["why"] == (
        f"gradients of update 1 overflowed fp16 at a loss scale of {2.0**36:g}; again at {2.0**35:g}"
    )
    assert all("gradients of update 1 " in one["why"] for one in told)
    stopping = Stopping(80)
    assert stoker.train(job, plan=IN_FP16, run_dir=tmp_path / "stopped", sink=stopping).status == "unfinished"
    resumed = Heard()
    run = stoker.train(job, plan=IN_FP16, run_dir=tmp_path / "stopped", sink=resumed)
    assert_equal_weights(run, expected)
    assert resumed.of("finished")[0]["updates"] == straight.of("finished")[0]["updates"] == 15
    assert stopping.of("recovered", what="loss scale")
    assert not resumed.of("recovered", what="loss scale")


def test_a_plan_of_fp16_is_refused_for_a_job_that_does_not_allow_it(tmp_path: Path) -> None:
    """With what would allow it."""
    with pytest.raises(BadJob, match="fp16") as problem:
        stoker.train(blobs_job(), plan=IN_FP16, run_dir=tmp_path / "run")
    assert 'numerics=["fp16"]' in str(problem.value)
