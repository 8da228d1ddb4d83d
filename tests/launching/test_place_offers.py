"""Places compared by when a run would be finished there, by money, and by what earlier runs showed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.launching import parse_target, place_offers, start_up
from stoker.launching.bundle import Bundle
from stoker.launching.launch import launch
from stoker.launching.launch_options import LaunchOptions
from stoker.launching.launcher import Offer, Probe, Submission
from stoker.launching.place_history import PlaceLessons, PlaceRun, job_key, lessons_of, place_history, setting_key
from stoker.launching.place_offers import PlaceOffer, ranked
from stoker.launching.sky import PREEMPTED_PER_H, STARTING_S
from stoker.launching.start_up import BEGIN_S, SEND_S, TRIED_S, StartUp, expected_start, program_start_s
from stoker.planning.model.objectives import PlanLimits
from stoker.records import Candidate
from stoker.testing import FakeClock
from tests.flow.command import job_file, stoker_here
from tests.launching.elsewhere import fake_place
from tests.launching.fake_sky import sky
from tests.reporting import story

__all__ = ["fake_place", "sky"]

pytestmark = pytest.mark.usefixtures("place")
HOUR_S = 3600.0


def candidate(hours: float) -> Candidate:
    """A plan whose run takes so long."""
    chosen = story.decision().chosen
    forecast = dataclasses.replace(
        chosen.forecast, total_s=story.estimate(hours * HOUR_S, 0.1, "s"), checkpoint_every_s=600.0, trials_s=0.0
    )
    return dataclasses.replace(chosen, forecast=forecast, device="l4")


def offer(**changes: Any) -> Offer:
    """An offer of one L4."""
    settings: dict[str, Any] = {"text": "fake:box", "num_nodes": 1, "devices_each": 1, "device": "l4"}
    return Offer(**settings | changes)


def priced(hours: float, lessons: PlaceLessons | None = None, sent_bytes: int = 0, **changes: Any) -> PlaceOffer:
    """An offer with its forecast."""
    return place_offers._priced(offer(**changes), candidate(hours), lessons or PlaceLessons(), sent_bytes)


def came_home(**fields: Any) -> None:
    """A run of `fake:box`, unless they say another place, that came home with these fields."""
    about = {"place": "fake:box", "word": "fake:box/l4", "run": "r", "at": "2026-11-25T10:00:00+00:00"}
    place_history().append(PlaceRun(**about | fields))


def test_the_first_to_finish_comes_first_whatever_its_sticker() -> None:
    """A queue and a slower device cost more time than a higher price an hour; the difference is said."""
    cheap = priced(10, text="fake:cheap", price_per_h=0.5, starts_in_s=2 * HOUR_S)
    fast = priced(1, text="fake:fast", price_per_h=4.0, starts_in_s=60.0)
    first, second = ranked([cheap, fast], PlanLimits(), None)
    assert (first.text, first.price_rank, second.price_rank) == ("fake:fast", 2, 1)
    assert first.finish_s == pytest.approx(HOUR_S + 60)
    assert first.cost is not None
    assert first.cost.value == pytest.approx(4.0)
    assert "10 h 59 min later, though cheaper an hour" in second.why
    assert ranked([cheap, fast], PlanLimits(), "money")[0].text == "fake:fast"  # 4 USD in all, not 5


def test_an_unknown_start_is_ranked_after_known_ones() -> None:
    """It may be tomorrow; where money counts, the start does not."""
    open_end, known = (
        priced(1, text="fake:open", price_per_h=1.0),
        priced(2, text="fake:known", price_per_h=1.0, starts_in_s=0.0),
    )
    order = ranked([open_end, known], PlanLimits(), None)
    assert [one.text for one in order] == ["fake:known", "fake:open"]
    assert order[1].why.startswith("its start is unknown")
    assert ranked([open_end, known], PlanLimits(), "money")[0].text == "fake:open"


def test_limits_are_kept_and_an_unknown_price_keeps_none() -> None:
    """What breaks them comes last, with the figure that does."""
    offers = [
        priced(10, text="fake:dear", price_per_h=4.0),
        priced(1, text="fake:free", price_per_h=0.0),
        priced(1, text="fake:secret"),
    ]
    by_text = {one.text: one.problem for one in ranked(offers, PlanLimits(max_cost_usd=5.0), None)}
    assert by_text["fake:free"] == ""
    assert by_text["fake:dear"] == "costs $40.00, over $5.00"
    assert "price is unknown" in by_text["fake:secret"]
    late = ranked(offers, PlanLimits(deadline_s=2 * HOUR_S), None)[-1]
    assert (late.text, late.problem) == ("fake:dear", "finished in 10 h, after the deadline of 2 h")


def test_preemptions_and_transfer_take_time() -> None:
    """A preemption costs half the time between two checkpoints and a restart; bytes cost 100 Mbit/s."""
    calm, shaky = priced(10), priced(10, preempted_per_h=0.1)
    assert calm.run is not None
    assert shaky.run is not None
    assert shaky.run.value - calm.run.value == pytest.approx(300 + place_offers.RESTART_S)
    assert shaky.interrupted == pytest.approx(0.632, abs=1e-3)
    assert priced(1, sent_bytes=125_000_000).transfer_s == pytest.approx(10)


def test_earlier_runs_correct_the_next_estimate(place: Path) -> None:
    """Two runs there took half as long again as forecast, and waited; one alone changes nothing."""
    for number, ratio in enumerate((1.4, 1.6), start=1):
        came_home(
            run=f"r{number}",
            queue_s=100.0 * number,
            startup_s=20.0,
            submit_s=5.0,
            forecast_s=100.0,
            measured_s=100.0 * ratio,
        )
        if number == 1:
            assert lessons_of("fake:box").ratio == 1.0
    lessons = lessons_of("fake:box")
    assert (lessons.ratio, lessons.queue_s, lessons.num_runs) == (pytest.approx(1.5), 150.0, 2)
    estimate = priced(1, lessons)
    assert estimate.run is not None
    assert estimate.run.value == pytest.approx(1.5 * HOUR_S)
    assert estimate.starts_in_s == 150.0
    assert estimate.finish_s == pytest.approx(150 + 20 + 5 + 1.5 * HOUR_S)
    assert "forecast × 1.50, as 2 earlier runs took" in estimate.why
    assert priced(1, lessons, starts_in_s=5.0).starts_in_s == 5.0


def test_the_first_run_at_a_place_starts_as_a_program_does_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once here and once there, where the same computation takes twice as long; the plans that it tries take time."""
    monkeypatch.setattr(start_up, "loop_s", lambda: 0.005)
    there = expected_start(3.0, 0.01)
    assert there.submit_s == 3.0 + SEND_S
    assert there.startup_s == (3.0 + BEGIN_S) * 2
    assert there.slowness == 2.0
    assert expected_start(3.0, 0.0).slowness == 1.0
    start = StartUp(submit_s=4.0, startup_s=7.0, slowness=2.0)
    best = candidate(1)
    measured = dataclasses.replace(best.forecast, total_s=story.estimate(HOUR_S, 0.1, "s"), total_updates=40)
    measured = dataclasses.replace(
        measured, total_s=dataclasses.replace(measured.total_s, basis="measured here"), trials_s=None
    )
    first = place_offers._priced(offer(), dataclasses.replace(best, forecast=measured), PlaceLessons(), 0, start)
    assert (first.startup_s, first.run.value if first.run else 0) == (11.0, HOUR_S + TRIED_S)
    assert first.finish_s == pytest.approx(HOUR_S + TRIED_S + 11.0)
    assert "start-up 11.0 s, from that of a program here, and times 2 there; an environment" in first.why
    few = dataclasses.replace(measured, total_updates=39)
    assert PlaceLessons().run_time(few).value == HOUR_S


def test_a_program_of_stoker_is_started_to_see_how_long_it_takes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time until it has imported PyTorch as training does; a Python that cannot start one is no answer."""
    imported = place / "imported.py"
    note = "import atexit, sys; atexit.register(lambda: open('modules', 'w').write(' '.join(sys.modules)))"
    imported.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{note}; $2"\n')
    imported.chmod(0o755)
    monkeypatch.setattr(start_up, "_MOST_START_S", 600.0)
    monkeypatch.setattr(sys, "executable", str(imported))
    monkeypatch.setattr(start_up, "time", SimpleNamespace(perf_counter=FakeClock(tick_s=7.0)))
    assert program_start_s() == 7.0
    assert {"torch", "stoker.training.train", "stoker.planning.decision"} <= set(Path("modules").read_text().split())
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert program_start_s() is None


def test_hosts_are_compared_by_the_fastest_of_many_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else runs there slows some of them down; the program that a host is sent prints the same."""
    durations = itertools.chain.from_iterable((0.0, took_s) for took_s in (3.0, 0.25, *[2.0] * 18))
    monkeypatch.setattr(start_up, "time", SimpleNamespace(perf_counter=lambda: next(durations)))
    assert start_up.loop_s() == 0.25
    monkeypatch.undo()
    said = subprocess.run([sys.executable, "-c", start_up.LOOP_PROGRAM], capture_output=True, text=True, check=True)
    assert float(said.stdout) > 0


def test_a_place_that_has_shown_nothing_starts_as_others_of_its_kind(place: Path) -> None:
    """Counted as none it would be finished before a place that is known to start in a few seconds."""
    assert "start-up not known yet, counted as none" in priced(1).why
    came_home(startup_s=20.0, submit_s=5.0)
    other = priced(1, text="fake:other", starts_in_s=0.0)
    assert other.startup_s == 25.0
    assert other.finish_s == pytest.approx(25 + HOUR_S)
    assert "start-up 25.0 s, as runs at other places of this kind took" in other.why
    assert priced(1, text="none:other", starts_in_s=0.0).startup_s == 0


def test_a_job_is_expected_at_its_own_pace_there(place: Path) -> None:
    """One run of the same job on the same devices counts more than what runs of other jobs say of the place."""
    forecast = candidate(1).forecast
    for job, measured_s in (("same", 0.5 * HOUR_S), ("other", 2 * HOUR_S), ("other", 2 * HOUR_S)):
        came_home(
            job=job,
            device="l4",
            forecast_s=HOUR_S,
            measured_s=measured_s + 60.0,
            tried_s=60.0,
            samples=forecast.total_samples,
        )
    same = lessons_of("fake:box", job="same", device="l4")
    assert same.run_time(forecast).value == pytest.approx(0.5 * HOUR_S)
    assert same.run_time(forecast).high == pytest.approx(0.5 * HOUR_S * same.pace_factor)
    twice = dataclasses.replace(forecast, total_samples=2 * forecast.total_samples)
    assert same.run_time(twice).value == pytest.approx(HOUR_S)
    assert "at the pace of 1 earlier run of this job there (forecast × 0.50)" in priced(1, same).why
    assert priced(1, same, sent_bytes=125_000_000).transfer_s == 0  # its files are there
    for job, device in (("same", "2xl4"), ("third", "l4"), ("", "")):
        lessons = lessons_of("fake:box", job=job, device=device)
        assert lessons.run_time(forecast).value == pytest.approx(2 * HOUR_S + 60)
        assert lessons.is_sent is (job == "same")


def test_a_pace_is_of_the_setting_in_which_it_was_measured(place: Path) -> None:
    """Another image may train at another pace: a launch takes that of its own, a plan that of the newest run."""
    forecast = candidate(1).forecast
    for setting, hours in (("image a", 0.5), ("image b", 2.0)):
        came_home(job="same", device="l4", setting=setting, measured_s=hours * HOUR_S, samples=forecast.total_samples)
    expected = {"image a": 0.5, "image b": 2.0, None: 2.0, "image c": 1.0}
    for setting, hours in expected.items():
        lessons = lessons_of("fake:box", job="same", device="l4", setting=setting)
        assert lessons.run_time(forecast).value == pytest.approx(hours * HOUR_S), setting
        assert lessons.num_paces == int(setting != "image c")


def test_what_was_measured_here_may_take_longer_at_a_place_that_has_shown_nothing(place: Path) -> None:
    """Until its runs say how long they took: the interval is open to more, and the reason is said."""
    here = candidate(1)
    by_datasheet = dataclasses.replace(here.forecast.total_s, basis="datasheet")
    there = dataclasses.replace(here, forecast=dataclasses.replace(here.forecast, total_s=by_datasheet))
    seen = PlaceLessons(mean_error=1.1, num_ratios=2)
    unseen = priced(1)
    assert unseen.run is not None
    assert unseen.run.high == pytest.approx(1.7 * HOUR_S)
    assert (unseen.run.value, unseen.run.low) == (HOUR_S, here.forecast.total_s.low)
    assert "measured here and not there, so up to × 1.7" in unseen.why
    assert priced(1, seen).run == here.forecast.total_s
    assert place_offers._priced(offer(), there, PlaceLessons(), 0).run == by_datasheet


def test_the_interval_of_a_pace_is_as_wide_as_runs_differ(place: Path) -> None:
    """One run says little of how much the next differs; runs that differ more than usual widen it, the forecast not."""
    forecast = candidate(1).forecast
    factors = []
    for hours in (1.0, 1.0, 3.0):
        came_home(job="same", device="l4", measured_s=hours * HOUR_S, samples=forecast.total_samples)
        lessons = lessons_of("fake:box", job="same", device="l4")
        run = lessons.run_time(forecast)
        assert (run.value, run.basis) == (pytest.approx(HOUR_S), "calibrated")
        assert run.high / run.value == pytest.approx(run.value / run.low)
        factors.append(run.high / run.value)
    assert 1.15 < factors[1] < factors[0] < 1.25
    assert factors[2] > 2


def test_a_setting_is_environment_and_options_but_not_who_pays() -> None:
    """Another Python, image, variable or option is another one; an account or a time limit is not."""
    code = Bundle(kind="code", name="job.py", files=())
    base = Submission(run="r", target=parse_target("ssh:box"), code=code, stoker=code, job_file="job.py")
    others = [
        dataclasses.replace(base, environment="/opt/conda/bin/python"),
        dataclasses.replace(base, image="me/image:1"),
        dataclasses.replace(base, variables={"OMP_NUM_THREADS": "1"}),
        dataclasses.replace(base, options={"cpus": "1"}),
    ]
    assert len({setting_key(submission) for submission in (base, *others)}) == 5
    paid = dataclasses.replace(
        base,
        options={"account": "ml", "time": "1:00:00", "verify": "5%", "forwarding": "1usd"},
        run="other",
        secrets=(),
    )
    assert setting_key(paid) == setting_key(base)
    plain, high = (parse_target(word) for word in ("slurm:gpu/a100", "slurm:gpu/a100:qos=high"))
    assert job_key("c", (), plain) != job_key("c", (), high)
    assert job_key("c", (), plain) != job_key("c", (), parse_target("slurm:gpu/2x1xa100"))
    assert job_key("c", (), plain) == job_key("c", (), parse_target("slurm:gpu/a100:account=ml,time=2:00:00"))


def test_a_run_is_compared_with_the_forecast_that_was_shown(
    place: Path, fake_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stoker plan --on` keeps it, before lessons correct it; the submission remembers it, and makes no other one."""

    def on_one(planner: Any, where: Any) -> Any:
        return dataclasses.replace(story.decision(), candidates=(candidate(1),))

    monkeypatch.setattr(place_offers, "on_one", on_one)
    monkeypatch.setattr("stoker.launching.launch.plan", None)
    monkeypatch.setattr(fake_place, "start", lambda submission, tell: {"directory": "/there", "sent_bytes": 0})
    box = fake_place.parse("box")
    monkeypatch.setattr(fake_place, "parse", lambda text: dataclasses.replace(box, text="fake:box/l4", device="l4"))
    fake_place.offered = (offer(text="fake:box/l4"),)
    for number in range(2):
        came_home(word="fake:box", run=f"r{number}", at="", forecast_s=100.0, measured_s=300.0)
    shown = json.loads(stoker_here("plan", job_file(), "--on", "fake:box/l4", "--json").out)["offers"][0]
    assert shown["run"]["value"] == pytest.approx(3 * HOUR_S)
    options = LaunchOptions(env="theirs")
    first = launch(job_file(), on="fake:box/l4", options=options).launch
    assert (first.forecast_s, first.device) == (pytest.approx(HOUR_S), "l4")
    assert first.submit_s is not None
    other = launch(job_file(), on="fake:box/l4", settings={"epochs": 77}, options=options).launch
    assert other.forecast_s is None


def test_one_table_has_places_and_devices(place: Path, fake_place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places that do not answer, or lack something, are listed with the reason; programs get a record."""

    def on_one(planner: Any, where: Any) -> Any:
        chosen = dataclasses.replace(candidate(1), is_here=where.is_here, device=where.name)
        return dataclasses.replace(story.decision(), candidates=(chosen,))

    monkeypatch.setattr(place_offers, "on_one", on_one)
    monkeypatch.setattr(place_offers, "program_start_s", lambda: 2.0)
    fake_place.offered = (offer(text="fake:box/l4", starts_in_s=30.0, price_per_h=0.8, price_source="list of today"),)
    words = "fake:box,fake:gone,here,h100"
    document = json.loads(stoker_here("plan", job_file(), "--on", words, "--json").out)
    offers = {one["text"]: one for one in document["offers"]}
    assert [one["text"] for one in document["offers"]][:2] == ["cpu", "fake:box/l4"]
    assert "start-up 6.0 s, from that of a program here" in offers["fake:box/l4"]["why"]
    assert document["offers"][-1]["text"] == "fake:gone"
    assert offers["fake:box/l4"]["finish_s"] == pytest.approx(HOUR_S + 30, rel=0.01)
    assert "no route" in offers["fake:gone"]["problem"]
    shown = stoker_here("plan", "blobs.py", "--on", "fake:box,here")
    assert shown.code == 0
    for expected in ("finished in", "fake:box/l4", "yours", "$0.80", "is sent"):
        assert expected in shown.out
    fake_place.probed = Probe(facts={}, missing=("box has no Python",))
    nowhere = stoker_here("plan", "blobs.py", "--on", "fake:box")
    assert "box has no Python" in nowhere.out
    assert nowhere.code == 4  # no place can take it
    assert stoker_here("plan", "blobs.py", "--on", "fake:!").code == 2


HOURS = {"l4": 10.0, "h100": 1.5, "a10": 9.0}


def test_clouds_are_ranked_by_what_the_run_costs_there(place: Path, sky: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dearest machine an hour is the cheapest to finish; its start is charged, by what earlier runs showed."""

    def on_one(planner: Any, where: Any) -> Any:
        chosen = dataclasses.replace(candidate(HOURS[where.name]), device=where.name)
        return dataclasses.replace(story.decision(), candidates=(chosen,))

    def offers(word: str) -> list[dict[str, Any]]:
        said = stoker_here("plan", job_file(), "--on", word, "--objective", "money", "--json")
        return [one for one in json.loads(said.out)["offers"] if not one["problem"]]

    monkeypatch.setattr(place_offers, "on_one", on_one)
    monkeypatch.setattr(place_offers, "program_start_s", lambda: None)
    found = offers("sky:any")
    assert [(one["text"], one["price_rank"]) for one in found] == [
        ("sky:lambda/1xh100", 4),
        ("sky:lambda/1xa10", 1),
        ("sky:lambda/1xl4", 2),
        ("sky:aws/1xl4", 3),
    ]
    assert found[0]["cost"]["value"] == pytest.approx(2.49 * (1.5 + STARTING_S / HOUR_S))
    assert found[0]["starts_in_s"] == STARTING_S
    spot = offers("sky:any/l4:spot")[0]
    lost_s = 10 * PREEMPTED_PER_H * (STARTING_S + 300)
    assert spot["cost"]["value"] == pytest.approx(0.3 * (10 + (STARTING_S + lost_s) / HOUR_S))
    for number in range(2):
        came_home(place="sky:lambda", word="sky:lambda", run=f"r{number}", queue_s=900.0)
    learned = offers("sky:lambda/h100")[0]
    assert learned["starts_in_s"] == 900.0
    assert "median of 2 earlier runs" in learned["why"]
