"""The whole search against servers of known capacity; what it finds is compared with that, never with a clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stoker.errors import ServiceError
from stoker.loadtesting.limit import Search
from stoker.loadtesting.measuring import Target
from stoker.records import ServiceSettings
from stoker.records.loadtest import Objective, SettingsTrial
from tests.loadtesting.servers import PAYLOAD, served, single_server

OBJECTIVE = Objective(q=0.99, within_s=0.25)
DEFAULT = ServiceSettings(max_batch_rows=1)


@contextmanager
def serving(settings: ServiceSettings) -> Iterator[Target]:
    """A server that takes 1 ms a request, and less with larger batches."""
    with served(single_server(0.001 / min(settings.max_batch_rows, 4))) as address:
        yield Target(address, [PAYLOAD], connections=64, objective=OBJECTIVE, patience_s=1.0)


def test_a_search_finds_no_more_than_the_service_can_do() -> None:
    """In a few seconds it has a rate below the capacity, tried others, and told of each as it ended."""
    told: list[SettingsTrial] = []
    search = Search(start=serving, objective=OBJECTIVE, default=DEFAULT, cores=1, seconds=4.0, told=told.append)
    found = search.run(model="m", machine="here")
    assert 0 < found.default.rate <= 1000
    assert found.chosen.rate <= 4000
    assert found.trials == tuple(told)
    assert found.trials[0] == found.default
    assert len(found.trials) > 1
    assert found.levels


def test_settings_that_do_not_start_are_passed_over() -> None:
    """Their trial says why, and the default ones are chosen."""

    @contextmanager
    def only_the_default(settings: ServiceSettings) -> Iterator[Target]:
        if settings != DEFAULT:
            raise ServiceError("too many threads")
        with serving(settings) as target:
            yield target

    search = Search(start=only_the_default, objective=OBJECTIVE, default=DEFAULT, cores=1, seconds=4.0)
    found = search.run(model="m", machine="here")
    assert found.chosen.settings == DEFAULT
    assert {trial.why for trial in found.trials[1:]} == {"too many threads"}


def test_a_service_that_never_comes_up_is_an_error() -> None:
    """There is nothing to find then."""

    @contextmanager
    def never(settings: ServiceSettings) -> Iterator[Target]:
        raise ServiceError("no model")
        yield

    with pytest.raises(ServiceError, match="no model"):
        Search(start=never, objective=OBJECTIVE, default=DEFAULT, cores=1, seconds=4.0).run(model="m", machine="here")


def test_an_interrupted_search_has_its_best_so_far() -> None:
    """Ctrl-C in the second trial: the first one's outcome is the result, and it is not called complete."""
    starts = iter([True])

    @contextmanager
    def interrupted(settings: ServiceSettings) -> Iterator[Target]:
        if not next(starts, False):
            raise KeyboardInterrupt
        with serving(settings) as target:
            yield target

    search = Search(start=interrupted, objective=OBJECTIVE, default=DEFAULT, cores=1, seconds=4.0)
    found = search.run(model="m", machine="here")
    assert found.chosen == found.default
    assert found.chosen.rate > 0
    assert (found.is_complete, found.levels) == (False, ())
