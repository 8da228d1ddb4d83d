"""Runs of strangers in isolation: commitments, replays, cheats, kills; and a whole pool with its control plane."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from safetensors.numpy import load_file

from bench.pool.cheats import CHEATS, cheating
from bench.pool.local_pool import LocalPool
from stoker.launching.bundle import Bundle, TreeFile, stoker_bundle
from stoker.launching.launcher import LaunchTarget, Submission
from stoker.pool import events as on
from stoker.pool.bisection import Bisection, Party, Side, points
from stoker.pool.blob_tree import TreeLimits, unpack
from stoker.pool.commitment import chain_head
from stoker.pool.isolation import KINDS, Bubblewrap, Host, Limits
from stoker.pool.job_box import JobBox, PoolOrder, order_of
from stoker.pool.lease_replay import blocks_of, made_again, replay_lease
from stoker.pool.leased_job import LeasedJob
from stoker.pool.replay_check import (
    Making,
    ReplayVerdict,
    check_block,
    check_update,
    supplied_states,
    traced_block,
)
from stoker.records import Layout, Plan
from stoker.records.codec import dumps
from stoker.store import RunDirectory
from tests.pool.fake_pool import FakePool

pytestmark = pytest.mark.places

JOB = b"""
from torch import nn

import stoker


def job(epochs: float = 400) -> stoker.Job:
    train, test = stoker.data.digits()
    return stoker.Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)),
        data=train, test=test, loss="cross_entropy", optimizer=stoker.AdamW(lr=1e-3), batch=128,
        until=stoker.epochs(epochs),
    )
"""
LIMITS = Limits(memory_bytes=2 << 30, cores=1, processes=256, disk_bytes=1 << 30, time_s=300)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the users of isolated programs can reach: pytest's own is closed to them."""
    made = Path(tempfile.mkdtemp(prefix="stoker-pool-test-", dir="/var/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def host() -> Host:
    """Bubblewrap, the quickest kind."""
    return host_of(Bubblewrap())


def host_of(kind: Any) -> Host:
    """A host with this kind of isolation; the test is skipped where it does not work."""
    if problem := kind.trial():
        pytest.skip(problem)
    return Host(isolation=kind, limits=LIMITS)


def ordered(pool: FakePool, folder: Path, **changes: Any) -> tuple[PoolOrder, str]:
    """The order of JOB, and its blob."""
    folder.mkdir(parents=True, exist_ok=True)
    code = Bundle(kind="code", name="job.py", files=(TreeFile.of_bytes("job.py", JOB),))
    submission = Submission(
        run="digits-1a2b3c",
        target=LaunchTarget(text="pool", kind="pool", address=""),
        code=code,
        stoker=stoker_bundle(),
        job_file="job.py",
    )
    order = replace(order_of(submission, pool.put_blob, folder / "order", block_s=0.5), device="cpu", **changes)
    return order, pool.put_blob(dumps(order).encode())


def run_lease(
    pool: FakePool, folder: Path, host: Host, job_type: type[LeasedJob] = LeasedJob, *, number: int = 0, **changes: Any
) -> tuple[dict[str, Any], LeasedJob]:
    """A lease whose job has begun."""
    order, digest = ordered(pool, folder, **changes)
    lease = pool.add_lease(f"digits.{number}", digest, determinism_class="same")
    pool.post(on.Accepted(lease_id=lease["lease_id"]))
    job = job_type(lease["lease_id"], digest, folder / "leases" / lease["lease_id"], pool, host=host, beat_s=0.2)  # type: ignore[arg-type]
    job.begin(order)
    return lease, job


def until(job: LeasedJob, is_so: Any = lambda: False, limit_s: float = 180.0) -> None:
    """Let a job do what is due until something is so, or it is over."""
    end = time.monotonic() + limit_s
    while not (is_so() or job.is_over):
        assert time.monotonic() < end, "it takes too long"
        job.tick()
        time.sleep(0.02)


def verdicts(
    pool: FakePool, lease: dict[str, Any], folder: Path, host: Host, blocks: Any = None
) -> list[ReplayVerdict]:
    """Replays of blocks of a lease, in the same class."""
    numbers = range(len(lease["commitments"])) if blocks is None else blocks
    return [
        replay_lease(pool, lease["lease_id"], number, folder=folder / "checks", host=host, own_class="same")  # type: ignore[arg-type]
        for number in numbers
    ]


def test_an_honest_run_is_committed_replayed_and_brought_home(folder, host):
    """Each block that is replayed is equal bit for bit; the results are the run's directory without links."""
    pool = FakePool(folder / "blobs")
    lease, job = run_lease(pool, folder, host)
    until(job)
    assert lease["reason"] == "finished", lease
    assert len(lease["commitments"]) >= 2
    assert lease["commitments"][-1]["update"] == 400 * 12
    assert not (folder / "leases" / "digits.0").exists()
    last = len(lease["commitments"]) - 1
    for verdict in verdicts(pool, lease, folder, host, sorted({0, last // 2, last})):
        assert verdict.equal, verdict.why
    unpack(pool.folder / lease["result"], folder / "home", TreeLimits(num_bytes=1 << 30))
    assert {"model.safetensors", "run.json", "events.jsonl"} <= {path.name for path in (folder / "home").iterdir()}
    beats = pool.of(on.Beat)
    assert [beat.index for beat in beats] == list(range(len(beats)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name != "podman"], ids=lambda kind: kind.name)
def test_a_run_over_two_devices_is_replayed_bit_for_bit(folder, kind):
    """Its ranks meet on the loopback of the box, where there is no other network; so do those of a replay."""
    pool, host = FakePool(folder / "blobs"), host_of(kind)
    lease, job = run_lease(pool, folder, host, num_devices=2, arguments=("--set", "epochs=100"))
    until(job)
    assert lease["reason"] == "finished", lease
    assert lease["commitments"][-1]["update"] == 100 * 12
    unpack(pool.folder / lease["result"], folder / "home", TreeLimits(num_bytes=1 << 30))
    decision = RunDirectory(folder / "home").read_decision()
    assert decision is not None
    assert decision.chosen.plan.layout.world_size == 2
    last = len(lease["commitments"]) - 1
    assert last >= 1
    for verdict in verdicts(pool, lease, folder, host, sorted({0, last})):
        assert verdict.equal, verdict.why
        assert verdict.why.endswith("equal bit for bit")


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_is_caught_by_a_replay_of_its_blocks(folder, host, cheat):
    """Skipped updates, a stale state, half batches, wrong data, another precision: the block is unequal."""
    pool = FakePool(folder / "blobs")
    lease, job = run_lease(pool, folder, host, cheating(cheat), arguments=("--set", "epochs=100"))
    until(job)
    assert lease["reason"] == "finished", lease
    first = 0 if lease["commitments"][0]["update"] > 25 else 1
    verdict = verdicts(pool, lease, folder, host, [first])[0]
    assert verdict.equal is False
    assert "differ" in verdict.why


def searched(
    pool: FakePool, lease: dict[str, Any], number: int, folder: Path, host: Host, sides: dict[Party, type[JobBox]]
) -> tuple[Making, Bisection]:
    """The search for the first update on which both sides differ, each of which makes a block in a box of its own."""

    def making(box_type: type[JobBox], name: str) -> Any:
        where = {"folder": folder / name, "host": host, "own_class": "same", "box_type": box_type}
        return made_again(pool, lease["lease_id"], number, **where)  # type: ignore[arg-type]

    with making(sides["verifier"], "verifier") as (_, block):
        made = check_block(block).made
        begin, high = block.begin, block.block.update
    search = Bisection(begin=begin, low=begin, high=high, agent=Side(), verifier=Side(end=made))
    while not search.is_ready:
        for party in get_args(Party):
            asked = search
            with making(sides[party], party) as (_, block):
                if asked.update:
                    before, after = supplied_states(block, asked.update, pool.put_blob)
                    assert after[0] == asked.side(party).end
                    assert before[0] == asked.low_state
                    search = search.supplied(party, before[1], after[1], 0.0)
                else:
                    wanted = points(asked.low, asked.high)
                    search = search.traced(party, traced_block(block, wanted), 0.0)
            if party == "agent" and search.agent.states and not asked.agent.end:
                assert chain_head(block.block.previous, high, search.agent.states[-1]) == block.block.state
    with making(JobBox, "arbiter") as (_, block):
        return block, search


FIRST_WRONG: dict[str, Callable[[int], int]] = {
    "skip": lambda begin: next(update for update in range(begin + 1, begin + 11) if update % 10 == 0),
    "stale": lambda begin: max(begin, 20) + 1,
    "half": lambda begin: begin + 1,
    "data": lambda begin: begin + 1,
    "precision": lambda begin: begin + 1,
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_the_first_wrong_update_of_a_cheat_is_found_and_made_by_an_arbiter(folder, host, cheat):
    """By the agent's own states: bit for bit in its class, and by the tolerance of a single update in another."""
    pool = FakePool(folder / "blobs")
    lease, job = run_lease(pool, folder, host, cheating(cheat), arguments=("--set", "epochs=100"))
    until(job)
    assert lease["reason"] == "finished", lease
    number = 1 if len(lease["commitments"]) > 1 else 0
    box_type = cheating(cheat).box_type
    making, search = searched(pool, lease, number, folder, host, {"agent": box_type, "verifier": JobBox})
    assert search.update == FIRST_WRONG[cheat](search.begin)
    verdict = check_update(making, search)
    assert (verdict.equal, verdict.made) == (False, search.verifier.end), verdict.why
    assert with_other_instructions(making, search) is False


def test_the_first_wrong_update_of_two_devices_is_found(folder, host):
    """All sides make the block in as many processes, whose states inside it are rank 0's."""
    pool = FakePool(folder / "blobs")
    lease, job = run_lease(pool, folder, host, cheating("skip"), num_devices=2, arguments=("--set", "epochs=100"))
    until(job)
    assert lease["reason"] == "finished", lease
    box_type = cheating("skip").box_type
    making, search = searched(pool, lease, 0, folder, host, {"agent": box_type, "verifier": JobBox})
    assert search.update == FIRST_WRONG["skip"](search.begin)
    verdict = check_update(making, search)
    assert (verdict.equal, verdict.made) == (False, search.verifier.end), verdict.why


def test_a_lying_verifier_is_found_wrong_by_the_arbiter(folder, host):
    """The same search with the sides changed: the first update that differs is the honest agent's right one."""
    pool = FakePool(folder / "blobs")
    lease, job = run_lease(pool, folder, host, arguments=("--set", "epochs=100"))
    until(job)
    sides: dict[Party, type[JobBox]] = {"agent": JobBox, "verifier": cheating("skip").box_type}
    making, search = searched(pool, lease, 1, folder, host, sides)
    assert search.update == FIRST_WRONG["skip"](search.begin)
    verdict = check_update(making, search)
    assert (verdict.equal, verdict.made) == (True, search.agent.end), verdict.why
    assert with_other_instructions(making, search) is True


def with_other_instructions(making: Making, search: Bisection) -> bool | None:
    """The verdict of an arbiter whose processor has none beyond the oldest, so that it rounds otherwise."""
    box = making.box

    class Rounding(type(box)):  # type: ignore[misc]
        def replay(self, *words: Any, **more: Any) -> Any:
            program = super().replay(*words, **more)
            settings = {**program.environment, "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ATEN_CPU_CAPABILITY": "default"}
            return replace(program, environment=settings)

    other = replace(making, box=Rounding(box.folder, box.order), is_same_class=False)
    verdict = check_update(other, search)
    if "avx2" in Path("/proc/cpuinfo").read_text():
        assert "relative difference" in verdict.why
        assert not verdict.made
    return verdict.equal


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_in_another_class_is_beyond_the_tolerance(folder, host, cheat):
    """Without bits to compare, the update of a short block differs by more than honest rounding ever does."""
    pool = FakePool(folder / "blobs")
    order, _ = ordered(pool, folder)
    lease, job = run_lease(pool, folder, host, cheating(cheat), arguments=("--set", "epochs=3"), block_s=0.01)
    until(job)
    blocks = blocks_of(lease, order)
    short = [
        two.block
        for one, two in itertools.pairwise(blocks)
        if two.update - one.update <= 40
        and one.update > 20
        and any(update % 10 == 9 for update in range(one.update, two.update))
    ]
    if not short:
        pytest.skip("no block of at most 40 updates was committed")
    verdict = replay_lease(pool, lease["lease_id"], short[-1], folder=folder / "checks", host=host, own_class="other")  # type: ignore[arg-type]
    assert verdict.equal is False, verdict.why


def test_a_killed_agents_job_goes_on_elsewhere_bit_equal(folder, host):
    """After SIGKILL another agent goes on from the last block, and ends with the weights of a run never stopped.

    Both under one plan: where a run tries plans, which update has which is decided by their speed.
    """
    pool = FakePool(folder / "blobs")
    whole, job = run_lease(pool, folder / "one", host, number=0, arguments=("--plan", "safe"))
    until(job)
    broken, job = run_lease(pool, folder / "two", host, number=1, arguments=("--plan", "safe"))
    until(job, lambda: len(broken["commitments"]) >= 1)
    os.kill(job._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    job.kill()
    last = broken["commitments"][-1]
    resumed, job = run_lease(
        pool,
        folder / "three",
        host,
        number=2,
        resume=last["blob"],
        resume_head=last["state"],
        resume_update=last["update"],
        resume_block=last["block"],
        arguments=("--plan", "safe"),
    )
    until(job)
    assert resumed["reason"] == "finished", resumed
    first = verdicts(pool, resumed, folder, host, [0])[0]
    assert first.equal, first.why
    weights = []
    for name, lease in (("a", whole), ("b", resumed)):
        unpack(pool.folder / lease["result"], folder / name, TreeLimits(num_bytes=1 << 30))
        weights.append((folder / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert resumed["commitments"][0]["update"] > last["update"]


def test_a_run_over_two_devices_goes_on_elsewhere_and_is_replayed(folder, host):
    """A rank is killed, and all go on from the last checkpoint; then the agent is, and another one goes on."""
    pool = FakePool(folder / "blobs")
    more: dict[str, Any] = {"num_devices": 2, "arguments": ("--set", "epochs=150")}
    broken, job = run_lease(pool, folder / "one", host, number=0, **more)
    until(job, lambda: len(broken["commitments"]) >= 1)
    ranks = [pid for pid in job.pids if b"--json" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(max(ranks), signal.SIGKILL)
    num_before = len(broken["commitments"])
    until(job, lambda: len(broken["commitments"]) > num_before)
    job.kill()
    last = broken["commitments"][-1]
    resume = {"resume": last["blob"], "resume_head": last["state"]}
    resume |= {"resume_update": last["update"], "resume_block": last["block"]}
    resumed, job = run_lease(pool, folder / "two", host, number=1, **more, **resume)
    until(job)
    assert resumed["reason"] == "finished", resumed
    assert resumed["commitments"][-1]["update"] == 150 * 12
    for verdict in (*verdicts(pool, broken, folder, host, [num_before]), *verdicts(pool, resumed, folder, host, [0])):
        assert verdict.equal, verdict.why


def test_the_job_goes_on_while_the_pool_is_away(folder, host):
    """A job does not stop because the control plane does not answer; what was missed is committed later."""
    pool = FakePool(folder / "blobs")
    lease, job = run_lease(pool, folder, host)
    until(job, lambda: len(lease["commitments"]) >= 1)
    pool.is_away = True
    before = len(pool.posted)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        job.tick()
        time.sleep(0.05)
    assert len(pool.posted) == before
    pool.is_away = False
    until(job)
    assert lease["reason"] == "finished", lease
    assert all(verdict.equal for verdict in verdicts(pool, lease, folder, host, [1]))


def test_an_owner_who_comes_back_gets_the_machine_and_loses_nothing(folder, host):
    """Notice is given, the run saves and leaves; its last state is committed before the lease is closed."""
    pool = FakePool(folder / "blobs")
    lease, job = run_lease(pool, folder, host, arguments=("--set", "epochs=4000"))
    until(job, lambda: len(lease["commitments"]) >= 1)
    job.reclaim(30.0, "the owner uses the machine")
    until(job, limit_s=60)
    assert lease["reason"] == "reclaimed: the owner uses the machine"
    assert [type(body) for body in pool.posted if isinstance(body, on.Reclaiming | on.Closed)] == [
        on.Reclaiming,
        on.Closed,
    ]
    assert verdicts(pool, lease, folder, host, [len(lease["commitments"]) - 1])[0].equal


def test_an_agent_that_is_started_again_takes_its_lease_up(folder, host):
    """The job's directory is still there: it goes on from its last checkpoint, in the same chain."""
    pool = FakePool(folder / "blobs")
    lease, job = run_lease(pool, folder, host)
    until(job, lambda: len(lease["commitments"]) >= 1)
    job.kill()
    job._process.wait(60)  # type: ignore[union-attr]
    order, digest = ordered(pool, folder)
    again = LeasedJob(lease["lease_id"], digest, folder / "leases" / lease["lease_id"], pool, host=host, beat_s=0.2)  # type: ignore[arg-type]
    again.begin(order, beats=lease["beat_index"] + 1, ran_s=lease["running_s"], blocks=blocks_of(lease, order))
    until(again)
    assert lease["reason"] == "finished", lease
    assert all(verdict.equal for verdict in verdicts(pool, lease, folder, host, [1]))


def test_a_job_that_fails_closes_its_lease_with_the_reason(folder, host):
    """What is wrong with the job is said, and no other agent will try it."""
    pool = FakePool(folder / "blobs")
    lease, job = run_lease(pool, folder, host, arguments=("--set", "epoochs=1"))
    until(job)
    assert lease["reason"].startswith("failed: ")
    assert "epochs" in lease["reason"]


def test_a_job_that_fills_its_disk_is_ended_with_the_reason(folder, host):
    """The owner's disk keeps its room, and the renter reads why."""
    pool = FakePool(folder / "blobs")
    small = replace(host, limits=replace(LIMITS, disk_bytes=200_000))
    lease, job = run_lease(pool, folder, small)
    until(job)
    assert lease["reason"].startswith("failed: ")
    assert re.search(r"writes more than|at most|more than", lease["reason"]), lease["reason"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name != "bubblewrap"], ids=lambda kind: kind.name)
def test_another_kind_of_isolation_computes_the_same(folder, host, kind):
    """A block made in bubblewrap is equal when it is made again in gVisor or Podman on the same machine."""
    pool = FakePool(folder / "blobs")
    lease, job = run_lease(pool, folder, host, arguments=("--set", "epochs=30"))
    until(job)
    verdict = verdicts(pool, lease, folder, host_of(kind), [0])[0]
    assert verdict.equal, verdict.why


@pytest.fixture
def lent(folder, host, monkeypatch) -> Iterator[LocalPool]:
    """A control plane and an agent as processes: 0.4 of a core, which its offer calls one."""
    for name in ("XDG_CONFIG_HOME", "STOKER_CACHE", "STOKER_POOL"):
        monkeypatch.setenv(name, "")  # set by it, and put back after the test
    pool = LocalPool(folder)
    try:
        pool.lend("slow", price=0.4, cores=0.4, beat_s=1.0, more=("--no-replay",))
        yield pool
    finally:
        pool.end()


def test_a_run_over_two_processes_of_a_pool_is_forecast_matched_and_checked(folder, lent):
    """From the list of offers to the weights at home; the agent of one CPU makes the blocks of both processes again."""
    (folder / "job.py").write_bytes(JOB)
    lent.lend("pair", price=0.5, cores=2, beat_s=1.0, more=("--device", "2xcpu", "--no-replay"))
    lent.lend("eye", price=9.0, cores=1, beat_s=1.0)

    def stoker(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "stoker", *words]
        done = subprocess.run(command, cwd=folder, env=lent.environment, check=False, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    job = ("job.py", "--set", "epochs=100")
    ranking = json.loads(stoker("pool", "offers", "--for", *job, "--json").stdout)
    matches = {one["listed"]["offer"]["offer_id"]: one for one in ranking["matches"]}
    assert matches["pair"]["listed"]["offer"]["device"]["count"] == 2
    assert 0 < matches["pair"]["hours"] < math.inf
    order = ("--place-option", "block=2s", "--place-option", "key=renter", "--verify", "100%")
    assert "--on pool:pair/2xcpu" in stoker("train", *job, "--on", "pool:pair", *order, code=4).stderr
    stoker("train", *job, "--on", "pool/2xcpu", *order)
    [lease] = lent.leases()
    assert (lease["offer_id"], lease["num_devices"], lease["reason"]) == ("pair", 2, "finished")
    assert {one["block"] for one in lease["challenges"] if one["equal"]} == set(range(len(lease["commitments"])))
    assert lease["paid_s"] > 0
    [home] = [path for path in (folder / "runs").iterdir() if (path / "model.safetensors").exists()]
    decision = RunDirectory(home).read_decision()
    assert decision is not None
    assert decision.chosen.plan.layout.world_size == 2


def test_a_run_of_two_agents_learns_what_two_processes_learn_and_is_checked(folder, lent):
    """A site at each, exchanges by the pool: the weights of `--on 2xhere`, bit for bit, and every block replayed."""
    sync = (
        b"sync=stoker.DiLoCo(every=stoker.updates(20), overlap=2, outer=stoker.SGD(lr=0.7, momentum=0.5)), batch=128,"
    )
    (folder / "job.py").write_bytes(JOB.replace(b"batch=128,", sync))
    (folder / "plain.py").write_bytes(JOB)
    for name, layout in (("one", Layout()), ("two", Layout(replicas=2))):
        (folder / f"{name}.json").write_text(dumps(Plan(device="cpu", micro_batch=64, layout=layout)))
    lent.lend("other", price=0.5, cores=1, beat_s=1.0, more=("--no-replay",))
    lent.lend("eye", price=9.0, cores=1, beat_s=1.0)

    def stoker(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "stoker", *words]
        done = subprocess.run(command, cwd=folder, env=lent.environment, check=False, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    place = ("--on", "pool", "--place-option", "agents=2", "--place-option", "key=renter", "--verify", "100%")
    order = (*place, "--place-option", "block=10s")
    assert "Job(sync=stoker.DiLoCo(" in stoker("train", "plain.py", *order, code=2).stderr
    job = ("job.py", "--set", "epochs=15")
    told = stoker("train", *job, *order, "--plan", "one.json").stderr
    assert "2 sites at slow, other" in told
    leases = lent.leases()
    assert sorted((one["offer_id"], one.get("site", 0), one["reason"]) for one in leases) == [
        ("other", 1, "finished"),
        ("slow", 0, "finished"),
    ]
    for lease in leases:
        assert len(lease["messages"]) == 15 * 12 // 20
        assert {one["block"] for one in lease["challenges"] if one["equal"]} == set(range(len(lease["commitments"])))
        assert lease["paid_s"] > 0
    stoker("train", *job, "--on", "2xhere", "--plan", "two.json", "--run-dir", "here")
    [home] = [path for path in (folder / "runs").iterdir() if (path / "model.safetensors").exists()]
    made, expected = (load_file(path / "model.safetensors") for path in (home, folder / "here"))
    assert made.keys() == expected.keys()
    assert all((made[name] == weights).all() for name, weights in expected.items())


def test_a_paid_minute_says_how_fast_a_job_is_and_is_gone_on_from(lent, folder):
    """`pool offers --for`, a probe, `--for` again, and the run itself: at the probe's pace, and from its last block.

    A machine that becomes slower than its forecast uses the deposit up: the same command goes on, as it says.
    """
    (folder / "job.py").write_bytes(JOB)
    job = ("job.py", "--set", "epochs=5000")

    def stoker(*words: str, codes: tuple[int, ...] = (0,)) -> str:
        command = [sys.executable, "-m", "stoker", *words]
        done = subprocess.run(command, cwd=folder, env=lent.environment, check=False, capture_output=True, text=True)
        assert done.returncode in codes, done.stdout + done.stderr
        return done.stdout

    def forecast() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(stoker("pool", "offers", "--for", *job, "--verify", "0", "--json"))
        return dict(found["matches"][0]["forecast"])

    order = ("--verify", "none", "--place-option", "block=2s", "--place-option", "key=renter")
    assert forecast()["basis"] != "history"
    stoker("train", *job, "--on", "pool:slow", "--time-limit", "60s", *order, codes=(4,))
    [probe] = lent.leases()
    assert probe["reason"] == "the deposit is used up"
    first, last = probe["commitments"][0], probe["commitments"][-1]
    pace = (last["update"] - first["update"]) / (last["at_s"] - first["at_s"])
    found = forecast()
    assert found["basis"] == "history"
    assert found["run_s"] == pytest.approx(5000 * 12 / pace)
    assert found["setup_s"] > 0
    leases = [probe]
    while leases[-1]["reason"] == probe["reason"] and len(leases) < 6:
        stoker("train", *job, "--on", "pool", *order, codes=(0, 4))
        leases, known = lent.leases(), leases
        assert len(leases) == len(known) + 1
    assert leases[-1]["reason"] == "finished"
    for before, after in itertools.pairwise(leases):
        assert after["commitments"][0]["update"] > before["commitments"][-1]["update"]
    assert leases[-1]["commitments"][-1]["update"] == 5000 * 12
    assert 0 < leases[1]["forecast"]["hours"] * 3600 < found["run_s"]
