"""Messages between a box and the pool: what is sent, what is brought, and what is not believed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import BadRun, PlaceFailed, PlaceUnreachable, StokerError
from stoker.pool import events as on
from stoker.pool.client import WrongBlob
from stoker.pool.job_box import MESSAGES, JobBox, PoolOrder
from stoker.pool.message_carrier import KnownMessage, MessageCarrier, differing_messages, needed_from
from stoker.pool.replay_check import Making, NotOfTheJob
from stoker.pool.shown_lease import ShownLease
from stoker.records.codec import to_json
from stoker.store import CheckpointStore
from stoker.store.site_message import MessageHead, encode_message, message_name
from tests.pool.counting import save
from tests.pool.fake_pool import shown


def content_of(site: int, update: int, message: bytes = b"values", job: str = "5" * 64, sites: int = 2) -> bytes:
    """The file of a site's message."""
    digest = hashlib.sha256(message).hexdigest()
    head = MessageHead(
        job=job, sites=sites, site=site, update=update, fragment=0, num_bytes=len(message), sha256=digest
    )
    return encode_message(head, message)


class FakePool:
    """A gang of two leases in memory: messages by site, and blobs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.posted = folder, list[on.Sent]()
        self.messages: dict[str, list[dict[str, Any]]] = {"run-s0.0": [], "run-s1.0": [], "run-s1.1": []}
        self.num_looks = 0
        self.peer: Any = None
        self.direct, self.copied = list[str](), list[tuple[str, str]]()

    def lease(self, lease_id: str) -> ShownLease:
        """A lease as the control plane shows it."""
        self.num_looks += 1
        names = [["run-s0.0"], ["run-s1.0", "run-s1.1"]]
        known = {"gang_leases": names, "messages": self.messages[lease_id], "direct": self.direct}
        return shown(lease_id=lease_id, agent=lease_id, **known)

    def put_blob(self, path: Path, *, through_pool: bool = False, message_of: str = "") -> str:
        """Keep a blob."""
        assert through_pool
        self.copied.append((hashlib.sha256(path.read_bytes()).hexdigest(), message_of))
        return self.kept(path.read_bytes())

    def kept(self, content: bytes) -> str:
        """Keep a blob; its digest."""
        digest = hashlib.sha256(content).hexdigest()
        (self.folder / digest).write_bytes(content)
        return digest

    def post(self, body: on.Sent) -> None:
        """Take an event."""
        self.posted.append(body)
        self.note(body.lease_id, body.update, body.blob)

    def note(self, lease_id: str, update: int, blob: str) -> None:
        """One more message in a lease."""
        self.messages[lease_id].append({"update": update, "fragment": 0, "blob": blob})


class Carried:
    """Site 0 of two in its box, and its carrier."""

    def __init__(self, folder: Path, most_bytes: int = 1 << 20) -> None:
        order = PoolOrder(run="run", tree="1" * 64, code="c", stoker="s", job_file="job.py", site=0, sites=2)
        self.box = JobBox(folder / "box", order)
        self.box.run.mkdir(parents=True)
        self.box.aside.mkdir()
        self.cache = folder / "cache"
        for each in (folder / "blobs", self.cache):
            each.mkdir()
        self.pool, self.fetched = FakePool(folder / "blobs"), list[str]()
        pool: Any = self.pool
        self.carrier = MessageCarrier("run-s0.0", 0, self.box, pool, self.fetch, most_bytes=most_bytes)

    def fetch(self, blob: str) -> Path:
        """The file with a blob."""
        self.fetched.append(blob)
        return Path(shutil.copy(self.pool.folder / blob, self.cache))

    def write(self, update: int, message: bytes = b"values") -> None:
        """The job writes its message."""
        self.box.message_names()  # makes the folder
        (self.box.run / MESSAGES / message_name(update, 0, 0)).write_bytes(content_of(0, update, message))

    def sent_by_other(self, update: int, content: bytes | None = None) -> None:
        """Site 1 has sent its message."""
        blob = self.pool.kept(content_of(1, update) if content is None else content)
        self.pool.note("run-s1.1" if update > 10 else "run-s1.0", update, blob)

    @property
    def names(self) -> list[str]:
        """Messages in the box."""
        return sorted(self.box.message_names())


def test_messages_are_carried_both_ways(tmp_path: Path) -> None:
    """What the job writes is sent once; what the other site has sent, by either lease, is brought; then it is quiet."""
    carried = Carried(tmp_path)
    carried.carrier.carry()
    assert (carried.carrier.has_sent, carried.pool.num_looks) == (True, 0)
    carried.write(4)
    carried.carrier.carry()
    assert [(one.update, one.fragment) for one in carried.pool.posted] == [(4, 0)]
    assert carried.carrier.has_sent  # a job that ends now waits for nobody here
    carried.sent_by_other(4)
    carried.write(14)
    carried.sent_by_other(14)
    carried.carrier.carry()
    assert carried.names == [message_name(update, 0, site) for update in (4, 14) for site in (0, 1)]
    assert (carried.box.run / MESSAGES / message_name(14, 0, 1)).read_bytes() == content_of(1, 14)
    carried.carrier.carry()
    looked = carried.pool.num_looks
    carried.carrier.carry()
    assert (carried.carrier.has_sent, carried.pool.num_looks, len(carried.pool.posted)) == (True, looked, 2)
    assert not [*carried.cache.iterdir(), *carried.box.aside.iterdir()]  # messages stay in the box alone


class Holding:
    """A peer that keeps files for others."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.released = folder, list[str]()

    def hold(self, digest: str, source: Path) -> Path:
        return Path(shutil.copy(source, self.folder / digest))

    def release(self, digest: str) -> None:
        self.released.append(digest)
        (self.folder / digest).unlink()


@pytest.fixture
def direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Carried:
    """A site with a direct path to the other one."""
    carried = Carried(tmp_path)
    (tmp_path / "held").mkdir()
    carried.pool.peer, carried.pool.direct = Holding(tmp_path / "held"), ["run-s1.0"]
    monkeypatch.setattr("stoker.pool.message_carrier._OTHERS_S", 0.0)
    return carried


def test_a_message_goes_directly_and_its_copy_to_the_pool_after_the_exchange(
    direct: Carried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is signed for before the pool has it; what the other site does not send the pool comes from here."""
    monkeypatch.setattr("stoker.pool.message_carrier._OTHERS_S", 60.0)
    own, other = (hashlib.sha256(content_of(site, 4)).hexdigest() for site in (0, 1))
    direct.write(4)
    direct.carrier.carry()
    assert [one.blob for one in direct.pool.posted] == [own]
    assert (direct.pool.peer.folder / own).is_file()
    assert not direct.pool.copied
    assert not direct.carrier.has_sent, "the pool has no copy"
    direct.sent_by_other(4)
    for _ in range(2):
        direct.carrier.carry()
    assert direct.pool.copied == [(own, "")]
    assert not direct.pool.peer.released, "the other may still be fetching it"
    assert message_name(4, 0, 1) in direct.names
    message, path, _ = direct.carrier._brought[0]
    direct.carrier._brought = [(message, path, 0.0)]
    direct.carrier.carry()
    assert direct.pool.copied[1:] == [(other, "run-s1.0")]
    direct.carrier.carry()
    assert direct.carrier.has_sent
    direct.carrier.close()
    direct.carrier.run()
    assert direct.pool.peer.released == [own]
    assert not [*direct.cache.iterdir(), *direct.box.aside.iterdir(), *direct.pool.peer.folder.iterdir()]


def test_the_copy_is_sent_as_well_while_another_site_is_waited_for(direct: Carried) -> None:
    """Else no block of this one were taken before that one has come."""
    direct.write(4)
    direct.carrier.carry()
    assert [blob for blob, _ in direct.pool.copied] == [hashlib.sha256(content_of(0, 4)).hexdigest()]


def test_the_copy_is_sent_although_what_others_hold_back_cannot_be_fetched(
    direct: Carried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder that says again and again that it sends a message delays no block of the others."""
    direct.write(4)
    direct.sent_by_other(4)

    def on_its_way(_: str) -> Path:
        raise PlaceUnreachable("it is being sent to the pool by who holds it")

    monkeypatch.setattr(direct.carrier, "_fetch", on_its_way)
    with pytest.raises(PlaceUnreachable):
        direct.carrier.carry()
    assert [blob for blob, _ in direct.pool.copied] == [hashlib.sha256(content_of(0, 4)).hexdigest()]


def test_what_others_sent_is_not_left_on_the_disk(direct: Carried, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a lease; what they may still have to fetch is."""
    monkeypatch.setattr("stoker.pool.message_carrier._OTHERS_S", 60.0)
    direct.write(4)
    direct.sent_by_other(4)
    direct.carrier.carry()
    assert [*direct.cache.iterdir()]
    direct.carrier.close()
    direct.carrier.run()
    assert not [*direct.cache.iterdir()]
    assert len([*direct.pool.peer.folder.iterdir()]) == 1


def test_a_site_without_a_path_to_all_others_sends_through_the_pool(direct: Carried) -> None:
    """Before it signs for the message, as without links."""
    direct.pool.direct = []
    direct.write(4)
    direct.carrier.carry()
    assert len(direct.pool.copied) == len(direct.pool.posted) == 1
    assert not [*direct.pool.peer.folder.iterdir()]


@pytest.mark.parametrize("problem", [on.Refused("there is no blob here"), WrongBlob("other bytes")])
def test_a_message_that_is_signed_for_and_not_given_is_waited_for(
    direct: Carried, monkeypatch: pytest.MonkeyPatch, problem: StokerError
) -> None:
    """A site that gives others nothing, or other bytes, does not end their leases."""
    direct.write(4)
    direct.sent_by_other(4)

    def fails(_: str) -> Path:
        raise problem

    monkeypatch.setattr(direct.carrier, "_fetch", fails)
    direct.carrier.carry()
    assert direct.names == [message_name(4, 0, 0)]
    monkeypatch.undo()
    direct.carrier.carry()
    assert len(direct.names) == 2


def test_nothing_is_brought_of_an_exchange_before_the_own_message_is_sent(tmp_path: Path) -> None:
    """So that none is left unsent at a job's end; and of exchanges that the job does not make, nothing at all."""
    carried = Carried(tmp_path)
    for update in (4, 9, 10**13):
        carried.sent_by_other(update)
    carried.carrier.carry()
    assert not carried.fetched
    carried.write(4)
    for _ in range(2):
        carried.carrier.carry()
    assert carried.names == [message_name(4, 0, 0), message_name(4, 0, 1)]
    assert len(carried.fetched) == 1


def test_a_file_that_is_larger_than_the_job_may_write_is_not_read(tmp_path: Path) -> None:
    """A sparse file takes no disk, and would take this machine's memory or disk."""
    carried = Carried(tmp_path, most_bytes=1000)
    carried.write(4, b"0" * 1000)
    with pytest.raises(BadRun, match="at most"):
        carried.carrier.carry()
    assert not carried.pool.posted
    assert not list(carried.box.aside.iterdir())
    (carried.box.run / MESSAGES / "0000.needs").write_bytes(b"1" * 65)
    with pytest.raises(BadRun, match="at most 64"):
        carried.box.needs_from()


def test_a_disk_that_is_full_here_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The site goes on at another agent: the reason is this machine's, and not the job's."""
    carried = Carried(tmp_path)
    carried.write(4)
    carried.sent_by_other(4)
    monkeypatch.setattr("stoker.pool.message_carrier._LOOK_S", 0.0)
    carried.carrier._pause_s = 0.0

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(JobBox, "write_message", full)
    carried.carrier.run()
    assert isinstance(carried.carrier.problem, PlaceFailed)


def test_a_site_that_goes_on_elsewhere_sends_the_same_or_nothing(tmp_path: Path) -> None:
    """A message that it has sent is not sent again; another one in its place ends the lease here."""
    carried = Carried(tmp_path)
    sent = hashlib.sha256(content_of(0, 4)).hexdigest()
    carried.pool.note("run-s0.0", 4, sent)
    carried.pool.note("run-s0.0", 9, hashlib.sha256(content_of(0, 9)).hexdigest())
    carried.write(4)
    carried.carrier.carry()
    assert not carried.pool.posted
    assert carried.pool.copied == [(sent, "run-s0.0")]  # it may have been deleted there while the run stood still
    carried.write(9, b"other")
    with pytest.raises(PlaceFailed, match=r"^the site has sent another message after update 10"):
        carried.carrier.carry()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"no message", "is none: its first line is not complete"),
        (content_of(1, 4)[:-1], "is none: it has 5 of 6 bytes"),
        (content_of(0, 4), "has sent 000000004-0000-0000.message as its message"),
        (content_of(1, 5), "has sent 000000005-0000-0001.message as its message"),
        (content_of(1, 4, job="6" * 64), "is of another job"),
        (content_of(1, 4, sites=3), "is of another job"),
        (content_of(1, 4, b"more values"), "or of another length"),
    ],
)
def test_what_another_site_sends_is_checked(tmp_path: Path, content: bytes, text: str) -> None:
    """Only the message that its agent signed for gets into the box; another one is fetched once, and ends no lease."""
    carried, told = Carried(tmp_path), list[str]()
    carried.carrier._tell = told.append
    carried.write(4)
    carried.sent_by_other(4, content)
    for _ in range(3):
        carried.carrier.carry()
    assert carried.names == [message_name(4, 0, 0)]
    assert len(carried.fetched) == len(told) == 1
    assert text in told[0]
    assert carried.carrier.waited_s > 0
    assert not [*carried.cache.iterdir()]


def test_what_is_no_message_is_shown_to_the_pool(direct: Carried) -> None:
    """Where its signer does not send it there: blocks rest on it, and a replay of the signer's own block reads it."""
    direct.write(4)
    direct.sent_by_other(4, b"no message")
    for _ in range(2):
        direct.carrier.carry()
    assert (hashlib.sha256(b"no message").hexdigest(), "run-s1.0") in direct.pool.copied
    assert not [*direct.cache.iterdir()]


def test_a_fetch_that_is_broken_off_at_the_end_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease is over: nothing is said of it, and nothing tried again."""
    carried, told = Carried(tmp_path), list[str]()
    carried.write(4)
    carried.sent_by_other(4)

    def broken_off(_: str) -> Path:
        carried.carrier.close()
        raise PlaceUnreachable("the blob is not wanted any more")

    monkeypatch.setattr(carried.carrier, "_fetch", broken_off)
    monkeypatch.setattr(carried.carrier, "_tell", told.append)
    carried.carrier._pause_s = 0.0
    carried.carrier.run()
    assert (told, carried.carrier.problem) == ([], None)


def test_it_is_known_for_how_long_another_site_is_waited_for(tmp_path: Path) -> None:
    """From the first look without its message to the one that finds it."""
    carried = Carried(tmp_path)
    carried.carrier.carry()
    assert carried.carrier.waited_s == 0
    carried.write(4)
    carried.carrier.carry()
    since_s = carried.carrier._waits_since_s
    assert since_s is not None
    carried.carrier.carry()
    assert carried.carrier._waits_since_s == since_s
    carried.sent_by_other(4)
    for _ in range(2):
        carried.carrier.carry()
    assert carried.carrier.waited_s == 0


def test_a_job_that_puts_a_link_in_the_place_of_its_folder(tmp_path: Path) -> None:
    """Nothing outside of the box is read or written."""
    for link in ("launch/messages", f"{MESSAGES}/{message_name(4, 0, 0)}"):
        carried = Carried(tmp_path / str(len(link)))
        outside = tmp_path / f"outside-{len(link)}"
        outside.mkdir()
        (outside / message_name(4, 0, 0)).write_bytes(content_of(0, 4))
        (carried.box.run / link).parent.mkdir(parents=True)
        is_file = link.endswith(".message")
        (carried.box.run / link).symlink_to(outside / message_name(4, 0, 0) if is_file else outside)
        carried.sent_by_other(4)
        with pytest.raises(StokerError):
            carried.carrier.carry()
        assert not carried.pool.posted
        assert len(list(outside.iterdir())) == 1


def test_what_the_job_needs_no_more_is_removed_from_the_box(tmp_path: Path) -> None:
    """By its own note; it is not brought again."""
    carried = Carried(tmp_path)
    for update in (4, 9):
        carried.write(update)
        carried.sent_by_other(update)
    carried.carrier.carry()
    (carried.box.run / MESSAGES / "0000.needs").write_text("7")
    carried.carrier.carry()
    carried.write(14)
    carried.carrier.carry()
    left = [name for name in carried.names if name.endswith(".message")]
    assert left == [message_name(9, 0, 0), message_name(9, 0, 1), message_name(14, 0, 0)]
    assert [one.update for one in carried.pool.posted] == [4, 9, 14]


def test_messages_that_may_be_on_their_way_are_needed() -> None:
    """After 10 updates: all that were sent since, and the last one before of each fragment and site."""
    known = [
        KnownMessage(site=1, update=update, fragment=fragment, blob="")
        for update in (4, 9, 14, 19)
        for fragment in (0, 1)
        if (update, fragment) != (9, 1)
    ]
    needed = [(one.update, one.fragment) for one in needed_from(known, 10)]
    assert sorted(needed) == [(4, 1), (9, 0), (14, 0), (14, 1), (19, 0), (19, 1)]
    assert len(needed_from(known, 0)) == len(known)


def test_messages_that_a_replay_writes_otherwise(tmp_path: Path) -> None:
    """Those that it did not make are not compared."""
    carried = Carried(tmp_path)
    carried.write(4)
    carried.write(9)
    right, wrong = (hashlib.sha256(content_of(0, update)).hexdigest() for update in (4, 1))
    own = [
        KnownMessage(site=0, update=update, fragment=0, blob=blob)
        for update, blob in ((1, wrong), (4, right), (9, wrong))
    ]
    assert [one.update for one in differing_messages(carried.box.run, own)] == [9]


@pytest.mark.parametrize(("agent", "is_blamed"), [("run-s0.0", True), ("run-s0.1", False)])
def test_an_agent_answers_for_its_own_messages(tmp_path: Path, agent: str, is_blamed: bool) -> None:
    """A replay of the next agent's block finds what the one before it has sent otherwise, and blames nobody here."""
    carried = Carried(tmp_path)
    carried.write(4)
    wrong = KnownMessage(site=0, update=4, fragment=0, blob="0" * 64, agent="run-s0.0")
    verdict = replayed(carried, (wrong,), agent)
    assert isinstance(verdict, NotOfTheJob) is is_blamed


def test_a_replay_fetches_what_the_block_could_have_read(tmp_path: Path) -> None:
    """What another site has sent of exchanges that this one did not make, or what is no message, is left out."""
    carried = Carried(tmp_path)
    known = [KnownMessage(site=0, update=update, fragment=0, blob="") for update in (4, 9, 14)]
    contents = {4: content_of(1, 4), 5: content_of(1, 5), 9: b"no message", 14: content_of(1, 14)}
    known += [KnownMessage(site=1, update=at, fragment=0, blob=carried.pool.kept(one)) for at, one in contents.items()]
    replayed(carried, tuple(known), "run-s0.0")
    assert carried.names == [message_name(4, 0, 1)]
    assert len(carried.fetched) == 2


def replayed(carried: Carried, messages: tuple[KnownMessage, ...], agent: str) -> Exception:
    """How a replay of ten updates ends, whose program makes nothing but what is in the box."""
    box: Any = SimpleNamespace(
        order=carried.box.order, replay=lambda *_, **__: None, write_message=carried.box.write_message
    )
    manifest = save(CheckpointStore(carried.box.aside / "made"), bytes(32), 10)
    answer = {"manifest": to_json(manifest), "states": []}
    host: Any = SimpleNamespace(run=lambda _: (0, json.dumps(answer).encode(), b""))
    block: Any = None
    making = Making(
        box=box,
        before=None,
        block=block,
        fetch=carried.fetch,
        host=host,
        messages=messages,
        agent=agent,
        is_same_class=True,
    )
    try:
        making.run(carried.box.run, 10)
    except NotOfTheJob as problem:
        return problem
    return Exception()
