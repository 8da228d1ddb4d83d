"""Exchanges of sites through a folder of files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stoker.errors import BadJob, RunFailed
from stoker.jobs import DiLoCo, LocalSGD
from stoker.records import Layout
from stoker.stepping.message_folder import BadMessage, MessageFolder, StoppedWaiting, parse_site
from stoker.stepping.world import World
from stoker.store.site_message import decode_message, encode_message, parse_name
from stoker.testing.ranks import on_ranks
from stoker.units import updates
from tests.stepping.outer.sites import UPDATES, Learned, ended, gpt_job, make_step, train

JOB = "5" * 64
MINE, THEIRS = torch.arange(64, dtype=torch.uint8), torch.arange(64, dtype=torch.uint8).flip(0)


class Clock:
    """A clock that only a pause moves; `on_pause` is called in each one."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_pause: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        """The time [s]."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let so much time pass [s]."""
        self.now += seconds
        self.on_pause()


def folder_of(path: Path, site: int, clock: Clock | None = None) -> MessageFolder:
    """Exchanges of one of two sites, which wait for 10 s."""
    clock = clock or Clock()
    return MessageFolder(path, site, 2, job=JOB, patience_s=10.0, clock=clock, sleep=clock.sleep)


def test_sites_receive_what_each_sent(tmp_path: Path) -> None:
    """In the order of the sites, also where the other one's message comes late."""
    clock = Clock()
    here, there = folder_of(tmp_path, 0, clock), folder_of(tmp_path, 1)
    pending = here.send(4, 0, MINE)

    def answer() -> None:
        there.send(4, 0, THEIRS)

    clock.on_pause = answer
    assert [one.tolist() for one in pending.received()] == [MINE.tolist(), THEIRS.tolist()]
    assert [one.tolist() for one in there.send(4, 0, THEIRS).received()] == [MINE.tolist(), THEIRS.tolist()]


def changed(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Site 1's message after update 4, changed."""
    file = next(one for one in path.iterdir() if parse_name(one.name) == (4, 0, 1))
    file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda content: content[:-1], r"not complete: it has 63 of 64 bytes"),
        (lambda content: content[:-64] + bytes(64), r"not complete: its 64 bytes do not have the digest"),
        (lambda content: content[:20], r"not complete: its first line is not complete in 20 bytes"),
        (lambda content: b"{}\n" + content, r"not complete: its first line is no head of a message"),
    ],
    ids=["torn", "other bytes", "torn head", "other head"],
)
def test_a_message_that_is_not_complete_is_waited_for(
    tmp_path: Path, change: Callable[[bytes], bytes], text: str
) -> None:
    """A file may be on its way. If it never gets complete, the error says what is wrong with it, after the patience."""
    clock = Clock()
    folder_of(tmp_path, 1).send(4, 0, THEIRS)
    changed(tmp_path, change)
    pending = folder_of(tmp_path, 0, clock).send(4, 0, MINE)
    with pytest.raises(RunFailed, match=text):
        pending.received()
    assert clock.now >= 10.0
    whole = encode_message(folder_of(tmp_path / "elsewhere", 1).send(4, 0, THEIRS).head, bytes(THEIRS))

    def complete() -> None:
        changed(tmp_path, lambda _: whole)

    clock.on_pause = complete
    assert [one.tolist() for one in pending.received()] == [MINE.tolist(), THEIRS.tolist()]


def test_a_message_that_never_comes_ends_the_run(tmp_path: Path) -> None:
    """After the patience, with the site's number and what to do; a request to stop ends the wait at once."""
    clock = Clock()
    here = folder_of(tmp_path, 0, clock)
    pending = here.send(4, 0, MINE)
    with pytest.raises(RunFailed, match=r"no message of site 1 after update 5 .* for 10.0 s") as caught:
        pending.received()
    assert "1/2" in (caught.value.remedy or "")
    here.is_stopping, clock.now = lambda: True, 0.0
    with pytest.raises(StoppedWaiting, match="asked to stop while waiting for site 1 after update 5"):
        pending.received()
    assert clock.now < 1


def test_the_same_message_again_is_no_other_one(tmp_path: Path) -> None:
    """A site that went back sends again what it sent; other bytes in the place of its own are refused."""
    here = folder_of(tmp_path, 0)
    first = here.send(4, 0, MINE)
    stamp = (tmp_path / first.head.name).stat().st_mtime_ns
    here.send(4, 0, MINE)
    assert (tmp_path / first.head.name).stat().st_mtime_ns == stamp
    with pytest.raises(RunFailed, match="is there already, and is not the message that site 0 of 2 has made"):
        here.send(4, 0, THEIRS)
    (tmp_path / first.head.name).write_bytes(b"torn")  # by a disk that lost power
    assert here.send(4, 0, MINE).head == first.head
    assert decode_message((tmp_path / first.head.name).read_bytes()) == (first.head, bytes(MINE))


@pytest.mark.parametrize(
    ("job", "num_sites", "size", "text"),
    [("6" * 64, 2, 64, "job 666"), (JOB, 3, 64, "sites 3 instead of 2"), (JOB, 2, 65, "num_bytes 65 instead of 64")],
    ids=["job", "sites", "size"],
)
def test_messages_of_another_job_are_refused(tmp_path: Path, job: str, num_sites: int, size: int, text: str) -> None:
    """Another job, number of sites, or size: at once, and the error says what differs."""
    MessageFolder(tmp_path, 1, num_sites, job=job).send(4, 0, torch.zeros(size, dtype=torch.uint8))
    pending = folder_of(tmp_path, 0).send(4, 0, MINE)
    with pytest.raises(BadMessage, match=rf"does not belong to this exchange: {text}"):
        pending.received()


def test_what_no_site_needs_is_deleted(tmp_path: Path) -> None:
    """Each site deletes its own messages, once all have saved beyond them."""
    here, there = folder_of(tmp_path, 0), folder_of(tmp_path, 1)
    for update in (4, 9, 14):
        here.send(update, 0, MINE)
        there.send(update, 0, THEIRS)
    here.needs_from(10)
    assert len(list(tmp_path.glob("*.message"))) == 6  # the other one has saved nothing
    there.needs_from(8)
    here.needs_from(10)
    left = sorted(filter(None, (parse_name(one.name) for one in tmp_path.iterdir())))
    assert left == [(9, 0, 0), (9, 0, 1), (14, 0, 0), (14, 0, 1)]


@pytest.mark.parametrize("text", ["2/2", "0/1", "1", "-1/2", "0/9999", ""])
def test_a_site_that_is_none(text: str) -> None:
    """Numbers go from 0, of two sites at least."""
    with pytest.raises(BadJob, match="wanted a number from 0"):
        parse_site(text)
    assert parse_site("1/2") == (1, 2)


CASES = (
    DiLoCo(every=updates(5), fragments=2, overlap=1, rate="by_noise", early=(updates(3), updates(5))),
    LocalSGD(every=updates(4)),
)


def by_both(world: World, folder: Path) -> list[tuple[Learned, Learned]]:
    """Each case by a process group, and through a folder; there the site goes back once, in the middle."""
    found = []
    for number, sync in enumerate(CASES):
        together = make_step(world, gpt_job(sync))
        of_group = ended(together, train(together, 0, UPDATES))
        messages = MessageFolder(folder / str(number), world.rank, 2, job=JOB, patience_s=60.0)
        alone = World(messages=messages)
        step = make_step(alone, gpt_job(sync))
        train(step, 0, 6)
        again = make_step(alone, gpt_job(sync))  # as after a loss: from the beginning, with the messages that are there
        found.append((of_group, ended(again, train(again, 0, UPDATES))))
    return found


def test_sites_with_a_folder_learn_what_processes_learn(tmp_path: Path) -> None:
    """Bit for bit: losses, own and shared weights, and exchanges but for the times; also where sites went back."""
    for cases in on_ranks(Layout(replicas=2), by_both, tmp_path):
        for of_group, of_folder in cases:
            assert of_folder.losses == of_group.losses
            assert of_folder.indices == of_group.indices
            assert of_folder.sent_bytes == of_group.sent_bytes
            same = [dataclasses.replace(one, speeds=()) for one in of_folder.exchanges]
            assert same == [dataclasses.replace(one, speeds=()) for one in of_group.exchanges]
            for kind in ("own", "shared"):
                mine, theirs = getattr(of_folder, kind), getattr(of_group, kind)
                assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_values_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    """In the values of another site, or in the number of its samples: the shared weights stay as they are."""
    for number, position in enumerate((0, -8)):  # the samples in the note; the last of the values
        step = make_step(World(messages=MessageFolder(tmp_path / str(number), 0, 2, job=JOB)), gpt_job(CASES[1]))
        assert step.outer is not None
        train(step, 0, 3)
        shared = [tensor.clone() for tensor in step.outer.shared.tensors()]
        elsewhere = MessageFolder(tmp_path / "elsewhere" / str(number), 0, 2, job=JOB, patience_s=0.0)
        twin = make_step(World(messages=elsewhere), gpt_job(CASES[1]))
        with pytest.raises(BadMessage, match="no message of site 1"):  # after its own was sent
            train(twin, 0, 4)
        (file,) = elsewhere.folder.glob("*.message")
        theirs = torch.frombuffer(bytearray(decode_message(file.read_bytes())[1]), dtype=torch.uint8)
        theirs[position:][:8].view(torch.float64)[0] = torch.nan
        MessageFolder(tmp_path / str(number), 1, 2, job=JOB).send(3, 0, theirs)
        with pytest.raises(BadMessage, match="what site 1 learned up to update 4 is not finite"):
            train(step, 3, 4)
        assert all(torch.equal(a, b) for a, b in zip(step.outer.shared.tensors(), shared, strict=True))
