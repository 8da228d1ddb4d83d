"""Hooks look on, and cannot hurt a run."""

from __future__ import annotations

from stoker.records import Event
from stoker.training import Hooks


def event(samples: int) -> Event:
    """Of some progress."""
    return Event(kind="progress", at=0.0, fields={"samples": samples, "split_s": {"data": 1.0}})


def test_every_hook_gets_a_copy_of_every_event() -> None:
    """What one of them changes neither the others nor the run see."""
    heard: list[float] = []

    def meddling(one: Event) -> None:
        one.fields["split_s"]["data"] = 2.0

    def listening(one: Event) -> None:
        heard.append(one.fields["split_s"]["data"])

    first = event(1)
    Hooks([meddling, listening], tell=heard.append)(first)  # type: ignore[arg-type]
    assert heard == [1.0]
    assert first.fields["split_s"] == {"data": 1.0}


def test_a_hook_that_raises_is_told_of_once_and_called_no_more() -> None:
    """The others go on."""
    told: list[str] = []
    heard: list[int] = []

    def failing(one: Event) -> None:
        raise KeyError(one.kind)

    hooks = Hooks([failing, lambda one: heard.append(one.fields["samples"])], tell=told.append)
    for samples in (1, 2, 3):
        hooks(event(samples))
    assert heard == [1, 2, 3]
    assert told == ["the hook failing raised KeyError ('progress') at 'progress', and is called no more"]
