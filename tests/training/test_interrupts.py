"""Signals ask training to stop, and are as before when it is over."""

from __future__ import annotations

import signal
import threading

import pytest

from stoker.training.signals import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_request_with_its_name(number: signal.Signals) -> None:
    """Nothing is interrupted; the loop sees the request after the update under way."""
    with stop_on_signals() as stop:
        assert stop.reason is None
        signal.raise_signal(number)
        assert stop.reason == number.name


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    """A user who cannot wait for the update presses again."""
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.reason == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_second_sigterm_waits_like_the_first() -> None:
    """A supervisor that repeats itself does not cost the checkpoint."""
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.reason == "SIGTERM"


def test_handlers_are_given_back_even_after_an_error() -> None:
    """A program that trains keeps its own way with signals."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ValueError, match="mine"), stop_on_signals():
        raise ValueError("mine")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    """There Python allows no handlers: training runs all the same, and can be asked to stop directly."""
    reasons: list[str | None] = []

    def train() -> None:
        with stop_on_signals() as stop:
            stop.ask("because")
            reasons.append(stop.reason)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert reasons == ["because"]
    assert signal.getsignal(signal.SIGINT) == before
