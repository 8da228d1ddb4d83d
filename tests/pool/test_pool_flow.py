"""A whole pool: control plane, agents in threads, isolation, and the launcher; jobs count in the place of training."""

from __future__ import annotations

import math
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.launching.bundle import Bundle, TreeFile, stoker_bundle
from stoker.launching.launcher import Submission
from stoker.pool import control_plane, presence, rented_run, renting, watch
from stoker.pool import events as on
from stoker.pool.agent import Agent, Lending
from stoker.pool.client import PoolClient
from stoker.pool.events import CREDIT
from stoker.pool.isolation import Bubblewrap, Host, Limits, Program
from stoker.pool.job_box import JobBox
from stoker.pool.keys import Key
from stoker.pool.lease_replay import evidence_of
from stoker.pool.leased_job import BlobCache, LeasedJob
from stoker.pool.log import audit
from stoker.pool.pool_launcher import LAUNCHER
from stoker.pool.shown_lease import ShownLease
from stoker.pool.state import State
from stoker.records import ENDED, Device
from tests.pool.server import Killable, in_thread, shift, until

COUNTING = Path(__file__).with_name("counting.py").read_bytes()
DEVICE = Device(name="cpu", kind="cpu", model="A CPU", cores=1, memory_bytes=1 << 30, fast_dtypes=("fp32",))
LIMITS = Limits(memory_bytes=512 << 20, cores=1, processes=64, disk_bytes=64 << 20, time_s=120)


class CheatingBox(JobBox):
    def training(self, host: Host) -> Program:
        return cheated(super().training(host))

    def replay(self, run: Path, until: int, host: Host, *, at: Sequence[int] = ()) -> Program:
        return cheated(super().replay(run, until, host, at=at))


def cheated(program: Program) -> Program:
    """The program, which makes other links now and then."""
    return replace(program, environment={**program.environment, "STOKER_CHEAT": "1"})


class CheatingJob(LeasedJob):
    box_type = CheatingBox


class Lender:
    """An agent at work in a thread."""

    def __init__(
        self, pool: PoolClient, name: str, price: float, folder: Path, *, num_devices: int = 1, **more: Any
    ) -> None:
        self.client = PoolClient(pool.address, Key.made())
        assert self.client.key is not None
        pool.post(on.Deposited(account=self.client.key.public, amount=10 * CREDIT))
        lending = Lending(
            name=name,
            price_per_hour=round(price * CREDIT),
            limits=LIMITS,
            beat_s=0.3,
            reclaim_s=20,
            num_devices=num_devices,
        )
        self.said: list[str] = []
        self.agent = Agent(self.client, lending, DEVICE, Bubblewrap(), folder / name, tell=self.said.append, **more)
        self.is_dead = False
        self.thread = threading.Thread(target=self._work, name=name)

    def _work(self) -> None:
        while not self.is_dead:
            self.agent.step()
            time.sleep(0.05)

    def start(self) -> Lender:
        """Begin to lend."""
        self.thread.start()
        return self

    def kill(self) -> None:
        """Vanish, as by SIGKILL: nothing more is posted, and the job dies with the agent."""
        self.is_dead = True
        self.thread.join()
        if self.agent._job is not None:
            self.agent._job.kill()


class Market:
    """A control plane, a renter, and lenders."""

    def __init__(self, folder: Path, operator: PoolClient, stack: ExitStack) -> None:
        self.folder, self.operator, self._stack = folder, operator, stack
        self.renter = PoolClient(operator.address, Key.made())
        assert self.renter.key is not None
        operator.post(on.Deposited(account=self.renter.key.public, amount=50 * CREDIT))
        self.lenders: dict[str, Lender] = {}

    def lend(self, name: str, price: float, **more: Any) -> Lender:
        """One more agent."""
        lender = Lender(self.operator, name, price, self.folder, **more).start()
        self._stack.callback(lender.kill)
        self.lenders[name] = lender
        until(
            lambda: any(one["offer"]["offer_id"] == name and one["is_present"] for one in self.operator.state("offers"))
        )
        return lender

    def submission(self, *settings: str, on: str = "", **options: str) -> Submission:
        """A job that counts."""
        whole = stoker_bundle()
        fake = {
            name: TreeFile.of_bytes(name, COUNTING)
            for name in ("stoker/__main__.py", "stoker/verifying/replay.py", "stoker/verifying/replay_ranks.py")
        }
        files = tuple(fake.get(file.path, file) for file in whole.files)
        code = Bundle(kind="code", name="job.py", files=(TreeFile.of_bytes("job.py", b"pass\n"),))
        words = tuple(word for setting in settings for word in ("--set", setting))
        return Submission(
            run="counting-1a2b3c",
            target=LAUNCHER.parse(on),
            code=code,
            job_file="job.py",
            arguments=words,
            stoker=Bundle(kind="stoker", name="Stoker", files=files),
            time_limit_s=1800.0,
            owner="me",
            options={"block": "0.3s", "verify": "100%", "window": "10min"} | options,
        )

    def leases(self) -> list[ShownLease]:
        """All leases, oldest first."""
        found = sorted(self.operator.leases(), key=lambda lease: lease.opened_s)
        return [self.operator.lease(one.lease_id) for one in found]

    def follow(self, handle: dict[str, Any], limit_s: float = 240.0) -> list[str]:
        """Phases of a run up to its end."""
        phases: list[str] = []
        end = time.monotonic() + limit_s
        while not phases or phases[-1] not in ENDED:
            assert time.monotonic() < end, (phases, [one.said[-5:] for one in self.lenders.values()])
            phase = LAUNCHER.state(handle).phase
            phases += [phase] if not phases or phases[-1] != phase else []
            time.sleep(0.05)
        return phases

    def require_right(self) -> None:
        """Every credit is somewhere, and anyone can check it from the log."""
        balances = self.operator.state("balances")
        assert sum(balances["balances"].values()) == balances["deposited"]
        assert not audit(self.folder / "log.db").problem

    def slashed(self, name: str) -> int:
        """How often an agent's bond was cut."""
        key = self.lenders[name].client.key
        assert key is not None
        return int(self.operator.state("records").get(key.public, {}).get("slashed", 0))


@pytest.fixture
def market(monkeypatch) -> Iterator[Market]:
    """A pool whose launcher acts for its renter."""
    for module, name in ((presence, "PRESENT_S"), (presence, "HERE_S"), (watch, "PRESENT_S")):
        monkeypatch.setattr(module, name, 5.0)
    monkeypatch.setattr(control_plane, "_AWAY_S", math.inf)  # its clock jumps
    with open_folder() as folder, ExitStack() as stack:
        _, operator = stack.enter_context(in_thread(folder, verdicts_to_slash=2))
        yield launched(Market(folder, operator, stack), monkeypatch)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that the users of isolated programs can reach; the test is skipped where nothing isolates."""
    if problem := Bubblewrap().trial():
        pytest.skip(problem)
    folder = Path(tempfile.mkdtemp(prefix="stoker-pool-flow-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def launched(market: Market, monkeypatch: pytest.MonkeyPatch) -> Market:
    """The market, for whose renter the launcher acts."""
    monkeypatch.setattr(renting, "_client", lambda terms: market.renter)
    monkeypatch.setattr(renting, "_blobs", lambda client, job, *_: BlobCache(market.renter, market.folder / "renter"))
    return market


@contextmanager
def nothing_said(lenders: Any) -> Iterator[None]:
    """For reading what agents said where a test fails."""
    try:
        yield
    except BaseException:
        for lender in lenders.values():
            print(lender.agent.lending.name, *lender.said, sep="\n  ")
        raise


def test_a_job_runs_is_checked_and_comes_home(market, tmp_path):
    """Matched, funded, run, replayed by others, fetched: the log by offset, files without links, the meter right."""
    with nothing_said(market.lenders):
        market.lend("ox", 0.4)
        market.lend("eye", 0.9)
        handle = LAUNCHER.start(market.submission("updates=800"), lambda text: None)
        phases = market.follow(handle)
        assert phases[-1] == "finished"
        assert "running" in phases
        assert "saving" in phases
        [lease] = market.leases()
        assert lease.offer_id == "ox"
        assert len(lease.commitments) >= 2
        assert {one.block for one in lease.challenges if one.equal} == set(range(len(lease.commitments)))
        assert 0 < lease.paid_s <= lease.closed_s - lease.accepted_s + 2
        verifier = market.lenders["eye"].client
        [record] = evidence_of(market.renter, lease, 0, tmp_path)
        assert (record["verifier"], record["equal"]) == (verifier.key.public, True)
        assert record["why"].endswith("made again, equal bit for bit")
        assert evidence_of(PoolClient(verifier.address, Key.made()), lease, 0, tmp_path) == [], "a stranger reads it"
        LAUNCHER.fetch(handle, tmp_path / "home")
        assert (tmp_path / "home" / "events.jsonl").read_bytes() == LAUNCHER.events(handle, 0)
        assert (tmp_path / "home" / "model.safetensors").stat().st_size == 32
        assert not (tmp_path / "home" / "link").exists()
        assert not (tmp_path / "home" / "launch").exists()
        market.require_right()


@pytest.mark.slow
def test_a_job_over_two_devices_runs_is_lost_and_goes_on_at_two_others(market, tmp_path):
    """Only offers of two are taken; ranks meet inside the box; an agent of one CPU replays blocks of two processes."""
    with nothing_said(market.lenders):
        market.lend("single", 0.1)
        first = market.lend("pair", 0.4, num_devices=2)
        market.lend("other", 0.5, num_devices=2)
        handle = LAUNCHER.start(market.submission("updates=1200", "pace=0.003", on="/2xcpu"), lambda text: None)
        until(lambda: len(market.leases()[0].commitments) >= 2)
        first.kill()
        shift(market.folder, 65)
        until(lambda: market.leases()[0].reason == "lost")
        assert market.follow(handle)[-1] == "finished"
        one, two = market.leases()
        assert [(lease.offer_id, lease.num_devices) for lease in (one, two)] == [("pair", 2), ("other", 2)]
        assert two.commitments[0].update > one.commitments[-1].update > 0
        assert {asked.block for asked in two.challenges if asked.equal} == set(range(len(two.commitments)))
        assert two.paid_s > 0
        market.require_right()


@pytest.mark.slow  # the queue is tested in test_pool_launcher
def test_a_run_waits_until_another_one_is_done(market):
    """Its place is in the log while it waits; then the offer is its own."""
    with nothing_said(market.lenders):
        market.lend("ox", 0.4)
        first = LAUNCHER.start(market.submission("updates=300", verify="none"), lambda text: None)
        second = replace(market.submission("updates=20", verify="none", wait="60s"), run="second-1a2b3c")
        handles, told = list[dict[str, Any]](), list[str]()
        waiter = threading.Thread(target=lambda: handles.append(LAUNCHER.start(second, told.append)))
        waiter.start()
        until(lambda: market.operator.state("pool")["num_waiting"])
        assert market.follow(first)[-1] == "finished"
        waiter.join(60)
        assert market.follow(handles[0])[-1] == "finished"
        assert any("waiting in the queue" in text for text in told)
        assert market.operator.state("pool")["num_waiting"] == 0
        assert [lease.offer_id for lease in market.leases()] == ["ox", "ox"]
        market.require_right()


@pytest.mark.slow
def test_an_agent_dies_and_a_cheat_is_slashed_and_the_job_finishes(market, tmp_path):
    """The cheapest agent is lost, the next one cheats: the run goes on from what is right, and the right one pays."""
    with nothing_said(market.lenders):
        market.lend("mayfly", 0.1)
        market.lend("magpie", 0.2, job_type=CheatingJob)
        market.lend("ox", 0.4)
        market.lend("eye", 9.0)
        handle = LAUNCHER.start(market.submission("updates=1500"), lambda text: None)
        until(lambda: len(market.leases()[0].commitments) >= 2)
        market.lenders["mayfly"].kill()
        shift(market.folder, 65)
        until(lambda: market.leases()[0].reason == "lost")
        phases = market.follow(handle)
        assert phases[-1] == "finished"
        leases = market.leases()
        assert [lease.offer_id for lease in leases] == ["mayfly", "magpie", "ox"]
        until(lambda: market.slashed("magpie") == 1)
        settled = [one for one in audited(market).leases[leases[1].lease_id].found_updates if one.for_verifier]
        assert settled
        for found in settled:
            assert found.update % 10 == 8
            assert found.arbiters[0][1] == found.verifier_state != found.agent_state
        assert market.slashed("mayfly") == market.slashed("ox") == market.slashed("eye") == 0
        LAUNCHER.fetch(handle, tmp_path / "home")
        state = b"\0" * 32
        from tests.pool.counting import link

        for update in range(1500):
            state = link(state, update)
        assert (tmp_path / "home" / "model.safetensors").read_bytes() == state, "a wrong block is in the result"
        market.require_right()


def audited(market: Market) -> State:
    """The state that anyone comes to from the log."""
    state = State()
    assert not audit(market.folder / "log.db", state=state).problem
    return state


@pytest.mark.slow
def test_a_lying_verifier_has_an_honest_agent_neither_slashed_nor_unpaid(market):
    """Its replay makes other updates: the first is found, an arbiter makes it right, and the run comes to its end."""
    with nothing_said(market.lenders):
        market.lend("ox", 0.4)
        market.lend("liar", 9.0, check_box=CheatingBox)
        handle = LAUNCHER.start(market.submission("updates=1500"), lambda text: None)
        until(lambda: market.leases()[0].result, 60.0)
        until(lambda: any(one.equal is False for one in market.leases()[0].challenges), 60.0)
        market.lend("eye", 9.0)
        market.lend("bat", 9.0)
        assert market.follow(handle)[-1] == "finished"
        [lease] = market.leases()
        until(lambda: market.leases()[0].state == "final")
        state = audited(market)
        lease = state.leases[lease.lease_id]
        assert (lease.state, lease.outcome) == ("final", "")
        assert lease.settlement.pay > 0
        liar, ox = (market.lenders[name].client.key.public for name in ("liar", "ox"))
        assert state.record_of(liar).wrong_verdicts == len({one.block for one in lease.challenges if one.dismissed}) > 0
        assert state.record_of(ox).slashed == 0
        assert state.record_of(ox).passed == 1
        for found in lease.found_updates:
            begin = lease.commitments[found.block - 1].update if found.block else 0
            assert found.update % 10 == 8
            assert 0 < found.update - begin <= 10
            assert (found.verifier, found.for_agent, found.for_verifier) == (liar, 1, 0)
        market.require_right()


@pytest.mark.slow
def test_a_cheat_that_cannot_make_its_blocks_again_is_slashed_all_the_same(market):
    """Its honest replay does not end in what it committed to: it gives up, and whole blocks are compared."""

    class ForgetfulBox(CheatingBox):
        replay = JobBox.replay

    class ForgetfulJob(LeasedJob):
        box_type = ForgetfulBox

    with nothing_said(market.lenders):
        market.lend("magpie", 0.1, job_type=ForgetfulJob)
        market.lend("ox", 0.4)
        market.lend("eye", 9.0)
        handle = LAUNCHER.start(market.submission("updates=1500"), lambda text: None)
        assert market.follow(handle)[-1] == "finished"
        until(lambda: market.slashed("magpie") == 1)
        lease = audited(market).leases[market.leases()[0].lease_id]
        assert not lease.found_updates
        assert any(one.bisection is not None and one.bisection.agent.has_given_up for one in lease.challenges)
        assert any("is not what it committed to" in text for text in market.lenders["magpie"].said)
        market.require_right()


@pytest.mark.slow
def test_an_owner_takes_the_machine_back_and_the_job_moves(market):
    """Notice, a last commitment, and the next agent goes on where the first one saved."""
    with nothing_said(market.lenders):
        first = market.lend("first", 0.1)
        market.lend("second", 0.4)
        handle = LAUNCHER.start(market.submission("updates=1500", verify="none"), lambda text: None)
        until(lambda: market.leases()[0].commitments)
        (first.agent.folder / "paused").touch()
        assert market.follow(handle)[-1] == "finished"
        one, two = market.leases()
        assert one.reason.startswith("reclaimed")
        assert two.commitments[0].update > one.commitments[-1].update > 0
        market.require_right()


@pytest.mark.slow
def test_a_stop_keeps_what_was_committed_and_the_same_command_goes_on(market, tmp_path):
    """Nothing runs on after a stop; the next start resumes."""
    with nothing_said(market.lenders):
        market.lend("ox", 0.4)
        submission = market.submission("updates=2000", verify="none")
        handle = LAUNCHER.start(submission, lambda text: None)
        until(lambda: market.leases()[0].commitments)
        LAUNCHER.stop(handle)
        assert market.follow(handle)[-1] == "stopped"
        LAUNCHER.fetch(handle, tmp_path / "home")
        assert (tmp_path / "home" / "checkpoints").is_dir()
        until(lambda: market.lenders["ox"].agent._job is None)
        again = LAUNCHER.start(submission, lambda text: None)
        assert market.follow(again)[-1] == "finished"
        assert market.leases()[1].commitments[0].update > market.leases()[0].commitments[-1].update


@pytest.mark.slow
def test_a_control_plane_that_is_killed_again_and_again_stops_no_job(monkeypatch):
    """SIGKILL at any moment: agents go on and reconcile, the job finishes, every credit is where it should be."""
    with open_folder() as folder, ExitStack() as stack:
        plane = Killable(folder)
        plane.start()
        stack.callback(plane.kill)
        market = launched(Market(folder, plane.client(), stack), monkeypatch)
        with nothing_said(market.lenders):
            market.lend("ox", 0.4)
            market.lend("eye", 0.9)
            handle = LAUNCHER.start(market.submission("updates=5000", "pace=0.004", block="2s"), lambda text: None)
            blocks = 0
            for _ in range(3):
                until(lambda blocks=blocks: len(market.leases()[0].commitments) > blocks)
                blocks = len(market.leases()[0].commitments)
                plane.kill()
                assert LAUNCHER.state(handle).phase == "unknown"
                plane.start()
            assert market.follow(handle)[-1] == "finished"
            assert len(market.leases()) == 1
            assert market.leases()[0].reason == "finished"
            market.require_right()


def test_a_job_that_fails_is_not_carried_from_agent_to_agent(market):
    """The reason comes home, and one lease was enough to find it."""
    with nothing_said(market.lenders):
        market.lend("ox", 0.4)
        market.lend("eye", 0.9)
        handle = LAUNCHER.start(market.submission("updates=10", "fail=lr-is-wrong"), lambda text: None)
        assert market.follow(handle)[-1] == "failed"
        assert "lr-is-wrong" in LAUNCHER.state(handle).why
        assert len(market.leases()) == 1


@pytest.mark.slow
def test_a_job_moves_to_a_better_offer_and_ends_with_the_same_state(market, tmp_path, monkeypatch):
    """A much cheaper agent comes while it runs: two leases, and the state of a run that stayed, bit for bit."""
    monkeypatch.setattr(rented_run.Needs, "setup_s", 1.0)
    monkeypatch.setattr(rented_run, "LOOK_S", 0.5)
    with nothing_said(market.lenders):
        market.lend("dear", 2.0)
        submission = market.submission("updates=8000", value="0.01usd", verify="none")
        handle = LAUNCHER.start(submission, lambda text: None)
        until(lambda: len(market.leases()[0].commitments) >= 3)
        market.lend("cheap", 0.1)
        assert market.follow(handle)[-1] == "finished"
        one, two = market.leases()
        assert (one.offer_id, two.offer_id) == ("dear", "cheap")
        assert one.reason.startswith("moved: the rest is expected to cost")
        assert two.commitments[0].update > one.commitments[-1].update
        LAUNCHER.fetch(handle, tmp_path / "home")
        state = b"\0" * 32
        from tests.pool.counting import link

        for update in range(8000):
            state = link(state, update)
        assert (tmp_path / "home" / "model.safetensors").read_bytes() == state
        market.require_right()
