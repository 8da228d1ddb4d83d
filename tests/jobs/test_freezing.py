from __future__ import annotations

import math

import pytest

import stoker
from stoker.errors import BadJob, BadSetting
from stoker.jobs.freezing import Freeze
from stoker.jobs.job_description import describe_settings
from stoker.jobs.run_length import Extent
from tests.stepping.models import make_job, mlp


def test_the_first_pattern_that_matches_decides():
    """As in the groups of an optimiser; what none matches is trained from the first update on."""
    freeze = Freeze({"body.0.*": None, "body.*": stoker.updates(10), "*.bias": None})
    names = ("body.0.weight", "body.1.weight", "body.1.bias", "head.bias", "head.weight")
    assert [freeze.release(name) for name in names] == [math.inf, 10, 10, math.inf, 0]


def test_all_but_some_can_be_frozen():
    """What is excepted is trained whatever matches it, now and at the end."""
    freeze = Freeze({"*": stoker.updates(3)}, but=("head.*",))
    assert [freeze.release(name) for name in ("body.weight", "head.weight")] == [3, 0]
    assert freeze.at_the_end.release("body.weight") == 0
    with pytest.raises(BadSetting, match="but is a list of patterns"):
        Freeze(["*"], but="head.*")


def test_a_list_freezes_for_good():
    """Nothing of it thaws, and at the end it is what it was."""
    freeze = Freeze(["body.*"])
    assert not freeze.is_gradual
    assert freeze.release("body.weight") == freeze.at_the_end.release("body.weight") == math.inf


def test_at_the_end_only_what_is_for_good_is_left():
    """What thaws is trained then, also where a later pattern would freeze it for good."""
    freeze = Freeze({"body.1.*": stoker.epochs(1), "body.*": None}).at_the_end
    assert not freeze.is_gradual
    assert [freeze.release(name) for name in ("body.1.weight", "body.0.weight")] == [0, math.inf]


def test_epochs_and_samples_become_updates():
    """The fewest whole updates that reach them; updates stay."""
    given = {"a": stoker.epochs(1.5), "b": stoker.samples(33), "c": stoker.updates(3), "d": None}
    counted = Freeze(given).in_updates(Extent(num_train=100, batch=32)).durations
    assert [None if one is None else (one.value, one.unit) for one in counted.values()] == [
        (6, "updates"),
        (2, "updates"),
        (3, "updates"),
        None,
    ]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ((), "there is no pattern"),
        ("body.*", "wanted a list of patterns"),
        ([3], "a pattern is a text"),
        ({"body.*": 3}, "frozen for a duration"),
        ({"body.*": stoker.seconds(3)}, "not seconds"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, problem):
    """Where the job is made, with what was given."""
    with pytest.raises(BadJob, match=rf"Job\(freeze=…\): .*{problem}"):
        make_job(mlp, freeze=given)


def test_unknown_statistics_are_refused():
    """There are two."""
    with pytest.raises(ValueError, match='"kept" or "moving"'):
        Freeze(["a"], "frozen")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "beside",
    [
        {"sync": stoker.LocalSGD(every=stoker.updates(2))},
        {"batch": "auto"},
        {"optimizer": stoker.Muon(lr=0.02, rest=stoker.AdamW(lr=1e-3))},
        {"step": lambda model, optimizers, batch: None, "loss": None, "optimizer": lambda model: None},
    ],
)
def test_thawing_does_not_go_with_everything_but_freezing_for_good_does(beside):
    """A sentence says so; frozen for good is accepted with all of them."""
    make_job(mlp, freeze=("0.*",), **beside)
    with pytest.raises(BadJob, match="thaw while training goes on do not go with"):
        make_job(mlp, freeze={"0.*": stoker.updates(2)}, **beside)


def test_it_is_part_of_what_is_learned():
    """The description holds patterns in their order."""
    assert describe_settings(make_job(mlp))["freeze"] is None
    one, other = (
        describe_settings(make_job(mlp, freeze=dict(pairs)))["freeze"]
        for pairs in ([("0.*", None), ("*", stoker.updates(2))], [("*", stoker.updates(2)), ("0.*", None)])
    )
    assert one != other
