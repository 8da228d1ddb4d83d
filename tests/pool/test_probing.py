"""A pool that probes idle devices at one moment: control plane and agents, with devices that say how long they took."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest

from stoker.errors import PlaceFailed
from stoker.pool import control_plane, probing
from stoker.pool import events as on
from stoker.pool.agent import Agent, Lending
from stoker.pool.client import PoolClient, request_message
from stoker.pool.events import CREDIT, Refused
from stoker.pool.hardware_proof import HardwareProof, probed_bytes, prove_hardware, shape_of
from stoker.pool.isolation import Bubblewrap, Limits
from stoker.pool.job_box import PoolOrder
from stoker.pool.keys import Key
from stoker.pool.leased_job import LeasedJob
from stoker.pool.log import audit
from stoker.pool.overview import Overview
from stoker.pool.probing import ProbeChannel, Prober, read_answer
from stoker.pool.state import State
from stoker.records import Device
from stoker.records.codec import dumps
from tests.pool.book import Book, offer, opened
from tests.pool.server import in_thread, until
from tests.pool.test_hardware_proof import Device as NumpyDevice

DEVICE = Device(name="cpu", kind="cpu", model="A CPU", cores=2, memory_bytes=1 << 30, fast_dtypes=("fp32",))
LIMITS = Limits(memory_bytes=1 << 30, cores=1, disk_bytes=1 << 20)
WAIT_S = 0.5


class Machine:
    """A device, on which each of several programs at one moment takes as many seconds as there are programs."""

    def __init__(self) -> None:
        self._news, self._active, self._most, self.num_asked = threading.Condition(), 0, 0, 0

    def open(self, cores: float | None) -> Program:
        """Another program on it."""
        return Program(self)

    def share(self) -> float:
        """The time that a product takes [s]; programs that begin within `WAIT_S` are at one moment."""
        with self._news:
            self.num_asked += 1
            self._active += 1
            self._most = max(self._most, self._active)
            self._news.notify_all()
            self._news.wait_for(lambda: self._most > 1, WAIT_S)
            most, self._active = self._most, self._active - 1
            self._most = self._most if self._active else 0
            return float(most)


class Program:
    """In the place of `LocalDevice`."""

    pid = os.getpid()

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __call__(self, question: dict[str, Any]) -> dict[str, Any]:
        return {"test_s": self._machine.share()} if question["n"] > 64 else {}

    def kill(self) -> None:
        """Nothing is left."""

    def end(self) -> None:
        """Likewise."""


def told(ask: Callable[[dict[str, Any]], dict[str, Any]], *, memory_bytes: int, num_rows: int) -> HardwareProof:
    """What a device says that it took."""
    answer = ask({"ask": "multiply", "seed": 1, "n": 100, "k": 4})
    return HardwareProof(is_passed=True, why="", product_s=answer["test_s"])


class IdleJob(LeasedJob):
    """A job that begins nothing."""

    def begin(self, order: Any, **_: Any) -> None:
        """Nothing."""

    def tick(self) -> None:
        """Nothing is due."""


class Lenders:
    """A control plane that probes all the time, and agents in threads."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.plane, self.operator = stack.enter_context(in_thread(folder / "pool", probe_every_s=0.0))
        assert self.plane.prober is not None
        self.plane.prober._prove = told
        n, k = shape_of(probed_bytes(LIMITS.memory_bytes, is_cpu=True))
        self._proof = HardwareProof(is_passed=True, why="", flop_per_s=2.0 * n * n * k)  # a second
        self.agents: dict[str, Agent] = {}

    def lend(self, name: str, machine: Machine, **more: Any) -> None:
        """One more agent, with a key of its own."""
        client = PoolClient(self.operator.address, Key.made())
        assert client.key is not None
        self.operator.post(on.Deposited(account=client.key.public, amount=10 * CREDIT))
        agent = Agent(
            client,
            Lending(name=name, price_per_hour=CREDIT // 2, limits=LIMITS, beat_s=0.0, **more),
            DEVICE,
            Bubblewrap(),
            self.folder / name,
            proof=self._proof,
            job_type=IdleJob,
            open_device=machine.open,  # type: ignore[arg-type]
        )
        self.agents[name] = agent
        is_over = threading.Event()

        def work() -> None:
            while not is_over.is_set():
                agent.step()
                time.sleep(0.02)

        thread = threading.Thread(target=work)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(is_over.set)

    def offers(self) -> dict[str, dict[str, Any]]:
        """All offers, by name."""
        return {one["offer"]["offer_id"]: one for one in self.operator.state("offers")}

    def probes(self) -> list[on.Probed]:
        """What the log says of probes."""
        return [event.draft.read_body() for event in self.operator.events() if event.kind == "probed"]  # type: ignore[misc]


@pytest.fixture
def lenders(tmp_path, monkeypatch) -> Iterator[Lenders]:
    """A pool without agents."""
    monkeypatch.setattr(control_plane, "_TICK_S", 0.1)
    monkeypatch.setattr(probing, "_WAIT_S", 1.0)
    with ExitStack() as stack:
        yield Lenders(tmp_path, stack)


def test_one_device_that_is_offered_twice_is_found_and_an_honest_one_is_not(lenders) -> None:
    """Both offers of it are stopped, by two probes that are in the log; the third one has met its time with others."""
    twice, own = Machine(), Machine()
    lenders.lend("box", twice)
    lenders.lend("twin", twice)
    lenders.lend("honest", own)
    until(lambda: {name for name, one in lenders.offers().items() if one.get("clashes_with")} == {"box", "twin"}, 60)
    found = lenders.offers()
    assert [found[name]["is_free"] for name in ("box", "twin", "honest")] == [False, False, True]
    assert (found["box"]["clashes_with"], found["twin"]["clashes_with"]) == ("twin", "box")
    pairs = [one for one in lenders.probes() if {times.offer_id for times in one.offers} == {"box", "twin"}]
    late = [one for one in pairs if all(times.together_s == (2.0,) * 3 for times in one.offers)]
    assert len(late) >= 2
    assert all(times.alone_s == (1.0,) * 3 for one in late for times in one.offers)
    renter = PoolClient(lenders.operator.address, Key.made())
    assert renter.key is not None
    lenders.operator.post(on.Deposited(account=renter.key.public, amount=10 * CREDIT))
    with pytest.raises(Refused, match="did not meet their times at one moment"):
        renter.post(opened("job-1", offer_id="box"))
    shown = {one["offer_id"]: one["status"] for one in Overview(lenders.operator, "").look()["offers"]}
    assert shown == {"box": "clashes", "twin": "clashes", "honest": "free"}
    until(lambda: lenders.offers()["honest"].get("probed_s"), 60)
    assert not audit(lenders.folder / "pool" / "log.db").problem


@pytest.mark.slow  # half a minute of probes
def test_a_lease_ends_a_probe_and_an_agent_may_decline(lenders, monkeypatch) -> None:
    """Who declines is not asked; a probe whose agent has a job comes to nothing, and nothing is written."""
    one, other, declining = Machine(), Machine(), Machine()
    lenders.lend("declining", declining, probes=False)
    lenders.lend("one", one)
    lenders.lend("other", other)
    until(lambda: all(lenders.offers().get(name, {}).get("probed_s") for name in ("one", "other")), 90)
    monkeypatch.setattr(probing, "_COMES_S", 10.0)  # the agent with the job does not come to the last probe
    assert declining.num_asked == 0
    agent = lenders.agents["one"]
    until(lambda: agent._probed, 90)
    renter = PoolClient(lenders.operator.address, Key.made())
    assert renter.key is not None
    lenders.operator.post(on.Deposited(account=renter.key.public, amount=10 * CREDIT))
    order = PoolOrder(run="x", tree="0" * 64, code="code/1", stoker="stoker/1", job_file="job.py")
    digest = renter.put_blob(dumps(order).encode())
    renter.post(opened("job-1", offer_id="one", order=digest, delegate=lenders.operator.address.key))
    until(lambda: agent._job, 90)
    asked = one.num_asked
    assert agent._probed == []
    until(lenders.plane.prober._task.done, 90)
    num_probes = len(lenders.probes())
    time.sleep(1.0)
    assert (one.num_asked, len(lenders.probes())) == (asked, num_probes), "a device with a job was asked"


def test_who_does_not_answer_is_not_waited_for_again(lenders, monkeypatch) -> None:
    """The probe comes to nothing, and the next one is of the others, which are in time."""
    monkeypatch.setattr(probing, "ANSWER_S", 2.0)
    silent = Machine()
    lenders.lend("silent", silent)
    until(lambda: lenders.offers().get("silent"))
    is_over = threading.Event()
    monkeypatch.setattr(silent, "share", lambda: is_over.wait() and 1.0)
    for name in ("one", "other"):
        lenders.lend(name, Machine())
    until(lambda: all(lenders.offers().get(name, {}).get("probed_s") for name in ("one", "other")), 60)
    is_over.set()
    assert not lenders.offers()["silent"].get("probed_s")
    assert lenders.plane.prober._left_until_s.keys() == {lenders.offers()["silent"]["agent"]}
    assert all("silent" not in {times.offer_id for times in one.offers} for one in lenders.probes())


class Honest(NumpyDevice):
    """A device's side in NumPy, as a program that ends."""

    pid = os.getpid()

    def kill(self) -> None:
        """Nothing is left."""

    def end(self) -> None:
        """Likewise."""


def test_real_questions_are_answered_and_checked_over_http(lenders, monkeypatch) -> None:
    """Products, digests and rows; a device that is right in some rows alone has given no right answer."""
    monkeypatch.setattr(probing, "bytes_of", lambda _: 1 << 17)
    lenders.plane.prober._prove = prove_hardware
    for name, cheat in (("one", ""), ("other", ""), ("lazy", "half the rows")):
        lenders.lend(name, SimpleNamespace(open=lambda cores, cheat=cheat: Honest(cheat)))
    names = {"one", "other", "lazy"}
    screens = until(lambda: [one for one in lenders.probes() if {times.offer_id for times in one.offers} == names], 60)
    found = {times.offer_id: times.together_s for times in screens[0].offers}
    assert found["lazy"] == (0.0,)
    assert min(found["one"][0], found["other"][0]) > 0


class Sender:
    """An agent that has come to a probe, and sends answers by itself."""

    def __init__(self, lenders: Lenders, name: str = "box") -> None:
        self._client = PoolClient(lenders.operator.address, Key.made())
        assert self._client.key is not None
        lenders.operator.post(on.Deposited(account=self._client.key.public, amount=0))
        for offer_id in (name, f"{name}-2"):
            self._client.post(on.Offered(offer=offer(offer_id, time.time())))
        asked = until(lambda: self._client.work(probes=True)["probes"], 60)
        self.probe_id, self.name = asked[0]["probe_id"], name
        for one in asked:
            self._client.probe(self.probe_id, one["offer_id"], one["device"], 0, {})

    def begin(self, step: int, content: bytes, num_bytes: int) -> http.client.HTTPConnection:
        """Send the first `num_bytes` of a signed answer."""
        place = {"offer": self.name, "device": 0, "step": step, "sha256": hashlib.sha256(content).hexdigest()}
        target, time_s, key = f"/v1/probes/{self.probe_id}?{urlencode(place)}", time.time(), self._client.key
        assert key is not None
        address = self._client.address
        signature = key.sign(request_message(address.key, key.public, "PUT", target, time_s))
        connection = http.client.HTTPConnection(address.url.removeprefix("http://"), timeout=60)
        connection.putrequest("PUT", target)
        for header, value in (
            ("Content-Length", len(content)),
            ("X-Stoker-Key", key.public),
            ("X-Stoker-Time", repr(time_s)),
            ("X-Stoker-Signature", signature),
        ):
            connection.putheader(header, str(value))
        connection.endheaders(content[:num_bytes])
        return connection

    def send(self, step: int, content: bytes) -> tuple[int, dict[str, Any]]:
        """Send a whole answer; the status and document of the reply."""
        connection = self.begin(step, content, len(content))
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read())
        connection.close()
        return found


def test_one_body_at_a_time_is_read_of_each_device(lenders, monkeypatch) -> None:
    """And only for the question that is asked: a stranger's bodies are not kept side by side in memory."""
    monkeypatch.setattr(probing, "_WAIT_S", 0.1)
    sender = Sender(lenders)
    prober = lenders.plane.prober
    channel = until(lambda: next((one for place, one in prober._channels.items() if place[0] == "box"), None))
    until(lambda: channel.awaits(1))
    status, said = sender.send(7, b"{}")
    assert (status, said["error"]) == (409, "question 7 of this probe was not asked")
    status, said = sender.send(0, b" " * 2000)
    assert (status, said["error"]) == (409, "this answer of a probe has 1,024 bytes at most")
    content = json.dumps({"test_s": 1.0}).encode()
    first = sender.begin(1, content, 5)
    until(lambda: channel.is_taking)
    status, said = sender.send(1, content)
    assert (status, said["error"]) == (429, "an answer of this device is being sent already")
    first.send(content[5:])
    assert first.getresponse().status == 200
    first.close()
    assert not channel.awaits(1)
    assert sender.send(1, b"of a body that is not read, the digest is not looked at")[0] == 200


def test_who_is_never_in_time_does_not_hold_the_prober_again(lenders) -> None:
    """Its agent is left alone, whatever offers it has, once it was slow alone as well; the others are probed."""
    slow = Machine()
    slow.share = lambda: 9.0  # type: ignore[method-assign]
    for name, machine in (("slow", slow), ("one", Machine()), ("other", Machine())):
        lenders.lend(name, machine)
    left = until(lambda: lenders.plane.prober._left_until_s, 60)
    assert left.keys() == {lenders.offers()["slow"]["agent"]}


class Asked:
    """A prober whose offers of three agents, `box`, `twin` and `third`, come and answer as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probing, "_COMES_S", 0.1)
        self.book, self.does = Book(), dict[str, Callable[[], None]]()
        for key, name in ((self.book.agent, "box"), (self.book.other, "twin"), (self.book.third, "third")):
            self.book.post(key, on.Offered(offer=offer(name, self.book.now_s)))
        self.offers = [*self.book.state.offers.values()]

    def made(self, names: str, rounds: int, *, absent: str = "") -> set[str] | None:
        """Names of the offers in the probe that came of those that were asked."""
        asked = [one for one in self.offers if one.offer.offer_id in names.split()]
        channels = {(one.offer.offer_id, 0): ProbeChannel(None) for one in asked}  # type: ignore[arg-type]
        for (name, _), channel in channels.items():
            channel.ask = lambda _, name=name: self.does.get(name, lambda: None)()  # type: ignore[method-assign]
            if name != absent:
                channel.has_come.set()

        def prove(ask: Any, **_: Any) -> HardwareProof:
            ask({"ask": "rows"})
            return HardwareProof(is_passed=True, why="", product_s=1.0)

        prober = probing.Prober(self.book.state, None, every_s=1.0, prove=prove)  # type: ignore[arg-type]
        prober._channels = channels
        body = prober._made(asked, rounds)
        return None if body is None else {one.offer_id for one in body.offers}


def test_a_screen_goes_on_with_those_that_come_and_answer(monkeypatch) -> None:
    """One offer spoils no screen of others; a pair is of both, and one alone is no screen."""
    asked = Asked(monkeypatch)
    assert asked.made("box twin third", 1) == {"box", "twin", "third"}
    assert asked.made("box twin third", 1, absent="twin") == {"box", "third"}
    assert asked.made("box twin", 3, absent="twin") is None
    assert asked.made("box twin", 1, absent="twin") is None

    def silent() -> None:
        raise PlaceFailed("no answer")

    asked.does["third"] = silent
    assert asked.made("box twin third", 1) == {"box", "twin"}
    assert asked.made("box third", 3) is None


@pytest.mark.parametrize("away_s", [0.0, 30.0])
def test_a_probe_in_which_the_pool_was_away_says_nothing(monkeypatch, away_s) -> None:
    """Answers came in time, and were not read: no agent was late, or is left out for that."""
    asked, paused_s, taken = Asked(monkeypatch), [0.0], list[on.Probed]()
    names = [(one.offer.offer_id, one.agent) for one in asked.offers]
    late = on.Probed(
        offers=tuple(on.ProbeTimes(offer_id=name, agent=key, alone_s=(0.0,), together_s=(0.0,)) for name, key in names)
    )

    def made(*_: Any) -> on.Probed:
        paused_s[0] += away_s
        return late

    async def submit(body: on.Probed) -> None:
        taken.append(body)

    monkeypatch.setattr(Prober, "_made", made)
    prober = Prober(asked.book.state, submit, every_s=1.0, paused_s=lambda: paused_s[0])
    asyncio.run(prober._run(asked.offers, 1))
    assert (len(taken), len(prober._left_until_s)) == ((0, 0) if away_s else (1, 3))


def test_rows_of_a_few_devices_are_kept_at_a_time(monkeypatch) -> None:
    """A stranger's 256 devices would send 24 MiB each into the memory of the pool."""
    monkeypatch.setattr(probing, "_MOST_CHECKED", 1)
    asked, another, num_sent, most = Asked(monkeypatch), threading.Event(), list[str](), list[int]()

    def send() -> None:
        num_sent.append("rows")
        most.append(len(num_sent))
        another.wait(0.05)
        num_sent.pop()

    asked.does = dict.fromkeys(("box", "twin", "third"), send)
    assert asked.made("box twin third", 1) == {"box", "twin", "third"}
    assert most == [1, 1, 1]


def test_an_answer_is_as_large_as_its_question_wants() -> None:
    """Rows are megabytes, a digest is not."""
    channel = ProbeChannel(None)  # type: ignore[arg-type]
    channel._put({"ask": "multiply"}, Future())
    assert channel.most_bytes < 1 << 20
    channel._put({"ask": "rows"}, Future())
    assert channel.most_bytes > 20 << 20


def test_a_probe_says_nothing_of_a_claim_that_changed_meanwhile(monkeypatch) -> None:
    """Its times were held against the old one."""
    asked = Asked(monkeypatch)

    def claim_more() -> None:
        more = on.Measured(fp32_flop_per_s=1e15)
        asked.book.post(asked.book.agent, on.Offered(offer=offer("box", asked.book.now_s, measured=more)))

    asked.does["box"] = claim_more
    assert asked.made("box twin third", 1) == {"twin", "third"}
    assert asked.made("box twin", 3) is None
    asked.offers = [*asked.book.state.offers.values()]
    assert asked.made("box twin", 3) == {"box", "twin"}


def test_of_those_that_clashed_the_same_two_offers_are_asked_again(monkeypatch) -> None:
    """Not other ones of theirs, of whatever device, while both stand."""
    asked = Asked(monkeypatch)
    book = asked.book
    for key, name in ((book.agent, "box-2"), (book.other, "twin-2")):
        book.post(key, on.Offered(offer=offer(name, time.time())))
    late = {"claimed_s": 1.0, "alone_s": (1.0,) * 3, "together_s": (2.0,) * 3}
    probe = on.Probed(
        offers=tuple(
            on.ProbeTimes(offer_id=name, agent=key.public, **late)  # type: ignore[arg-type]
            for key, name in ((book.agent, "box"), (book.other, "twin"))
        )
    )
    for key, name in ((book.agent, "box"), (book.other, "twin")):
        book.post(key, on.Offered(offer=offer(name, time.time())))
    book.post(book.operator, probe)
    prober = probing.Prober(book.state, None, every_s=1.0)  # type: ignore[arg-type]
    monkeypatch.setattr(probing, "to_screen", lambda *_: [])

    def drawn() -> set[frozenset[str]]:
        draws = [prober._due(book.state.offers)[0] for _ in range(50)]
        return {frozenset(one.offer.offer_id for one in found) for found in draws}

    assert drawn() == {frozenset({"box", "twin"})}
    book.post(book.other, on.Withdrawn(offer_id="twin"))
    assert drawn() == {frozenset({"box", "twin-2"}), frozenset({"box-2", "twin-2"})}


def test_addresses_of_keys_that_lend_nothing_are_forgotten() -> None:
    """A key that only asks for work costs nothing, and there may be any number of them."""
    prober = Prober(State(), lambda _: asyncio.sleep(0.0), every_s=0.0)
    prober.networks["a" * 64] = "192.0.2.1"
    prober.look(list, lambda _: None)
    assert prober.networks == {}


@pytest.mark.parametrize("part", [b"[],", b"{},", b'"ab",', b"7,"])
def test_a_large_answer_takes_no_more_memory_than_it_has(part: bytes) -> None:
    """A stranger's list of small values would take thirty times its text; three texts in base64 are all there is."""
    many = part * 20_000
    assert read_answer(b'{"rows": [' + many + b"0]}") == {}
    assert read_answer(b'{"rows": [' + part + b"0]}").keys() == {"rows"}
    text = "A" * 100_000
    assert read_answer(b'{"rows": "%b", "first": "", "salted": ""}' % text.encode())["rows"] == text
    for wide in ("\N{EURO SIGN}", "\\ud83d\\ude00"):
        assert read_answer(f'{{"rows": "{text}{wide}"}}'.encode()) == {}
