from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from stoker.records import JobSpec
from tests.records.strategies import JSON_VALUES, record_of

SPEC = JobSpec(
    name="mlp",
    entry="train_me.py",
    entry_digest="ab",
    parameters={"lr": 0.1},
    data_class="indexed",
    settings={"batch": 512, "optimizer": {"type": "SGD", "lr": 0.1}, "metrics": ["accuracy"]},
    data_fingerprint="f",
    num_train=1000,
    weights_digest="w",
)

# A dot in a key would look like a step down in the dotted name of a setting.
KEYS = st.text("abc", min_size=1, max_size=2)
SETTINGS = st.dictionaries(KEYS, JSON_VALUES | st.dictionaries(KEYS, JSON_VALUES, max_size=2), max_size=3)


def with_settings(**changes) -> JobSpec:
    """The spec with some settings changed."""
    return dataclasses.replace(SPEC, settings=SPEC.settings | changes)


def test_a_difference_names_the_setting_and_both_values() -> None:
    """A line reads `name: value here, value there`, nested settings by their dotted path."""
    assert with_settings(batch=256).differences(SPEC) == ("batch: 256 here, 512 there",)
    other = with_settings(optimizer={"type": "SGD", "lr": 0.2})
    assert other.differences(SPEC) == ("optimizer.lr: 0.2 here, 0.1 there",)
    assert dataclasses.replace(SPEC, num_train=10).differences(SPEC) == ("num_train: 10 here, 1000 there",)


def test_a_difference_within_a_list_names_the_part_that_differs() -> None:
    """Not both lists, with all that is equal in them."""
    flip = {"type": "RandomFlip", "p": 0.5}
    mine = with_settings(augment=[flip, {"type": "RandomShift", "pixels": 2}])
    theirs = with_settings(augment=[flip, {"type": "RandomShift", "pixels": 4}])
    assert mine.differences(theirs) == ("augment[1].pixels: 2 here, 4 there",)
    assert with_settings(metrics=["a", "b"]).differences(with_settings(metrics=["a"])) == (
        "metrics: ['a', 'b'] here, ['a'] there",
    )


def test_a_setting_of_one_side_alone_is_absent_on_the_other() -> None:
    """What only one of two has is a difference, even if its value is the word `absent`."""
    assert with_settings(ema="absent").differences(SPEC) == ("ema: absent here, absent there",)
    assert SPEC.differences(with_settings(ema=0.9)) == ("ema: absent here, 0.9 there",)


def test_a_whole_number_and_its_float_are_no_difference() -> None:
    """5 and 5.0 are one setting; True and 1 are two."""
    assert with_settings(epochs=5).differences(with_settings(epochs=5.0)) == ()
    assert with_settings(epochs=5).digest() == with_settings(epochs=5.0).digest()
    assert with_settings(flag=True).differences(with_settings(flag=1)) == ("flag: True here, 1 there",)


@given(SETTINGS, SETTINGS)
def test_there_are_differences_just_when_the_digests_differ(mine: dict, theirs: dict) -> None:
    """A run is refused by its digest and explained by the differences: neither may come without the other."""
    one, other = dataclasses.replace(SPEC, settings=mine), dataclasses.replace(SPEC, settings=theirs)
    assert (one.differences(other) == ()) == (one.digest() == other.digest())
    assert len(one.differences(other)) == len(other.differences(one))


@given(record_of(JobSpec))
def test_a_spec_does_not_differ_from_itself(spec: JobSpec) -> None:
    """Whatever is in it."""
    assert spec.differences(spec) == ()
