"""A pool in memory for tests: keys, a clock, and events that are signed and applied one after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stoker.pool import events as on
from stoker.pool.events import CREDIT, Body, Event, draft_of, sha256
from stoker.pool.keys import Key
from stoker.pool.rules import apply
from stoker.pool.state import State

ORDER = sha256(b"order")


def offer(name: str = "box", now_s: float = 0.0, **more: Any) -> on.Offer:
    """An offer of a small device for half a credit an hour."""
    fields = {
        "offer_id": name,
        "device": on.OfferedDevice(kind="cpu"),
        "isolation": "bubblewrap",
        "price_per_hour": CREDIT // 2,
        "expires_s": now_s + 10**6,
    }
    return on.Offer(**{**fields, **more})


def opened(name: str = "job", **more: Any) -> on.Opened:
    """A lease of that offer for two hours, without replays unless asked for."""
    fields: dict[str, Any] = {
        "lease_id": name,
        "offer_id": "box",
        "order": ORDER,
        "rate_per_hour": CREDIT // 2,
        "deposit": 3 * CREDIT,
        "bond": CREDIT,
        "window_s": 600,
        "forecast": on.Forecast(hours=2.0, credits=CREDIT),
    }
    return on.Opened(**{**fields, **more})


class Book:
    """The pool: `post` signs and applies, at the book's clock."""

    def __init__(self, now_s: float = 1_000_000.0, **rules: Any) -> None:
        self.operator, self.renter, self.agent, self.other, self.third = (Key.made() for _ in range(5))
        self.now_s = now_s
        self.state = State()
        self.events: list[Event] = []
        self.post(self.operator, on.Founded(name="test", **rules))
        for key in (self.renter, self.agent, self.other, self.third):
            amount = 0 if "contract" in rules else 10 * CREDIT
            self.post(self.operator, on.Deposited(account=key.public, amount=amount))

    def event(self, key: Key, body: Body, *, skew_s: float = 0.0, nonce: str | None = None) -> Event:
        """The next event, not applied yet."""
        draft = draft_of(body, key, self.operator.public, time_s=self.now_s + skew_s, nonce=nonce)
        return Event(seq=self.state.seq + 1, previous=self.state.head, received_s=self.now_s, draft=draft)

    def post(self, key: Key, body: Body, **more: Any) -> Event:
        """Sign and apply; raises Refused as the pool would."""
        event = self.event(key, body, **more)
        apply(self.state, event)
        self.events.append(event)
        return event

    def pass_time(self, seconds: float) -> None:
        """Let the clock go on."""
        self.now_s += seconds

    def balance(self, key: Key) -> int:
        """What a key has [micro-credits]."""
        return self.state.accounts.balance(key.public)

    def run(self, *, beats: int = 3, blocks: int = 0, every_s: int = 10, **more: Any) -> None:
        """Offer, open, accept, and some beats, each co-signed, with commitments."""
        self.post(self.agent, on.Offered(offer=offer(now_s=self.now_s)))
        self.post(self.renter, opened(**more))
        self.post(self.agent, on.Accepted(lease_id="job"))
        for index in range(beats):
            self.pass_time(every_s)
            self.post(self.agent, on.Beat(lease_id="job", index=index, running_s=(index + 1) * every_s))
            self.post(self.renter, on.Cosigned(lease_id="job", index=index))
        for block in range(blocks):
            previous = sha256(b"%d" % (block - 1)) if block else ""
            state = sha256(b"%d" % block)
            self.post(
                self.agent,
                on.Committed(
                    lease_id="job", block=block, update=10 * (block + 1), state=state, blob=state, previous=previous
                ),
            )

    def finish(self, **more: Any) -> None:
        """A run as above, and its end."""
        self.run(**more)
        self.post(self.agent, on.Finished(lease_id="job", result=sha256(b"result")))

    def forced(self, state: str) -> None:
        """Put the lease into a state without the events that lead there: for tests of the table."""
        self.state.leases["job"] = replace(self.state.leases["job"], state=state)  # type: ignore[arg-type]
