from __future__ import annotations

from stoker.inspecting.findings import class_findings, in_order_of_use
from stoker.records.data_check import SplitFacts


def _split(name: str, **classes: int) -> SplitFacts:
    return SplitFacts(name=name, num_samples=sum(classes.values()), classes=classes)


def test_imbalance_is_told_from_ten_to_one() -> None:
    """Nine to one is not reported, ten to one is, with both classes."""
    assert list(class_findings([_split("train", a=9, b=1)])) == []
    (told,) = class_findings([_split("train", a=1, b=10, c=5)])
    assert (told.fault, told.measure, told.detail) == ("imbalance", 10.0, "b has 10 samples, a has 1")


def test_a_class_that_only_measures_is_told() -> None:
    """A class that training lacks is reported; one that a split that measures lacks is not."""
    (told,) = class_findings([_split("test", a=2, b=1), _split("train", a=3, c=3)])
    assert (told.fault, told.where) == ("unknown-class", "test/b")
    assert list(class_findings([_split("test", a=2)])) == []


def test_empty_folders_are_told_and_training_comes_first() -> None:
    """A class without a sample is named with its split; splits are in the order they are used in."""
    assert [one.where for one in class_findings([], [("train", "x"), ("", "y")])] == ["train/x", "y"]
    splits = [_split("test"), _split("against"), _split("train")]
    assert [one.name for one in in_order_of_use(splits)] == ["train", "test", "against"]
