"""What a page shows of a pool: offers, this user's leases and wallet, the newest events, and whether the log holds.

`python -m stoker.pool.overview` is a process of its own, which asks the pool once for each line of its input, and
answers with one line of JSON. Whatever a pool does (no answer, a byte a second, a gigabyte, nonsense) happens to this
process, which the page can end, and not to the page. It posts nothing, and makes no key.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from stoker.errors import StokerError
from stoker.pool.answers import read_offer
from stoker.pool.client import PoolAddress, PoolClient
from stoker.pool.escrow import credits_text, pay_for, short
from stoker.pool.events import CREDIT, FIRST_PREVIOUS, Draft, Event, Refused
from stoker.pool.keys import keys_folder, read_key
from stoker.pool.matching import declines, hazard_interval, hazard_per_hour
from stoker.pool.shown_lease import ShownLease
from stoker.records.codec import JSON, to_json
from stoker.units import format_seconds

_TIMEOUT_S = 5.0
_MOST_LOOK_S = 60
"""After which this process ends itself: who asked gave up long before, or was killed and could not end it [s]."""
_MOST_ANSWER_BYTES = 16 * 2**20
_MOST_CHECKED = 2000
"""Events that are checked at the first look, and after a gap: the newest ones; later looks check all that come."""
_MOST_EVENTS, _MOST_OFFERS, _MOST_LEASES = 60, 300, 60
_OF_METERS = ("beat", "cosigned")
_LONGEST = 300
"""Characters of a text."""


class LogCheck:
    """The newest part of a pool's log, read on at each look: hashes, signatures, and that it only grows.

    That each step was legal, and all balances, are for `log.audit`, which needs the log from its first event on.

    Attributes:
        first: number of the first event that was checked; 0: none was.
        seq: of the last one.
        problem: what is wrong with the first bad event; it stays.
        newest: the last events, without those of meters, which are most.
    """

    def __init__(self, client: PoolClient) -> None:
        self._client, self._pool = client, client.address.key
        self.first, self.seq, self._head, self._received_s = 0, 0, FIRST_PREVIOUS, 0.0
        self.problem = ""
        self.newest: deque[Event] = deque(maxlen=_MOST_EVENTS)

    def read_on(self, seq: int, head: str) -> None:
        """Read what is new, up to event `seq`, which has the hash `head` as the pool says."""
        if self.problem:
            return
        if seq < self.seq:
            self.problem = f"it had {self.seq} events, and has {seq} now: it was cut"
        elif seq == self.seq and head != self._head:
            self.problem = f"event {seq} has another hash than before: it was rewritten"
        if seq - self.seq > _MOST_CHECKED:
            self.first, self.seq, self._head = 0, seq - _MOST_CHECKED, ""
        while self.seq < seq and not self.problem:
            found = self._client.events(self.seq)
            if not found:
                self.problem = f"the pool says that it has {seq} events, and shows {self.seq}"
            for event in found:
                if not self.problem:
                    self._take(event, head if event.seq == seq else "")

    def _take(self, event: Event, head: str) -> None:
        draft = event.draft
        if event.seq != self.seq + 1:
            bad = f"it is in the place of event {self.seq + 1}"
        elif self._head and event.previous != self._head:
            bad = "it does not name the hash of the event before"
        elif draft.pool != self._pool or (event.seq == 1 and event.actor != self._pool):
            bad = "it is of another pool"
        elif not draft.is_signed():
            bad = f"its signature is not of {short(event.actor)}"
        elif event.received_s < self._received_s:
            bad = "it was received before the event before it"
        elif head and event.hash != head:
            bad = "the pool says that it has another hash"
        elif problem := _misfit(draft):
            bad = problem
        else:
            self.first, self._received_s = self.first or event.seq, event.received_s
            self.seq, self._head = event.seq, event.hash
            if event.kind not in _OF_METERS:
                self.newest.append(event)
            return
        self.problem = f"event {event.seq}: {bad}"


def _misfit(draft: Draft) -> str:
    """Why a body is not of its kind; "": it is."""
    try:
        draft.read_body()
    except Refused as problem:
        return problem.message
    return ""


class Overview:
    """A pool as its page shows it.

    Args:
        client: of the pool; its key is not used.
        account: this user's public key; "": there is none yet.
    """

    def __init__(self, client: PoolClient, account: str) -> None:
        self._client, self._account = client, account
        self._log = LogCheck(client)

    def look(self) -> dict[str, JSON]:
        """Ask the pool now.

        Raises:
            PlaceUnreachable: it does not answer.
            PlaceFailed: it answers what is no JSON, or too much of it.
            ValueError, TypeError, KeyError: it answers what no pool does.
        """
        client, account = self._client, self._account
        pool: Any = client.state("pool")
        offers: Any = client.state("offers")
        roles = ("renter", "agent") if account else ()
        leases = {lease.lease_id: lease for role in roles for lease in client.leases(**{role: account})}
        self._log.read_on(int(pool["seq"]), str(pool["head"]))
        now_s = float(pool["now_s"])
        listed = sorted(
            (_offer(one, account) for one in offers), key=lambda one: (one["status"] != "free", one["price"])
        )
        document = {
            "at": time.time(),
            "address": client.address.url,
            "key": client.address.key,
            "rules": dict(pool["rules"]),
            "clock_off_s": now_s - time.time(),
            "account": account,
            "wallet": self._wallet(leases.values()) if account else None,
            "num_offers": len(listed),
            "num_free": sum(one["status"] == "free" for one in listed),
            "offers": listed[:_MOST_OFFERS],
            "leases": sorted((_lease(one, account) for one in leases.values()), key=lambda one: -one["opened_s"])[
                :_MOST_LEASES
            ],
            "events": [
                {
                    "seq": event.seq,
                    "at": event.received_s,
                    "kind": event.kind,
                    "actor": "the pool" if event.actor == client.address.key else short(event.actor),
                    "is_own": event.actor == account,
                    "text": event_words(event),
                }
                for event in reversed(self._log.newest)
            ],
            "log": {
                "seq": pool["seq"],
                "first": self._log.first,
                "last": self._log.seq,
                "problem": self._log.problem,
            },
        }
        shown: dict[str, JSON] = bounded(document)
        return shown

    def _wallet(self, leases: Iterable[ShownLease]) -> dict[str, JSON]:
        """What the account has, and what is held of it [credits]."""
        balances: Any = self._client.state("balances")
        account, found = self._account, balances["balances"]
        return {
            "is_admitted": account in found,
            "balance": found.get(account, 0) / CREDIT,
            "in_escrow": sum(one.escrow for one in leases if one.renter == account) / CREDIT,
            "bonds": sum(one.bond_held for one in leases if one.agent == account) / CREDIT,
        }


def _offer(document: dict[str, Any], account: str) -> dict[str, Any]:
    """An offer, with the record of who made it as evidence; money in credits, the hazard by the hour."""
    listed, record = read_offer(document)
    offer = listed.offer
    status = "free" if document["is_present"] is True else "away"
    if document["is_free"] is not True:
        status = "taken" if listed.lease_id else "clashes" if document.get("clashes_with") else "lapsed"
    return {
        "offer_id": offer.offer_id,
        "status": status,
        "device": to_json(offer.device),
        "price": offer.price_per_hour / CREDIT,
        "isolation": offer.isolation,
        "measured": to_json(offer.measured),
        "upload_bytes_per_s": offer.upload_bytes_per_s,
        "download_bytes_per_s": offer.download_bytes_per_s,
        "disk_bytes": offer.disk_bytes,
        "reclaim_s": offer.reclaim_s,
        "hours": offer.hours,
        "max_s": offer.max_s,
        "agent": short(listed.agent),
        "is_own": listed.agent == account,
        "record": to_json(record),
        "hazard": [hazard_per_hour(record), *hazard_interval(record)],
        "declines": declines(record),
    }


def _lease(lease: ShownLease, account: str) -> dict[str, Any]:
    """A lease in which an account has part: its meter, money in credits, and what was replayed of it."""
    so_far = 0 if lease.outcome else pay_for(lease.paid_s, lease.rate_per_hour)
    if lease.settlement is not None:
        so_far = lease.settlement.pay
    return {
        "lease_id": lease.lease_id,
        "role": "rented" if lease.renter == account else "lent",
        "offer_id": lease.offer_id,
        "device": lease.device,
        "num_devices": lease.num_devices,
        "state": lease.state,
        "reason": lease.reason,
        "outcome": lease.outcome,
        "opened_s": lease.opened_s,
        "heard_s": lease.heard_s,
        "closed_s": lease.closed_s,
        "reclaim_by_s": lease.reclaim_by_s,
        "disputable_until_s": lease.closed_s + lease.window_s if lease.closed_s else 0.0,
        "running_s": lease.running_s,
        "paid_s": lease.paid_s,
        "samples": lease.samples,
        "rate": lease.rate_per_hour / CREDIT,
        "so_far": so_far / CREDIT,
        "limit": lease.deposit / CREDIT,
        "forecast_h": lease.forecast.hours,
        "forecast": lease.forecast.credits / CREDIT,
        "check_fraction": lease.check_fraction,
        "num_blocks": lease.num_blocks,
        "replays": lease.replays,
    }


def _probe_words(times: dict[str, Any]) -> str:
    """What a probe found of one offer."""
    together = ", ".join(f"{time_s:g} s" if time_s else "no right answer" for time_s in times["together_s"])
    alone = min(filter(None, times["alone_s"]), default=0.0) or times["claimed_s"]
    return f"{times['offer_id']} together {together}{f' (alone {alone:g} s)' if alone else ''}"


def event_words(event: Event) -> str:
    """What an event says, for people; that its body is of its kind is not checked."""
    body: dict[str, Any] = event.draft.body
    words = []
    for name, value in body.items():
        if name in ("amount", "deposit", "bond", "fee"):
            words.append(f"{name} {credits_text(value)}")
        elif name in ("lease_id", "offer_id", "reason", "index", "block", "equal", "update", "team"):
            words.append(f"{name.removesuffix('_id')} {value}")
        elif name == "running_s":
            words.append(f"ran {format_seconds(value)}")
        elif name == "last":
            words.append(f"events {body['first']} to {value}")
        elif name in ("account", "verifier", "against"):
            words.append(f"{name} {short(value)}")
        elif name == "offers":
            words += [_probe_words(one) for one in value]
        elif name == "states":
            words.append(f"{len(value)} states, to {value[-1][:12]}…" if value else "cannot make the block again")
        elif name == "offer":
            words.append(f"offer {value['offer_id']}, {credits_text(value['price_per_hour'])} an hour")
    return ", ".join(words)


def bounded(value: Any) -> Any:
    r"""JSON from elsewhere as a page may have it: texts printable and of 300 characters, numbers that it can hold.

    >>> bounded(["a\u202eb", 10**400, float("nan"), True, {"n": 5}])
    ['a\\u202eb', None, None, True, {'n': 5}]
    """
    if isinstance(value, str):
        text = value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…"
        return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if abs(value) <= 2**53 else None
    if isinstance(value, dict):
        return {bounded(name): bounded(one) for name, one in value.items()}
    return [bounded(one) for one in value] if isinstance(value, list | tuple) else value


def main() -> None:
    """Answer each line with what the pool says now, until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", default="", help="its address; else STOKER_POOL")
    parser.add_argument("--key", default="default", help="name of the user's key")
    options = parser.parse_args()
    overview: Overview | None = None
    before: dict[str, JSON] = {}
    for _ in sys.stdin:
        signal.alarm(_MOST_LOOK_S)
        try:
            if overview is None:
                path = keys_folder() / f"{options.key}.key"
                account = read_key(path).public if path.is_file() else ""
                client = PoolClient(
                    PoolAddress.parse(options.pool), timeout_s=_TIMEOUT_S, most_answer_bytes=_MOST_ANSWER_BYTES
                )
                overview = Overview(client, account)
            before = overview.look()
            document = {**before, "problem": "", "remedy": ""}
        except StokerError as problem:
            document = {**before, "problem": problem.message, "remedy": problem.remedy or ""}
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as problem:
            document = {
                **before,
                "problem": f"it answers what no pool of this version does: {problem}",
                "remedy": "Is the address a pool's, and this Stoker as new as the pool's?",
            }
        finally:
            signal.alarm(0)
        sys.stdout.write(json.dumps(bounded(document)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
