from __future__ import annotations

import json
import shutil
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import BadRun, NoDevice, PlaceFailed
from stoker.pool import agent as agent_module
from stoker.pool import events as on
from stoker.pool import lease_replay
from stoker.pool.agent import Agent, Lending, determinism_class, lent_devices, offer_of
from stoker.pool.bisection import Bisection, Side
from stoker.pool.events import sha256
from stoker.pool.hardware_proof import HardwareProof
from stoker.pool.isolation import Bubblewrap, Limits
from stoker.pool.job_box import JobBox, PoolOrder
from stoker.pool.lease_replay import replay_lease
from stoker.pool.leased_job import LeasedJob
from stoker.pool.replay_check import Making, ReplayVerdict
from stoker.pool.rules.disputes import draw_message
from stoker.records import Device
from stoker.records.codec import dumps, to_json
from tests.pool.book import Book
from tests.pool.fake_pool import FakePool
from tests.pool.server import until

DEVICE = Device(name="cpu", kind="cpu", model="A CPU", cores=4, memory_bytes=8 << 30, fast_dtypes=("fp32",))
LIMITS = Limits(memory_bytes=1 << 30, cores=2, disk_bytes=1 << 20)
LENDING = Lending(name="box", price_per_hour=400_000, limits=LIMITS, beat_s=0.0)
ORDER = PoolOrder(run="digits", tree="0" * 64, code="code/1", stoker="stoker/1", job_file="job.py")


class IdleJob(LeasedJob):
    """A job that begins nothing."""

    def begin(self, order: PoolOrder, **about: Any) -> None:
        self.about = about

    def tick(self) -> None:
        """Nothing is due."""


@pytest.fixture
def pool(tmp_path) -> FakePool:
    """A pool without leases."""
    return FakePool(tmp_path / "blobs")


@pytest.fixture
def lender(pool, tmp_path) -> Agent:
    """An agent whose jobs begin nothing, and who asks for work at each step."""
    return Agent(pool, LENDING, DEVICE, Bubblewrap(), tmp_path / "agent", job_type=IdleJob)  # type: ignore[arg-type]


def lease_of(pool: FakePool, name: str = "job.0", order: PoolOrder = ORDER) -> dict[str, Any]:
    """A lease that waits for the agent."""
    return pool.add_lease(name, pool.put_blob(dumps(order).encode()))


def test_an_offer_says_what_was_measured_and_in_which_isolation() -> None:
    """Memory that a job may have, not the machine's; speed as it was shown; the class in which replays are exact."""
    proof = HardwareProof(is_passed=True, why="", flop_per_s=1e12, proved_bytes=1 << 30)
    offer = offer_of(LENDING, DEVICE, Bubblewrap(), proof, expires_s=1e9)
    assert offer.device.memory_bytes == 1 << 30
    assert offer.measured.fp32_flop_per_s == 1e12
    assert offer.isolation == "bubblewrap"
    assert offer.determinism_class == determinism_class(DEVICE)


def test_the_class_changes_with_what_changes_bits(monkeypatch) -> None:
    """Another device, or flags of the libraries, is another class; the number of cores is not."""
    same = determinism_class(DEVICE)
    assert determinism_class(Device(**{**vars(DEVICE), "cores": 64})) == same
    assert determinism_class(Device(**{**vars(DEVICE), "model": "Another"})) != same
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert determinism_class(DEVICE) != same


def test_several_devices_are_one_offer_with_the_price_of_all(monkeypatch) -> None:
    """A CPU's processes share its memory; several GPUs sum in the order of their number, links and NCCL."""
    several = replace(LENDING, num_devices=2)
    offer = offer_of(several, DEVICE, Bubblewrap(), None, expires_s=1e9)
    assert (offer.device.kind, offer.device.count, offer.price_per_hour) == ("cpu", 2, 400_000)
    assert offer.device.memory_bytes == 1 << 29
    assert offer.determinism_class == determinism_class(DEVICE), "sums on a CPU are in the order of the ranks"
    gpu = replace(DEVICE, kind="cuda", model="A GPU")
    monkeypatch.setattr(agent_module, "gpu_links", lambda: "GPU0 NV18 GPU1")
    two = determinism_class(gpu, 2)
    assert len({two, determinism_class(gpu), determinism_class(gpu, 4)}) == 3
    monkeypatch.setattr(agent_module, "gpu_links", lambda: "GPU0 PHB GPU1")
    assert determinism_class(gpu, 2) != two
    monkeypatch.setattr(agent_module, "gpu_links", lambda: "")
    assert determinism_class(gpu, 2) not in (two, determinism_class(gpu))
    assert offer_of(several, gpu, Bubblewrap(), None, expires_s=1e9).device.memory_bytes == DEVICE.memory_bytes


def test_what_is_lent_is_said_as_it_is_said_to_train() -> None:
    """`2xcpu` are two processes; of GPUs those of one model, in their order."""
    gpus = [
        replace(DEVICE, name=f"cuda:{index}", kind="cuda", model="NVIDIA L4", index=index, memory_bytes=24 << 30)
        for index in range(3)
    ]
    attached = [*gpus, DEVICE]
    assert lent_devices("2xcpu", attached) == (DEVICE, DEVICE)
    assert lent_devices("cuda:2", attached) == (gpus[2],)
    assert lent_devices("here", attached) == (gpus[0],)
    assert lent_devices("3xl4", attached) == tuple(gpus)
    for word in ("4xl4", "2xh100", "4xhere", "h100"):
        with pytest.raises(NoDevice):
            lent_devices(word, attached)


def test_a_lease_of_another_number_of_devices_is_refused(lender, pool) -> None:
    """An agent that lends two devices takes no job of one, and the other way round."""
    lease_of(pool, order=replace(ORDER, num_devices=2))
    lender.step()
    assert "for 2 devices, and 1 are lent" in pool.documents["job.0"]["reason"]
    lender.lending = replace(LENDING, num_devices=2)
    lease_of(pool, "job.1", order=replace(ORDER, num_devices=2))
    lender.step()
    assert [body.lease_id for body in pool.of(on.Accepted)] == ["job.1"]


@pytest.mark.parametrize(
    ("order", "lease", "text"),
    [
        ({"site": 0, "sites": 2}, {}, "its order is of site 0, and the lease of no gang"),
        ({"site": 1, "sites": 2}, {"gang": "run"}, "its order is of site 1, and the lease of site 0"),
        ({}, {"gang": "run", "site": 1}, "its order is of no gang, and the lease of site 1"),
    ],
)
def test_an_order_of_another_site_than_its_lease_is_refused(lender, pool, order, lease, text) -> None:
    """It would hold the device unpaid, waiting for a gang, or would run before its gang begins."""
    lease_of(pool, order=replace(ORDER, **order)).update(lease)
    lender.step()
    assert text in pool.documents["job.0"]["reason"]


def test_one_lease_at_a_time_is_accepted_and_ended_with_the_pool(lender, pool) -> None:
    """A second lease waits; a lease that is over for the pool leaves nothing here, and the next one is taken."""
    lease_of(pool, "job.0")
    lease_of(pool, "job.1")
    lender.step()
    assert [body.lease_id for body in pool.of(on.Accepted)] == ["job.0"]
    lender.step()
    pool.documents["job.0"]["state"] = "closed"
    lender.step()
    lender.step()
    assert [body.lease_id for body in pool.of(on.Accepted)] == ["job.0", "job.1"]
    assert not (lender.folder / "leases" / "job.0").exists()
    assert len(pool.of(on.Offered)) == 1


def test_an_agent_with_a_job_asks_for_other_work_at_each_beat(lender, pool, monkeypatch) -> None:
    """Not at each step, which costs owner and pool; an answer is waited for no longer than until the next beat."""
    lender.lending = replace(LENDING, beat_s=10.0)
    asked = []
    monkeypatch.setattr(pool, "work", lambda **given: asked.append(given["answer_s"]) or FakePool.work(pool))
    lender.step()
    lender.step()
    assert len(asked) == 2
    lease_of(pool)
    for _ in range(5):
        lender.step()
    assert pool.of(on.Accepted)
    assert len(asked) == 3
    lender._asks_from = 0.0
    lender.step()
    assert asked == [None, None, None, 10.0]


def test_a_job_that_needs_what_is_not_here_is_refused_with_its_name(lender, pool) -> None:
    """The renter reads which package is missing, and the lease goes elsewhere."""
    lease = lease_of(pool, order=PoolOrder(**{**vars(ORDER), "requirements": ("no-such-package==1.0",)}))
    lender.step()
    assert not pool.of(on.Accepted)
    assert lease["reason"].startswith("refused: the job needs no-such-package==1.0")


def test_what_is_no_order_is_refused(lender, pool) -> None:
    """Whatever a renter puts in the place of an order, the agent goes on."""
    lease = pool.add_lease("job.0", pool.put_blob(b'{"record": "TreeIndex", "schema": 1}'))
    lender.step()
    assert lease["reason"].startswith("refused: the order cannot be read")
    escaping = dumps(ORDER).replace("code/1", "../../etc")
    lease = pool.add_lease("job.1", pool.put_blob(escaping.encode()))
    lender.step()
    assert "leads out of the box" in lease["reason"]


@pytest.mark.parametrize(
    "changes",
    [
        {"requirements": ("",)},
        {"variables": {"A=B": "c"}},
        {"variables": {"LD_PRELOAD\0": "c"}},
        {"variables": {"A": "c\0"}},
        {"arguments": ("--set", "a\0b")},
        {"job_file": "job\ud800.py"},
    ],
)
def test_words_that_no_command_can_have_are_refused(lender, pool, changes) -> None:
    """An order of nonsense neither ends the agent nor is accepted."""
    document = {**to_json(ORDER), **to_json(changes)} if "job_file" not in changes else {**to_json(ORDER), **changes}
    lease = pool.add_lease("job.0", pool.put_blob(json.dumps(document).encode()))
    lender.step()
    assert not pool.of(on.Accepted)
    assert lease["reason"].startswith("refused: ")


def test_leases_that_would_not_pay_or_bind_for_long_are_refused(lender, pool) -> None:
    """Beats that the renter alone may co-sign are not paid for sure; a bond is not put up for years."""
    for change, text in (
        ({"delegate": ""}, "unsigned ones are not paid"),
        ({"bond": 68_000_000}, "it wants a bond of"),
        ({"window_s": 2**53}, "its bond could be held for"),
    ):
        lease = lease_of(pool) | change
        pool.documents["job.0"] = lease
        lender._refused.clear()
        lender.step()
        assert text in lease["reason"]
    assert not pool.of(on.Accepted)


def test_a_full_disk_refuses_the_next_lease(lender, pool, monkeypatch) -> None:
    """An owner without room for the quota takes no job, and the renter reads why."""
    usage = namedtuple("usage", "total used free")  # noqa: PYI024 - as shutil's
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 0, (1 << 30) + 5))
    lease = lease_of(pool)
    lender.step()
    assert "disk of this agent is full: 1.0 GiB are free, 1.0 GiB are needed" in lease["reason"]


def test_a_wrong_clock_is_said_in_the_pools_words(lender, pool) -> None:
    """The pool refuses what is dated wrongly; the agent ends with that sentence in place of trying for ever."""
    pool.refusals = ["the event is dated +300 s from the pool's clock; at most 120 s are taken"]
    with pytest.raises(on.Refused, match="300 s from the pool's clock"):
        lender.step()


def test_a_refusal_after_the_first_offer_ends_neither_agent_nor_job(lender, pool, monkeypatch) -> None:
    """A clock that goes wrong, or an answer of no use, is said once and waited out; the job is looked after."""
    said: list[str] = []
    lender.tell = said.append
    monkeypatch.setattr(agent_module, "_POLL_S", 0.0)
    lease_of(pool)
    lender.step()
    ticks: list[int] = []
    monkeypatch.setattr(lender._job, "tick", lambda: ticks.append(1))
    real = pool.work

    for problem in (on.Refused("300 s from the pool's clock"), PlaceFailed("an answer that is no JSON")):
        monkeypatch.setattr(pool, "work", lambda problem=problem, **_: (_ for _ in ()).throw(problem))
        lender.step()
        lender.step()
    monkeypatch.setattr(pool, "work", real)
    lender.step()
    assert len(ticks) == 5
    assert [text for text in said if "clock" in text] == ["the pool refuses: 300 s from the pool's clock"]


def test_a_paused_owner_makes_no_replays(lender, pool, monkeypatch) -> None:
    """A pause holds for replays as for jobs; one that runs is ended, and its CPU is not the owner's."""

    class Replaying:
        cpu_s, is_ended = 7.0, False

        def kill(self) -> None:
            self.is_ended = True

    began, process = threading.Event(), Replaying()

    def replay(client, lease_id, block, *, host, **_):
        host.started(process)
        began.set()
        until(lambda: process.is_ended)
        raise PlaceFailed("it was ended")

    monkeypatch.setattr(agent_module, "replay_lease", replay)
    monkeypatch.setattr(
        pool, "work", lambda **_: {"leases": [], "challenges": [{"lease_id": "a.0", "block": 3}], "live": []}
    )
    paused = lender.folder / "paused"
    paused.touch()
    lender.step()
    assert not lender._is_checking
    paused.unlink()
    lender.step()
    assert began.wait(60)
    assert lender._others_cpu_s() == 7.0
    paused.touch()
    lender.step()
    assert process.is_ended
    until(lambda: not lender._is_checking)
    assert lender._others_cpu_s() == 0.0


def test_a_replay_ends_when_its_verdict_would_come_too_late(lender, pool, monkeypatch) -> None:
    """A block that sleeps does not hold the only thread for replays for as long as a whole lease may last."""
    lease = lease_of(pool)
    commitment = {"block": 0, "update": 10, "state": "a" * 64, "blob": "b" * 64}
    lease |= {"commitments": [commitment], "running_s": 30}
    limits: list[float] = []

    def check(making: Making, **_: Any) -> ReplayVerdict:
        limits.append(making.host.limits.time_s)
        return ReplayVerdict(equal=None, why="not looked at")

    monkeypatch.setattr(lease_replay, "check_block", check)
    monkeypatch.setattr(JobBox, "make", lambda *_: None)
    for ran_s in (30, 90, 10**9):
        lease["running_s"] = ran_s
        replay_lease(pool, "job.0", 0, folder=lender.folder / "checks", host=lender.host, own_class="")
    assert limits == [600.0, 900.0, LENDING.limits.time_s]


def in_dispute(pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> Bisection:
    """A lease of this agent, whose first block of ten updates a verifier found unequal; the search."""
    book = Book()
    book.finish(blocks=1, verify_fraction=1.0)
    draw = book.operator.sign(draw_message(book.operator.public, book.state.leases["job"]))
    verifier = book.other.public
    book.post(book.operator, on.Challenged(lease_id="job", block=0, verifier=verifier, draw=draw))
    verdict = on.VerdictGiven(lease_id="job", block=0, verifier=verifier, equal=False, made=sha256(b"made"))
    book.post(book.other, verdict)
    book.post(book.operator, on.Disputed(lease_id="job"))
    pool.key.public = book.agent.public
    pool.documents["job"] = json.loads(json.dumps(to_json(book.state.leases["job"])))
    search = {"lease_id": "job", "block": 0, "verifier": verifier}
    monkeypatch.setattr(pool, "work", lambda **_: {"leases": [], "challenges": [], "searches": [search], "live": []})
    return book.state.leases["job"].searched(0, verifier)[1]


@contextmanager
def nothing_made(*_: Any, **__: Any) -> Iterator[tuple[Any, Any]]:
    """In the place of `made_again`."""
    yield {}, SimpleNamespace(block=SimpleNamespace(previous=""), begin=0)


def test_a_search_that_begins_elsewhere_is_given_up_at_once(lender, pool, monkeypatch) -> None:
    """Its updates are not those of the block, and no states of the agent could be right."""
    in_dispute(pool, monkeypatch)

    @contextmanager
    def made(*_: Any, **__: Any) -> Iterator[tuple[Any, Any]]:
        yield {}, SimpleNamespace(block=SimpleNamespace(previous=""), begin=4)

    monkeypatch.setattr(agent_module, "made_again", made)
    monkeypatch.setattr(agent_module, "traced_block", lambda _, at: tuple(sha256(b"%d" % update) for update in at))
    lender.step()
    until(lambda: not lender._is_checking)
    assert [body.states for body in pool.of(on.Traced)] == [()]


def test_a_side_that_cannot_make_a_block_again_says_so(lender, pool, monkeypatch) -> None:
    """After three tries, or at once where the pool does not take its states; not where it is asked no more."""
    search = in_dispute(pool, monkeypatch)
    monkeypatch.setattr(agent_module, "made_again", nothing_made)

    def stepped(times: int) -> list[on.Traced]:
        for _ in range(times):
            lender.step()
            until(lambda: not lender._is_checking)
        found, pool.posted = pool.of(on.Traced), []
        lender._checked.clear()
        return found

    def fails(*_: Any) -> tuple[str, ...]:
        raise PlaceFailed("the disk is full")

    monkeypatch.setattr(agent_module, "traced_block", fails)
    assert stepped(2) == []
    assert [body.states for body in stepped(4)] == [()]
    states = tuple(sha256(b"%d" % number) for number in range(10))
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(agent_module, "traced_block", lambda _, at: asked.append(at) or states)
    assert [body.states for body in stepped(1)] == [states]
    assert asked == [tuple(range(1, 11))]
    usual, has_answered = pool.post, False

    def post(body: on.Body, **more: Any) -> None:
        if isinstance(body, on.Traced) and body.states:
            if has_answered:  # it came through after all: what follows is another question
                answered = replace(search, agent=Side(states=states))
                pool.documents["job"]["challenges"][0]["bisection"] = json.loads(json.dumps(to_json(answered)))
            raise on.Refused("they end in another state")
        usual(body, **more)

    monkeypatch.setattr(pool, "post", post)
    assert [body.states for body in stepped(1)] == [()]
    has_answered = True
    assert stepped(1) == []
    assert len(asked) == 3
    assert stepped(1) == []
    assert len(asked) == 3


def test_ctrl_c_gives_the_whole_notice_that_was_promised(lender, pool) -> None:
    """A shorter one would be refused, and count as leaving."""
    lease_of(pool)
    lender.step()
    lender.stop()
    assert pool.of(on.Reclaiming)[0].by_s > time.time() + 110


def test_a_pool_that_is_away_does_not_end_the_agent(lender, pool, monkeypatch) -> None:
    """No answer is no reason: it asks again."""
    said: list[str] = []
    lender.tell = said.append
    monkeypatch.setattr(agent_module, "_POLL_S", 0.0)
    pool.is_away = True
    lender.step()
    pool.is_away = False
    lender.step()
    assert "does not answer" in said[0]
    assert len(pool.of(on.Offered)) == 1


def test_a_paused_owner_withdraws_the_offer_and_gets_the_job_reclaimed(lender, pool) -> None:
    """`stoker pool pause` reaches a running agent by a file; `--off` lends again."""
    lease_of(pool)
    lender.step()
    (lender.folder / "paused").touch()
    lender.step()
    assert pool.of(on.Reclaiming)[0].lease_id == "job.0"
    pool.documents["job.0"]["state"] = "closed"
    lender.step()
    lender.step()
    assert pool.of(on.Withdrawn)
    lease_of(pool, "job.1")
    lender.step()
    assert len(pool.of(on.Accepted)) == 1
    (lender.folder / "paused").unlink()
    lender.step()
    assert [body.lease_id for body in pool.of(on.Accepted)] == ["job.0", "job.1"]


def test_what_is_sent_beyond_a_day_gives_notice(pool, tmp_path) -> None:
    """A job that has sent what may be sent saves and leaves, and no lease is taken until tomorrow."""
    lending = replace(LENDING, max_upload_bytes=1000)
    agent = Agent(pool, lending, DEVICE, Bubblewrap(), tmp_path / "agent", job_type=IdleJob)  # type: ignore[arg-type]
    lease_of(pool)
    agent.step()
    assert pool.of(on.Accepted)
    pool.sent_bytes = 2000
    agent.step()
    (reclaiming,) = pool.of(on.Reclaiming)
    assert "were sent today" in str(agent._owner.is_back(lambda: 0.0))
    assert reclaiming


def test_outside_of_the_hours_nothing_is_lent(pool, tmp_path, monkeypatch) -> None:
    """A lease waits, and a job that runs over the end is given notice."""
    lending = replace(LENDING, hours=(22, 6))
    agent = Agent(pool, lending, DEVICE, Bubblewrap(), tmp_path / "agent", job_type=IdleJob)  # type: ignore[arg-type]
    lease_of(pool)
    monkeypatch.setattr(agent_module.time, "time", lambda: 12 * 3600.0)
    agent.step()
    assert not pool.posted
    monkeypatch.setattr(agent_module.time, "time", lambda: 23 * 3600.0)
    agent.step()
    assert pool.of(on.Accepted)
    monkeypatch.setattr(agent_module.time, "time", lambda: 31 * 3600.0)
    agent.step()
    assert pool.of(on.Reclaiming)


def test_a_killed_agents_leftovers_go_and_its_lease_is_taken_up(lender, pool) -> None:
    """A new agent in the same folder finds the lease that it holds, and removes what no lease is for."""
    lease = lease_of(pool)
    lease |= {"state": "running", "beat_index": 6, "running_s": 70, "samples": 900}
    for name in ("job.0", "gone.3"):
        (lender.folder / "leases" / name).mkdir(parents=True)
    lender._adopt()
    assert lender._job is not None
    assert lender._job.about["beats"] == 7
    assert lender._job.about["samples"] == 900
    assert [path.name for path in (lender.folder / "leases").iterdir()] == ["job.0"]


def test_a_lease_that_cannot_be_taken_up_does_not_end_the_agent(lender, pool) -> None:
    """Whatever became of its order, the agent starts, and offers."""
    pool.add_lease("job.0", pool.put_blob(b"no order"))["state"] = "running"
    (lender.folder / "leases" / "job.0").mkdir(parents=True)
    lender.step()
    assert lender._job is None
    assert pool.of(on.Offered)
    assert not list((lender.folder / "leases").iterdir())


def test_a_lease_is_taken_up_once_the_pool_answers(lender, pool, monkeypatch) -> None:
    """An agent that starts while the pool is away takes its lease up later, and removes nothing before."""
    monkeypatch.setattr(agent_module, "_POLL_S", 0.0)
    lease_of(pool)["state"] = "running"
    (lender.folder / "leases" / "job.0").mkdir(parents=True)
    pool.is_away = True
    lender.step()
    assert lender._job is None
    pool.is_away = False
    lender.step()
    assert lender._job is not None
    assert lender._job.lease_id == "job.0"


def test_words_for_the_job_are_written_through_no_link_of_its(tmp_path) -> None:
    """A job that puts a link in the place of `launch/`, or of a file in it, does not make the agent write there."""
    owner = tmp_path / "owner"
    owner.mkdir()
    box = JobBox(tmp_path / "box", ORDER)
    box.run.mkdir(parents=True)
    box.write_word("stop")
    assert (box.run / "launch" / "stop").exists()
    (box.run / "launch" / "order.json").symlink_to(owner / "file")
    box.write_word("order.json", b"{}")
    assert not (owner / "file").exists()
    assert (box.run / "launch" / "order.json").read_bytes() == b"{}"
    shutil.rmtree(box.run / "launch")
    (box.run / "launch").symlink_to(owner)
    with pytest.raises(BadRun, match="put something else in the place of launch/"):
        box.write_word("stop")
    assert not list(owner.iterdir())


def test_an_agent_pauses_between_steps_while_its_device_gets_ready_for_a_probe(lender, pool, monkeypatch) -> None:
    """Until the device has come the pool answers each look for work at once."""
    is_loaded = threading.Event()

    class Loading:
        def __call__(self, question: dict[str, Any]) -> dict[str, Any]:
            is_loaded.wait(60)
            return {}

        def end(self) -> None:
            """Nothing is left."""

    work = {"leases": [], "challenges": [], "live": [], "probes": [{"probe_id": "x", "offer_id": "box", "device": 0}]}
    monkeypatch.setattr(pool, "work", lambda **_: work)
    monkeypatch.setattr(pool, "probe", lambda *_: {"over": True}, raising=False)
    lender.open_device = lambda _: Loading()
    lender.lending = replace(LENDING, beat_s=10.0)
    assert lender._pause_s == 0
    lender.step()
    assert lender._pause_s > 0
    is_loaded.set()
    until(lambda: lender._pause_s == 0)
