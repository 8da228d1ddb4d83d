from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

import stoker
from stoker.errors import BadJob
from stoker.records import Event
from stoker.store import CheckpointStore, RunDirectory
from stoker.store.site_message import message_name
from stoker.verifying.replay import NotTheRun, replay
from tests.training.builders import blobs, net

UPDATES = 15


def job(**changes) -> stoker.Job:
    """Dropout, a held-out set that decides about the learning rate, an average, clipping and a ragged last batch."""
    settings = {
        "model": net,
        "data": blobs(74),
        "valid": blobs(20),
        "loss": "cross_entropy",
        "optimizer": stoker.AdamW(lr=0.01),
        "batch": 16,
        "until": stoker.epochs(3),
        "clip_norm": 1.0,
        "average": stoker.EMA(0.9),
        "metrics": ["accuracy"],
    }
    return stoker.Job(**(settings | changes))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A run that tried plans on its updates, with a copy of its directory after each update."""
    return record(job(), tmp_path_factory.mktemp("recorded"))


def record(trained: stoker.Job, folder: Path) -> Path:
    """Train a job, and keep a copy of its directory after each update in `folder`."""
    run = folder / "run"

    def keep(event: Event) -> None:
        if event.kind == "checkpointed":
            name = Path(event.fields["path"]).name  # a newer one may be there already
            there = folder / str(CheckpointStore(run / "checkpoints").named(name)[1].position.updates)
            others = shutil.ignore_patterns("checkpoints")  # older ones may be removed while they are copied
            shutil.copytree(run, there, dirs_exist_ok=True, ignore=others)
            shutil.copytree(run / "checkpoints" / name, there / "checkpoints" / name, dirs_exist_ok=True)

    stoker.train(trained, run_dir=run, sink=keep, checkpoint_every=stoker.seconds(1e-9))
    return folder


def copy_at(recorded: Path, begin: int, end: int, into: Path) -> RunDirectory:
    """The run as it was after `begin` updates, with the records that it had after `end`."""
    shutil.copytree(recorded / str(end), into)
    shutil.rmtree(into / "checkpoints")
    if begin:
        name = CheckpointStore(recorded / str(begin) / "checkpoints").names()[-1]
        shutil.copytree(recorded / str(begin) / "checkpoints" / name, into / "checkpoints" / name)
    return RunDirectory(into)


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (0, 6), (3, 4), (4, 11), (10, UPDATES)])
def test_a_stretch_made_again_is_equal_bit_for_bit(recorded, tmp_path, begin, end):
    """Weights, optimiser, average, generators, decisions: all but times, from any update to any other."""
    claimed = CheckpointStore(recorded / str(end) / "checkpoints").newest()[1]
    made = replay(job(), copy_at(recorded, begin, end, tmp_path / "run"), end)
    assert made[-1].position == claimed.position
    assert made[-1].state_digest() == claimed.state_digest()


@pytest.mark.parametrize(("end", "at"), [(9, (6, 7, 8, 9)), (9, (7, 9)), (9, (6,)), (12, (6, 11))])
def test_states_on_the_way_can_be_noted(recorded, tmp_path, end, at):
    """They are those that the run itself had after the same updates; what is saved as the best is none of them."""
    made = replay(job(), copy_at(recorded, 5, end, tmp_path / "run"), end, at=at)
    noted = sorted({*at, end})
    assert [manifest.position.updates for manifest in made] == noted
    claimed = [CheckpointStore(recorded / str(n) / "checkpoints").newest()[1] for n in noted]
    assert [one.state_digest() for one in made] == [one.state_digest() for one in claimed]


def test_a_stretch_may_end_on_a_skipped_update(tmp_path):
    """One sample makes one loss of each epoch not finite: states after that update, before it and later are equal."""
    inputs, labels = blobs(74)
    inputs[5, 2] = float("nan")
    skipping = job(data=(inputs, labels), on_non_finite="skip")
    folder = record(skipping, tmp_path / "recorded")
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    skipped = [one["fields"]["updates"] + 1 for one in events if one["kind"] == "skipped"]
    assert len(skipped) == 3
    for update in skipped:
        for begin, end, at in (
            (update - 1, update, ()),
            (update - 1, update + 1, (update,)),
            (1, update, (update - 1,)),
        ):
            if not 0 <= begin < end <= UPDATES:
                continue
            directory = copy_at(folder, begin, end, tmp_path / f"run-{begin}-{end}")
            made = replay(skipping, directory, end, at=at)
            claimed = [CheckpointStore(folder / str(n) / "checkpoints").newest()[1] for n in (*at, end)]
            assert [one.state_digest() for one in made] == [one.state_digest() for one in claimed]


@pytest.mark.parametrize(
    "changes", [{"data": blobs(90)}, {"batch": 8}, {"optimizer": stoker.AdamW(lr=0.02)}, {"seed": 1}]
)
def test_the_records_of_another_job_are_refused(recorded, tmp_path, changes):
    """Other data, half the batch, another rate or seed: the run's records are not of this job."""
    with pytest.raises(NotTheRun, match="of another job"):
        replay(job(**changes), copy_at(recorded, 3, 6, tmp_path / "run"), 6)


def test_a_run_planned_for_fewer_updates_is_refused(recorded, tmp_path):
    """The schedule depends on the length, which is the job's and not what the machine that ran it says."""
    directory = copy_at(recorded, 3, 6, tmp_path / "run")
    text = (directory.path / "plan.json").read_text()
    assert f'"total_updates": {UPDATES}' in text
    (directory.path / "plan.json").write_text(text.replace(f'"total_updates": {UPDATES}', '"total_updates": 7'))
    with pytest.raises(NotTheRun, match="planned for 7 updates, and the job has 15"):
        replay(job(), directory, 6)


@pytest.mark.slow
def test_a_job_of_seconds_cannot_be_replayed(recorded, tmp_path):
    """How many updates a second has is known to one machine alone."""
    run = tmp_path / "run"
    timed = job(until=stoker.seconds(1))
    stoker.train(timed, run_dir=run, sink=lambda event: None)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(BadJob, match="given in seconds"):
        replay(timed, RunDirectory(run), 2)


def test_a_changed_weight_changes_the_state(recorded):
    """The digest is of the content: one changed file of a checkpoint, and the state is another one."""
    manifest = CheckpointStore(recorded / "4" / "checkpoints").newest()[1]
    other = CheckpointStore(recorded / "5" / "checkpoints").newest()[1]
    assert manifest.state_digest() != other.state_digest()


def test_how_tensors_lie_in_memory_is_no_part_of_the_state(recorded):
    """A run that changed its memory format, and its replay from a checkpoint, have one state."""
    manifest = CheckpointStore(recorded / "4" / "checkpoints").newest()[1]
    text = json.dumps(manifest.skeleton)
    assert '"strides": [1]' in text
    other = dataclasses.replace(manifest, skeleton=json.loads(text.replace('"strides": [1]', '"strides": [2]')))
    assert manifest.state_digest() == other.state_digest()


def test_a_stretch_that_goes_on_from_a_message_that_is_none_is_refused(tmp_path):
    """All messages that a site got are there: where one is missing, or is none, no machine has gone on."""
    alone = job(sync=stoker.LocalSGD(every=stoker.updates(4)), until=stoker.epochs(1), valid=None, average=None)
    recorded, messages = record(alone, tmp_path / "recorded"), tmp_path / "messages"
    messages.mkdir()
    (messages / message_name(3, 0, 1)).write_bytes(b"no message")
    with pytest.raises(NotTheRun, match="no message of site 1 after update 4"):
        replay(alone, copy_at(recorded, 0, 5, tmp_path / "run"), 5, site=(0, 2), messages=messages)
