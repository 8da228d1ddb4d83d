"""What a control plane answers that is wrong, or lies: nothing of it becomes a path, a number or a crash."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import PlaceFailed
from stoker.pool import agent as agent_module
from stoker.pool import events as on
from stoker.pool import leased_job
from stoker.pool.agent import Agent
from stoker.pool.answers import read_lease, read_leases, read_question, read_state, read_work
from stoker.pool.client import DiskFailed, PoolClient
from stoker.pool.events import sha256
from stoker.pool.hardware_proof import shape_of
from stoker.pool.isolation import Bubblewrap
from stoker.pool.keys import Key
from stoker.pool.leased_job import BlobCache
from stoker.pool.matching import listed_offers
from stoker.pool.probed_device import ProbedDevice
from stoker.pool.rules.disputes import draw_message
from stoker.pool.state import ListedOffer, Record
from stoker.records.codec import to_json
from tests.pool.book import Book, offer
from tests.pool.server import answering, in_thread, until
from tests.pool.test_agent import DEVICE, LENDING
from tests.pool.test_control_plane import joined


def a_lease() -> dict[str, Any]:
    """A lease with three blocks and a replay, as the control plane shows it."""
    book = Book()
    book.finish(blocks=3, verify_fraction=1.0)
    lease = book.state.leases["job"]
    draw = book.operator.sign(draw_message(book.operator.public, lease))
    book.post(book.operator, on.Challenged(lease_id="job", block=1, verifier=book.other.public, draw=draw, fee=1))
    book.post(
        book.other,
        on.VerdictGiven(lease_id="job", block=1, verifier=book.other.public, equal=False, made=sha256(b"made")),
    )
    book.post(book.operator, on.Disputed(lease_id="job"))
    states = tuple(sha256(b"%d" % number) for number in range(9))
    book.post(
        book.other,
        on.Traced(lease_id="job", block=1, verifier=book.other.public, states=(*states, sha256(b"made"))),
    )
    document: dict[str, Any] = json.loads(json.dumps(to_json(book.state.leases["job"])))
    return document | {"escrow": 5, "bond_held": 0, "bulk": {"direct_bytes": 0, "pool_bytes": 9}, "of_later": [1]}


LEASE = a_lease()
"""One, whose keys are drawn once for all tests of this file."""
OFFER: dict[str, Any] = {
    **json.loads(json.dumps(to_json(ListedOffer(offer=offer(), agent="a" * 64, offered_s=1.0)))),
    "is_free": True,
    "is_present": True,
    "network": "",
    "record": to_json(Record()),
}
WORK = {
    "leases": [LEASE],
    "challenges": [{"lease_id": "job", "block": 1}],
    "searches": [{"lease_id": "job", "block": 1, "verifier": "a" * 64}],
    "live": ["job"],
    "leaving": {"job": 5.5},
    "links": [{"other": "a" * 64, "name": "b" * 64}],
}
LINK = {"source": "a" * 64, "target": "b" * 64, "bytes_per_s": 1e6, "delay_s": 0.1}


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a path."""
    document = copy.deepcopy(document)
    held = document
    for step in path[:-1]:
        held = held[step]
    held[path[-1]] = value
    return document


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All paths in a document."""
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, held in steps:
        yield (*path, step)
        yield from places(held, (*path, step))


def test_a_control_planes_own_answers_are_taken(tmp_path: Path) -> None:
    """Offers, leases, balances, work and rules of a real one are read; what a later version says of a lease is not."""
    lease = read_lease(LEASE, "job")
    assert {name: to_json(getattr(lease, name)) for name in LEASE if name != "of_later"} == {
        name: value for name, value in LEASE.items() if name != "of_later"
    }
    assert read_work(WORK) == {**WORK, "leases": [lease]}
    with in_thread(tmp_path) as (_, operator):
        agent = joined(operator)
        for what in ("pool", "offers", "links", "balances", "records"):
            assert agent.state(what) is not None
        assert agent.leases() == agent.work()["leases"] == []
        assert agent.rules().name == "test"


def test_a_first_block_at_update_0_is_taken() -> None:
    """The control plane takes it from an agent: the renter must be able to read, and to stop, the lease."""
    document = changed(LEASE, ("commitments", 0, "update"), 0)
    assert read_lease(document, "job").commitments[0].update == 0


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("lease_id",), "../../../home/owner"),
        (("lease_id",), "/etc"),
        (("lease_id",), ""),
        (("lease_id",), "other"),
        (("order",), "../../.ssh/id_ed25519"),
        (("order",), ""),
        (("result",), "../x"),
        (("inputs",), ["0" * 63]),
        (("inputs",), "0" * 64),
        (("commitments", 1, "blob"), ".."),
        (("commitments", 1, "seal"), "0" * 63),
        (("commitments", 1, "state"), "x"),
        (("commitments", 1, "block"), 7),
        (("commitments", 1, "update"), 10),
        (("commitments", 1, "update"), -1),
        (("commitments",), [{**LEASE["commitments"][0], "block": n, "update": n + 1} for n in range(10_001)]),
        (("challenges", 0, "block"), 3),
        (("challenges", 0, "block"), -1),
        (("challenges", 0, "bisection", "low"), 20),
        (("challenges", 0, "bisection", "begin"), 11),
        (("challenges", 0, "bisection", "verifier", "end"), "../x"),
        (("challenges", 0, "bisection", "verifier", "states", 3), "x"),
        (("challenges", 0, "bisection", "agent", "before"), ".."),
        (("deposit",), 10**300),
        (("deposit",), 1.5),
        (("window_s",), math.nan),
        (("window_s",), math.inf),
        (("check_fraction",), "much"),
        (("escrow",), "5"),
        (("escrow",), -1),
        (("bulk", "pool_bytes"), 10**30),
        (("state",), "paid twice"),
        (("forecast",), None),
    ],
)
def test_a_lease_that_is_none_is_refused(path: tuple[Any, ...], value: Any) -> None:
    """Names that lead elsewhere, hashes that are none, numbers that no time or money is, blocks out of order."""
    with pytest.raises((ValueError, TypeError)):
        read_lease(changed(LEASE, path, value), "job")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("leases",), {}),
        (("leases",), [LEASE] * 1001),
        (("leases", 0, "lease_id"), "a/b"),
        (("challenges", 0, "lease_id"), ".."),
        (("challenges", 0, "block"), "1"),
        (("challenges", 0), None),
        (("challenges", 0, "against"), ".."),
        (("searches", 0, "lease_id"), ".."),
        (("searches", 0, "verifier"), "x"),
        (("searches", 0, "block"), -1),
        (("live",), None),
        (("live", 0), "../x"),
        (("leaving", "job"), "soon"),
        (("leaving", "job"), math.nan),
        (("leaving",), []),
        (("links", 0, "other"), ".."),
        (("links", 0, "name"), 5),
        (("links",), {}),
    ],
)
def test_work_that_is_none_is_refused(path: tuple[Any, ...], value: Any) -> None:
    """What an agent would walk through, make folders of, or subtract from its clock."""
    with pytest.raises((ValueError, TypeError)):
        read_work(changed(WORK, path, value))


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(path=st.sampled_from(sorted(places(WORK), key=repr)), value=_ANY)
def test_whatever_stands_anywhere_is_taken_or_refused(path: tuple[Any, ...], value: Any) -> None:
    """No other error comes out, and a name of a lease is one wherever it was taken."""
    try:
        found = read_work(changed(WORK, path, value))
    except (ValueError, TypeError):
        return
    assert {"/", ".."}.isdisjoint([*found["live"], *(one.lease_id for one in found["leases"])])


@given(path=st.sampled_from(sorted(places(OFFER), key=repr)), value=_ANY)
def test_an_offer_of_anything_is_taken_or_refused(path: tuple[Any, ...], value: Any) -> None:
    """What is listed for a renter is read whole before it is ranked or shown."""
    try:
        found = listed_offers(read_state("offers", [changed(OFFER, path, value)]))
    except (ValueError, TypeError, PlaceFailed):
        return
    assert len(found[0]) <= 1


@pytest.mark.parametrize("wrong", [{"source": "x"}, {"bytes_per_s": 0.0}, {"bytes_per_s": math.nan}, {"delay_s": -1.0}])
def test_links_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    """A time is divided by what the pool says of them."""
    assert read_state("links", [LINK]) == [LINK]
    with pytest.raises((ValueError, TypeError)):
        read_state("links", [{**LINK, **wrong}])


@given(what=st.sampled_from(("pool", "offers", "links", "leases", "balances", "records")), value=_ANY)
def test_a_list_of_anything_is_taken_or_refused(what: str, value: Any) -> None:
    """The same of what is listed."""
    try:
        read_leases(value) if what == "leases" else read_state(what, value)
    except (ValueError, TypeError):
        return


def test_a_pool_that_lies_to_an_agent_reaches_none_of_its_owners_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease whose name leads out of the agent's folder would be refused, and the folder of that name removed."""
    monkeypatch.setattr(agent_module, "_POLL_S", 0.0)
    owners = tmp_path / "owners"
    owners.mkdir()
    (owners / "letter").write_text("kept")
    away = "../../owners"
    work = {"leases": [{**LEASE, "lease_id": away, "state": "funded"}], "challenges": [], "live": [away]}
    said = list[str]()
    with answering(lambda path: work if path.startswith("/v1/work") else {"rules": {"name": "x"}}) as address:
        client = PoolClient(address, Key.made())
        monkeypatch.setattr(client, "post", lambda *_, **__: None)
        agent = Agent(client, LENDING, DEVICE, Bubblewrap(), tmp_path / "agent", tell=said.append)
        agent.step()
        work["leases"], work["challenges"] = [], [{"lease_id": away, "block": 0}]
        agent.step()
    assert (owners / "letter").read_text() == "kept"
    assert "answers what no pool of this version does" in said[0]
    assert "'../../owners' is no name of a lease" in said[0]


def test_another_lease_than_the_one_asked_for_is_none() -> None:
    """A replay would be made, and a verdict signed, for a lease that was not meant."""
    with answering(lambda _: LEASE) as address, pytest.raises(PlaceFailed, match="job in the place of other"):
        PoolClient(address).lease("other")


@pytest.mark.parametrize("name", ["../secret", "", "A" * 64, "0" * 65])
def test_what_is_no_hash_is_fetched_from_nowhere(tmp_path: Path, name: str) -> None:
    """The name of a blob becomes the name of a file: one that is there already would be taken for it."""
    (tmp_path / "secret").write_bytes(b"of the owner")
    cache = BlobCache(SimpleNamespace(), tmp_path / "blobs")  # type: ignore[arg-type]
    with pytest.raises(PlaceFailed, match="names no blob"):
        cache.whole(name, 100)


@pytest.mark.parametrize("call", ["fetch", "aside"])
def test_a_cache_that_cannot_be_made_is_a_sentence(tmp_path: Path, call: str) -> None:
    """A full or closed disk: where, why, and how to choose another place."""
    (tmp_path / "file").write_bytes(b"")
    cache = BlobCache(SimpleNamespace(), tmp_path / "file" / "blobs")  # type: ignore[arg-type]
    with pytest.raises(DiskFailed, match=r"Cannot write what comes from the pool at .*/file/blobs") as found:
        cache.fetch("0" * 64) if call == "fetch" else cache.aside()
    assert "STOKER_CACHE" in str(found.value.remedy)


@pytest.mark.parametrize(("most", "free"), [(1000, 1 << 30), (None, 256 << 20)])
def test_a_part_of_the_disk_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None, free: int
) -> None:
    """Neither an owner's nor a renter's disk is filled by what a pool sends."""
    asked = []

    class Pool:
        def get_blob(self, digest: str, target: Path, *, most_bytes: int | None = None, **_: Any) -> None:
            asked.append(most_bytes)
            target.write_bytes(b"")

    cache = BlobCache(Pool(), tmp_path / "blobs", most)  # type: ignore[arg-type]
    monkeypatch.setattr(leased_job.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(DiskFailed, match="stay free"):
        cache.fetch("0" * 64)
    monkeypatch.setattr(leased_job.shutil, "disk_usage", lambda _: SimpleNamespace(free=free + 7))
    cache.fetch("0" * 64)
    assert asked == [7]


@pytest.mark.parametrize(
    "question",
    [
        {"ask": "divide"},
        {"ask": "multiply", "seed": 1, "n": 64},
        {"ask": "multiply", "seed": 1, "n": 1, "k": 1 << 30},
        {"ask": "multiply", "seed": 1, "n": -1, "k": 4},
        {"ask": "salt"},
        {"ask": "rows"},
        {"ask": "rows", "rows": [1] * 65},
        {"ask": ["rows"]},
    ],
)
def test_a_question_of_a_probe_has_the_numbers_that_the_device_needs(question) -> None:
    """None is missing, and none makes the device's process copy thousands of rows."""
    with pytest.raises((ValueError, TypeError)):
        read_question({"step": 1, "question": question})


def test_a_pool_cannot_make_a_probed_device_take_more_memory_than_is_offered() -> None:
    """The question is not passed on; one that fits is."""
    asked, told = list[dict[str, Any]](), list[str]()

    class Device:
        def __call__(self, question: dict[str, Any]) -> dict[str, Any]:
            asked.append(question)
            return {}

        def end(self) -> None:
            """Nothing is left."""

    def question(step: int, n: int) -> dict[str, Any]:
        return {"step": step, "question": {"ask": "multiply", "seed": 1, "n": n, "k": 4096}}

    n, _ = shape_of(1 << 30)
    questions = iter([question(1, n), question(2, n + 1)])
    client = SimpleNamespace(probe=lambda *_: next(questions))
    device = ProbedDevice(
        client,  # type: ignore[arg-type]
        ("probe", 0),
        "box",
        torch_name="cpu",
        most_bytes=1 << 30,
        cores=None,
        tell=told.append,
        open_device=lambda _: Device(),  # type: ignore[arg-type,return-value]
    )
    until(lambda: device.is_over)
    assert [one["n"] for one in asked] == [64, n]
    assert "more memory than is offered" in told[0]
