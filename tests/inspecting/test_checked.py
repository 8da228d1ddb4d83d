from __future__ import annotations

import pytest

from stoker.errors import BadJob
from stoker.inspecting.findings import clean_list, in_order
from stoker.records.data_check import DataCheck, Fault, Finding, Gravity, SplitFacts


def _finding(fault: Fault, gravity: Gravity, name: str = "", measure: float | None = None) -> Finding:
    return Finding(fault=fault, gravity=gravity, id=name, measure=measure)


def _check(findings: tuple[Finding, ...], num_samples: int) -> DataCheck:
    splits = (SplitFacts(name="", num_samples=num_samples),)
    return DataCheck(source="s", kind="images", made_at="now", took_s=0.0, splits=splits, findings=findings)


FINDINGS = (
    _finding("corrupt", "corrupt", "a"),
    _finding("duplicate", "fault", "b"),
    _finding("leak", "fault", "b"),
    _finding("extension", "fault", "c"),
    _finding("near-duplicate", "suspect", "d"),
    _finding("foreign", "note", "e"),
    _finding("empty-class", "fault"),
)


def test_faults_are_left_out_and_suspects_only_if_asked() -> None:
    """Each sample is left out once, for the first reason; a wrong name alone costs no sample."""
    clean = clean_list(_check(FINDINGS, 9))
    assert [(one.id, one.why) for one in clean.dropped] == [("a", "corrupt"), ("b", "duplicate")]
    assert clean.kept == 8  # the corrupt one was never counted
    strict = clean_list(_check(FINDINGS, 9), drop_suspects=True)
    assert strict.dropped_ids() == {"a", "b", "d"}
    assert strict.kept == 7


def test_nothing_left_is_an_error() -> None:
    """A list that keeps no sample is of no use."""
    with pytest.raises(BadJob, match="all 1 samples have faults; the first: a "):
        clean_list(_check((_finding("blank", "fault", "a"),), 1))


def test_the_worst_comes_first() -> None:
    """By gravity, then by kind, then by how far out."""
    ordered = in_order([*FINDINGS[::-1], _finding("near-duplicate", "suspect", "f", 0.99)])
    assert [one.gravity for one in ordered] == sorted(
        (one.gravity for one in ordered), key=("corrupt", "fault", "suspect", "note").index
    )
    assert [one.id for one in ordered if one.fault == "near-duplicate"] == ["f", "d"]
