"""Which run a call means: continued, started over, named, forked, refused."""

from __future__ import annotations

import dataclasses
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadJob, BadRun
from stoker.jobs.job_file import load_job
from stoker.records import Event
from stoker.store import CheckpointStore, RunLock
from stoker.training.checkpoints import model_weights
from tests.flow.builders import (
    PLAN,
    Heard,
    assert_equal_tensors,
    assert_equal_weights,
    blobs,
    blobs_job,
    net,
    stopped_run,
)
from tests.flow.command import job_file

LONGER = stoker.epochs(5)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two finished runs, trained once for all tests: of the usual job, and as it is with its last weights."""
    folder, found = tmp_path_factory.mktemp("kept"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("STOKER_RUNS", raising=False)
        patch.setenv("STOKER_CACHE", str(folder / "cache"))
        for name, changes in (("best", {}), ("last", {"evaluation": stoker.Evaluation(select="last")})):
            found[name] = folder / stoker.train(blobs_job(**changes), plan=PLAN).path
    return found


def copied(run: Path) -> stoker.Run:
    """That run, as one that was trained here."""
    shutil.copytree(run, Path("runs") / run.name)
    return stoker.load(run.name)


@pytest.fixture
def finished(kept: dict[str, Path]) -> stoker.Run:
    """A finished run of `blobs_job()` under PLAN."""
    return copied(kept["best"])


def run_names() -> list[str]:
    """The runs there are."""
    return sorted(path.name for path in Path("runs").iterdir()) if Path("runs").exists() else []


def test_an_unfinished_run_is_continued_and_named(kept: dict[str, Path]) -> None:
    """The same call goes on where it was stopped, says so, and ends at the weights of a run that was never stopped."""
    stopped = stopped_run(blobs_job())
    assert stopped.record.samples == 96
    assert stopped.metrics == {}
    heard = Heard()
    run = stoker.train(blobs_job(), plan=PLAN, sink=heard)
    assert (run.name, run.status) == (stopped.name, "finished")
    message = heard.of("warned")[0]["message"]
    assert run.name in message
    assert "96 of 240 samples" in message
    assert heard.of("resumed")[0]["samples"] == heard.of("started")[0]["samples"] == 96
    assert "planned" not in heard.kinds
    assert_equal_weights(run, stoker.load(kept["best"]))


def test_a_finished_run_starts_anew_under_the_next_number() -> None:
    """Each its own directory; all of them learn the same."""
    runs = [stoker.train(blobs_job(), plan=PLAN) for _ in range(3)]
    first = runs[0].name
    assert [run.name for run in runs] == [first, f"{first}-2", f"{first}-3"]
    assert_equal_weights(runs[0], runs[2])


def test_new_starts_another_run_though_one_could_be_continued() -> None:
    """The unfinished one stays as it is, and is what the same call continues."""
    stopped = stopped_run(blobs_job())
    run = stoker.train(blobs_job(), plan=PLAN, new=True)
    assert run.name == f"{stopped.name}-2"
    assert stoker.load(stopped.name).record == stopped.record
    assert stoker.train(blobs_job(), plan=PLAN).name == stopped.name


def test_resume_continues_the_run_it_names_and_no_other() -> None:
    """Of two unfinished ones the older, by name or by path."""
    older = stopped_run(blobs_job())
    newer = stopped_run(blobs_job(), new=True)
    run = stoker.train(blobs_job(), resume=older.name)
    assert (run.name, run.status) == (older.name, "finished")
    assert stoker.load(newer.name).status == "unfinished"
    assert stoker.train(blobs_job(), resume=str(newer.path)).name == newer.name


@pytest.mark.parametrize(
    "choices", [{"fork": "b"}, {"new": True}, {"run_dir": "b"}], ids=["fork", "new", "another directory"]
)
def test_a_run_that_is_named_is_not_to_be_another_one_too(choices: dict[str, Any]) -> None:
    """Refused: one of the two would not be what happens."""
    stopped = stopped_run(blobs_job(), run_dir="a")
    with pytest.raises(BadJob, match="exclude each other"):
        stoker.train(blobs_job(), resume=str(stopped.path), **choices)
    assert stoker.load(stopped.path).record == stopped.record


def test_a_finished_run_is_not_resumed(finished: stoker.Run) -> None:
    """It has nothing left to do; a longer job forks it."""
    with pytest.raises(BadRun, match="is finished: there is nothing to resume") as caught:
        stoker.train(blobs_job(), resume=finished.name)
    assert f"--fork {finished.name}" in (caught.value.remedy or "")


def test_a_run_of_another_job_is_not_resumed() -> None:
    """What differs is listed."""
    stopped = stopped_run(blobs_job())
    with pytest.raises(BadRun, match=r"batch: 16 -> 8"):
        stoker.train(blobs_job(batch=8), resume=stopped.name)


def test_an_unknown_run_is_not_resumed() -> None:
    """The nearest name is suggested, and nothing is made."""
    stopped = stopped_run(blobs_job(name="blobs"))
    with pytest.raises(BadRun, match="There is no run 'blbs'") as caught:
        stoker.train(blobs_job(name="blobs"), resume="blbs")
    assert f"Did you mean '{stopped.name}'" in str(caught.value)
    assert run_names() == [stopped.name]


def test_a_directory_of_ones_own_is_used_and_continued() -> None:
    """`run_dir` names it; a finished run in it is followed by its number."""
    stopped = stopped_run(blobs_job(), run_dir="mine/first")
    assert stopped.path == Path("mine/first")
    assert stoker.train(blobs_job(), run_dir="mine/first").path == Path("mine/first")
    assert stoker.train(blobs_job(), run_dir="mine/first", plan=PLAN).path == Path("mine/first-2")
    assert run_names() == []


def test_a_changed_job_does_not_go_into_the_directory_of_another() -> None:
    """Not even a finished one: the error lists the differences, and the run stays as it was."""
    run = stoker.train(blobs_job(), plan=PLAN, run_dir="mine")
    before = {path: path.read_bytes() for path in run.path.rglob("*.json")}
    changed = blobs_job(optimizer=stoker.SGD(lr=0.2, momentum=0.9), seed=3)
    with pytest.raises(BadRun) as caught:
        stoker.train(changed, plan=PLAN, run_dir="mine")
    assert "optimizer.lr: 0.1 -> 0.2" in caught.value.message
    assert "seed: 0 -> 3" in caught.value.message
    assert "--new" in (caught.value.remedy or "")
    assert {path: path.read_bytes() for path in run.path.rglob("*.json")} == before
    assert stoker.train(changed, plan=PLAN, run_dir="mine", new=True).path == Path("mine-2")


def test_a_directory_that_holds_something_else_is_left_alone() -> None:
    """It is named, with what is in it."""
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("years of work")
    with pytest.raises(BadRun, match=r"mine is not a run: it holds thesis\.tex"):
        stoker.train(blobs_job(), plan=PLAN, run_dir="mine")
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.tex"]


def test_a_run_in_use_is_refused_and_goes_on_undisturbed(kept: dict[str, Path]) -> None:
    """The process that trains it holds it; the second call names that process, and says and changes nothing."""
    refusals: list[str] = []
    second: list[Event] = []

    def sink(event: Event) -> None:
        if event.kind == "evaluated" and not refusals:
            with pytest.raises(BadRun) as caught:
                stoker.train(blobs_job(), plan=PLAN, sink=second.append)
            refusals.append(str(caught.value))

    run = stoker.train(blobs_job(), plan=PLAN, sink=sink)
    assert "is in use by this process" in refusals[0]
    assert second == []  # not: it is continued
    assert "--new" in refusals[0]
    assert run.status == "finished"
    assert run_names() == [run.name]
    assert_equal_weights(run, stoker.load(kept["best"]))


def test_nothing_is_made_where_a_run_is_held_while_it_is_planned() -> None:
    """A directory that another process holds without a run in it yet is in use."""
    with RunLock(Path("mine")), pytest.raises(BadRun, match="is in use by"):
        stoker.train(blobs_job(), plan=PLAN, run_dir="mine")
    assert not Path("mine/run.json").exists()


def test_a_fork_under_a_longer_job_continues_where_its_parent_is() -> None:
    """Position, weights, optimiser and average are taken over: the fork is the longer run itself, bit for bit."""
    jobs = [
        blobs_job(until=until, schedule=lambda _: 1.0, average=0.95, evaluation=stoker.Evaluation(select="last"))
        for until in (stoker.epochs(3), LONGER)
    ]
    parent = stoker.train(jobs[0], plan=PLAN)
    heard = Heard()
    fork = stoker.train(jobs[1], plan=PLAN, fork=parent.name, sink=heard)
    assert heard.of("resumed")[0]["samples"] == 240
    assert (fork.record.samples, fork.record.forked_from) == (400, parent.name)
    assert [fields["samples"] for fields in heard.of("evaluated", split="valid")] == [320, 400]
    assert_equal_weights(fork, stoker.train(jobs[1], plan=PLAN))
    assert fork.record.wall_s < 60
    assert stoker.load(parent.name).record == parent.record


def contradicted() -> tuple[torch.Tensor, torch.Tensor]:
    """Points with the wrong labels: the more is learned, the worse."""
    inputs, targets = blobs(30, seed=1)
    return inputs, 1 - targets


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": stoker.schedules.plateau("loss", factor=0.1, patience=stoker.updates(3)), "valid": contradicted()},
        {"average": stoker.SWA(start=0.0, every=stoker.updates(1))},
    ],
    ids=["plateau", "average"],
)
def test_what_a_run_has_decided_and_averaged_so_far_is_taken_over_by_its_fork(changes: dict) -> None:
    """A lowered learning rate stays lowered, and an average goes on counting: the fork is the longer run itself."""
    settings = {"evaluation": stoker.Evaluation(every=stoker.updates(3), select="last"), **changes}
    jobs = [blobs_job(until=until, **settings) for until in (stoker.epochs(3), LONGER)]
    parent = stoker.train(jobs[0], plan=PLAN)
    fork = stoker.train(jobs[1], plan=PLAN, fork=parent.name)
    assert_equal_weights(fork, stoker.train(jobs[1], plan=PLAN))


def test_a_fork_of_a_run_that_ended_before_its_time_trains_on() -> None:
    """It waits again for an improvement; under its parent's verdict it would train nothing."""
    stop = [stoker.EarlyStopping("loss", patience=stoker.updates(3))]
    job = blobs_job(
        until=LONGER, evaluation=stoker.Evaluation(every=stoker.updates(3)), stop=stop, valid=contradicted()
    )
    parent = stoker.train(job, plan=PLAN)
    fork = stoker.train(job, plan=PLAN, fork=parent.name)
    assert parent.record.updates == 6
    assert fork.record.updates > parent.record.updates


def test_a_fork_chooses_its_own_best_by_its_own_measure(finished: stoker.Run) -> None:
    """What its parent found best is not in its directory, and may have been chosen by a metric it no longer has."""
    heard = Heard()
    job = blobs_job(until=LONGER, metrics=[])
    fork = stoker.train(job, plan=PLAN, fork=finished.name, sink=heard)
    losses = [fields["metrics"]["loss"] for fields in heard.of("evaluated", split="valid")]
    assert heard.of("evaluated", split="valid")[0]["best"] is True
    assert fork.metrics["valid/loss"] == pytest.approx(min(losses))


def first_checkpoint(run: stoker.Run) -> dict[str, torch.Tensor]:
    """The weights in the oldest checkpoint that is there."""
    store = CheckpointStore(run.directory.checkpoints)
    path = run.directory.checkpoints / store.names()[0]
    found = store.newest()
    assert found is not None
    return model_weights(path, found[1])


@pytest.mark.parametrize(
    "changes",
    [
        {"data": blobs(100, seed=5)},
        {"batch": 8},
        {"seed": 1},
        {"optimizer": stoker.AdamW(lr=1e-9, weight_decay=0.0)},
        {"sampling": stoker.sampling.balanced(num_samples=40)},
        {"seed": 1, "average": None, "sync": stoker.DiLoCo(every=stoker.updates(1))},
    ],
    ids=["data", "batch", "seed", "optimizer", "sampling", "sync"],
)
def test_a_fork_onto_other_data_or_another_optimiser_takes_the_weights_and_counts_from_zero(
    changes: dict, kept: dict[str, Path]
) -> None:
    """What the parent learned is there at the start; its position would mean something else here."""
    parent = copied(kept["last"])
    settings = {"optimizer": stoker.SGD(lr=1e-9), "until": stoker.updates(1), "average": 0.9} | changes
    job = blobs_job(**settings)
    heard = Heard()
    plan = dataclasses.replace(PLAN, micro_batch=job.batch)
    fork = stoker.train(job, plan=plan, fork=parent.name, sink=heard)
    assert heard.of("resumed")[0]["samples"] == heard.of("started")[0]["samples"] == 0
    assert fork.record.updates == 1
    for name, tensor in fork.weights().items():
        assert torch.allclose(tensor, parent.weights()[name], atol=1e-6), name


def test_a_fork_with_other_settings_of_its_optimiser_trains_with_them(kept: dict[str, Path]) -> None:
    """Not with those of its parent, whose state it goes on from."""
    parent = copied(kept["last"])
    job = blobs_job(
        until=LONGER, evaluation=stoker.Evaluation(select="last"), optimizer=stoker.SGD(lr=1e-9, momentum=0.0)
    )
    fork = stoker.train(job, plan=PLAN, fork=parent.name)
    for name, tensor in fork.weights().items():
        assert torch.allclose(tensor, parent.weights()[name], atol=1e-6), name


def test_an_unfinished_fork_is_continued_by_the_same_call_only(finished: stoker.Run) -> None:
    """The same job without `fork` is another run."""
    stopped = stopped_run(blobs_job(until=LONGER), at_samples=320, fork=finished.name)
    plain = stoker.train(blobs_job(until=LONGER), plan=PLAN)
    assert plain.name != stopped.name
    heard = Heard()
    run = stoker.train(blobs_job(until=LONGER), plan=PLAN, fork=finished.name, sink=heard)
    assert (run.name, run.status) == (stopped.name, "finished")
    assert heard.of("resumed")[0]["samples"] == 336


def test_a_fork_that_was_killed_early_goes_on_from_where_it_began() -> None:
    """It saves before its first update: its parent, which goes on training, is not read again."""
    parent = stopped_run(blobs_job())
    jobs = blobs_job(), blobs_job(until=LONGER)
    stop = stoker.on("updated", lambda _update: signal.raise_signal(signal.SIGTERM))
    stopped = stoker.train(jobs[1], plan=PLAN, fork=parent.name, hooks=[stop], sink=Heard())
    first, *later = sorted(stopped.directory.checkpoints.glob("*[0-9]"))
    for checkpoint in later:
        shutil.rmtree(checkpoint)
    assert stoker.train(jobs[0], plan=PLAN, sink=Heard()).status == "finished"
    heard = Heard()
    fork = stoker.train(jobs[1], plan=PLAN, fork=parent.name, sink=heard)
    assert (fork.name, heard.of("resumed")[0]["samples"], int(first.name)) == (stopped.name, 96, 96)
    assert_equal_weights(fork, stoker.train(jobs[1], plan=PLAN))


def test_a_fork_without_checkpoints_of_its_own_starts_from_its_parent_again(finished: stoker.Run) -> None:
    """There is nothing of its own to go on from."""
    stopped = stopped_run(blobs_job(until=LONGER), at_samples=320, fork=finished.name)
    shutil.rmtree(stopped.directory.checkpoints)
    heard = Heard()
    run = stoker.train(blobs_job(until=LONGER), plan=PLAN, fork=finished.name, sink=heard)
    assert run.name == stopped.name
    assert heard.of("resumed")[0]["samples"] == 240


def test_a_fork_with_nothing_left_to_do_is_refused(finished: stoker.Run) -> None:
    """A job that is no longer than what its parent has made; no run is left behind."""
    with pytest.raises(BadRun, match="made 15 updates; this job makes 10") as caught:
        stoker.train(blobs_job(until=stoker.epochs(2)), plan=PLAN, fork=finished.name)
    assert "longer job" in (caught.value.remedy or "")
    assert run_names() == [finished.name]


def test_a_fork_of_another_model_is_refused_with_what_differs(finished: stoker.Run) -> None:
    """Names and shapes of the weights; no run is left behind."""
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2))
    wider = blobs_job(model=model, until=LONGER)
    with pytest.raises(BadRun, match=r"0\.weight is \[9, 6\] in the model, \[8, 6\] in the file"):
        stoker.train(wider, plan=PLAN, fork=finished.name)
    assert run_names() == [finished.name]


def test_a_fork_of_a_run_without_checkpoints_is_refused(finished: stoker.Run) -> None:
    """There is nothing to start from; no run is left behind."""
    shutil.rmtree(finished.directory.checkpoints)
    with pytest.raises(BadRun, match="has no checkpoint to start from"):
        stoker.train(blobs_job(until=LONGER), plan=PLAN, fork=finished.name)
    assert run_names() == [finished.name]


@pytest.mark.slow
def test_a_plan_a_name_and_a_place_are_no_part_of_the_identity() -> None:
    """The same job under another name or plan continues the run; another seed or another initial weight does not."""
    stopped = stopped_run(blobs_job(name="one"))
    assert stoker.train(blobs_job(name="one")).name == stopped.name
    digests = {
        stoker.train(job, plan=PLAN).directory.read_spec().digest()
        for job in (blobs_job(), blobs_job(seed=1), blobs_job(model=net()), blobs_job(model=nn.Linear(6, 2)))
    }
    assert len(digests) == 4


def test_a_budget_of_seconds_is_turned_into_samples_once() -> None:
    """What is left after a stop is what was planned, however fast the machine is now."""
    job = blobs_job(until=stoker.seconds(0.05), evaluation=stoker.Evaluation(every=stoker.updates(2)))
    stopped = stopped_run(job, at_samples=32)
    decision = stopped.directory.read_decision()
    assert decision is not None
    total = decision.chosen.forecast.total_samples
    assert stopped.record.total_samples == total > 48
    run = stoker.train(job)
    assert (run.name, run.record.samples, run.record.total_samples) == (stopped.name, total, total)


def test_the_time_between_checkpoints_may_change_when_a_run_goes_on(kept: dict[str, Path]) -> None:
    """It is no part of what makes two runs bit-equal; it is reported in seconds."""
    stopped = stopped_run(blobs_job())
    heard = Heard()
    run = stoker.train(blobs_job(), checkpoint_every=stoker.seconds(1e-6), sink=heard)
    assert run.name == stopped.name
    assert [fields["samples"] for fields in heard.of("checkpointed")] == list(range(112, 241, 16))
    schedule = run.directory.read_schedule()  # other processes of the run read it there
    assert schedule is not None
    assert (schedule.last.checkpoint_every_s, schedule.last.device_mtbf_h) == (1e-6, None)
    assert_equal_weights(run, stoker.load(kept["best"]))
    with pytest.raises(BadJob, match="checkpoints are counted in seconds, not epochs"):
        stoker.train(blobs_job(), checkpoint_every=stoker.epochs(1))


def test_what_a_finished_run_keeps_is_not_touched_by_the_next_one() -> None:
    """A second run of the same job leaves the first one's files as they are."""
    first = stoker.train(blobs_job(), plan=PLAN)
    before = {path: path.read_bytes() for path in first.path.rglob("*") if path.is_file()}
    stoker.train(blobs_job(), plan=PLAN)
    assert {path: path.read_bytes() for path in first.path.rglob("*") if path.is_file()} == before
    assert_equal_tensors(stoker.load(first.name).weights(), first.weights())


def from_file(path: Path, **settings: str) -> dict:
    """What `stoker.train` takes for a job file."""
    job, entry = load_job(path, settings)
    return {"job": job, "entry": entry}


OWN_LOSS = """
def squared(output, target):
    return (output[:, 1] - target) ** 2

def unused():
    return 1

"""


def test_a_comment_in_the_job_file_does_not_cost_the_run() -> None:
    """Killed, then a comment, a docstring and an unused function changed: the same command goes on where it was."""
    path = job_file('settings["loss"] = squared', head=OWN_LOSS)
    stopped = stopped_run(**from_file(path))
    path.write_text(
        path.read_text()
        .replace("return 1", "return 2")
        .replace("A classifier of", "A net for")
        .replace("    return (output", "    # the error\n    return (output")
    )
    run = stoker.train(**from_file(path), sink=lambda _: None)
    assert (run.name, run.status, run_names()) == (stopped.name, "finished", [stopped.name])


def test_an_unfinished_run_of_a_changed_job_file_is_named_with_the_change() -> None:
    """Which run, how far, what changed and how to take it over; `--resume` refuses by naming the same, no digests."""
    path = job_file('settings["loss"] = squared', head=OWN_LOSS)
    stopped = stopped_run(**from_file(path))
    path.write_text(path.read_text().replace("** 2", "** 2 / 8"))
    heard = Heard()
    stoker.train(**from_file(path, lr="0.2"), plan=PLAN, sink=heard)
    message = heard.of("warned")[0]["message"]
    for words in (
        f"{stopped.name} is unfinished, at 96 of 240 samples",
        "function squared in blobs.py changed",
        "parameter lr: 0.1 -> 0.2",
        f"--fork {stopped.name}",
        f"--resume {stopped.name}",
    ):
        assert words in message
    with pytest.raises(BadRun) as caught:
        stoker.train(**from_file(path, lr="0.2"), resume=stopped.name, sink=lambda _: None)
    assert "function squared in blobs.py changed" in caught.value.message
    assert re.search("[0-9a-f]{16}", caught.value.message) is None
    fork = Heard()
    stoker.train(**from_file(path, lr="0.2"), plan=PLAN, fork=stopped.name, sink=fork)
    assert fork.of("resumed")[0]["samples"] == 96
    assert not [fields for fields in fork.of("warned") if "is unfinished" in fields["message"]]


def test_a_checkpoint_of_another_run_is_not_taken() -> None:
    """Copied into the directory by hand, whole, further on: it is passed over and said."""
    stopped, other = stopped_run(blobs_job()), stopped_run(blobs_job(seed=1), at_samples=160)
    checkpoint = max(path for path in other.directory.checkpoints.iterdir() if path.is_dir())
    shutil.copytree(checkpoint, stopped.directory.checkpoints / checkpoint.name)
    heard = Heard()
    stoker.train(blobs_job(), sink=heard)
    assert heard.of("resumed")[0]["samples"] == 96
    assert any("is of another job" in fields["message"] for fields in heard.of("warned"))
