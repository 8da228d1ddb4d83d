"""What a lease's job sends while it runs and at its end, without an isolation: the program is a stand-in."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import BadRun, PlaceFailed, PlaceUnreachable
from stoker.launching.at_place import HostState
from stoker.pool import events as on
from stoker.pool import leased_job
from stoker.pool.blob_tree import TreeLimits, pack_folder, plain_names, read_index
from stoker.pool.client import PoolClient, _Busy
from stoker.pool.isolation import HOST_FULL, Host, Limits
from stoker.pool.job_box import JobBox, PoolOrder
from stoker.pool.keys import Key
from stoker.pool.lease import SAVES_NOTHING, WAITED
from stoker.pool.leased_job import BlobCache, LeasedJob
from stoker.pool.sealing import seal
from stoker.records.codec import dumps
from stoker.store import CheckpointStore
from tests.pool import counting
from tests.pool.fake_pool import FakePool
from tests.pool.server import until

ORDER = PoolOrder(run="count", tree="0" * 64, code="code/1", stoker="stoker/1", job_file="job.py", block_s=0.001)
LIMITS = Limits(memory_bytes=1 << 30, cores=1, disk_bytes=1 << 20)


class Given(JobBox):
    """A box whose code is there already."""

    @classmethod
    def make(cls, folder: Path, order: PoolOrder, *_: Any) -> Given:
        box = cls(folder, order)
        for below in (box.run, box.aside):
            below.mkdir(parents=True, exist_ok=True)
        return box


class Job(LeasedJob):
    box_type = Given


@dataclass
class Running:
    """A program that ends on request."""

    code: int | None = None
    exceeded: str = ""
    stderr: bytes = b""
    cpu_s: float = 0.0

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9 if self.code is None else self.code

    def wait(self, timeout_s: float) -> int:
        return self.code or 0


class Nowhere:
    """Runs nothing."""

    name = "nowhere"

    def __init__(self) -> None:
        self.running = Running()

    def start(self, *_: Any, **__: Any) -> Running:
        self.running = Running()
        return self.running


class SlowPool(FakePool):
    """Blobs arrive when `may_arrive` is set; events of kinds in `lost` do not arrive."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_arrive, self.lost = threading.Event(), list[type]()
        self.may_arrive.set()

    def put_blob(self, source: bytes | Path) -> str:
        assert self.may_arrive.wait(60)
        return super().put_blob(source)

    def post(self, body: on.Body, **more: Any) -> None:
        if type(body) in self.lost:
            raise PlaceUnreachable("lost on its way")
        super().post(body, **more)


@pytest.fixture
def pool(tmp_path: Path) -> SlowPool:
    """A pool with one lease."""
    made = SlowPool(tmp_path / "blobs")
    made.add_lease("job.0", "0" * 64)
    return made


@pytest.fixture
def job(pool: SlowPool, tmp_path: Path) -> Job:
    """A job that runs."""
    host = Host(isolation=Nowhere(), limits=LIMITS)  # type: ignore[arg-type]
    made = Job("job.0", "0" * 64, tmp_path / "lease", pool, host=host, beat_s=0.0)  # type: ignore[arg-type]
    pool.post(on.Accepted(lease_id="job.0"))
    made.begin(ORDER)
    until(lambda: made.tick() or made._process is not None)
    return made


def run_of(job: Job) -> Path:
    """The run's directory."""
    assert job._box is not None
    return job._box.run


def save(job: Job, updates: int) -> None:
    """Write a checkpoint."""
    store = CheckpointStore(run_of(job) / "checkpoints")
    counting.save(store, bytes([updates]) * 32, updates)


def end(job: Job, phase: str = "finished") -> None:
    """Let the program end and say so."""
    state = HostState(host=0, hostname="", pid=1, began=1, boot="", phase=phase, why="")  # type: ignore[arg-type]
    job._box.write_word("host-0.json", dumps(state).encode())  # type: ignore[union-attr]
    job._process.code = 0  # type: ignore[union-attr]


def test_an_agent_that_was_started_again_counts_on(pool: SlowPool, job: Job, tmp_path: Path) -> None:
    """Its beats go on from the last one's samples: one that went back is refused, and refused beats are silence."""
    again = Job("job.0", "0" * 64, tmp_path / "lease", pool, host=job._host, beat_s=0.0)  # type: ignore[arg-type]
    again.begin(ORDER, beats=7, ran_s=60.0, samples=500)
    until(lambda: again.tick() or again._process is not None)
    beat = pool.of(on.Beat)[-1]
    assert (beat.index >= 7, beat.running_s >= 60, beat.samples) == (True, True, 500)
    pool.documents["job.0"] |= {"samples": 900, "beat_index": 20}
    pool.refusals.append("the beat goes back")
    again.tick()
    again.tick()
    assert [(beat.index, beat.samples) for beat in pool.of(on.Beat)[-1:]] == [(21, 900)]


def test_a_checkpoint_that_was_sent_is_committed_without_waiting_for_the_next_turn(job: Job, pool: SlowPool) -> None:
    """The agent hears of it: what waits in between would be lost with the machine."""
    news = threading.Event()
    job.news = news.set
    save(job, 10)
    job.tick()
    assert news.wait(60)
    job.tick()
    assert [body.update for body in pool.of(on.Committed)] == [10]


@pytest.mark.parametrize("peer", [None, SimpleNamespace()], ids=["through the pool", "directly"])
def test_a_checkpoint_that_its_renter_may_get_before_the_commitment_is_sealed(
    job: Job, pool: SlowPool, tmp_path: Path, peer: Any
) -> None:
    """Whoever has the blob alone has nothing; with the key in the commitment it is the checkpoint."""
    pool.peer = peer
    save(job, 10)
    until(lambda: job.tick() or pool.of(on.Committed))
    (committed,) = pool.of(on.Committed)
    cache, limits = BlobCache(pool, tmp_path / "renter"), TreeLimits(num_bytes=1 << 20)  # type: ignore[arg-type]
    assert read_index(cache.fetch(committed.blob, seal=committed.seal), limits).entries
    assert bool(committed.seal) == (peer is not None)
    if peer is not None:
        with pytest.raises(BadRun, match="index"):
            read_index(pool.folder / committed.blob, limits)
        assert b"manifest" not in (pool.folder / committed.blob).read_bytes()


def test_a_block_that_is_not_taken_yet_is_posted_again_with_the_next_beat(
    job: Job, pool: SlowPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that waits for messages of other sites gets neither a flood of commitments nor a beat for each of them."""
    save(job, 10)
    tried, post = list[on.Committed](), pool.post

    def busy(body: on.Body, **more: Any) -> None:
        if isinstance(body, on.Committed):
            tried.append(body)
            if len(tried) == 1:
                raise _Busy("1 messages are not here yet")
        post(body, **more)

    monkeypatch.setattr(pool, "post", busy)
    job._beat_s = 3600.0
    until(lambda: job.tick() or tried)
    for _ in range(3):
        job.tick()
    assert len(tried) == 1
    job._sends_from = time.monotonic()
    until(lambda: job.tick() or pool.of(on.Committed))
    assert (len(tried), job._sends_from) == (2, 0.0)


def test_a_blob_is_kept_for_each_key_that_was_committed_to(pool: SlowPool, tmp_path: Path) -> None:
    """An agent that commits to the block of another with a key of its own makes that one not unreadable."""
    (tmp_path / "block").write_bytes(b"a checkpoint")
    key = seal(tmp_path / "block")
    blob = pool.put_blob(tmp_path / "block")
    cache = BlobCache(pool, tmp_path / "cache")  # type: ignore[arg-type]
    for other in ("", "7" * 64):
        assert cache.fetch(blob, seal=other).read_bytes() != b"a checkpoint"
    assert cache.fetch(blob, seal=key).read_bytes() == b"a checkpoint"
    assert len([*(tmp_path / "cache").iterdir()]) == 3
    with pytest.raises(BadRun, match=r"wanted 64 hexadecimal digits"):  # an order states what its renter wants
        cache.fetch(blob, seal="../7")


def test_a_fetched_block_is_whole_on_the_disk_before_it_has_its_name(
    pool: SlowPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after a power cut under that name would be taken for the block."""
    (tmp_path / "block").write_bytes(b"a checkpoint")
    key = seal(tmp_path / "block")
    blob, names = pool.put_blob(tmp_path / "block"), list[str]()

    def synced(path: Path) -> None:
        assert path.read_bytes() == b"a checkpoint"
        names.append(path.name)

    monkeypatch.setattr(leased_job, "sync_file", synced)
    got = BlobCache(pool, tmp_path / "cache").fetch(blob, seal=key)  # type: ignore[arg-type]
    assert len(names) == 1
    assert names != [got.name]
    assert [*(tmp_path / "cache").iterdir()] == [got]


def test_a_job_goes_on_from_a_sealed_block(pool: SlowPool, tmp_path: Path) -> None:
    """The next agent has the key from the order."""
    counting.save(CheckpointStore(tmp_path / "earlier" / "checkpoints"), bytes(32), 10)
    pack_folder(
        tmp_path / "earlier", plain_names(tmp_path / "earlier"), tmp_path / "tree", TreeLimits(num_bytes=1 << 20)
    )
    key = seal(tmp_path / "tree")
    order = replace(ORDER, resume=pool.put_blob(tmp_path / "tree"), resume_seal=key, resume_update=10)
    host = Host(isolation=Nowhere(), limits=LIMITS)  # type: ignore[arg-type]
    job = Job("job.0", "0" * 64, tmp_path / "lease", pool, host=host, beat_s=0.0)  # type: ignore[arg-type]
    job.begin(order)
    until(lambda: job.tick() or job._process is not None)
    assert CheckpointStore(run_of(job) / "checkpoints").newest() is not None


def test_a_beat_that_was_not_taken_is_sent_again_soon(job: Job, pool: SlowPool) -> None:
    """Of four that are missing the lease is lost; one whose answer is there is not sent again before it is due."""
    job._beat_s = 10.0
    pool.lost = [on.Beat]
    job._next_beat = 0.0
    job.tick()
    assert job._next_beat - time.monotonic() < 2.5
    pool.lost, job._next_beat = [], 0.0
    job.tick()
    assert job._next_beat - time.monotonic() > 9.0


def test_an_order_of_tiny_blocks_does_not_use_up_the_events_of_an_agent(job: Job, pool: SlowPool) -> None:
    """Its beats count against the same rate as its commitments."""
    assert job.order.block_s < 0.01
    save(job, 10)
    until(lambda: job.tick() or pool.of(on.Committed))
    save(job, 20)
    assert job._due(is_last=False) is None
    job._committed_at -= 0.1
    assert job._due(is_last=False) is not None


def test_beats_go_on_while_a_checkpoint_and_the_results_are_sent(job: Job, pool: SlowPool) -> None:
    """An upload that takes minutes is not a minute of silence; the time after the job's end is not charged."""
    pool.may_arrive.clear()
    save(job, 10)
    job.tick()
    before = len(pool.of(on.Beat))
    for _ in range(3):
        job.tick()
    assert len(pool.of(on.Beat)) == before + 3
    assert not pool.of(on.Committed)
    pool.may_arrive.set()
    until(lambda: job.tick() or pool.of(on.Committed))
    pool.may_arrive.clear()
    end(job)
    until(lambda: job.tick() or (job._upload is not None and job._upload.what == "results"))
    ran_s = job.running_s
    job._began -= 100.0
    job._ended_s -= 100.0  # type: ignore[operator]
    before = len(pool.of(on.Beat))
    job.tick()
    assert len(pool.of(on.Beat)) == before + 1
    assert job.running_s == ran_s
    pool.may_arrive.set()
    until(lambda: job.tick() or job.is_over)
    assert pool.documents["job.0"]["reason"] == "finished"


def test_a_commitment_that_was_lost_on_its_way_is_posted_again(job: Job, pool: SlowPool) -> None:
    """The last state is committed before the lease ends, whatever answer was lost."""
    pool.lost = [on.Committed]
    save(job, 10)
    end(job)
    until(lambda: job.tick() or job._kept is not None)
    job.tick()
    assert not job.is_over
    pool.lost = []
    until(lambda: job.tick() or job.is_over)
    assert [body.update for body in pool.of(on.Committed)] == [10]
    assert pool.of(on.Finished)


def test_a_commitment_that_is_refused_is_tried_once_more(job: Job, pool: SlowPool) -> None:
    """What the log says is taken over between the two tries; a second refusal does not keep the job from ending."""
    save(job, 10)
    end(job)
    real, tries = pool.post, list[on.Body]()

    def refuse(body: on.Body, **more: Any) -> None:
        if isinstance(body, on.Committed):
            tries.append(body)
            raise on.Refused("it does not follow")
        real(body, **more)

    pool.post = refuse  # type: ignore[method-assign]
    until(lambda: job.tick() or job.is_over)
    assert len(tries) == 2
    assert pool.of(on.Finished)


@pytest.mark.parametrize("replaced", ["stop", "host-0.json"])
def test_a_folder_in_the_place_of_a_file_ends_the_job_and_not_the_agent(
    job: Job, pool: SlowPool, replaced: str
) -> None:
    """A job that crashes after it made `launch/stop` a folder cannot be started again: its lease is closed."""
    (run_of(job) / "launch" / replaced).mkdir(parents=True)
    job._process.code = 1  # type: ignore[union-attr]
    until(lambda: job.tick() or job.is_over)
    assert "put a folder into it" in pool.documents["job.0"]["reason"]


def test_what_nobody_foresaw_closes_the_lease(job: Job, pool: SlowPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is none of Stoker's, from files of the job, does not leave `tick`."""

    def names(store: CheckpointStore) -> list[str]:
        raise RecursionError("too deep")

    monkeypatch.setattr(CheckpointStore, "names", names)
    job.tick()
    assert job.is_over
    assert "RecursionError" in pool.documents["job.0"]["reason"]


def test_what_cannot_be_unpacked_closes_the_lease(pool: SlowPool, tmp_path: Path) -> None:
    """An error in the thread that prepares is seen: no beat says that the job runs."""

    class Broken(Given):
        @classmethod
        def make(cls, folder: Path, order: PoolOrder, *_: Any) -> Given:
            raise ValueError("embedded null byte")

    class BrokenJob(LeasedJob):
        box_type = Broken

    host = Host(isolation=Nowhere(), limits=LIMITS)  # type: ignore[arg-type]
    job = BrokenJob("job.0", "0" * 64, tmp_path / "lease", pool, host=host, beat_s=0.0)  # type: ignore[arg-type]
    job.begin(ORDER)
    until(lambda: job.tick() or job.is_over)
    assert "embedded null byte" in pool.documents["job.0"]["reason"]


def test_a_pool_that_is_away_while_code_is_fetched_fails_no_run(
    pool: SlowPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blob is fetched again once the pool is back."""
    monkeypatch.setattr(leased_job, "_RETRY_S", 0.01)
    blob, tries = pool.put_blob(b"code"), list[str]()

    def fetched(text: str) -> None:
        tries.append(text)
        pool.is_away = False

    class Fetching(Given):
        @classmethod
        def make(cls, folder: Path, order: PoolOrder, *more: Any) -> Given:
            assert more[0](blob).read_bytes() == b"code"
            return super().make(folder, order)

    class FetchingJob(LeasedJob):
        box_type = Fetching

    host = Host(isolation=Nowhere(), limits=LIMITS)  # type: ignore[arg-type]
    job = FetchingJob("job.0", "0" * 64, tmp_path / "lease", pool, host=host, tell=fetched)  # type: ignore[arg-type]
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    pool.is_away = True
    job.begin(ORDER)
    until(lambda: job._is_prepared)
    assert "fetched again" in tries[0]


def test_an_agents_disk_that_is_full_while_code_is_fetched_fails_no_run(pool: SlowPool, tmp_path: Path) -> None:
    """The renter goes on elsewhere: that is no failure of the job."""

    class Fetching(Given):
        @classmethod
        def make(cls, folder: Path, order: PoolOrder, *more: Any) -> Given:
            raise AssertionError(more[0]("0" * 64))

    class FetchingJob(LeasedJob):
        box_type = Fetching

    client = PoolClient(f"http://127.0.0.1:9#{'f' * 64}", Key.made())
    (tmp_path / "file").write_bytes(b"")
    pool.get_blob = lambda digest, *_, **__: client.get_blob(digest, tmp_path / "file" / "x")  # type: ignore[method-assign]
    host = Host(isolation=Nowhere(), limits=LIMITS)  # type: ignore[arg-type]
    job = FetchingJob("job.0", "0" * 64, tmp_path / "lease", pool, host=host)  # type: ignore[arg-type]
    job.begin(ORDER)
    until(lambda: job.tick() or job.is_over)
    assert pool.documents["job.0"]["reason"].startswith("refused: Cannot write a blob")


@pytest.mark.parametrize("trouble", ["no room to start", "its disk is full"])
def test_trouble_of_the_owner_does_not_end_the_run(
    job: Job, pool: SlowPool, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong with this machine is no failure of the job: its renter goes on elsewhere."""

    def full(*_: Any, **__: Any) -> Running:
        raise PlaceFailed("10.4 GiB free")

    if trouble == "no room to start":
        monkeypatch.setattr(Nowhere, "start", full)
        job._process.code = 1  # type: ignore[union-attr]
    else:
        job._process.exceeded = f"{HOST_FULL}: 5 bytes are free"  # type: ignore[union-attr]
        job._process.code = -9  # type: ignore[union-attr]
    until(lambda: job.tick() or job.is_over)
    assert pool.documents["job.0"]["reason"].startswith("refused: ")


def test_results_that_the_pool_has_no_room_for_are_sent_again(job: Job, pool: SlowPool) -> None:
    """Days of training are not lost to a full disk of the pool."""
    real, tries = pool.put_blob, list[int]()

    def put(source: bytes | Path) -> str:
        tries.append(1)
        if len(tries) < 3:
            raise _Busy("0 bytes are free")
        return real(source)

    pool.put_blob = put  # type: ignore[method-assign]
    end(job)
    until(lambda: job.tick() or job.is_over)
    assert pool.documents["job.0"]["reason"] == "finished"


def test_a_job_that_saves_nothing_is_not_worked_on_for_nothing(job: Job, pool: SlowPool) -> None:
    """Of a lease that is checked only what was committed is paid; what is on its way counts, and so do long blocks."""
    job._is_checked = True
    save(job, 10)
    until(lambda: job.tick() or pool.of(on.Committed))
    job._began -= 899
    job.tick()
    assert not job.is_over
    job._began -= 10
    job.tick()
    assert pool.documents["job.0"]["reason"].startswith("refused: it has saved nothing for 15 min")


def test_a_block_is_paid_up_to_its_commitment(job: Job, pool: SlowPool) -> None:
    """A beat says the seconds right before it: none waits for the next block, or is lost with it."""
    job._is_checked = True
    until(lambda: job.tick() or pool.of(on.Beat))
    job._began, job._next_beat = job._began - 7, float("inf")  # none is due
    save(job, 10)
    until(lambda: job.tick() or pool.of(on.Committed))
    posted = [body for body in pool.posted if isinstance(body, on.Beat | on.Committed)]
    assert isinstance(posted[-1], on.Committed)
    assert isinstance(posted[-2], on.Beat)
    assert posted[-2].running_s >= 7


@pytest.mark.parametrize(("waited_s", "reason"), [(600.0, WAITED), (30.0, SAVES_NOTHING)])
def test_a_wait_for_another_site_is_told_from_a_job_that_saves_nothing(
    job: Job, pool: SlowPool, waited_s: float, reason: str
) -> None:
    """Two agents in a row that leave a job without checkpoints end its run; an exchange that goes on is no excuse."""
    job._is_checked = True
    carrier: Any = SimpleNamespace(waited_s=waited_s, problem=None, close=lambda: None, join=lambda _: None)
    job._carrier = carrier
    job._began -= 1000
    job.tick()
    assert pool.documents["job.0"]["reason"].startswith(reason)


@pytest.mark.parametrize("waited_s", [0.0, 3000.0])
def test_time_in_which_the_pool_is_away_counts_against_nobody(job: Job, pool: SlowPool, waited_s: float) -> None:
    """Nothing could be committed, and no message came: the job goes on once the pool is back."""
    job._is_checked = True
    until(lambda: job.tick() or pool.of(on.Beat))
    job._carrier = SimpleNamespace(  # type: ignore[assignment]
        waited_s=waited_s, problem=None, close=lambda: None, join=lambda _: None
    )
    pool.lost = [on.Beat]
    job.tick()
    job._began -= 3000
    job._next_beat = float("inf")  # between two tries
    job.tick()
    pool.lost, job._next_beat = [], 0.0
    job.tick()
    assert not job.is_over
    assert pool.of(on.Beat)[-1].running_s >= 3000
    job._began -= 1000
    job.tick()
    assert job.is_over


def test_a_site_that_waits_does_not_stay_for_a_block_that_is_not_taken(job: Job, pool: SlowPool) -> None:
    """The pool takes none before it has all messages of its exchanges, and ends a lease that commits nothing."""
    job._is_checked = True
    carrier: Any = SimpleNamespace(waited_s=600.0, problem=None, close=lambda: None, join=lambda _: None)
    block: Any = None
    job._carrier, job._kept, job._sends_from = carrier, ((0, 10), block), float("inf")
    job._began -= 1000
    job.tick()
    assert pool.documents["job.0"]["reason"].startswith(WAITED)


def test_a_site_that_waits_stays_for_a_block_on_its_way(job: Job, pool: SlowPool) -> None:
    """It may be from before the exchange, and is paid for once it is there."""
    job._is_checked = True
    carrier: Any = SimpleNamespace(waited_s=600.0, problem=None, close=lambda: None, join=lambda _: None)
    pool.may_arrive.clear()
    save(job, 10)
    until(lambda: job.tick() or job._upload is not None)
    job._carrier = carrier
    job._began -= 1000
    job.tick()
    assert not job.is_over
    pool.may_arrive.set()
    until(lambda: job.tick() or pool.of(on.Committed))
    assert not job.is_over


def test_a_checkpoint_that_the_pool_has_no_room_for_is_waited_for(job: Job, pool: SlowPool) -> None:
    """A pool with a full disk is no job that saves nothing."""
    job._is_checked, real = True, pool.put_blob

    def full(_: bytes | Path) -> str:
        raise _Busy("0 bytes are free")

    pool.put_blob = full  # type: ignore[method-assign]
    save(job, 10)
    until(lambda: job.tick() or job._sends_from)
    job._began -= 1000
    job.tick()
    assert not job.is_over
    pool.put_blob = real  # type: ignore[method-assign]
    until(lambda: job.tick() or pool.of(on.Committed))
    job.tick()
    assert not job.is_over


def test_results_of_a_checked_job_without_a_commitment_are_not_sent(job: Job, pool: SlowPool) -> None:
    """A job that removes its checkpoints at the end does not have its results for five minutes' pay."""
    job._is_checked = True
    end(job)
    until(lambda: job.tick() or job.is_over)
    assert pool.documents["job.0"]["reason"].startswith("failed: it ended without a checkpoint")
    assert not pool.of(on.Finished)


def test_a_lease_that_is_taken_back_before_it_began_is_closed(pool: SlowPool, tmp_path: Path) -> None:
    """An owner who comes back while code is fetched does not get a job started afterwards."""
    may_go_on, isolation = threading.Event(), Nowhere()

    class Slow(Given):
        @classmethod
        def make(cls, folder: Path, order: PoolOrder, *_: Any) -> Given:
            assert may_go_on.wait(60)
            return super().make(folder, order)

    class SlowJob(LeasedJob):
        box_type = Slow

    host = Host(isolation=isolation, limits=LIMITS)  # type: ignore[arg-type]
    job = SlowJob("job.0", "0" * 64, tmp_path / "lease", pool, host=host, beat_s=0.0)  # type: ignore[arg-type]
    job.begin(ORDER)
    job.reclaim(60.0, "the owner is back")
    may_go_on.set()
    job.tick()
    assert job.is_over
    assert pool.documents["job.0"]["reason"] == "reclaimed: the owner is back"
    assert job._process is None


def test_a_notice_waits_for_the_pool(job: Job, pool: SlowPool) -> None:
    """An owner who takes the device back while the pool is away does not count as one who left."""
    pool.is_away = True
    job.reclaim(60.0, "the owner is back")
    pool.is_away = False
    assert not pool.of(on.Reclaiming)
    job.tick()
    assert len(pool.of(on.Reclaiming)) == 1


@pytest.mark.parametrize("heeds", [True, False])
def test_a_lease_ends_while_what_its_job_needs_is_on_its_way(
    pool: SlowPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, heeds: bool
) -> None:
    """A fetch is broken off; one that hangs is not waited for, and leaves nothing behind once it is over."""
    arrived, is_fetching = threading.Event(), threading.Event()

    def get_blob(_: str, target: Path, *, is_over: threading.Event, **__: Any) -> None:
        is_fetching.set()
        assert (is_over if heeds else arrived).wait(60)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"late")

    class Fetched(Given):
        @classmethod
        def make(cls, folder: Path, order: PoolOrder, *more: Any) -> Given:
            more[0]("1" * 64)
            return super().make(folder, order)

    monkeypatch.setattr(pool, "get_blob", get_blob)
    monkeypatch.setattr(leased_job, "_ENDS_S", 60.0 if heeds else 0.0)
    host = Host(isolation=Nowhere(), limits=LIMITS)  # type: ignore[arg-type]
    job = Job("job.0", "0" * 64, tmp_path / "lease", pool, host=host)  # type: ignore[arg-type]
    job.box_type = Fetched
    job.begin(ORDER)
    assert is_fetching.wait(60)
    job.end("stopped")
    assert job.is_over
    arrived.set()
    assert job._preparing is not None
    job._preparing.join(60)
    assert not (tmp_path / "lease").exists()


def test_a_blob_is_fetched_within_the_limit_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order that names a huge blob does not fill the owner's disk before anything is looked at."""
    asked = []

    class Pool:
        def get_blob(self, digest: str, target: Path, *, most_bytes: int | None = None, **_: Any) -> None:
            asked.append(most_bytes)
            raise PlaceFailed("larger")

    cache = BlobCache(Pool(), tmp_path, 1000)  # type: ignore[arg-type]
    with pytest.raises(PlaceFailed):
        cache.fetch("0" * 64)
    with pytest.raises(PlaceFailed):
        cache.whole("0" * 64, 10)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=(1 << 30) + 7))
    with pytest.raises(PlaceFailed):
        cache.fetch("0" * 64)
    assert asked == [1000, 10, 7]
