"""Plateaus, ends before time, averages and metrics in whole runs: stopped, killed, continued, and reported."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker import optimizers, schedules
from stoker.records import Event, Layout, dumps
from tests.flow.builders import PLAN, Heard, assert_equal_weights, blobs, blobs_job, stopped_run
from tests.flow.command import Running, job_file, plan_file, stoker_here, stoker_process
from tests.reporting.test_html import documents


def trained(job: stoker.Job, **options: Any) -> tuple[stoker.Run, Heard]:
    """The job's run, and its events."""
    heard = Heard()
    return stoker.train(job, plan=PLAN, sink=heard, **options), heard


def normed() -> nn.Module:
    """With a batch norm, and dropout."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


HABITS: dict[str, dict[str, Any]] = {
    "plateau": {"schedule": schedules.plateau(factor=0.5, patience=stoker.epochs(1), min_delta=0.5)},
    "swa": {"average": stoker.SWA(start=0.4), "model": normed},
    "schedule-free": {"optimizer": optimizers.ScheduleFreeAdamW(lr=0.05), "model": normed},
    "early": {
        "stop": [stoker.EarlyStopping(patience=stoker.epochs(3), min_delta=0.5)],
        "evaluation": stoker.Evaluation(select="last"),
    },
}


@pytest.mark.parametrize("name", HABITS)
def test_a_run_that_was_stopped_goes_on_as_one_that_never_was(name: str) -> None:
    """To the same bits, metrics and rates: what evaluations decided and averages hold is in the checkpoint."""
    job = blobs_job(until=stoker.epochs(6), **HABITS[name])
    stopped_run(job, at_samples=240, run_dir="stopped")
    again, told = trained(job, run_dir="stopped")
    whole, heard = trained(job, run_dir="whole")
    assert told.of("resumed")[0]["samples"] >= 240
    assert_equal_weights(again, whole)
    assert again.metrics == whole.metrics
    assert again.record.ended_early == whole.record.ended_early
    assert told.of("progress")[-1]["lr"] == heard.of("progress")[-1]["lr"]


def test_a_plateau_lowers_the_rate_and_says_so() -> None:
    """No epoch is better by so much: after each the rate is half of what it was."""
    job = blobs_job(**HABITS["plateau"])
    _, heard = trained(job)
    decided = [event.get("decided") for event in heard.of("evaluated", split="valid")]
    assert decided[0] is None
    assert decided[1] == "a plateau at 160 samples: the learning rate is 0.5 of its schedule's from here on"
    assert heard.of("progress")[-1]["lr"] == pytest.approx(0.05)


def test_a_run_that_ends_early_is_finished_and_says_why() -> None:
    """In its record, its events, its summary and its report; the same job then starts over."""
    job = blobs_job(until=stoker.epochs(9), stop=[stoker.EarlyStopping(patience=stoker.epochs(2), min_delta=0.9)])
    run, heard = trained(job)
    why = "loss on valid has not got better than"
    assert (run.status, run.record.samples) == ("finished", 240)
    assert run.record.ended_early is not None
    assert run.record.ended_early.startswith(why)
    assert heard.of("finished")[0]["ended_early"] == run.record.ended_early
    assert why in run.report_path.read_text()
    assert "test/accuracy" in run.metrics
    again, _ = trained(job)
    assert again.name != run.name


def test_a_target_ends_a_run() -> None:
    """As soon as an evaluation reaches it."""
    job = blobs_job(
        until=stoker.epochs(30),
        stop=[stoker.Target("accuracy", 0.6)],
        evaluation=stoker.Evaluation(every=stoker.updates(1)),
    )
    run, heard = trained(job)
    assert heard.of("evaluated", split="valid")[-1]["metrics"]["accuracy"] >= 0.6
    assert all(event["metrics"]["accuracy"] < 0.6 for event in heard.of("evaluated", split="valid")[:-1])
    assert run.record.samples < 30 * 80


def test_the_mean_of_swa_is_that_of_the_weights_at_its_points() -> None:
    """Of epochs 3 and 4 of 4 where it starts at half: by hand, from runs that end there."""
    job = {"until": stoker.epochs(4), "evaluation": stoker.Evaluation(select="last"), "valid": None}
    averaged, _ = trained(blobs_job(average=stoker.SWA(start=0.6), **job))
    heard: list[dict[str, torch.Tensor]] = []
    for updates in (15, 20):
        # The rate is constant: a shorter run is the beginning of a longer one. 100 samples are 7 updates of 16.
        part, _ = trained(blobs_job(**(job | {"until": stoker.epochs(3 if updates == 15 else 4)})))
        heard.append(part.weights())
    for name, tensor in averaged.weights().items():
        torch.testing.assert_close(tensor, (heard[0][name] + heard[1][name]) / 2)


def test_running_statistics_of_an_average_are_those_of_its_own_activations() -> None:
    """Of the mean's batch norm: means over whole batches in training order, as a plain loop finds them."""
    from stoker.loading.order import EpochOrder

    inputs, target = blobs(96)
    job = blobs_job(
        data=(inputs, target),
        valid=None,
        test=None,
        model=normed,
        average=stoker.SWA(start=0.0, statistics=3),
        evaluation=stoker.Evaluation(select="last"),
    )
    run, _ = trained(job)
    weights = run.weights()
    hidden = inputs @ weights["0.weight"].T + weights["0.bias"]
    order = EpochOrder(96, job.seed)
    groups = [hidden[torch.from_numpy(order.indices(0, start, start + 16).copy())] for start in (0, 16, 32)]
    torch.testing.assert_close(weights["1.running_mean"], torch.stack([g.mean(0) for g in groups]).mean(0))
    torch.testing.assert_close(weights["1.running_var"], torch.stack([g.var(0) for g in groups]).mean(0))


def test_a_report_shows_samples_and_what_is_confused() -> None:
    """Of both held-out sets, also when it is made again; the gradient's norm comes with it."""
    run, heard = trained(blobs_job())
    pages = [run.report_path.read_text(), stoker.report(run.path).read_text()]
    for page in pages:
        assert "Largest losses, of 30 in test" in page
        assert [one["split"] for one in documents(page)["confusion"]] == ["valid", "test"]
        assert any(documents(page)["series"]["samples"]["progress"]["grad_norm"])
    assert heard.of("progress")[0]["grad_norm"] > 0
    assert len(run.plot().data) > 2
    assert "accuracy" in run._repr_html_()


def test_hooks_hear_every_event_and_a_broken_one_costs_nothing() -> None:
    """In addition to the sink, and only what happens; the warning is in the run's log."""
    heard = Heard()

    def broken(event: Event) -> None:
        if event.kind == "progress":
            raise ValueError("no")

    run, told = trained(blobs_job(), hooks=[heard, broken])
    assert run.status == "finished"
    assert heard.kinds == [kind for kind in told.kinds if kind != "warned"]
    failure = "the hook broken raised ValueError (no) at 'progress'"
    messages = [f"{failure}, and is called no more", f"{failure}, and saw nothing of the run after that"]
    assert [event["message"] for event in told.of("warned")] == messages
    assert [event.fields["message"] for event in run.directory.read_events() if event.kind == "warned"] == messages


def test_the_norm_that_is_told_is_that_before_clipping() -> None:
    """Of the first update, as by hand; a run that clips reports it too."""
    job = blobs_job(until=stoker.updates(1), valid=None, test=None)
    _, plain = trained(job)
    _, clipped = trained(blobs_job(until=stoker.updates(1), valid=None, test=None, clip_norm=1e-3), run_dir="clipped")
    assert plain.of("progress")[0]["grad_norm"] == pytest.approx(clipped.of("progress")[0]["grad_norm"], rel=1e-6)
    assert plain.of("progress")[0]["grad_norm"] > 1e-2


@pytest.mark.slow  # each habit by itself is resumed above, and what a kill leaves is tested in test_resume
def test_killed_again_and_again_a_run_with_all_of_it_ends_at_the_same_bits() -> None:
    """SIGKILL at several moments: a plateau, SWA with batch norms, an end before its time, two sets, weights kept."""
    changes = """settings["model"] = lambda: nn.Sequential(
    nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))
settings["average"] = stoker.SWA(start=0.2, every=stoker.updates(3), statistics=4)
settings["schedule"] = stoker.schedules.plateau(factor=0.7, patience=stoker.epochs(1), min_delta=0.01)
settings["stop"] = [stoker.EarlyStopping("accuracy", patience=stoker.epochs(8), min_delta=0.01)]
settings["valid"] = {"seen": stoker.holdout(0.2), "unseen": (inputs[:40] + 1.0, target[:40])}
settings["optimizer"] = stoker.SGD(lr=lr, momentum=0.9, groups={lambda name, p: p.dim() >= 2: {"weight_decay": 1e-3}})
settings["evaluation"] = stoker.Evaluation(select="last", keep_every=stoker.updates(30)) """
    path, plan = job_file(changes), plan_file()
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"checkpoint_every_s": 0.02}))
    arguments: list[str | Path] = ["train", path, "--set", "epochs=60", "--plan", plan]
    for kind, count in (("checkpointed", 3), ("evaluated", 4)):
        with Running(*arguments, "--run-dir", "killed") as running:
            running.until(kind, count)
            running.kill()
    assert stoker_here(*arguments, "--run-dir", "killed", "--json").code == 0
    assert stoker_here(*arguments, "--run-dir", "whole", "--json").code == 0
    killed, whole = stoker.load("killed"), stoker.load("whole")
    assert_equal_weights(killed, whole)
    assert killed.metrics == whole.metrics
    assert killed.record.ended_early == whole.record.ended_early is not None
    assert files_kept("killed") == files_kept("whole")
    assert len(files_kept("whole")) == whole.record.updates // 30


@pytest.mark.slow  # its metrics and its page are tested by themselves, in training/test_metrics and above
def test_the_example_of_habits_shows_all_of_them() -> None:
    """Scores by class, a curve's area, an end or the last epoch; a report with everything."""
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    from stoker.jobs import load_job

    example = Path(__file__).parents[2] / "examples" / "habits.py"
    job, entry = load_job(example, {"epochs": "3", "width": "8"})
    heard = Heard()
    run = stoker.train(job, plan=dataclasses.replace(PLAN, micro_batch=64), sink=heard, entry=entry)
    assert {"test/accuracy", "test/recall[0]", "test/recall[2]", "test/auroc"} <= set(run.metrics)
    assert heard.of("evaluated", split="valid")[0]["metrics"]["auroc"] > 0.5
    page = run.report_path.read_text()
    assert "Recall by class" in page
    assert "test" in [one["split"] for one in documents(page)["confusion"]]


@pytest.mark.slow  # a minute on a busy machine
def test_two_processes_decide_what_one_does() -> None:
    """The same end before time after the same evaluation, the same rates at plateaus, the same mean to rounding."""
    changes = """settings["average"] = stoker.SWA(start=0.1)
settings["schedule"] = stoker.schedules.plateau(factor=0.5, patience=stoker.epochs(2), min_delta=0.2)
settings["stop"] = [stoker.EarlyStopping(patience=stoker.epochs(5), min_delta=0.2)]
settings["evaluation"] = stoker.Evaluation(select="last") """
    path = job_file(changes)
    found = {}
    for name, layout in (("one", Layout()), ("two", Layout(replicas=2))):
        plan = Path(f"{name}.json")
        plan.write_text(dumps(dataclasses.replace(PLAN, layout=layout, loader="memory")))
        on = ("--on", "2xhere") if name == "two" else ()
        outcome = stoker_process("train", path, "--set", "epochs=40", *on, "--plan", plan, "--run-dir", name, "--json")
        assert outcome.code == 0, outcome.err
        found[name] = outcome
    one, two = stoker.load("one"), stoker.load("two")
    assert one.record.ended_early is not None
    assert (two.record.samples, one.record.samples < 40 * 80) == (one.record.samples, True)
    assert [event.get("decided") for event in found["two"].of("evaluated")] == [
        event.get("decided") for event in found["one"].of("evaluated")
    ]
    assert any(event.get("decided") for event in found["one"].of("evaluated"))
    for name, value in one.metrics.items():
        assert two.metrics[name] == pytest.approx(value, abs=1e-5)
    assert "test" in [one["split"] for one in documents(two.report_path.read_text())["confusion"]]


def two_sets(**changes: Any) -> stoker.Job:
    """A job that is evaluated on points like the training data, held out, and on others that are shifted."""
    inputs, target = blobs(40, seed=2)
    others = (inputs + 1.0, target)
    return blobs_job(**({"valid": {"seen": stoker.holdout(0.2), "unseen": others}} | changes))


def test_each_validation_set_is_evaluated_every_time_and_the_first_one_chooses() -> None:
    """Under its own name in events and results; the first set's values are those of a run with it alone."""
    run, heard = trained(two_sets(), run_dir="both")
    alone, told = trained(blobs_job(), run_dir="alone")
    assert [event["split"] for event in heard.of("evaluated")] == ["valid/seen", "valid/unseen"] * 3 + ["test"]
    first, alike = heard.of("evaluated", split="valid/seen"), told.of("evaluated", split="valid")
    assert [(one["metrics"], one["best"]) for one in first] == [(one["metrics"], one["best"]) for one in alike]
    assert_equal_weights(run, alone)
    assert set(run.metrics) == {
        f"{split}/{name}" for split in ("valid/seen", "valid/unseen", "test") for name in ("loss", "accuracy")
    }
    assert run.metrics["valid/seen/loss"] == alone.metrics["valid/loss"]
    assert run.metrics["valid/seen/loss"] != run.metrics["valid/unseen/loss"]
    assert heard.of("started")[0]["data"]["valid"] == 60
    shown = documents(run.report_path.read_text())["state"]["evaluations"]
    assert {"valid/seen loss", "valid/unseen loss"} <= set(shown)
    assert run.directory.read_spec().digest() != alone.directory.read_spec().digest()


def test_a_set_that_is_named_chooses_lowers_the_rate_and_ends_the_run() -> None:
    """By the values of that set: `select`, `stop` and a plateau take `set/measure`."""
    named = {
        "evaluation": stoker.Evaluation(select="valid/unseen/loss"),
        "until": stoker.epochs(9),
        "stop": [stoker.EarlyStopping("unseen/loss", patience=stoker.epochs(2), min_delta=0.9)],
        "schedule": schedules.plateau("valid/unseen/loss", factor=0.5, patience=stoker.epochs(1), min_delta=0.9),
    }
    run, heard = trained(two_sets(**named))
    best = [event["samples"] for event in heard.of("evaluated", split="valid/unseen") if event["best"]]
    losses = {event["samples"]: event["metrics"]["loss"] for event in heard.of("evaluated", split="valid/unseen")}
    assert losses[best[-1]] == min(losses.values()) == pytest.approx(run.metrics["valid/unseen/loss"])
    assert not any(event["best"] for event in heard.of("evaluated", split="valid/seen"))
    assert run.record.ended_early is not None
    assert run.record.ended_early.startswith("unseen/loss on valid has not got better")
    assert any("a plateau" in event.get("decided", "") for event in heard.of("evaluated", split="valid/unseen"))


def test_a_run_with_two_sets_that_was_stopped_goes_on_as_one_that_never_was() -> None:
    """To the same bits and metrics."""
    evaluation = stoker.Evaluation(select="unseen/accuracy", keep_every=stoker.epochs(2))
    job = two_sets(until=stoker.epochs(6), evaluation=evaluation)
    stopped_run(job, at_samples=240, run_dir="stopped")
    again, _ = trained(job, run_dir="stopped")
    whole, _ = trained(job, run_dir="whole")
    assert_equal_weights(again, whole)
    assert again.metrics == whole.metrics
    assert files_kept("stopped") == files_kept("whole")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"valid": {"a": (torch.zeros(0, 6), torch.zeros(0).long())}}, "valid/a has no samples"),
        ({"valid": {"a": blobs(8), "b c": blobs(8)}}, "a set is named by letters.*got 'b c'"),
        ({"valid": {1: blobs(8)}}, "a set is named by letters.*got 1"),
        ({"valid": {"a": blobs(8), "b": None}}, "the set .*'b'.* is None"),
        ({"valid": {"a": stoker.holdout(0.1), "b": stoker.holdout(0.2)}}, "2 sets are held out of the training data"),
        ({"valid": {}}, "valid has no samples"),
        ({"valid": {"a": blobs(8)}, "metrics": {"a/f": lambda output, target: output.sum()}}, "results of one name"),
        (
            {"evaluation": stoker.Evaluation(select="unseen/accuracy")},
            'wanted "best" or "last", or a measure .loss, accuracy.',
        ),
        ({"stop": [stoker.Target("unseen/accuracy", 0.9)]}, "'unseen/accuracy' is none of this job's measures"),
    ],
)
def test_sets_and_intervals_that_cannot_be_meant_are_refused(changes: dict[str, Any], problem: str) -> None:
    """Before anything is spent."""
    with pytest.raises(stoker.BadJob, match=problem):
        stoker.plan(blobs_job(**changes))


def test_a_dict_of_columns_stays_one_validation_set() -> None:
    """Arrays, or lists of numbers, are the entries of samples."""
    inputs, target = blobs(20)
    job = blobs_job(
        data={"x": inputs, "y": target},
        valid={"x": inputs, "y": target.tolist()},
        fields=stoker.Fields(target="y"),
        test=None,
    )
    assert list(job.validation) == ["valid"]


def files_kept(run_dir: str) -> dict[str, bytes]:
    """The files of the weights that a run kept for good."""
    return {path.name: path.read_bytes() for path in Path(run_dir, "weights").iterdir()}


def test_weights_are_kept_at_intervals_and_loaded_again() -> None:
    """Those that are evaluated, an average's here, at the end of every second epoch, whatever checkpoints are left."""
    kept = stoker.Evaluation(keep_every=stoker.epochs(2), select="last")
    run, _ = trained(blobs_job(until=stoker.epochs(5), evaluation=kept, average=0.9))
    assert [(kept.epochs, kept.samples, kept.updates) for kept in run.kept()] == [(2.0, 160, 10), (4.0, 320, 20)]
    early, _ = trained(blobs_job(until=stoker.epochs(2), average=0.9, evaluation=stoker.Evaluation(select="last")))
    for at in (stoker.epochs(2), stoker.samples(160), stoker.updates(10)):
        kept = run.weights(at)
        assert all(torch.equal(kept[name], tensor) for name, tensor in early.weights().items())
    assert torch.equal(run.model(at=stoker.epochs(4))[0].weight, run.weights(stoker.epochs(4))["0.weight"])
    assert not torch.equal(run.model()[0].weight, run.model(at=stoker.epochs(4))[0].weight)
    for missed in (stoker.epochs(3), stoker.updates(11), stoker.seconds(2)):
        with pytest.raises(stoker.BadRun, match=r"kept no weights at .*those of epochs 2, 4"):
            run.weights(missed)
    with pytest.raises(stoker.BadRun, match="it kept none"):
        early.model(at=stoker.epochs(2))


def test_weights_are_kept_at_points_that_are_not_evaluated() -> None:
    """A mean's batch norms have their statistics found first, as before an evaluation."""
    habits = {"until": stoker.epochs(4), "average": stoker.SWA(start=0.4), "model": normed}
    kept = stoker.Evaluation(select="last", keep_every=stoker.epochs(3))
    run, _ = trained(blobs_job(evaluation=dataclasses.replace(kept, every=stoker.epochs(9)), **habits))
    other, _ = trained(blobs_job(evaluation=kept, **habits))
    kept, expected = run.weights(stoker.epochs(3)), other.weights(stoker.epochs(3))
    assert len(run.kept()) == 1
    assert all(torch.equal(kept[name], tensor) for name, tensor in expected.items())


def test_weights_that_a_kill_cost_are_written_when_the_run_goes_on() -> None:
    """A kill may come after a checkpoint was written and before the weights of it were."""
    job = blobs_job(until=stoker.epochs(3), evaluation=stoker.Evaluation(keep_every=stoker.updates(1)))
    stopped_run(job, run_dir="stopped")
    newest = max(Path("stopped/weights").iterdir())
    newest.unlink()
    trained(job, run_dir="stopped")
    trained(job, run_dir="whole")
    assert len(files_kept("whole")) == 15
    assert files_kept("stopped") == files_kept("whole")


def test_a_group_by_predicate_is_planned_trained_and_resumed() -> None:
    """A plan traces the optimiser without values; a run that was stopped goes on to the same bits."""
    groups = {lambda _name, parameter: parameter.dim() >= 2: {"weight_decay": 0.3, "lr": 0.02}}
    job = blobs_job(until=stoker.epochs(6), optimizer=stoker.AdamW(lr=0.01, groups=groups))
    stopped_run(job, at_samples=240, run_dir="stopped")
    again, told = trained(job, run_dir="stopped")
    whole, _ = trained(job, run_dir="whole")
    assert told.of("progress")[-1]["lrs"] == [0.01, 0.02]
    assert_equal_weights(again, whole)
    assert stoker.plan(job).candidates
