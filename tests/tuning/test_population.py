"""Populations: who is replaced by whom, what is changed, and a whole study of members that train nothing."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import RunFailed
from stoker.records.study import StudyTrial
from stoker.tuning.population import Population, explored
from stoker.tuning.processes import Judge, Processes, TrialReading, TrialRequest, TrialResult, TrialSlot
from stoker.tuning.space import parse_space
from stoker.tuning.study_database import read_trials
from tests.tuning import children
from tests.tuning.builders import STEP, TOTAL, Told, conducted, conductor, settings

SPACE = "x=float(0,1) rate=log(1e-4,1) depth=int(1,9) width=choice(8,16,32) kind=choice(a,b,c) p=float(0,1,step=0.1)"


def population(members: int = 8, intervals: int = 3) -> Population:
    """Of members judged by their loss, over the steps of `builders`."""
    return Population(settings("x=float(0,1)", sampler="pbt", members=members, intervals=intervals))


def ended(number: int, loss: float | None, at: int = 900, x: float = 0.5) -> StudyTrial:
    """A trial handed on with that loss; pruned if there is none."""
    curve = () if loss is None else ((at, loss),)
    state = "pruned" if loss is None else "handed on"
    return StudyTrial(number=number, state=state, parameters={"x": x}, curve=curve, reason="diverged: too high")


def parents(losses: list[float | None]) -> list[int | None]:
    """Of each member's second trial, the trial that it goes on from."""
    first = [ended(number, loss) for number, loss in enumerate(losses)]
    found = population(len(losses))
    return [found.origin(len(losses) + member, first).parent for member in range(len(losses))]


def test_the_worst_quarter_goes_on_from_the_best_quarter() -> None:
    """Two of eight are replaced, by one of the best two each; the others go on from themselves."""
    found = parents([8.0, 1.0, 3.0, 7.0, 2.0, 4.0, 5.0, 6.0])
    assert [found[member] for member in (1, 2, 4, 5, 6, 7)] == [1, 2, 4, 5, 6, 7]
    assert {found[0], found[3]} <= {1, 4}


def test_who_is_gone_is_replaced_first() -> None:
    """Diverged members count to the worst quarter, and a number that is none to them; if they are more, all are."""
    assert parents([1.0, None, 3.0, 2.0])[2] == 2
    assert parents([1.0, None, 3.0, 2.0])[1] == 0
    assert parents([None, 5.0, None, None]) == [1, 1, 1, 1]
    assert parents([1.0, math.nan, 3.0, 2.0]) == [0, 0, 2, 3]


def test_nobody_left_ends_the_study_with_the_reasons() -> None:
    """There is nothing to go on from."""
    with pytest.raises(RunFailed, match="no member came to the end of interval 1: diverged: too high"):
        parents([None] * 4)


@given(st.lists(st.one_of(st.none(), st.floats(-1e3, 1e3)), min_size=4, max_size=24).filter(any))
def test_whoever_is_replaced_goes_on_from_somebody_at_least_as_good(losses: list[float | None]) -> None:
    """Whatever the values; and those that go on by themselves keep their settings."""
    first = [ended(number, loss, x=number / 100) for number, loss in enumerate(losses)]
    found = population(len(losses))
    replaced = 0
    for member, loss in enumerate(losses):
        origin = found.origin(len(losses) + member, first)
        assert origin.parent is not None
        taken = losses[origin.parent]
        assert taken is not None
        assert loss is None or taken <= loss
        assert origin.parent != member or origin.parameters == {"x": member / 100}
        replaced += origin.parent != member
    gone = losses.count(None)
    assert gone <= replaced <= max(gone, len(losses) // 4)


@given(st.integers(0, 10_000))
def test_changed_settings_stay_in_the_space_and_near(seed: int) -> None:
    """Numbers within their range, whole where they are, choices from the choices, steps on the grid."""
    space = parse_space(SPACE)
    before = {"x": 0.9, "rate": 0.01, "depth": 2, "width": 8, "kind": "a", "p": 0.30000000000000004}
    after = explored(before, space, random.Random(seed))
    assert 0 <= after["x"] <= 1
    assert 1e-4 <= after["rate"] <= 1
    assert after["depth"] in range(1, 10)
    assert isinstance(after["depth"], int)
    assert after["width"] in (8, 16, 32)
    assert after["kind"] in ("a", "b", "c")
    assert round(after["p"] * 10) == pytest.approx(after["p"] * 10)


def test_a_setting_is_changed_by_a_fifth_or_by_a_step() -> None:
    """Unless it is drawn again, which one in four is."""
    space, draws = parse_space("rate=log(1e-4,1) depth=int(1,90) width=choice(8,16,32)"), random.Random(0)
    found = [explored({"rate": 0.01, "depth": 2, "width": 16}, space, draws) for _ in range(400)]
    near = sum(one["rate"] in (0.008, 0.012) for one in found)
    assert 0.65 < near / 400 < 0.85
    assert sum(one["depth"] in (1, 3) for one in found) > 250
    assert {one["width"] for one in found} == {8, 16, 32}


def test_an_interval_ends_at_the_nearest_evaluation() -> None:
    """Nine evaluations in four intervals: after 2, 4 and 7 of them; the last one ends with the run."""
    found = population(members=4, intervals=4)
    ends = [next((at for at in range(STEP, TOTAL + 1, STEP) if found.ends_at(4 * k, at)), None) for k in range(4)]
    assert ends == [2 * STEP, 4 * STEP, 7 * STEP, None]


class Members:
    """Trials with a state on a disk of their own: how far each is, and a number that falls by `rate` a step."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[int, float]] = {}
        self.begun: list[tuple[int, int, float]] = []

    def __call__(self, request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
        """Go on from its own state, or its parent's."""
        name = request.directory.name
        at, loss = self.kept.get(name) or (self.kept[request.parent.name] if request.parent else (0, 10.0))
        self.begun.append((request.number, at, loss))
        while at < TOTAL:
            at, loss = at + STEP, loss * (1 - float(request.parameters["rate"]))
            is_stopping = judge(TrialReading(samples=at, total_samples=TOTAL, metrics={"loss": loss}))
            self.kept[name] = (at, loss)
            if is_stopping:
                return TrialResult(kind="stopped", samples=at)
        return TrialResult(kind="finished", metrics={"loss": loss}, samples=TOTAL)


STUDY = settings("rate=float(0.01,0.2)", sampler="pbt", members=6, intervals=3)


def test_members_train_side_by_side_and_better_than_any_that_is_left_alone() -> None:
    """Eighteen trials; each begins where its parent ended; what is trained is six whole trainings."""
    members = Members()
    study = conducted(None, STUDY, members)._study
    trials = read_trials(study)
    assert [one.state for one in trials] == ["handed on"] * 12 + ["finished"] * 6
    assert sum(one.samples for one in trials) == 6 * TOTAL
    for one in trials:
        assert (one.interval, one.member) == divmod(one.number, 6)
        if one.parent is not None:
            assert members.begun[one.number][1:] == members.kept[f"{one.parent:04}"]
    alone = max(float(one.parameters["rate"]) for one in trials[:6])
    assert min(one.value or 10 for one in trials) <= 10 * (1 - alone) ** 9 + 1e-9
    assert any(one.parent is not None and one.parent % 6 != one.member for one in trials)


@pytest.mark.slow
def test_a_population_that_is_cut_off_goes_on_as_if_it_were_not(tmp_path: Path) -> None:
    """In the middle of an interval, by another process: the same settings, parents and values."""
    whole = read_trials(conducted(None, STUDY, Members())._study)
    members = Members()
    calls = iter(range(10**6))

    def cut_off(request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
        return members(request, slot, lambda reading: _killed(calls) or judge(reading))

    with pytest.raises(KeyboardInterrupt):
        conducted(tmp_path, STUDY, cut_off)
    told = Told()
    again = read_trials(conducted(tmp_path, STUDY, members, tell=told)._study)
    assert [one["trial"] for one in told.of("resumed")] == [7]

    def same(trials: tuple[StudyTrial, ...]) -> list[object]:
        return [(one.number, one.state, one.parameters, one.parent, one.value, one.curve) for one in trials]

    assert same(again) == same(whole)


def _killed(calls: object) -> bool:
    if next(calls) == 22:  # type: ignore[call-overload]  # an iterator of numbers
        raise KeyboardInterrupt
    return False


def test_a_trial_that_stops_before_its_interval_ends_is_not_handed_on(tmp_path: Path) -> None:
    """The study's time was up: it is taken up again."""
    found = conductor(tmp_path, STUDY)
    request = found.next_request()
    assert request is not None
    assert not found.judge(0, TrialReading(samples=STEP, total_samples=TOTAL, metrics={"loss": 1.0}))
    found.ended(0, TrialResult(kind="stopped", samples=STEP))
    again = found.next_request()
    assert again is not None
    assert (again.number, again.reported_samples) == (0, STEP)


def test_a_trial_that_stops_just_before_its_evaluation_is_not_handed_on(tmp_path: Path) -> None:
    """Nearer to its interval's end than to the evaluation before, but not judged by it: it is taken up again."""
    found = conductor(tmp_path, STUDY)
    assert found.next_request() is not None
    for samples in (STEP, 2 * STEP):
        assert not found.judge(0, TrialReading(samples=samples, total_samples=TOTAL, metrics={"loss": 1.0}))
    found.ended(0, TrialResult(kind="stopped", samples=3 * STEP - STEP // 4))
    again = found.next_request()
    assert again is not None
    assert (again.number, again.reported_samples) == (0, 2 * STEP)


def test_a_trial_that_lost_what_it_was_judged_by_is_not_handed_on(tmp_path: Path) -> None:
    """A power cut took its last checkpoint, and it was stopped again before it came as far."""
    found = conductor(tmp_path, STUDY)
    assert found.next_request() is not None
    assert found.judge(0, TrialReading(samples=3 * STEP, total_samples=TOTAL, metrics={"loss": 1.0}))
    found.ended(0, TrialResult(kind="stopped", samples=STEP))
    again = found.next_request()
    assert again is not None
    assert again.number == 0


def test_the_next_interval_waits_for_all_members() -> None:
    """The first to finish is not ahead: there is nothing to begin until then."""
    found = conductor(None, dataclasses.replace(STUDY, members=4))
    begun = [found.next_request() for _ in range(4)]
    assert [one.number for one in begun if one is not None] == [0, 1, 2, 3]
    assert found.next_request() is None
    for number in range(4):
        assert found.judge(number, TrialReading(samples=900, total_samples=TOTAL, metrics={"loss": float(number)}))
        assert found.next_request() is None
        found.ended(number, TrialResult(kind="stopped", samples=900))
    following = found.next_request()
    assert following is not None
    assert (following.number, following.parent) == (4, Path("nowhere/trials/0000"))


@pytest.mark.slow
def test_members_run_in_processes_of_their_own(tmp_path: Path) -> None:
    """Two at once; the first waits for the last of its interval, and each learns whose state it begins with."""
    study = settings(
        "x=float(0,1)",
        sampler="pbt",
        members=4,
        intervals=2,
        objective="valid/score",
        higher_is_better=True,
        first_samples=100,
        total_samples=children.TOTAL,
    )
    found = conductor(tmp_path, study, parallel=2)
    Processes(children.climb, [TrialSlot(on="cpu"), TrialSlot(on="cpu")]).run(found)
    trials = read_trials(found._study)
    assert [one.state for one in trials] == ["handed on"] * 4 + ["finished"] * 4
    assert min(one.began_at for one in trials[4:]) >= max(one.ended_at or math.inf for one in trials[:4])
    worst = min(trials[:4], key=lambda one: one.value or 0)
    best = max(trials[:4], key=lambda one: one.value or 0)
    assert trials[4 + worst.number].parent == best.number
