from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadJob, BadSetting
from stoker.jobs import SGD, AdamW, DiLoCo, Job, LocalSGD
from stoker.jobs.job_description import describe_settings
from stoker.units import epochs, samples, updates


def job(**changes: Any) -> Job:
    """A job that can be meant, with changes."""
    settings = {
        "model": object,
        "data": ((), ()),
        "loss": "mse",
        "optimizer": SGD(lr=0.1),
        "batch": 64,
        "until": epochs(1),
    }
    return Job(**settings | changes)


@pytest.mark.parametrize(
    ("every", "interval"),
    [(updates(50), 50), (updates(2.5), 3), (samples(6400), 100), (samples(6401), 101), (samples(1), 1)],
)
def test_an_interval_is_whole_updates(every: Any, interval: int) -> None:
    """Updates stay what they are; samples are rounded up to whole batches, one at least."""
    assert LocalSGD(every=every).interval(64) == interval


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"every": epochs(1)}, "got Duration(value=1.0, unit='epochs')"),
        ({"every": 50}, "every is stoker.updates(50) or stoker.samples(25_600), say; got 50"),
        ({"outer": SGD(lr=0.7, weight_decay=0.1)}, "weight decay, dampening and groups are inner ones"),
        ({"outer": SGD(lr=0.7, momentum=1.0)}, "the outer momentum must be in [0, 1), got 1.0"),
        ({"compress": "int2"}, "compress is one of int8, int4, none, got 'int2'"),
        ({"fragments": 0}, "fragments is a whole number, 1 or more, got 0"),
        ({"fragments": 1.5}, "fragments is a whole number, 1 or more, got 1.5"),
        ({"overlap": True}, "overlap is a whole number, 0 or more, got True"),
        ({"overlap": -1}, "overlap is a whole number, 0 or more, got -1"),
        ({"keep": 1.0}, "keep is a share in [0, 1), got 1.0"),
        ({"early": updates(4)}, "how long it goes for: (stoker.updates(4), stoker.updates(300)); got"),
        ({"early": (updates(4), epochs(1))}, "early is an interval and how long it goes for"),
        ({"rate": "sqrt"}, 'rate is "as_given" or "by_noise", got \'sqrt\''),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], problem: str) -> None:
    """Each setting is checked when it is made, with what it was."""
    with pytest.raises(ValueError, match=re.escape(problem)):
        DiLoCo(**{"every": updates(50), **settings})


def test_another_outer_optimiser_is_refused() -> None:
    """Pseudo-gradients go into SGD: nothing else is carried out."""
    with pytest.raises(BadSetting, match=r"outer is a stoker\.SGD, got a AdamW"):
        DiLoCo(every=updates(50), outer=AdamW(lr=1e-3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sync": "diloco"}, "Job(sync=…): wanted stoker.DiLoCo(…) or stoker.LocalSGD(…), got a str"),
        ({"sync": DiLoCo(every=updates(4), fragments=5)}, "5 fragments cannot take turns within 4 updates"),
        ({"sync": DiLoCo(every=samples(256), overlap=4)}, "goes on for 4 updates is not over when the next one begins"),
        ({"sync": DiLoCo(every=updates(9), overlap=4, early=(updates(4), updates(8)))}, "begins, after 4"),
        ({"sync": LocalSGD(every=updates(4), early=(updates(5), updates(9)))}, "early exchanges, every 5 updates, are"),
        ({"sync": LocalSGD(every=updates(4)), "average": 0.9}, "an average would be of one site's weights"),
        ({"sync": LocalSGD(every=updates(4)), "on_non_finite": "skip"}, 'sync needs "stop"'),
        ({"sync": LocalSGD(every=updates(4)), "step": len}, "sync does not go with a step of the job's own"),
        ({"sync": DiLoCo(every=updates(4), rate="by_noise")}, 'rate="by_noise" is for Adam and its kin'),
    ],
)
def test_jobs_that_it_does_not_go_with_are_refused(changes: dict[str, Any], problem: str) -> None:
    """What would be done by halves is said when the job is made."""
    with pytest.raises(BadJob, match=re.escape(problem)):
        job(**changes)


def test_it_belongs_to_what_is_learned() -> None:
    """A job with it has another spec, one with another interval too."""
    plain, one, other = (
        describe_settings(job(sync=sync)) for sync in (None, DiLoCo(every=updates(50)), DiLoCo(every=updates(20)))
    )
    assert plain["sync"] is None
    assert one["sync"] != other["sync"]
    assert {name for name in one if one[name] != plain[name]} == {"sync"}


def test_an_early_interval_goes_for_whole_ones() -> None:
    """Samples are of all sites together, as those of the later interval; without it none is early."""
    sync = LocalSGD(every=updates(50), early=(samples(256), samples(1000)))
    assert sync.early_interval(64) == (4, 16)
    assert LocalSGD(every=updates(50)).early_interval(64) == (50, 0)


@given(parts=st.lists(st.integers(1, 500), min_size=1, max_size=6))
def test_the_average_of_sites_is_as_noisy_as_lockstep_and_goes_as_far(parts: list[int]) -> None:
    """Where noise decides an update's length, whatever part of the batch each takes; a site's updates have length 1."""
    sync, batch = LocalSGD(every=updates(4), rate="by_noise"), sum(parts)
    rates = [sync.rate_factor(batch, part) for part in parts]
    weights = [part / batch for part in parts]
    noise = sum((weight * rate) ** 2 for weight, rate in zip(weights, rates, strict=True))
    # Of fewer samples the way that all agree on is a smaller part of an update of length 1.
    way = sum(w * rate * (part / batch) ** 0.5 for w, rate, part in zip(weights, rates, parts, strict=True))
    assert noise == pytest.approx(1)
    assert way == pytest.approx(1)


@pytest.mark.parametrize(
    ("num_updates", "settings", "outer", "words"),
    [
        (5000, {}, SGD(lr=0.7, momentum=0.9, nesterov=True), None),
        (
            620,
            {},
            SGD(lr=1.0, momentum=0.4, nesterov=True),
            "has 62 exchanges between sites before its end (620 updates",
        ),
        (70, {}, SGD(lr=1.0), "outer was not given: stoker.SGD(lr=1) is taken"),
        (70, {"outer": SGD(lr=0.7, momentum=0.9)}, SGD(lr=0.7, momentum=0.9), "overshoots in runs of fewer than 100"),
        (70, {"outer": SGD(lr=1.0)}, SGD(lr=1.0), None),
        (70, {"overlap": 4}, SGD(lr=0.7, momentum=0.9, nesterov=True), "without overlap takes their average"),
        (9, {}, SGD(lr=1.0), "has 0 exchanges between sites before its end (9 updates, one after every 10): each site"),
        (99, {"early": (updates(1), updates(99))}, SGD(lr=1.0, momentum=0.4, nesterov=True), "has 99 exchanges"),
        (101, {"early": (updates(1), updates(101))}, SGD(lr=0.7, momentum=0.9, nesterov=True), None),
    ],
)
def test_a_short_run_does_not_get_the_published_momentum_in_silence(
    num_updates: int, settings: dict[str, Any], outer: SGD, words: str | None
) -> None:
    """What was not given is chosen by the number of exchanges; what was given stays, and what it costs is said."""
    chosen, said = DiLoCo(every=updates(10), **settings).for_run(64, num_updates)
    assert chosen.outer == outer
    if words is None:
        assert said is None
    else:
        assert words in (said or "")


def test_an_average_needs_no_warning_unless_there_is_none() -> None:
    """Local SGD has no momentum; but sites that never come together are said to."""
    assert LocalSGD(every=updates(10)).for_run(64, 70) == (LocalSGD(every=updates(10)), None)
    assert "has 0 exchanges" in (LocalSGD(every=updates(10)).for_run(64, 7)[1] or "")


def test_long_runs_keep_the_spec_that_they_had() -> None:
    """Their identity has the published optimiser in it, as it had when that was the setting's own default."""
    chosen, _ = DiLoCo(every=updates(10)).for_run(64, 5000)
    given = DiLoCo(every=updates(10), outer=SGD(lr=0.7, momentum=0.9, nesterov=True))
    assert describe_settings(job(sync=chosen)) == describe_settings(job(sync=given))
