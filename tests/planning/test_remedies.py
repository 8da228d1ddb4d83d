"""Changes that would make a run faster."""

from __future__ import annotations

import dataclasses

import pytest

from stoker.planning.model.bottleneck import Remedy, RunTimes, best_remedy, remedies
from stoker.records import Device, Plan

CPU = Device(name="cpu", kind="cpu", model="AMD EPYC", cores=8, memory_bytes=2**34, fast_dtypes=("fp32",))
GPU = dataclasses.replace(CPU, name="cuda:0", kind="cuda", model="H100")
PLAN = Plan(device="cpu", micro_batch=64, threads=4)


def ran(*, evaluations_s: tuple[float, ...] = (), checkpoints: int = 0, **split_s: float) -> RunTimes:
    """A run of a hundred updates."""
    return RunTimes(
        split_s=split_s,
        updates=100,
        samples_per_update=64,
        samples_per_s=None,
        evaluations_s=evaluations_s,
        num_checkpoints=checkpoints,
    )


def remedy(saved_s: float, *, changes_job: bool = False) -> Remedy:
    """A change that saves so much."""
    return Remedy(
        change=f"{saved_s}", saved_s=saved_s, low_s=0.0, high_s=saved_s, basis="roofline", changes_job=changes_job
    )


def test_half_of_the_evaluations_and_checkpoints_are_saved() -> None:
    """Of three, one goes; the interval between checkpoints doubles."""
    found = list(remedies(ran(update=120.0, checkpoint=4.0, evaluations_s=(1.0, 1.0, 1.0), checkpoints=4), PLAN, CPU))
    assert [one.saved_s for one in found] == pytest.approx([1.0, 2.0])
    assert "--checkpoint-every 60" in found[1].change
    assert [one.changes_job for one in found] == [True, False]


def test_a_single_evaluation_cannot_be_halved() -> None:
    """It is the one at the end."""
    assert list(remedies(ran(update=10.0, evaluations_s=(5.0,), checkpoints=1, checkpoint=3.0), PLAN, CPU)) == []


def test_an_interval_changes_no_checkpoint_of_an_evaluation() -> None:
    """A run of 5 s saves at its best evaluations and its end; 65 s have two intervals of 30 s, of which one goes."""
    assert list(remedies(ran(update=3.0, checkpoint=2.0, checkpoints=4), PLAN, CPU)) == []
    (fewer,) = remedies(ran(update=63.0, checkpoint=2.0, checkpoints=4), PLAN, CPU)
    assert fewer.saved_s == pytest.approx(0.5)


def test_workers_fetch_beside_updates_as_far_as_there_are_cores() -> None:
    """12 s of fetching over 8 workers hide behind 10 s of updates on a GPU; on a CPU four threads leave four cores."""
    plan = dataclasses.replace(PLAN, loader="inline")
    on_gpu = next(remedies(ran(update=10.0, data=12.0), plan, GPU))
    assert on_gpu.saved_s == pytest.approx(12.0)
    on_cpu = next(remedies(ran(update=10.0, data=60.0), plan, CPU))
    assert on_cpu.saved_s == pytest.approx(70.0 - (10.0 * 4 + 60.0) / 8)
    busy = next(remedies(ran(update=10.0, data=60.0), dataclasses.replace(plan, threads=8), CPU))
    assert busy.saved_s == pytest.approx(70.0 - (10.0 * 8 + 60.0) / 8)


def test_more_workers_are_thought_of_beside_a_gpu() -> None:
    """Twice as many wait half as long, and never less than the updates take."""
    plan = dataclasses.replace(PLAN, loader="workers", num_workers=4)
    more, _ = remedies(ran(update=10.0, data=20.0), plan, GPU)
    assert "8 loader workers instead of 4" in more.change
    assert more.saved_s == pytest.approx(15.0)


def test_a_change_of_what_is_learned_has_to_save_twice_as_much() -> None:
    """The best remedy is otherwise the one that leaves the job as it is."""
    assert best_remedy([remedy(5.0, changes_job=True), remedy(3.0)], 10.0) == remedy(3.0)
    assert best_remedy([remedy(7.0, changes_job=True), remedy(3.0)], 10.0) == remedy(7.0, changes_job=True)
    assert best_remedy([remedy(0.1)], 10.0) is None


def test_a_gain_is_never_more_than_the_whole() -> None:
    """And its interval holds its value."""
    gain = Remedy(change="", saved_s=4.0, low_s=5.0, high_s=20.0, basis="roofline").gain(10.0)
    assert (gain.low, gain.value, gain.high) == (0.4, 0.4, 1.0)
