"""What a control plane answers, checked before a client uses anything of it as a path, a number or a name.

A control plane may be wrong, or lie: names of leases and hashes become names of files, numbers become sums and times.
Leases become records; other documents stay as they came.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoker.errors import PlaceFailed
from stoker.pool.bisection import Bisection
from stoker.pool.events import MOST_SITES
from stoker.pool.hardware_proof import MOST_INNER
from stoker.pool.keys import is_digest
from stoker.pool.lease import MOST_COMMITMENTS, Commitment
from stoker.pool.shown_lease import ShownLease
from stoker.pool.state import ListedOffer, Record
from stoker.records.codec import JSON, from_json

MOST_WORK = 1000
"""Leases, and blocks to replay, of one answer at most: an agent does one of each at a time."""
_LEASE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LARGEST = 2**53
_MOST_ROWS = 64
"""Rows of a product that a probe may ask for: each is as wide as the product."""
_QUESTIONS = {"multiply": ("seed", "n", "k"), "salt": ("salt",), "rows": ("rows",)}
"""Questions of a probe, and the numbers that each one names."""
_LISTED = ("offer", "agent", "offered_s", "lease_id")


def read_lease(document: JSON, lease_id: str | None = None) -> ShownLease:
    """A lease, of which fields that this version does not know are left out; `lease_id`: the one that was asked for.

    Raises:
        ValueError, TypeError: it is none, or another one.
    """
    found = _object(document, "lease")
    lease = from_json({name: found[name] for name in ShownLease.__dataclass_fields__ if name in found}, ShownLease)
    require_lease_id(lease.lease_id)
    if lease_id is not None and lease.lease_id != lease_id:
        raise ValueError(f"the lease {lease.lease_id} in the place of {lease_id}")
    _require_numbers(found)
    for name in ("escrow", "bond_held"):
        _whole(getattr(lease, name), name)
    hashes = {
        "order": lease.order,
        "result": lease.result,
        **{f"inputs[{number}]": digest for number, digest in enumerate(lease.inputs)},
    }
    for name, digest in hashes.items():
        _require_hash(digest, name, may_be_empty=name == "result")
    if len(lease.commitments) > MOST_COMMITMENTS:
        raise ValueError(f"{len(lease.commitments):,} blocks: a lease has {MOST_COMMITMENTS:,} at most")
    _require_gang(lease)
    before: Commitment | None = None
    for number, block in enumerate(lease.commitments):
        _require_hash(block.state, f"commitments[{number}].state")
        _require_hash(block.blob, f"commitments[{number}].blob")
        _require_hash(block.seal, f"commitments[{number}].seal", may_be_empty=True)
        if block.block != number or block.update <= (-1 if before is None else before.update):
            raise ValueError(f"block {number} is number {block.block}, at update {block.update}")
        before = block
    for challenge in lease.challenges:
        if not 0 <= challenge.block < len(lease.commitments):
            raise ValueError(f"a replay of block {challenge.block}, of {len(lease.commitments)}")
        if challenge.bisection is not None:
            _require_search(challenge.bisection)
    return lease


def read_leases(document: JSON) -> list[ShownLease]:
    """A list of leases, without their blocks and replays.

    Raises:
        ValueError, TypeError: it is none.
    """
    return [read_lease(one) for one in _list(document, "leases")]


def _require_gang(lease: ShownLease) -> None:
    """Raises ValueError where the messages of a site, or the leases or links of its gang, are none."""
    for message in lease.messages:
        _require_hash(message.blob, "messages.blob")
        if not 0 <= message.update <= _LARGEST or not 0 <= message.fragment <= _LARGEST:
            raise ValueError(f"a message after update {message.update} about fragment {message.fragment}")
    _require_few(lease.gang_leases, "gang_leases", MOST_SITES)
    for of_site in lease.gang_leases:
        _require_few(of_site, "gang_leases", MOST_WORK)
        for name in of_site:
            require_lease_id(name)
    _require_few(lease.direct, "direct", MOST_SITES)
    for key in lease.direct:
        _require_hash(key, "direct")


def _require_search(search: Bisection) -> None:
    """Raises ValueError where the stretch of a search is none, or what was stated is no hash: an agent acts on it."""
    if not 0 <= search.begin <= search.low < search.high:
        raise ValueError(f"a search between updates {search.low} and {search.high} of a block after {search.begin}")
    for side in (search.agent, search.verifier):
        for digest in (search.low_state, side.end, side.before, side.after, *side.states):
            _require_hash(digest, "bisection", may_be_empty=True)


def read_offer(document: Mapping[str, Any]) -> tuple[ListedOffer, Record]:
    """An offer as the control plane lists it, and the record of its agent.

    Raises:
        PlaceFailed: it is none.
    """
    try:
        listed = from_json(
            {name: document[name] for name in _LISTED} | {"probed_s": document.get("probed_s", 0.0)}, ListedOffer
        )
        return listed, from_json(document["record"], Record)
    except (ValueError, TypeError, LookupError) as problem:
        raise PlaceFailed(
            f"the pool lists what is no offer: {problem}", remedy="Is this Stoker as new as the pool's?"
        ) from problem


def read_work(document: JSON) -> dict[str, Any]:
    """What waits for an agent: `leases`, `challenges`, `searches`, `live`, and `leaving` with times [s since 1970].

    Raises:
        ValueError, TypeError: it is something else.
    """
    found = _object(document, "work")
    leases, challenges, live = (_list(found.get(name), name, MOST_WORK) for name in ("leases", "challenges", "live"))
    searches = _list(found.get("searches", []), "searches", MOST_WORK)
    for challenge in challenges:
        require_lease_id(_object(challenge, "challenge").get("lease_id"))
        _whole(challenge.get("block"), "block")
        _require_key(challenge.get("against", ""), "against", may_be_empty=True)
    for search in searches:
        require_lease_id(_object(search, "search").get("lease_id"))
        _whole(search.get("block"), "block")
        _require_key(search.get("verifier"), "verifier")
    leaving = _object(found.get("leaving", {}), "leaving")
    for lease_id, by_s in (*((name, 0) for name in live), *leaving.items()):
        require_lease_id(lease_id)
        if not isinstance(by_s, int | float):
            raise TypeError(f"leaving: {by_s!r} is no time")
    _require_numbers(leaving)
    for probe in _list(found.get("probes", []), "probes", MOST_WORK):
        asked = _object(probe, "probe")
        if not all(isinstance(asked.get(name), str) for name in ("probe_id", "offer_id")):
            raise TypeError("a probe has no name, or none of an offer")
        _whole(asked.get("device"), "device")
    for link in _list(found.get("links", []), "links", MOST_WORK):
        for name in ("other", "name"):
            _require_key(_object(link, "link").get(name), name)
    return {**found, "leases": [read_lease(lease) for lease in leases]}


def read_question(document: JSON) -> dict[str, Any]:
    """A question of a probe: `over`; or `step`, and `question`, which is None where none is asked now.

    Raises:
        ValueError, TypeError: it is something else. Whether the device has the memory is for `ProbedDevice` to say.
    """
    found = _object(document, "question of a probe")
    if found.get("over"):
        return found
    _whole(found.get("step"), "step")
    if found.get("question") is None:
        return {**found, "question": None}
    asked = _object(found["question"], "question")
    names = _QUESTIONS.get(str(asked.get("ask")))
    if names is None:
        raise ValueError(f"{str(asked.get('ask'))[:40]!r} is no question of a probe")
    for name in names:
        for value in _list(asked.get(name), name, _MOST_ROWS) if name == "rows" else (asked.get(name),):
            _whole(value, name)
    if asked["ask"] == "multiply" and asked["k"] > MOST_INNER:
        raise ValueError(f"a product over {asked['k']:,}, at most {MOST_INNER:,} is exact")
    return found


def read_state(what: str, document: JSON) -> JSON:
    """The answer to one of the questions of `PoolClient.state`.

    Raises:
        ValueError, TypeError: it is something else.
    """
    reader = _READERS.get(what)
    return document if reader is None else reader(document)


def require_lease_id(name: object) -> None:
    """Raises ValueError where something is no name of a lease: it becomes the name of a folder."""
    if not isinstance(name, str) or _LEASE_ID.fullmatch(name) is None:
        raise ValueError(f"{str(name)[:80]!r} is no name of a lease")


def _pool(document: JSON) -> JSON:
    found = _object(document, "pool")
    _object(found.get("rules"), "rules")
    for name in ("seq", "num_waiting"):
        _whole(found.get(name, 0), name)
    rendezvous = found.get("rendezvous")
    if rendezvous is not None:
        for name in ("port", "bulk_bytes"):
            _whole(_object(rendezvous, "rendezvous").get(name), name)
    return found


def _offers(document: JSON) -> JSON:
    for one in _list(document, "offers"):
        found = _object(one, "offer")  # `read_offer` reads one whole: thousands take seconds
        for name in ("is_free", "is_present"):
            if not isinstance(found.get(name), bool):
                raise TypeError(f"{name}: {found.get(name)!r} is neither true nor false")
    return document


def _links(document: JSON) -> JSON:
    for one in _list(document, "links"):
        found = _object(one, "link")
        for name in ("source", "target"):
            _require_key(found.get(name), name)
        for name, least in (("bytes_per_s", 1e-9), ("delay_s", 0.0)):
            if not isinstance(value := found.get(name), int | float) or not least <= value <= _LARGEST:
                raise TypeError(f"{name}: {str(value)[:40]} is no rate or time of a link")
    return document


def _balances(document: JSON) -> JSON:
    for account, amount in _object(_object(document, "balances").get("balances"), "balances").items():
        if not isinstance(amount, int) or abs(amount) > _LARGEST:  # a chain's own account may be below 0
            raise TypeError(f"the balance of {account[:80]!r} is no whole number of at most {_LARGEST:,}")
    return document


_READERS: Mapping[str, Callable[[JSON], JSON]] = {
    "pool": _pool,
    "offers": _offers,
    "links": _links,
    "balances": _balances,
}


def _object(value: JSON, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{name}: wanted an object, found {type(value).__name__}")
    return value


def _list(value: JSON, name: str, most: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{name}: wanted a list, found {type(value).__name__}")
    if most is not None:
        _require_few(value, name, most)
    return value


def _require_few(value: Sequence[object], name: str, most: int) -> None:
    if len(value) > most:
        raise ValueError(f"{name}: {len(value):,} entries, at most {most:,} are taken")


def _whole(value: JSON, name: str) -> None:
    if not isinstance(value, int) or not 0 <= value <= _LARGEST:
        raise ValueError(f"{name}: {str(value)[:80]} is no whole number, 0 or more")


def _require_hash(text: str, name: str, *, may_be_empty: bool = False) -> None:
    if not is_digest(text) and (text or not may_be_empty):
        raise ValueError(f"{name}: {text[:80]!r} is no SHA-256")


def _require_key(value: JSON, name: str, *, may_be_empty: bool = False) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}: {value!r:.40} is no key")
    _require_hash(value, name, may_be_empty=may_be_empty)


def _require_numbers(value: JSON) -> None:
    """Raises ValueError where a number is not finite, or too large to be a time, a count or money."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            waiting += one.values() if isinstance(one, dict) else one
        elif isinstance(one, int | float) and not abs(one) <= _LARGEST:  # also of NaN
            raise ValueError(f"the number {one!r:.40}")
