"""Earlier names of a Job's settings give the same job, and say the present one."""

from __future__ import annotations

import dataclasses
import pickle
import re
import warnings
from typing import Any

import pytest

import stoker
from stoker.errors import BadJob
from stoker.jobs.earlier_names import SPELLINGS, EarlierName
from stoker.jobs.job_description import KEYS, NOT_SETTINGS, describe_settings
from tests.jobs import test_stored_descriptions

GIVEN: dict[str, tuple[Any, dict[str, Any], str]] = {
    "ema": (0.9, {"average": 0.9}, "Job(average=…)"),
    "swa": (stoker.SWA(start=0.5), {"average": stoker.SWA(start=0.5)}, "Job(average=…)"),
    "label_smoothing": (
        0.1,
        {"loss": stoker.Objective("cross_entropy", label_smoothing=0.1)},
        "Job(loss=stoker.Objective(loss, label_smoothing=…))",
    ),
    "loss_scope": (
        "batch",
        {"loss": stoker.Objective("cross_entropy", scope="batch")},
        "Job(loss=stoker.Objective(loss, scope=…))",
    ),
    "penalty": (
        stoker.l2(0.1),
        {"loss": stoker.Objective("cross_entropy", penalty=stoker.l2(0.1))},
        "Job(loss=stoker.Objective(loss, penalty=…))",
    ),
    "inputs": ([0], {"fields": stoker.Fields(inputs=[0])}, "Job(fields=stoker.Fields(inputs=…))"),
    "target": (1, {"fields": stoker.Fields(target=1)}, "Job(fields=stoker.Fields(target=…))"),
    "collate": (list, {"fields": stoker.Fields(collate=list)}, "Job(fields=stoker.Fields(collate=…))"),
    "lengths": (stoker.lengths.packed(8), {"sampling": stoker.lengths.packed(8)}, "Job(sampling=…)"),
    "evaluate_every": (
        stoker.updates(3),
        {"evaluation": stoker.Evaluation(every=stoker.updates(3))},
        "Job(evaluation=stoker.Evaluation(every=…))",
    ),
    "select": ("last", {"evaluation": stoker.Evaluation(select="last")}, "Job(evaluation=stoker.Evaluation(select=…))"),
    "keep_every": (
        stoker.updates(9),
        {"evaluation": stoker.Evaluation(keep_every=stoker.updates(9))},
        "Job(evaluation=stoker.Evaluation(keep_every=…))",
    ),
}
"""By earlier name: a value, what it is now, and how the warning writes that."""


SETTINGS: dict[str, Any] = {
    "model": dict,
    "data": (),
    "loss": "mse",
    "batch": 4,
    "until": stoker.epochs(1),
    "optimizer": stoker.SGD(lr=0.1),
}
"""Of a job without samples."""


def job_of(**settings: Any) -> stoker.Job:
    """A job whose target is a class."""
    return test_stored_descriptions.job_of(**({"loss": "cross_entropy"} | settings))


def earlier(**settings: Any) -> stoker.Job:
    """A job with some settings by their earlier names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EarlierName)
        return job_of(**settings)


def test_every_earlier_name_is_tried_here() -> None:
    """None is forgotten, and each is a key of descriptions on disk."""
    assert set(GIVEN) == set(SPELLINGS)
    assert set(SPELLINGS) <= set(KEYS)


def test_every_setting_is_described() -> None:
    """By its own name, by earlier names of its parts, or by its content."""
    present = {SPELLINGS[key].field if key in SPELLINGS else key for key in KEYS}
    assert present | set(NOT_SETTINGS) == {field.name for field in dataclasses.fields(stoker.Job)}


@pytest.mark.parametrize("name", GIVEN)
def test_an_earlier_name_gives_the_same_job_and_says_the_present_one(name: str) -> None:
    """The warning has the exact spelling, and points at the line that is to be changed."""
    value, now, spelling = GIVEN[name]
    with pytest.warns(EarlierName, match=re.escape(f"Job({name}=…) is now written {spelling}")) as caught:
        job = job_of(**{name: value})
    assert len(caught) == 1
    assert describe_settings(job) == describe_settings(job_of(**now))


@pytest.mark.parametrize("name", GIVEN)
def test_a_setting_can_be_read_by_its_earlier_name(name: str) -> None:
    """Hooks and recipes of earlier versions read jobs."""
    value, now, _ = GIVEN[name]
    with pytest.warns(EarlierName):
        found = getattr(job_of(**now), name)
    assert describe_settings(earlier(**{name: found})) == describe_settings(earlier(**{name: value}))


@pytest.mark.parametrize("name", GIVEN)
def test_both_names_are_refused(name: str) -> None:
    """Whichever were meant: the message has both."""
    value, now, spelling = GIVEN[name]
    with pytest.raises(BadJob, match=re.escape(f"Job({name}=…) is the earlier name of {spelling}, and both are given")):
        earlier(**{name: value}, **now)


@pytest.mark.parametrize("name", GIVEN)
def test_a_copy_can_be_changed_by_an_earlier_name(name: str) -> None:
    """`dataclasses.replace(job, ema=0.9)` changes a job that has another average, or none."""
    value, now, _ = GIVEN[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EarlierName)
        for job in (job_of(), job_of(**now)):
            assert describe_settings(dataclasses.replace(job, **{name: value})) == describe_settings(job_of(**now))
        assert dataclasses.replace(job_of(average=0.9), ema=None).average is None  # type: ignore[call-arg]
        assert dataclasses.replace(job_of(average=0.9), swa=None).average == stoker.EMA(0.9)  # type: ignore[call-arg]


def test_a_value_of_another_kind_is_refused() -> None:
    """A number is the decay of an average, and nothing of SWA."""
    with pytest.raises(BadJob, match=re.escape("Job(swa=…): wanted stoker.SWA(…), got 0.75")):
        earlier(swa=0.75)


def test_the_place_in_the_users_file_is_named() -> None:
    """Of a job made here it is this file."""
    with pytest.warns(EarlierName) as caught:
        stoker.Job(**SETTINGS, ema=0.9)
    assert caught[0].filename == __file__
    with pytest.warns(EarlierName) as caught:
        dataclasses.replace(job_of(), ema=0.9)  # type: ignore[call-arg]  # an earlier name
    assert caught[0].filename == __file__


def test_a_line_that_is_run_again_warns_once() -> None:
    """As in a study, which loads its job file for every trial."""
    code = compile("make(**settings, ema=0.9)", "train_me.py", "exec")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", EarlierName)
        for _ in range(3):
            exec(code, {"make": stoker.Job, "settings": SETTINGS})  # noqa: S102 - our own
    assert [(warning.filename, warning.lineno) for warning in caught] == [("train_me.py", 1)]


def test_what_no_job_ever_had_is_no_attribute() -> None:
    """Copies and protocols ask for attributes that are absent."""
    job = job_of(model=dict)
    assert not hasattr(job, "emma")
    assert pickle.loads(pickle.dumps(dataclasses.replace(job, name="again"))).name == "again"  # noqa: S301 - our own
