"""Hooks look on, and cannot hurt a run."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from stoker.errors import BadJob
from stoker.records import Event
from stoker.training.hooks import Hooks, Update, on


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


def update(number: int) -> Update:
    """Some update."""
    return Update(samples=8 * number, updates=number, epoch=0, batch=8, loss=1.0, lr=0.1, grad_norm=None, wall_s=1.0)


def test_a_hook_hears_the_kinds_that_it_asked_for() -> None:
    """One that asked for nothing in particular hears every event, and no updates, of which there are thousands."""
    heard: list[tuple[str, object]] = []
    hooks = Hooks(
        [
            on("progress", lambda one: heard.append(("progress", one.kind))),
            on(["updated", "evaluated"], lambda one: heard.append(("both", getattr(one, "kind", "updated")))),
            lambda one: heard.append(("all", one.kind)),
        ],
        tell=heard.append,  # type: ignore[arg-type]
    )
    assert hooks.see_updates
    hooks(event(1))
    hooks.updated(update(1))
    hooks(Event(kind="evaluated", at=0.0, fields={}))
    assert heard == [
        ("progress", "progress"),
        ("all", "progress"),
        ("both", "updated"),
        ("both", "evaluated"),
        ("all", "evaluated"),
    ]


def test_who_raises_at_an_update_is_called_no_more() -> None:
    """Reported by the function's name, once; no hook is left to be called."""
    told: list[str] = []

    def broken(one: Update) -> None:
        raise ValueError(one.updates)

    hooks = Hooks([on("updated", broken)], tell=told.append)
    hooks.updated(update(1))
    hooks.updated(update(2))
    assert told == ["the hook broken raised ValueError (1) at 'updated', and is called no more"]
    assert not hooks.see_updates


def test_an_unknown_kind_is_refused_where_it_is_written() -> None:
    """With the nearest there is."""
    with pytest.raises(BadJob, match=r"no event 'evaluatd'.*evaluated"):
        on("evaluatd", print)
    with pytest.raises(BadJob, match="wants a function to call, got 3"):
        on("updated", 3)  # type: ignore[arg-type]


def test_an_update_cannot_be_changed() -> None:
    """Those who look on share it."""
    with pytest.raises(FrozenInstanceError):
        update(1).loss = 0.0  # type: ignore[misc]
