"""What evaluations decide: when a rate falls, when a run ends, and that a run which goes on decides the same."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ReduceLROnPlateau

import stoker
from stoker import schedules
from stoker.errors import RunFailed
from stoker.jobs.run_length import Extent
from stoker.training.run_control import RunControl
from tests.training.builders import tiny_job

EXTENT = Extent(num_train=64, batch=16)
VALID = stoker.holdout(0.2)


def judged(course: RunControl, losses: list[float], *, first: int = 1) -> list[tuple[float, str | None]]:
    """The factor and the verdict after an evaluation at the end of each epoch from number `first` on."""
    found = []
    for epoch, loss in enumerate(losses, start=first):
        course.judge({"loss": loss, "accuracy": 1 - loss}, EXTENT.position(4 * epoch), EXTENT)
        found.append((course.rate_factor, course.verdict))
    return found


def course_of(**changed: object) -> RunControl:
    """At the beginning of a job that evaluates."""
    return RunControl.of(tiny_job(valid=VALID, until=stoker.epochs(50), **changed))


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40), st.integers(1, 5))
def test_a_plateau_is_pytorchs_where_evaluations_come_every_epoch(losses: list[float], epochs: int) -> None:
    """Patience of n epochs is PyTorch's of n - 1 evaluations, which counts how many may pass before the rate falls."""
    plateau = schedules.plateau(factor=0.5, patience=stoker.epochs(epochs), least=0.05)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = ReduceLROnPlateau(
        optimizer, factor=0.5, patience=epochs - 1, threshold=0.0, threshold_mode="abs", min_lr=0.05, eps=0.0
    )
    factors = []
    for loss in losses:
        theirs.step(loss)
        factors.append(optimizer.param_groups[0]["lr"])
    assert [factor for factor, _ in judged(course_of(schedule=plateau), losses)] == pytest.approx(factors)


def test_nothing_is_counted_while_a_plateau_cools_down() -> None:
    """Two epochs of patience, three of cooldown: falls after the 3rd and the 8th of evaluations that stand still."""
    plateau = schedules.plateau(factor=0.1, patience=stoker.epochs(2), cooldown=stoker.epochs(3))
    factors = [factor for factor, _ in judged(course_of(schedule=plateau), [1.0] * 9)]
    assert factors == pytest.approx([1, 1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01])


def test_a_run_ends_when_a_measure_has_stood_still_for_its_patience() -> None:
    """By more than min_delta is better; the words say since when, and why."""
    rule = stoker.EarlyStopping("valid accuracy", patience=stoker.epochs(2), min_delta=0.05)
    verdicts = [verdict for _, verdict in judged(course_of(stop=[rule]), [0.5, 0.4, 0.38, 0.37])]
    assert verdicts[:3] == [None, None, None]
    assert verdicts[3] == (
        "accuracy on valid has not got better than 0.6 by more than 0.05 for 2 epochs, since 128 samples"
    )


def test_patience_may_be_counted_in_samples_and_updates() -> None:
    """Five updates are over a little after one epoch of four; 128 samples are two epochs."""
    for patience, ends_after in ((stoker.updates(5), 3), (stoker.samples(128), 3), (stoker.updates(4), 2)):
        course = course_of(stop=[stoker.EarlyStopping(patience=patience)])
        verdicts = [verdict is not None for _, verdict in judged(course, [0.5] * 4)]
        assert verdicts.index(True) + 1 == ends_after


def test_a_run_ends_when_its_target_is_reached() -> None:
    """Of a loss from above, of an accuracy from below, whichever rule is met first."""
    rules = [stoker.Target("accuracy", 0.9), stoker.Target("loss", 0.2)]
    verdicts = [verdict for _, verdict in judged(course_of(stop=rules), [0.3, 0.2])]
    assert verdicts == [None, "loss on valid is 0.2: the target of 0.2 is reached"]


def test_numbers_that_are_none_are_no_improvement() -> None:
    """NaN from the beginning ends a run by its patience, and says what it was."""
    rule = stoker.EarlyStopping(patience=stoker.epochs(2))
    verdicts = [verdict for _, verdict in judged(course_of(stop=[rule]), [math.nan] * 3)]
    assert verdicts == [None, "loss on valid was no number for 2 epochs", "loss on valid was no number for 2 epochs"]


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=30), st.data())
def test_a_run_that_goes_on_decides_what_one_never_stopped_does(losses: list[float], data: st.DataObject) -> None:
    """Wherever it was cut, through the JSON that a checkpoint keeps; an evaluation made twice counts once."""
    settings = {
        "schedule": schedules.plateau(factor=0.5, patience=stoker.epochs(2), cooldown=stoker.epochs(1)),
        "stop": [stoker.EarlyStopping(patience=stoker.epochs(9)), stoker.Target("accuracy", 0.999)],
    }
    whole = judged(course_of(**settings), losses)
    cut = data.draw(st.integers(1, len(losses)))
    first = course_of(**settings)
    judged(first, losses[:cut])
    again = course_of(**settings)
    again.load(json.loads(json.dumps(first.state())))
    judged(again, losses[cut - 1 : cut], first=cut)  # what followed it did not come to its end
    assert judged(again, losses[cut:], first=cut + 1) == whole[cut:]


def test_a_job_without_these_keeps_nothing() -> None:
    """Its checkpoints are as they were."""
    course = course_of()
    judged(course, [0.5, 0.4])
    assert (course.state(), course.rate_factor, course.verdict) == ({}, 1.0, None)
    course.load({})
    assert course.verdict is None


def test_a_measure_that_no_evaluation_finds_is_an_error() -> None:
    """With those that there are, before the run waits for ever."""
    course = course_of(stop=[stoker.Target("accuracy", 0.9)])
    with pytest.raises(RunFailed, match="the job waits for 'accuracy', and an evaluation found loss"):
        course.judge({"loss": 0.1}, EXTENT.position(4), EXTENT)
