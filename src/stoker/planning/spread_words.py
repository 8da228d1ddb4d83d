"""What a layout's forecast rests on, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stoker.planning.communication import Passing
from stoker.planning.spread_forecast import SpreadUpdate
from stoker.records import Forecast
from stoker.records.links import Links
from stoker.units import format_bytes, format_seconds

_WORTH_TELLING = 0.01
"""Messages that take less than this share of an update are not spoken of."""


def words_on_messages(spread: SpreadUpdate, links: Sequence[Links]) -> tuple[str, ...]:
    """What processes tell each other in an update, a line for each kind, and what the links rest on."""
    return (*_messages(spread), *_waiting(spread), *(line for one in links if (line := words_on_links(one))))


def words_on_links(links: Links) -> str:
    """`links: NVLink 4, datasheet`, with what was assumed."""
    said = f"links: {links.name}, {links.basis}"
    return f"{said}; {links.note}" if links.note else said


def words_on_message(one: Passing) -> str:
    """`gradients summed, 41 MB in 2 messages: 30 ms, 21 ms of it hidden`."""
    traffic = one.traffic
    count = round(len(traffic.sizes) * traffic.times)
    plural = "s" if count != 1 else ""
    hidden = one.seconds - one.exposed_s
    beside = f"{format_seconds(hidden)} of it hidden" if hidden > 0.01 * one.seconds else "none of it hidden"
    return (
        f"{traffic.what}, {format_bytes(traffic.num_bytes)} in {count} message{plural}: "
        f"{format_seconds(one.seconds)}, {beside}"
    )


def why_slower(spread: SpreadUpdate, forecast: Forecast, best: Forecast) -> str:
    """What a layout loses by: `1.40x the time: 12 ms of messages show, 3 ms of stages waiting`."""
    ratio = forecast.seconds_per_sample / best.seconds_per_sample
    parts = [
        (spread.exposed_s - (best.exposed_s.value if best.exposed_s is not None else 0.0), "more of messages show"),
        (spread.bubble_s, "of stages waiting"),
        (spread.waiting_s, "of processes waiting for each other at messages"),
        (spread.overhead_s, "of the layout's own work"),
    ]
    told = [f"{format_seconds(seconds)} {what}" for seconds, what in parts if seconds > _WORTH_TELLING * spread.total_s]
    return f"{ratio:.2f}x the time" + (f": {', '.join(told)} an update" if told else "")


def _messages(spread: SpreadUpdate) -> Iterator[str]:
    told = sorted(spread.messages, key=lambda one: -one.seconds)
    worth = [one for one in told if one.seconds > _WORTH_TELLING * spread.total_s]
    yield from (words_on_message(one) for one in worth)


def _waiting(spread: SpreadUpdate) -> Iterator[str]:
    if spread.bubble_s > 0:
        yield f"stages wait for each other {format_seconds(spread.bubble_s)} of {format_seconds(spread.total_s)}"
    if spread.waiting_s > _WORTH_TELLING * spread.total_s:
        yield f"processes wait for each other at messages {format_seconds(spread.waiting_s)}"
