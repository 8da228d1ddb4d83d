from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from stoker.errors import BadRun, RunFailed
from stoker.records import Coupling, Decision, Environment, Event, RankTimes, SampledUpdates
from stoker.store import CheckpointStore, RunDirectory, RunLock, run_files
from stoker.testing import FaultyDisk, PowerCutAt, fake_device, operations_of
from tests.store.builders import make_run, run_record, save, spec

DECISION = Decision(device="cpu", candidates=(), rejected=(), explanation=("because",), took_s=0.5)
ENVIRONMENT = Environment(
    device_model="m", device_kind="cpu", threads=1, torch_version="2", python_version="3", platform="p"
)
COUPLING = Coupling(kind="separable", group=None, causes=(), evidence="none found")


def create_with_everything(path: Path) -> RunDirectory:
    """A run with every record there is."""
    return RunDirectory.create(
        path,
        run_record(spec()),
        spec(),
        decision=DECISION,
        environment=ENVIRONMENT,
        device=fake_device(),
        coupling=COUPLING,
    )


def test_every_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """What `create` stores, a fresh reader reads."""
    create_with_everything(tmp_path / "a")
    run = RunDirectory(tmp_path / "a")
    assert run.is_run
    assert run.name == "a"
    assert (run.read_run(), run.read_spec()) == (run_record(spec()), spec())
    assert (run.read_decision(), run.read(run_files.ENVIRONMENT)) == (DECISION, ENVIRONMENT)
    assert (run.read(run_files.DEVICE), run.read(run_files.COUPLING)) == (fake_device(), COUPLING)


def test_the_record_of_a_run_is_replaced(tmp_path: Path) -> None:
    """It says how the run stands now; records that were not given at the start are None."""
    run = make_run(tmp_path / "a")
    assert [
        run.read_decision(),
        run.read(run_files.ENVIRONMENT),
        run.read(run_files.DEVICE),
        run.read(run_files.COUPLING),
    ] == [None] * 4
    run.write(run_files.RUN, run_record(spec(), status="finished", metrics={"test/accuracy": 0.9}))
    assert run.read_run().metrics == {"test/accuracy": 0.9}


@pytest.mark.parametrize(("status", "samples"), [("unfinished", 900), ("failed", 900), ("finished", 100)])
def test_the_headway_of_a_run_is_that_of_its_newest_checkpoint(tmp_path: Path, status: str, samples: int) -> None:
    """A run that went on and was killed wrote no record of it, also one that had failed before."""
    run = make_run(tmp_path / "a")
    run.write(run_files.RUN, run_record(spec(), status=status, samples=100))
    save(CheckpointStore(run.checkpoints), 900)
    assert run.read_headway().samples == samples


@pytest.mark.parametrize("loses", ["nothing", "data", "data and names"])
def test_a_power_cut_leaves_a_whole_run_or_a_vacant_directory(tmp_path: Path, loses: str) -> None:
    """At every operation of `create`; whatever it left, the next `create` succeeds with nothing of the old in it."""
    num_operations = len(operations_of(lambda: create_with_everything(tmp_path / "counted")))
    assert num_operations > 30
    outcomes = set()
    for at in range(num_operations + 1):
        run = RunDirectory(tmp_path / str(at))
        with PowerCutAt(at, loses=loses):
            create_with_everything(run.path)
        assert run.is_run or run.is_vacant, at
        outcomes.add(run.is_run)
        if run.is_run:
            assert run.read(run_files.COUPLING) == COUPLING
            assert run.read_spec() == spec()
        else:
            RunDirectory.create(run.path, run_record(spec(lr=9)), spec(lr=9))
            assert run.read_spec() == spec(lr=9)
            assert run.read_decision() is None
    assert outcomes == {True, False}
    assert run.is_run, "the last cut came after create returned"


@pytest.mark.parametrize(
    "fault",
    [
        lambda place: FaultyDisk.full(place, after_bytes=600),
        FaultyDisk.read_only,
        FaultyDisk.failing_sync,
        lambda place: FaultyDisk.refusing(place, errno.EACCES),
    ],
    ids=["full", "read-only", "failing sync", "not permitted"],
)
def test_a_run_that_cannot_be_made_leaves_nothing(tmp_path: Path, fault) -> None:
    """Not even its directory; and it is the user's to mend, nothing was spent."""
    with fault(tmp_path), pytest.raises(BadRun, match="Cannot write") as caught:
        create_with_everything(tmp_path / "runs" / "a")
    assert caught.value.remedy
    assert list(tmp_path.rglob("a")) == []


def test_a_directory_given_empty_is_used_and_kept_when_making_the_run_fails(tmp_path: Path) -> None:
    """A mounted volume cannot be made again: it is emptied, not removed."""
    with FaultyDisk.full(tmp_path, after_bytes=600), pytest.raises(BadRun, match="full"):
        create_with_everything(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]
    assert create_with_everything(tmp_path).is_run


def test_a_run_is_not_made_over_anything(tmp_path: Path) -> None:
    """Neither over a run, nor a user's files, nor checkpoints, nor a file, nor under another process's lock."""
    make_run(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    for name in "abcde":
        (tmp_path / "mine" / name).touch()
    (tmp_path / "half" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").touch()
    for name, said in [("run", "run.json"), ("mine", "a, b, c and 2 more"), ("half", "checkpoints"), ("file", "file")]:
        with pytest.raises(BadRun, match=said):
            make_run(tmp_path / name)
    assert len(list((tmp_path / "mine").glob("?"))) == 5


def test_a_lock_this_process_holds_is_used(tmp_path: Path) -> None:
    """A flow may lock first and make the run then; a failure in between leaves nothing."""
    with RunLock(tmp_path / "a"):
        make_run(tmp_path / "a")
    assert RunDirectory(tmp_path / "a").is_run


def test_a_run_of_another_spec_is_our_own_bug(tmp_path: Path) -> None:
    """The run's digest is its spec's."""
    with pytest.raises(ValueError, match="is of job"):
        RunDirectory.create(tmp_path / "a", run_record(spec(lr=1)), spec(lr=2))


def damage(text: str) -> dict[str, str]:
    """Ways in which a record of a run can be unusable, with what the error says."""
    content = json.loads(text)
    return {
        text[: len(text) // 2]: "run.json cannot be used",
        "": "run.json cannot be used",
        json.dumps({**content, "schema": 99}): "schema version 99, this Stoker reads version 1",
        json.dumps({**content, "samples": "many"}): r'Run\.samples: wanted .*int.*, found "many"',
        json.dumps({k: v for k, v in content.items() if k != "status"}): "field 'status' is missing",
        json.dumps({**content, "record": "Device"}): "this is a 'Device' record",
    }


def test_a_damaged_or_foreign_record_is_told_with_file_and_field(tmp_path: Path) -> None:
    """Every kind of damage is the user's to mend, with a remedy, and names the file."""
    run = make_run(tmp_path / "a")
    path = run.path / "run.json"
    for text, said in damage(path.read_text()).items():
        path.write_text(text)
        with pytest.raises(BadRun, match=said) as caught:
            run.read_run()
        assert str(path) in caught.value.message
        assert "--new" in str(caught.value.remedy)
    path.unlink()
    with pytest.raises(BadRun, match=r"run\.json cannot be read: No such file"):
        run.read_run()


def test_events_come_back_in_order(tmp_path: Path) -> None:
    """One line each, in the order they happened; text with any line separator stays one event."""
    run = make_run(tmp_path / "a")
    events = tuple(
        Event(kind="warned", at=float(i), fields={"message": f"{i}\u2028\nä", "loss": float("inf")}) for i in range(3)
    )
    for event in events:
        run.append_event(event)
    read = run.read_events()
    assert [(e.kind, e.at, e.fields["message"]) for e in read] == [(e.kind, e.at, e.fields["message"]) for e in events]
    assert run.events_path.read_bytes().count(b"\n") == 3


def test_an_event_cut_off_is_left_out_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    """A torn end is as if it never happened; a damaged line in the middle leaves a warning in its place."""
    run = make_run(tmp_path / "a")
    assert run.read_events() == ()
    for at in (1.0, 2.0, 3.0):
        run.append_event(Event(kind="progress", at=at))
    lines = run.events_path.read_bytes().split(b"\n")
    run.events_path.write_bytes(b"\n".join([lines[0], b"\x00\xff" * 5, lines[2], lines[0][:20]]))
    read = run.read_events()
    assert [(e.kind, e.at) for e in read] == [("progress", 1.0), ("warned", 1.0), ("progress", 3.0)]
    assert "events.jsonl, line 2 cannot be read" in read[1].fields["message"]


def test_a_log_of_another_version_is_refused(tmp_path: Path) -> None:
    """Not one line can be read: that is no damage to pass over."""
    run = make_run(tmp_path / "a")
    run.append_event(Event(kind="progress", at=1.0))
    run.events_path.write_bytes(run.events_path.read_bytes().replace(b'"schema": 1', b'"schema": 7'))
    with pytest.raises(BadRun, match="schema version 7"):
        run.read_events()


def test_an_event_on_a_full_disk_fails_the_run_and_leaves_the_log(tmp_path: Path) -> None:
    """Training had started: exit code 4, and the log is as it was."""
    run = make_run(tmp_path / "a")
    run.append_event(Event(kind="progress", at=1.0))
    with FaultyDisk.full(tmp_path, after_bytes=10), pytest.raises(RunFailed, match="Cannot write an event"):
        run.append_event(Event(kind="progress", at=2.0))
    assert [e.at for e in run.read_events()] == [1.0]


def test_taking_the_lock_clears_what_a_killed_process_left(tmp_path: Path) -> None:
    """Half-written records go; the run stays."""
    run = make_run(tmp_path / "a")
    (run.path / ".writing-run.json-12-0123abcd").write_bytes(b"half")
    with run.locked():
        assert sorted(p.name for p in run.path.iterdir()) == ["lock", "run.json", "spec.json"]


@pytest.mark.parametrize("loses", ["nothing", "data and names"])
def test_discarding_leaves_the_run_or_a_vacant_directory(tmp_path: Path, loses: str) -> None:
    """A run that failed at its first update is removed; at every moment it is a run, or vacant."""

    def failed_run(path: Path) -> RunDirectory:
        run = create_with_everything(path)
        run.append_event(Event(kind="stopped", at=1.0))
        run.checkpoints.mkdir()
        return run

    num_operations = len(operations_of(failed_run(tmp_path / "counted").discard))
    assert not (tmp_path / "counted").exists()
    for at in range(num_operations + 1):
        run = failed_run(tmp_path / str(at))
        with PowerCutAt(at, loses=loses):
            run.discard()
        assert run.is_run or run.is_vacant, at
        if run.is_run:
            assert run.read(run_files.COUPLING) == COUPLING


def test_a_run_with_a_checkpoint_is_not_discarded(tmp_path: Path) -> None:
    """Work is never removed."""
    run = make_run(tmp_path / "a")
    save(CheckpointStore(run.checkpoints), 100)
    with pytest.raises(BadRun, match="000000000100"):
        run.discard()
    assert run.is_run


def _times(rank: int, *, first_update: int = 0, began_at: float = 7.0, updates: int = 3) -> RankTimes:
    return RankTimes(
        rank=rank,
        size=2,
        worker=rank,
        host="here",
        began_at=began_at,
        first_update=first_update,
        updates=updates,
        parts_s={"compute": 0.5},
        sample=SampledUpdates(
            update=(0,), began_s=(1.5,), data_s=(0.0,), compute_s=(0.25,), blocked_s=(0.1,), optimiser_s=(0.01,)
        ),
    )


def test_each_process_keeps_its_times_for_each_meeting(tmp_path: Path) -> None:
    """A process replaces what it wrote before; what was noted before a loss stays, and the report has all of it."""
    directory = make_run(tmp_path / "run")
    assert directory.read_rank_times() == ()
    later = _times(0, first_update=40, began_at=9.0)
    for times in (later, _times(1), _times(0, updates=2), _times(0)):
        directory.write_rank_times(times)
    assert directory.read_rank_times() == (_times(0), _times(1), later)
    assert directory.read_report().ranks == directory.read_rank_times()


def test_times_that_cannot_be_written_leave_the_old_ones(tmp_path: Path) -> None:
    """A full disk fails that write alone."""
    directory = make_run(tmp_path / "run")
    directory.write_rank_times(_times(0))
    with FaultyDisk.full(tmp_path, after_bytes=10), pytest.raises(RunFailed, match="times of a process"):
        directory.write_rank_times(_times(0, updates=9))
    assert directory.read_rank_times() == (_times(0),)
