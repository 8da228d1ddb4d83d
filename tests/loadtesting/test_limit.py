"""The whole search against servers of known capacity; what it finds is compared with that, never with a clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from stoker.errors import ServiceError
from stoker.loadtesting import load_test, measurement, serving_limit
from stoker.loadtesting.http_connection import Address
from stoker.loadtesting.load_generator import LoadTrace
from stoker.loadtesting.measurement import LoadTarget
from stoker.loadtesting.serving_limit import SettingsSearch
from stoker.records import ServiceSettings
from stoker.records.service import Objective, SettingsTrial
from stoker.testing.tiny_models import tiny_artifact
from tests.loadtesting.servers import PAYLOAD, served, single_server

OBJECTIVE = Objective(q=0.99, within_s=0.25)
DEFAULT = ServiceSettings(max_batch_rows=1)


@contextmanager
def serving(settings: ServiceSettings) -> Iterator[LoadTarget]:
    """A server that takes 1 ms a request, and less with larger batches."""
    with served(single_server(0.001 / min(settings.max_batch_rows, 4))) as address:
        yield LoadTarget(address, [PAYLOAD], connections=64, objective=OBJECTIVE, patience_s=1.0)


@pytest.mark.slow
def test_a_search_finds_no_more_than_the_service_can_do() -> None:
    """In a few seconds it has a rate below the capacity, tried others, and reported of each as it ended."""
    told: list[SettingsTrial] = []
    search = SettingsSearch(
        start=serving, objective=OBJECTIVE, default=DEFAULT, cores=1, seconds=4.0, on_trial=told.append
    )
    found = search.run(model="m", machine="here")
    assert 0 < found.default.rate <= 1000
    assert found.chosen.rate <= 4000
    assert found.trials == tuple(told)
    assert found.trials[0] == found.default
    assert len(found.trials) > 1
    assert found.levels


@pytest.mark.slow
def test_settings_that_do_not_start_are_passed_over() -> None:
    """Their trial says why, and the default ones are chosen."""

    @contextmanager
    def only_the_default(settings: ServiceSettings) -> Iterator[LoadTarget]:
        if settings != DEFAULT:
            raise ServiceError("too many threads")
        with serving(settings) as target:
            yield target

    search = SettingsSearch(start=only_the_default, objective=OBJECTIVE, default=DEFAULT, cores=1, seconds=4.0)
    found = search.run(model="m", machine="here")
    assert found.chosen.settings == DEFAULT
    assert {trial.why for trial in found.trials[1:]} == {"too many threads"}


def test_a_service_that_never_comes_up_is_an_error() -> None:
    """There is nothing to find then."""

    @contextmanager
    def never(settings: ServiceSettings) -> Iterator[LoadTarget]:
        raise ServiceError("no model")
        yield

    with pytest.raises(ServiceError, match="no model"):
        SettingsSearch(start=never, objective=OBJECTIVE, default=DEFAULT, cores=1, seconds=4.0).run(
            model="m", machine="here"
        )


def test_an_interrupted_search_has_its_best_so_far() -> None:
    """Ctrl-C in the second trial: the first one's outcome is the result, and it is not called complete."""
    starts = iter([True])

    @contextmanager
    def interrupted(settings: ServiceSettings) -> Iterator[LoadTarget]:
        if not next(starts, False):
            raise KeyboardInterrupt
        with serving(settings) as target:
            yield target

    search = SettingsSearch(start=interrupted, objective=OBJECTIVE, default=DEFAULT, cores=1, seconds=4.0)
    found = search.run(model="m", machine="here")
    assert found.chosen == found.default
    assert found.chosen.rate > 0
    assert (found.is_complete, found.levels) == (False, ())


def test_where_nothing_is_held_other_settings_are_tried_at_rates_that_there_is_time_for() -> None:
    """Every answer is late: the search goes on from the lowest rate it measured, and says down to which none held."""

    @contextmanager
    def late(settings: ServiceSettings) -> Iterator[LoadTarget]:
        with served(single_server(0.001)) as address:
            yield LoadTarget(
                address, [PAYLOAD], connections=8, objective=Objective(q=0.9, within_s=1e-5), patience_s=1.0
            )

    objective = Objective(q=0.9, within_s=1e-5)
    found = SettingsSearch(start=late, objective=objective, default=DEFAULT, cores=1, seconds=8.0).run(
        model="m", machine="here"
    )
    assert found.chosen.rate == 0
    assert len(found.trials) > 1
    assert "missed at every rate tried, down to" in found.default.why


def test_requests_at_equal_distances_are_so_in_a_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`--constant` holds for every measurement of it, not for a single rate alone."""
    dues: list[np.ndarray] = []

    def loop(address: Address, payloads: object, due: np.ndarray, **options: object) -> LoadTrace:
        dues.append(due)
        times, each = due.tolist(), [1] * len(due)
        done, statuses = [at + 0.001 for at in times], [200] * len(due)
        return LoadTrace(due=times, noticed=times, done=done, statuses=statuses, rows=each)

    monkeypatch.setattr(measurement, "open_loop", loop)
    load = load_test.Load(is_constant=True)
    target = load_test._target(Address("127.0.0.1", 1), "tiny", tiny_artifact(tmp_path), load, OBJECTIVE)
    search = SettingsSearch(start=serving, objective=OBJECTIVE, default=DEFAULT, cores=1, seconds=0.1)
    search._began = search.clock()
    search._highest(target, first=1000.0)
    assert dues
    assert all(np.diff(due).std() < 1e-9 for due in dues)


def test_a_rate_below_one_that_held_is_measured_twice_before_it_is_called_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A table with a rate that missed below one that held says that this was tried again."""
    outcomes = iter(["held", "missed", "held", "missed", "missed"])
    asked: list[float] = []

    def measured(target: LoadTarget, rate: float, seconds: float, **options: object) -> SimpleNamespace:
        asked.append(rate)
        return SimpleNamespace(rate=rate, held=next(outcomes))

    monkeypatch.setattr(serving_limit, "at_rate", measured)
    search = SettingsSearch(start=serving, objective=OBJECTIVE, default=DEFAULT, cores=1, seconds=4.0)
    search._began = search.clock()
    best, levels = search._confirmed(SettingsTrial(settings=DEFAULT, rate=400.0, why=""))
    assert asked == [400, 200, 200, 320, 320]
    assert [one.held for one in levels] == ["held", "missed", "held"]
    assert (best.rate, "320 requests/s missed twice" in best.why) == (400, True)
