"""Runs kept at a URL: what is sent, what a kill leaves there, and what comes home."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import BadJob, BadRun
from stoker.records import Event
from stoker.store import CheckpointStore, RunDirectory, checkpoint_name
from stoker.store.mirror import Mirror
from stoker.store.remote_runs import RemoteRuns, bring_home, event_pieces
from stoker.store.run_files import RUN
from stoker.testing import operations_of
from tests.store.builders import content, make_run, manifest_at, run_record, save, spec

DIGEST = spec().digest()


@pytest.fixture
def remote(tmp_path: Path) -> RemoteRuns:
    """Runs kept in another folder."""
    return RemoteRuns.open(f"file://{tmp_path}/bucket/runs")


def checkpointed(run: RunDirectory, samples: int) -> None:
    """A checkpoint of the run."""
    store = CheckpointStore(run.checkpoints)
    store.write(
        checkpoint_name(manifest_at(samples)(()).position),
        lambda folder: (folder / "model.safetensors").write_bytes(content(samples)) and None,
        lambda files: dataclasses.replace(manifest_at(samples)(files), spec_digest=DIGEST),
    )


def mirrored(run: RunDirectory, remote: RemoteRuns, action: Callable[[Mirror], None] = lambda _: None) -> list[str]:
    """The run, sent to the end; what was said."""
    said: list[str] = []
    with Mirror(run, remote, said.append, said.append) as mirror:
        action(mirror)
    return said


def came_home(remote: RemoteRuns, base: Path) -> list[str]:
    """What is said when the run is fetched to `base`."""
    said: list[str] = []
    bring_home(remote, base, said.append)
    return said


def test_a_run_comes_home_to_another_machine(tmp_path: Path, remote: RemoteRuns) -> None:
    """Records, log, the newest and the best checkpoint, byte for byte; the job's code and locks stay away."""
    run = make_run(tmp_path / "a/mlp")
    for samples in (1000, 2000, 3000):
        checkpointed(run, samples)
        if samples == 1000:
            CheckpointStore(run.checkpoints).mark_best("000000001000")
        run.append_event(Event(kind="progress", at=1.0, fields={"samples": samples}))
    (run.path / "job").mkdir()
    (run.path / "job/evil.py").write_text("boom")
    assert mirrored(run, remote) == []
    said = came_home(remote, tmp_path / "b/mlp")
    home = RunDirectory(tmp_path / "b/mlp")
    assert "3,000 samples" in said[0] or "3000 samples" in said[0]
    assert home.read_run() == run.read_run()
    assert home.events_path.read_bytes() == run.events_path.read_bytes()
    store = CheckpointStore(home.checkpoints, spec_digest=DIGEST)
    newest, best = store.newest(), store.best()
    assert newest is not None
    assert newest[1].position.samples == 3000
    assert (newest[0] / "model.safetensors").read_bytes() == content(3000)
    assert best is not None
    assert best[1].position.samples == 1000
    assert not (home.path / "job").exists()
    assert not list((tmp_path / "b").glob(".writing*"))


def test_what_the_run_does_not_keep_is_deleted_there(tmp_path: Path, remote: RemoteRuns) -> None:
    """The same checkpoints are there as here; the log is a chain of pieces that add up to it."""
    run = make_run(tmp_path / "mlp")
    for samples in (1000, 2000, 3000, 4000):
        checkpointed(run, samples)
        run.append_event(Event(kind="progress", at=1.0, fields={"samples": samples}))
        mirrored(run, remote)
    files = remote.files("mlp")
    assert remote.checkpoints(files) == list(CheckpointStore(run.checkpoints).names())
    pieces = event_pieces(files)
    assert len(pieces) == 4
    assert b"".join(remote.read("mlp", path) for path, _, _ in pieces) == run.events_path.read_bytes()


def test_what_is_there_is_not_sent_again(tmp_path: Path, remote: RemoteRuns) -> None:
    """Another process of the run sends only its records."""
    run = make_run(tmp_path / "mlp")
    checkpointed(run, 1000)
    mirrored(run, remote)
    with Mirror(run, remote, pytest.fail, pytest.fail) as again:
        pass
    assert 0 < again.sent_bytes < 2000
    assert again.kept_samples == 1000


def test_of_two_machines_that_send_a_run_the_last_one_counts(tmp_path: Path, remote: RemoteRuns) -> None:
    """The first one stops sending and says so, with who took over: what is there is of one of them alone."""
    said: dict[str, list[str]] = {"a": [], "b": []}
    first = make_run(tmp_path / "a/mlp")
    checkpointed(first, 1000)
    with Mirror(first, remote, said["a"].append, said["a"].append) as mirror:
        mirror(Event(kind="checkpointed", at=0.0, fields={}))
        until = time.monotonic() + 60
        while mirror.kept_samples is None and time.monotonic() < until:
            time.sleep(0.01)
        bring_home(remote, tmp_path / "b/mlp", said["b"].append)
        second = RunDirectory(tmp_path / "b/mlp")
        checkpointed(second, 3000)
        with Mirror(second, remote, said["b"].append, said["b"].append):
            pass
        checkpointed(first, 2000)  # after the second one has ended, too
        mirror(Event(kind="checkpointed", at=0.0, fields={}))
        assert mirror._done.wait(60)
    assert any("did not say that it ended" in text and str(first.path.resolve()) in text for text in said["b"])
    assert [text for text in said["a"] if "from here nothing more is" in text and str(second.path.resolve()) in text]
    files = remote.files("mlp")
    assert "000000002000" not in remote.checkpoints(files)
    assert remote.checkpoints(files)[-1] == "000000003000"
    assert mirrored(second, remote) == [], "both have ended in order"


def test_a_killed_process_is_followed_in_silence_and_a_sender_that_cannot_be_read_is_ignored(
    tmp_path: Path, remote: RemoteRuns
) -> None:
    """The same directory on the same machine is locked: what sent before is gone; other programs may write anything."""
    run = make_run(tmp_path / "a/mlp")
    with Mirror(run, remote, print, print):
        left = remote.read("mlp", "sender.json")
    rude = json.dumps(json.loads(left) | {"who": "\x1b[2J"}).encode()
    for noted in (left, b"[]", b"{}", b"\xff", rude):
        remote.put("mlp", "sender.json", noted)
        assert mirrored(run, remote) == []


def test_the_end_of_the_process_before_takes_nothing_over(tmp_path: Path, remote: RemoteRuns) -> None:
    """It writes its note of the end, or the store shows an older note, after this one has begun: this one goes on."""
    run = make_run(tmp_path / "a/mlp")
    with Mirror(run, remote, print, print):
        before = json.loads(remote.read("mlp", "sender.json"))
    ended = json.dumps(before | {"ended_at": "2026-01-01T00:00:00Z"}).encode()
    checkpointed(run, 1000)
    mirrored_by: list[str] = []

    def late(mirror: Mirror) -> None:
        mirrored_by.append(mirror._sender["token"])
        remote.put("mlp", "sender.json", ended)

    assert mirrored(run, remote, late) == []
    assert remote.checkpoints(remote.files("mlp")) == ["000000001000"]
    assert json.loads(remote.read("mlp", "sender.json"))["token"] == mirrored_by[0]


@pytest.mark.parametrize("file", ["checkpoints/000000001000/model.safetensors", "checkpoints/best.json"])
def test_a_process_that_is_taken_over_during_an_upload_writes_no_manifest_and_no_end(
    tmp_path: Path, remote: RemoteRuns, file: str
) -> None:
    """Its last upload may take minutes, in which the next process begins: that one's note stays."""
    run, said = make_run(tmp_path / "a/mlp"), list[str]()
    checkpointed(run, 1000)
    CheckpointStore(run.checkpoints).mark_best("000000001000")
    other = {"who": "other:/mlp", "began_at": "2026-01-01T00:00:00Z", "token": "t"}

    @dataclasses.dataclass(frozen=True)
    class Overtaken(RemoteRuns):
        def put(self, name: str, path: str, source: Path | bytes) -> None:
            super().put(name, path, source)
            if path == file:
                super().put(name, "sender.json", json.dumps(other).encode())

    overtaken = Overtaken(**dataclasses.asdict(remote) | {"fs": remote.fs})
    with Mirror(run, overtaken, said.append, said.append):
        pass
    assert [text for text in said if "is sent to" in text and "by other:/mlp" in text] == said
    assert len(said) == 1
    assert json.loads(remote.read("mlp", "sender.json")) == other
    assert ("checkpoints/000000001000/manifest.json" in remote.files("mlp")) == (file == "checkpoints/best.json")


class Cut(Exception):
    """The process is killed."""


@dataclasses.dataclass(frozen=True)
class Dying(RemoteRuns):
    """A remote whose process is killed after so many writes; a write may be cut off in the middle."""

    writes: list[str] = dataclasses.field(default_factory=list)
    most: int = 10**9

    def put(self, name: str, file: str, source: Path | bytes) -> None:
        """Write, or leave half a file and die."""
        if len(self.writes) >= self.most:
            raise Cut
        self.writes.append(file)
        super().put(name, file, source)


def test_a_kill_between_any_two_parts_leaves_the_newest_whole_checkpoint(tmp_path: Path, remote: RemoteRuns) -> None:
    """After each write of an upload: the one before the kill comes home, then the new one once it is whole."""
    run = make_run(tmp_path / "mlp")
    checkpointed(run, 1000)
    mirrored(run, remote)
    checkpointed(run, 2000)
    found = []
    for most in range(12):
        dying = Dying(**dataclasses.asdict(remote) | {"fs": remote.fs}, most=most)
        mirror = Mirror(run, dying, pytest.fail, pytest.fail)
        remote.put("mlp", "sender.json", json.dumps(mirror._sender).encode())  # as when it begins
        mirror._there = dying.files("mlp")
        try:
            mirror._send()
        except Cut:
            is_whole = False
        else:
            is_whole = True
        home = tmp_path / f"home{most}/mlp"
        came_home(remote, home)
        newest = CheckpointStore(home / "checkpoints", spec_digest=DIGEST).newest()
        assert newest is not None
        found.append(newest[1].position.samples)
        if is_whole:
            break
    assert found[0] == 1000
    assert found[-1] == 2000
    assert found == sorted(found)


def test_a_damaged_checkpoint_there_is_passed_over_and_named(tmp_path: Path, remote: RemoteRuns) -> None:
    """A flipped byte of the same size, and a missing file: the one before is fetched. None usable: refused."""
    run = make_run(tmp_path / "mlp")
    for samples in (1000, 2000):
        checkpointed(run, samples)
    mirrored(run, remote)
    weights = remote.path("mlp", "checkpoints/000000002000/model.safetensors")
    remote.fs.pipe_file(weights, b"X" + content(2000)[1:])
    said = came_home(remote, tmp_path / "flipped/mlp")
    assert any("000000002000" in text and "not as it was written" in text for text in said)
    assert CheckpointStore(tmp_path / "flipped/mlp/checkpoints").names() == ("000000001000",)
    remote.fs.rm_file(weights)
    assert any("has no of" in text for text in came_home(remote, tmp_path / "missing/mlp"))
    remote.fs.pipe_file(remote.path("mlp", "checkpoints/000000001000/manifest.json"), b"{}")
    with pytest.raises(BadRun, match=r"No checkpoint in .* is usable"):
        came_home(remote, tmp_path / "none/mlp")
    assert not (tmp_path / "none/mlp").exists()


@pytest.mark.parametrize("name", ["../../../evil", "/etc/evil", "a/../../evil", ".hidden", "x\x00y"])
def test_names_from_there_cannot_leave_the_run(tmp_path: Path, remote: RemoteRuns, name: str) -> None:
    """A manifest that names a file elsewhere does not count; nothing is written outside."""
    run = make_run(tmp_path / "mlp")
    checkpointed(run, 1000)
    checkpointed(run, 2000)
    mirrored(run, remote)
    text = (run.checkpoints / "000000002000/manifest.json").read_text()
    evil = text.replace('"model.safetensors"', json.dumps(name))
    assert evil != text
    remote.fs.pipe_file(remote.path("mlp", "checkpoints/000000002000/manifest.json"), evil.encode())
    before = {path for path in tmp_path.rglob("*") if "home" not in path.parts}
    came_home(remote, tmp_path / "home/mlp")
    assert CheckpointStore(tmp_path / "home/mlp/checkpoints").names() == ("000000001000",)
    assert {path for path in tmp_path.rglob("*") if "home" not in path.parts} == before


def test_files_of_other_names_stay_there(tmp_path: Path, remote: RemoteRuns) -> None:
    """Code, locks and hidden files that somebody put into the bucket do not come home."""
    run = make_run(tmp_path / "mlp")
    mirrored(run, remote)
    for file in ("job/job.py", "lock", ".bashrc", "started.json", "launch.json", "weights/../../x.safetensors"):
        target = remote.path("mlp", file)
        remote.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        remote.fs.pipe_file(target, b"evil")
    came_home(remote, tmp_path / "home/mlp")
    names = {path.name for path in (tmp_path / "home/mlp").rglob("*")}
    assert names == {"run.json", "spec.json", "events.jsonl"}


def test_a_run_that_is_further_there_is_fetched_and_one_that_is_further_here_is_not(
    tmp_path: Path, remote: RemoteRuns
) -> None:
    """Two machines in turn: each goes on from the newest checkpoint of both."""
    here = make_run(tmp_path / "a/mlp")
    checkpointed(here, 1000)
    mirrored(here, remote)
    came_home(remote, tmp_path / "b/mlp")
    other = RunDirectory(tmp_path / "b/mlp")
    checkpointed(other, 2000)
    mirrored(other, remote)
    assert "is further" in came_home(remote, here.path)[0]
    assert CheckpointStore(here.checkpoints).newest_position().samples == 2000
    checkpointed(here, 3000)
    assert came_home(remote, here.path) == []
    assert CheckpointStore(here.checkpoints).newest_position().samples == 3000
    mirrored(here, remote)
    assert remote.checkpoints(remote.files("mlp"))[-1] == "000000003000"


def test_every_file_that_comes_home_is_on_the_disk_before_it_has_its_name(tmp_path: Path, remote: RemoteRuns) -> None:
    """The log too: a power cut must not leave an empty one with newer records."""
    run = make_run(tmp_path / "a/mlp")
    run.append_event(Event(kind="progress", at=1.0, fields={"samples": 1}))
    mirrored(run, remote)
    operations = operations_of(lambda: came_home(remote, tmp_path / "b/mlp"))
    for name in ("events.jsonl", "run.json"):
        (renamed,) = [place for place, done in enumerate(operations) if done.startswith("rename") and name in done]
        assert operations[renamed - 1].startswith(f"sync .writing-{name}")


def test_a_damaged_checkpoint_here_is_replaced_by_the_whole_one_there(tmp_path: Path, remote: RemoteRuns) -> None:
    """Else the run would go on from the one before, although the newest is kept."""
    run = make_run(tmp_path / "mlp")
    for samples in (1000, 2000):
        checkpointed(run, samples)
    mirrored(run, remote)
    (run.checkpoints / "000000002000/model.safetensors").write_bytes(b"cut")
    assert "is further" in came_home(remote, run.path)[0]
    newest = CheckpointStore(run.checkpoints, spec_digest=DIGEST).newest()
    assert newest is not None
    assert newest[1].position.samples == 2000


def test_another_jobs_run_of_that_name_is_not_replaced(tmp_path: Path, remote: RemoteRuns) -> None:
    """It is refused before anything is sent."""
    mirrored(make_run(tmp_path / "a/mlp"), remote)
    other = make_run(tmp_path / "b/mlp", spec(lr=0.5))
    before = remote.files("mlp")
    with pytest.raises(BadRun, match="of another job"):
        mirrored(other, remote)
    assert remote.files("mlp") == before


class Failing:
    """A file system in front of another one that is down for its first so many writes."""

    def __init__(self, fs: Any, failures: int) -> None:
        self._fs, self.failures, self.failed = fs, failures, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def put_file(self, *arguments: Any) -> None:
        """Write, unless it is down."""
        if self.failures > 0:
            self.failures -= 1
            self.failed.set()
            raise ConnectionError("the bucket is on fire")
        self._fs.put_file(*arguments)


def test_errors_are_said_once_and_the_upload_is_tried_again(
    tmp_path: Path, remote: RemoteRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three failures in a row: one warning, one note that it works again, and everything is there."""
    drawn = random.getstate()
    monkeypatch.setattr("stoker.store.mirror._FIRST_PAUSE_S", 0.01)
    run = make_run(tmp_path / "mlp")
    checkpointed(run, 1000)
    failing = Failing(remote.fs, 3)
    said = mirrored(run, dataclasses.replace(remote, fs=failing), lambda mirror: mirror._wake.set())
    assert [text for text in said if "on fire" in text] == said[:1]
    assert "after 3 failed attempts" in said[1]
    assert len(said) == 2
    assert remote.checkpoints(remote.files("mlp")) == ["000000001000"]
    assert random.getstate() == drawn, "the global generator is the run's"


def test_the_end_waits_for_a_bounded_time(tmp_path: Path, remote: RemoteRuns) -> None:
    """A bucket that is down for good: the end says what is missing, and where it is."""
    run = make_run(tmp_path / "mlp")
    checkpointed(run, 1000)
    failing = Failing(remote.fs, 10**9)
    said: list[str] = []
    with Mirror(run, dataclasses.replace(remote, fs=failing), said.append, said.append, most_s=lambda: 0.0):
        failing.failed.wait(0.0)
    assert "did not take all of mlp in 1.0 s: it last took nothing" in said[-1]
    assert str(run.path) in said[-1]


def test_pieces_of_a_log_that_were_joined_count_once() -> None:
    """What a kill left while pieces became one is passed over; after a gap nothing counts."""
    files = {f"events/{offset:015d}.jsonl": size for offset, size in ((0, 30), (10, 20), (30, 5), (99, 1))}
    assert [(offset, size) for _, offset, size in event_pieces(files)] == [(0, 30), (30, 5)]


@pytest.mark.parametrize("url", ["nowhere://bucket/x", "file:///proc/nothing/x"])
def test_a_url_that_cannot_be_used_is_refused_at_once(url: str) -> None:
    """In one sentence, before anything is spent."""
    with pytest.raises(BadJob, match="--keep"):
        RemoteRuns.open(url)


def test_what_to_check_is_of_the_store(tmp_path: Path) -> None:
    """A folder that cannot be written has no credentials."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BadJob, match="cannot be written") as caught:
        RemoteRuns.open(f"file://{tmp_path}/file/runs")
    assert "free space" in str(caught.value)
    assert "AWS" not in str(caught.value)


def test_a_run_comes_home_to_where_it_was_ordered(tmp_path: Path, remote: RemoteRuns) -> None:
    """At a place elsewhere the directory holds what was ordered before the run is there: that stays."""
    run = make_run(tmp_path / "a/mlp")
    checkpointed(run, 1000)
    mirrored(run, remote)
    order = tmp_path / "b/mlp/launch/order.json"
    order.parent.mkdir(parents=True)
    order.write_text("{}")
    came_home(remote, tmp_path / "b/mlp")
    assert RunDirectory(tmp_path / "b/mlp").read_run() == run.read_run()
    assert CheckpointStore(tmp_path / "b/mlp/checkpoints").names() == ("000000001000",)
    assert order.read_text() == "{}"


def test_a_finished_run_comes_home_without_checkpoints(tmp_path: Path, remote: RemoteRuns) -> None:
    """Its record says that it is finished, so that the same command does not train it again; its weights are there."""
    run = make_run(tmp_path / "a/mlp")
    checkpointed(run, 5000)
    (run.path / "model.safetensors").write_bytes(b"weights")
    run.write(RUN, run_record(spec(), status="finished", samples=5000))
    mirrored(run, remote)
    came_home(remote, tmp_path / "b/mlp")
    home = RunDirectory(tmp_path / "b/mlp")
    assert home.read_run().status == "finished"
    assert (home.path / "model.safetensors").read_bytes() == b"weights"
    assert CheckpointStore(home.checkpoints).names() == ()


def test_a_finished_run_comes_home_with_checkpoints_if_another_begins_from_it(
    tmp_path: Path, remote: RemoteRuns
) -> None:
    """Where nothing is here, where it was left unfinished here, and where its records came home alone."""
    run = make_run(tmp_path / "a/mlp")
    checkpointed(run, 1000)
    mirrored(run, remote)
    came_home(remote, tmp_path / "left/mlp")
    came_home(remote, tmp_path / "records/mlp")
    checkpointed(run, 5000)
    run.write(RUN, run_record(spec(), status="finished", samples=5000))
    mirrored(run, remote)
    came_home(remote, tmp_path / "records/mlp")
    (tmp_path / "records/mlp/events.jsonl").write_text("a line of this machine's\n")
    for machine in ("nothing", "left", "records"):
        home = RunDirectory(tmp_path / machine / "mlp")
        said: list[str] = []
        bring_home(remote, home.path, said.append, is_parent=True)
        assert len(said) == 1
        assert home.read_run().status == "finished"
        assert CheckpointStore(home.checkpoints, spec_digest=DIGEST).newest_position().samples == 5000
        bring_home(remote, home.path, pytest.fail, is_parent=True)
    assert (tmp_path / "records/mlp/events.jsonl").read_text() == "a line of this machine's\n"


def test_memory_and_other_file_systems_work_alike(tmp_path: Path) -> None:
    """The same through a file system without folders."""
    remote = RemoteRuns.open("memory://bucket/runs")
    run = make_run(tmp_path / "mlp")
    save_twice = CheckpointStore(run.checkpoints)
    save(save_twice, 1000)
    mirrored(run, remote)
    assert remote.names() == ["mlp"]
    assert remote.checkpoints(remote.files("mlp")) == ["000000001000"]


def test_a_log_of_any_size_is_sent_in_pieces_and_comes_home(
    tmp_path: Path, remote: RemoteRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small pieces become large ones, which stay; none is read as a record, neither by a new process nor at home."""
    monkeypatch.setattr("stoker.store.remote_runs._MOST_RECORD_BYTES", 4096)
    monkeypatch.setattr("stoker.store.remote_runs._BLOCK_BYTES", 1000)
    monkeypatch.setattr("stoker.store.mirror._MOST_PIECE_BYTES", 8192)
    monkeypatch.setattr("stoker.store.mirror._COMPARED_BYTES", 100)
    monkeypatch.setattr("stoker.store.mirror._MOST_PIECES", 4)
    run = make_run(tmp_path / "a/mlp")
    for part in range(1, 13):
        for samples in range(30):
            run.append_event(Event(kind="progress", at=1.0, fields={"samples": samples, "note": "x" * 60}))
        checkpointed(run, 1000 * part)
        assert mirrored(run, remote) == []
        pieces = event_pieces(remote.files("mlp"))
        assert len(pieces) == len([file for file in remote.files("mlp") if file.startswith("events/")])
        assert all(size <= 8192 for _, _, size in pieces)
        assert sum(size < 4096 for _, _, size in pieces) <= 4 + 1
    came_home(remote, tmp_path / "b/mlp")
    assert run.events_path.stat().st_size > 4 * 8192
    assert (tmp_path / "b/mlp/events.jsonl").read_bytes() == run.events_path.read_bytes()
    run.events_path.write_text('{"another": "log"}\n')
    mirrored(run, remote)
    assert [size for _, _, size in event_pieces(remote.files("mlp"))] == [run.events_path.stat().st_size]
