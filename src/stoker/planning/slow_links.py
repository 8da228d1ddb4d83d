"""Cost of training in lockstep over a slow link, and the synchronisation interval to use instead. No torch.

What: compares an all-reduce of gradients with every update with an all-gather of compressed pseudo-gradients after an
interval (`Job(sync=…)`), both against the time of an update alone. Links are measured, or stated as bandwidth and
latency; the latter cost as much as a ring.
Assumes that gradients are summed after the backward pass (overlap hides at most the backward pass, two thirds of an
update), that all links are equal, and that nothing else uses them. Not modelled: TCP's slow start, which adds some
round trips to an exchange after a pause.
Sources: ring all-reduce as in Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002; intervals in
Douillard et al. 2023, https://arxiv.org/abs/2311.08105, section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker.jobs.sync import Compression
from stoker.records.hardware import LinkCost, Links
from stoker.units import format_bytes, format_seconds

MOST_SHARE = 0.1
"""Largest share of a site's time that exchanges may take."""

MOST_EVERY = 500
"""Most updates between two exchanges that are recommended: the interval of DiLoCo's main result; longer ones lose more
there."""

BYTES_EACH: dict[Compression, float] = {"int8": 1 + 4 / 1024, "int4": 0.5 + 4 / 128}
"""Bytes per parameter in a compressed exchange: its bits, and a scale for each 1,024, or 128, parameters."""

_ROUND = (1, 2, 3, 4, 5, 6, 8, 10)
_BACKWARD = 2 / 3
"""Share of the backward pass in an update's arithmetic."""


def stated_link(*, bytes_per_s: float, latency_s: float, sites: int = 2) -> Links:
    """A link between sites from its bandwidth in one direction [bytes/s] and its latency [s].

    >>> stated_link(bytes_per_s=12.5e6, latency_s=0.05).seconds("all-reduce", 12.5e6)
    1.1

    Raises:
        ValueError: no bandwidth, a negative latency, or fewer than 2 sites.
    """
    if not (0 < bytes_per_s < math.inf and 0 <= latency_s < math.inf and sites >= 2):
        raise ValueError(
            f"a link joins 2 sites or more, carries more than 0 bytes/s and takes 0 s or longer; got {sites} sites, "
            f"{bytes_per_s} bytes/s and {latency_s} s"
        )
    turns = sites - 1
    one = 1 / sites / bytes_per_s
    return Links(
        name="slow link",
        world_size=sites,
        costs=(
            LinkCost(collective="all-reduce", alpha_s=2 * turns * latency_s, beta_s_per_byte=2 * turns * one),
            LinkCost(collective="all-gather", alpha_s=turns * latency_s, beta_s_per_byte=turns * one),
        ),
        basis="datasheet",
    )


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Lockstep compared with exchanges after an interval, over one link.

    `sync_s` is the time of summing gradients in each update, `slowdown` the ratio of an update with it to one without,
    at best (the backward pass hides a part) and at worst. `exchange_s` is one exchange of weights under `compress`,
    `every` the least round number of updates after which it takes no more than MOST_SHARE of the time. With exchanges
    in the background, `overlap` is the length of one in updates, and `overlapped_every` the least round number of
    updates of which it takes at most half, so that temporarily slower links do not hold sites up. Neither is capped.
    """

    step_s: float
    sync_s: float
    slowdown: tuple[float, float]
    exchange_s: float
    every: int
    overlap: int
    overlapped_every: int
    sync_bytes: float
    exchange_bytes: float
    compress: Compression = "int8"

    @property
    def is_in_background(self) -> bool:
        """True if exchanges must overlap with updates, since the interval would be longer than published ones."""
        return self.every > MOST_EVERY

    @property
    def interval(self) -> int:
        """Recommended number of updates between two exchanges, at most MOST_EVERY."""
        return min(MOST_EVERY, self.overlapped_every if self.is_in_background else self.every)

    @property
    def waiting_share(self) -> float:
        """Share of a site's time spent waiting for exchanges at `interval` [0 to 1]."""
        hidden_s = min(self.overlap, self.interval - 1) * self.step_s if self.is_in_background else 0.0
        waiting_s = max(0.0, self.exchange_s - hidden_s)
        return waiting_s / (waiting_s + self.interval * self.step_s)

    @property
    def settings(self) -> str:
        """The job's `sync` as a Python expression."""
        words = [f"every=stoker.updates({self.interval})"]
        if self.is_in_background:
            words.append(f"overlap={min(self.overlap, self.interval - 1)}")
        if self.compress != "int8":
            words.append(f'compress="{self.compress}"')
        return f"stoker.DiLoCo({', '.join(words)})"

    @property
    def is_needed(self) -> bool:
        """True if lockstep loses more than MOST_SHARE even with overlap."""
        return self.slowdown[0] > 1 / (1 - MOST_SHARE)

    @property
    def fewer_bytes(self) -> float:
        """Ratio of the bytes over the link in lockstep to those at `interval` [1]."""
        return self.sync_bytes * self.interval / self.exchange_bytes

    def in_words(self) -> str:
        """A sentence for the user."""
        fast, slow = (f"{factor:.2g}" for factor in self.slowdown)
        cost = f"summing {format_bytes(self.sync_bytes)} over this link takes {format_seconds(self.sync_s)} an update"
        if not self.is_needed:
            return (
                f"In lockstep {cost}, most of it hidden by {format_seconds(self.step_s)} of arithmetic: sites "
                "need no updates of their own."
            )
        factor = f"{fast} to {slow} times" if fast != slow else f"{fast} times"
        words = (
            f"In lockstep {cost}, which makes it {factor} as long as the {format_seconds(self.step_s)} of one alone. "
        )
        if self.is_in_background:
            words += (
                f"Waiting for exchanges for no more than {100 * MOST_SHARE:g} % of the time would take {self.every:,} "
                f"updates between two, and published intervals end at about {MOST_EVERY}. "
            )
        waiting = f"at most {100 * MOST_SHARE:g} % of the time"
        if self.is_in_background and (share := self.waiting_share) >= 0.005:
            waiting = f"during updates, but for {100 * share:.0f} % of the time"
        elif self.is_in_background:
            waiting = "all during updates"
        words += (
            f"With sync={self.settings} an exchange takes {format_seconds(self.exchange_s)} after every "
            f"{self.interval} updates: {waiting}, and {self.fewer_bytes:,.0f} times fewer bytes. "
            "It changes what is learned."
        )
        return f"{words} fragments=… spreads the bytes evenly." if self.is_in_background else words


def recommend(links: Links, *, gradient_bytes: float, step_s: float) -> Recommendation:
    """The cost of lockstep over the links between sites, and the interval to exchange weights at instead.

    Args:
        links: between the sites, as measured or stated.
        gradient_bytes: of all trained parameters, in fp32.
        step_s: an update of one site without any exchange [s].

    Raises:
        ValueError: `gradient_bytes` or `step_s` is not positive.
        KeyError: the links lack the cost of an all-reduce or an all-gather.
    """
    if not (0 < gradient_bytes < math.inf and 0 < step_s < math.inf):
        raise ValueError(f"wanted gradients and the time of an update, got {gradient_bytes} bytes and {step_s} s")
    sites = links.world_size
    sync_s = links.seconds("all-reduce", gradient_bytes)
    taking = {name: links.seconds("all-gather", sites * gradient_bytes / 4 * each) for name, each in BYTES_EACH.items()}
    intervals = {name: rounded_up(one * (1 - MOST_SHARE) / (MOST_SHARE * step_s)) for name, one in taking.items()}
    # int4 only if int8 would need too long an interval.
    compress: Compression = next((name for name in taking if intervals[name] <= MOST_EVERY), "int4")
    exchange_s, message_bytes = taking[compress], gradient_bytes / 4 * BYTES_EACH[compress]
    exposed_s = max(0.0, sync_s - _BACKWARD * step_s)
    overlap = math.ceil(exchange_s / step_s)
    return Recommendation(
        step_s=step_s,
        sync_s=sync_s,
        slowdown=((step_s + exposed_s) / step_s, (step_s + sync_s) / step_s),
        exchange_s=exchange_s,
        every=intervals[compress],
        overlap=overlap,
        overlapped_every=rounded_up(2 * overlap),
        sync_bytes=2 * (sites - 1) / sites * gradient_bytes,
        exchange_bytes=(sites - 1) * message_bytes,
        compress=compress,
    )


def rounded_up(updates: float) -> int:
    """The least round number of updates that is no less than `updates`; at least 1.

    >>> [rounded_up(number) for number in (0.2, 7, 11, 43, 99, 450)]
    [1, 8, 20, 50, 100, 500]
    """
    if updates <= 1:
        return 1
    magnitude = 10.0 ** math.floor(math.log10(updates))
    return next(round(one * magnitude) for one in _ROUND if one * magnitude >= updates)
