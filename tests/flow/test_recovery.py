"""Runs that break and go on by themselves: the whole of `stoker.train`, and what the next plan knows of it."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.devices import attached_devices, planned_devices
from stoker.errors import RunFailed
from stoker.loading.datasets import datasets_of
from stoker.planning.model.bottleneck import find_bottleneck
from stoker.planning.plan_history import known_failures, memory_identity
from stoker.planning.planner import Planner
from stoker.planning.resolved_job import resolve_job
from stoker.records import Event, Layout, Plan
from stoker.records.plan import OutOfMemory
from stoker.store import cache_root
from stoker.store.record_caches import out_of_memory_log
from tests.flow.builders import PLAN, Heard, Stopping, assert_equal_weights, blobs, blobs_job
from tests.loading.streams import Sized, Stateful


class Cramped(nn.Linear):
    """A layer for which, while it trains, more than `most` samples at once are too many."""

    most = 10**9

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer, if there is room."""
        if self.training and torch.is_grad_enabled() and len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().forward(inputs)


class FullSGD(torch.optim.SGD):
    """An optimiser that runs out of memory once, amid its step, when `is_full`."""

    is_full = False

    def step(self, closure: Any = None) -> Any:
        """Move the first weight a bit, then fail."""
        if FullSGD.is_full:
            FullSGD.is_full = False
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise torch.OutOfMemoryError("no room for the optimiser's state")
        return super().step(closure)


class Overflowing(nn.Linear):
    """A layer that overflows in reduced precision, when `is_broken`."""

    is_broken = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer; infinite under autocast."""
        output = super().forward(inputs)
        return output / 0 if self.is_broken and self.training and torch.is_autocast_enabled("cpu") else output


def overflowing() -> nn.Module:
    """Two layers, the first of which may overflow."""
    return nn.Sequential(Overflowing(6, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """Every test begins with room enough."""
    yield
    Cramped.most, FullSGD.is_full, Overflowing.is_broken = 10**9, False, False


def double_job(layer: type[nn.Linear] = nn.Linear, **changes: Any) -> stoker.Job:
    """A job in double precision without random draws."""
    inputs, targets = blobs(100)
    model = lambda: nn.Sequential(layer(6, 8), nn.ReLU(), nn.Linear(8, 2)).double()  # noqa: E731 - a setting
    return blobs_job(**({"model": model, "data": (inputs.double(), targets), "test": None} | changes))


class Doing(Heard):
    """A sink that does something once, when `valid` was evaluated at `samples` or, for 0, when training starts."""

    def __init__(self, samples: int, deed: Callable[[], Any]) -> None:
        super().__init__()
        self.samples, self.deed, self.is_done = samples, deed, False

    def __call__(self, event: Event) -> None:
        """Keep the event; do it if it is time."""
        super().__call__(event)
        kind = "evaluated" if self.samples else "started"
        if event.kind == kind and event.fields["samples"] >= self.samples and not self.is_done:
            self.is_done = True
            self.deed()


def assert_close_weights(one: stoker.Run, other: stoker.Run) -> None:
    """Equal to 1e-9."""
    mine, theirs = one.weights(), other.weights()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-12, msg=name)


def set_most(most: int) -> Callable[[], None]:
    """Leave room for so many samples."""
    return lambda: setattr(Cramped, "most", most)


class CrampedAndStopped(Stopping):
    """Room for four samples from the start, and a signal to stop later."""

    def __call__(self, event: Event) -> None:
        """Keep the event."""
        super().__call__(event)
        if event.kind == "started":
            Cramped.most = 4


def test_memory_that_runs_out_changes_the_plan_and_not_what_is_learned() -> None:
    """The run ends as one with room enough; interrupted, it goes on under the changed plan, and names the first."""
    job = double_job(Cramped)
    whole = stoker.train(job, plan=PLAN, sink=Heard(), run_dir="whole")
    first = CrampedAndStopped(80)
    run = stoker.train(job, plan=PLAN, sink=first, run_dir="cramped")
    assert run.status == "unfinished"
    assert [(fields["new"]["micro_batch"], fields["samples"]) for fields in first.of("replanned")] == [(8, 0), (4, 0)]
    schedule = run.directory.read_schedule()
    assert schedule is not None
    assert schedule.last.micro_batch == 4
    second = Heard()
    run = stoker.train(job, plan=PLAN, sink=second, run_dir="cramped")
    assert (run.status, second.of("replanned")) == ("finished", [])
    assert_close_weights(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [0, 80])
def test_memory_that_runs_out_amid_the_optimisers_step_rolls_the_run_back(samples: int) -> None:
    """To its beginning or its last checkpoint, in the same process: half-moved weights are nowhere in the result."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return FullSGD(parameters, lr=0.1, momentum=0.9)

    whole = stoker.train(double_job(optimizer=optimizer), plan=PLAN, sink=Heard(), run_dir="whole")
    heard = Doing(samples, lambda: setattr(FullSGD, "is_full", True))
    run = stoker.train(double_job(optimizer=optimizer), plan=PLAN, sink=heard, run_dir="full")
    assert [fields["what"] for fields in heard.of("recovered")] == ["rolled back"]
    assert [fields["samples"] for fields in heard.of("resumed")] == ([80] if samples else [])
    assert_close_weights(run, whole)


class CrampedInEvaluation(nn.Linear):
    """A layer for which, while it is evaluated, more than `most` samples at once are too many."""

    most = 10**9

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer, if there is room."""
        if not self.training and len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().forward(inputs)


@pytest.mark.parametrize(("samples", "after"), [(80, 4), (240, 16)])
def test_memory_short_in_an_evaluation_makes_it_smaller(
    samples: int, after: int, monkeypatch: pytest.MonkeyPatch, judged: dict[str, Plan]
) -> None:
    """Amid training or after it: nothing is rolled back, and the verdict is of the plan that training ended under."""
    job = double_job(CrampedInEvaluation, test=blobs_in_double(30))
    whole = stoker.train(job, plan=PLAN, sink=Heard(), run_dir="whole")
    assert judged["plan"].micro_batch == 16
    heard = Doing(samples, lambda: monkeypatch.setattr(CrampedInEvaluation, "most", 4))
    run = stoker.train(job, plan=PLAN, sink=heard, run_dir="cramped")
    assert [fields["new"]["micro_batch"] for fields in heard.of("replanned")] == [8, 4]
    assert (heard.of("recovered"), heard.of("resumed")) == ([], [])
    assert judged["plan"].micro_batch == after
    assert run.metrics == pytest.approx(whole.metrics, rel=1e-9)
    assert_close_weights(run, whole)


def blobs_in_double(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in double precision, and their classes."""
    inputs, targets = blobs(num_samples, seed=1)
    return inputs.double(), targets


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> dict[str, Plan]:
    """The plan that the last verdict is of."""
    judged: dict[str, Plan] = {}
    find = find_bottleneck

    def spy(times: Any, plan: Plan, *args: Any, **given: Any) -> Any:
        judged["plan"] = plan
        return find(times, plan, *args, **given)

    monkeypatch.setattr("stoker.planning.run_bottleneck.find_bottleneck", spy)
    return judged


def test_a_run_that_may_roll_back_goes_on_in_fp32() -> None:
    """From the last checkpoint; the same command after an interruption would too."""
    job = blobs_job(model=overflowing, on_non_finite="roll_back")
    heard = Doing(80, lambda: setattr(Overflowing, "is_broken", True))
    run = stoker.train(job, plan=dataclasses.replace(PLAN, precision="bf16"), sink=heard)
    assert run.status == "finished"
    change = heard.of("replanned")[0]
    assert (change["old"]["precision"], change["new"]["precision"], change["samples"]) == ("bf16", "fp32", 80)
    assert [fields["samples"] for fields in heard.of("resumed")] == [80]
    schedule = run.directory.read_schedule()
    assert schedule is not None
    assert schedule.last.precision == "fp32"


def test_a_run_that_breaks_before_its_first_checkpoint_leaves_what_was_found() -> None:
    """The dump is worth keeping; the same command begins over in the same place."""
    job = blobs_job(model=overflowing)
    breaking = Doing(0, lambda: setattr(Overflowing, "is_broken", True))
    with pytest.raises(RunFailed, match=r"the first was in the output of 0 \(Overflowing\)") as caught:
        stoker.train(job, plan=dataclasses.replace(PLAN, precision="bf16"), sink=breaking)
    run = stoker.load("latest")
    assert run.status == "failed"
    (path,) = run.directory.dumps.iterdir()
    assert str(path) in str(caught.value)
    assert json.loads(path.read_text())["first"]


@pytest.mark.slow
def test_a_run_whose_checkpoints_were_deleted_keeps_the_rest() -> None:
    """A command that fails before it saved removes what it began itself, and nothing of an earlier one."""

    def fill() -> None:
        raise RunFailed("Cannot write: the disk is full")

    job = blobs_job(until=stoker.epochs(6), evaluation=stoker.Evaluation(keep_every=stoker.updates(1)))
    with pytest.raises(RunFailed):
        stoker.train(job, plan=PLAN, sink=Doing(0, fill), run_dir="run")
    assert not Path("run").exists()
    run = stoker.train(job, plan=PLAN, sink=Stopping(80), run_dir="run")
    kept = [weights.samples for weights in run.kept()]
    shutil.rmtree(run.directory.checkpoints)
    with pytest.raises(RunFailed):
        stoker.train(job, plan=PLAN, sink=Doing(0, fill), run_dir="run")
    left = stoker.load("run")
    assert left.status == "failed"
    assert [weights.samples for weights in left.kept()] == kept
    assert kept
    heard = Heard()
    stoker.train(job, plan=PLAN, sink=heard, run_dir="run")
    assert any("begins again, for it has no checkpoint" in fields["message"] for fields in heard.of("warned"))


def test_a_bad_sample_is_named_by_its_place_in_the_data_that_was_given() -> None:
    """Not by that in what a holdout leaves of it."""
    inputs, targets = blobs(100)
    bad = int(datasets_of(blobs_job()).train.indices[60])
    assert bad > 60
    spoiling = Doing(80, lambda: inputs[bad].fill_(math.nan))
    with pytest.raises(RunFailed, match=rf"the first was in the input \(samples {bad}\)"):
        stoker.train(blobs_job(data=(inputs, targets)), plan=PLAN, sink=spoiling)


class Items(torch.utils.data.Dataset):
    """The points as a data set."""

    def __init__(self) -> None:
        self.inputs, self.targets = blobs(100)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + 0.01 * torch.rand(6), self.targets[index]


BY_WORKERS = dataclasses.replace(PLAN, loader="workers", num_workers=2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> stoker.Run:
    """A run whose workers were left alone."""
    return stoker.train(
        blobs_job(data=Items()), plan=BY_WORKERS, sink=Heard(), run_dir=tmp_path_factory.mktemp("undisturbed") / "run"
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers are tested where they are forked")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "hung"])
def test_a_worker_that_dies_or_hangs_is_replaced_and_nothing_else_changes(
    undisturbed: stoker.Run, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are those of a run that was left alone, bit for bit."""
    monkeypatch.setenv("STOKER_WATCHDOG", "0.2")

    def strike() -> None:
        for worker in multiprocessing.active_children():
            os.kill(worker.pid or 0, number)

    heard = Doing(80, strike)
    run = stoker.train(blobs_job(data=Items()), plan=BY_WORKERS, sink=heard, run_dir="struck")
    assert [fields["what"] for fields in heard.of("recovered")] == ["loader worker"]
    if number == signal.SIGSTOP:
        assert any("nothing has moved for" in fields["message"] for fields in heard.of("warned"))
        assert (run.directory.dumps / "stacks.txt").exists()
    assert_equal_weights(run, undisturbed)


@pytest.mark.slow
def test_the_next_plan_does_not_propose_what_ran_out_of_memory() -> None:
    """Of the same model and batch, though for a longer run; another model is not concerned."""
    stoker.train(double_job(Cramped), plan=PLAN, sink=Doing(0, set_most(8)))
    again = double_job(Cramped, until=stoker.epochs(5), seed=3)
    device = attached_devices()[-1]
    place = planned_devices(device.torch_name, attached_devices())[0]
    planner = Planner(resolve_job(again))
    failures = planner.failures(place)
    assert [one.plan.micro_batch for one in failures] == [16]
    candidates = planner.ranked(place)
    assert candidates
    assert not any(failures[0].rules_out(one.plan) for one in candidates)
    assert Planner(resolve_job(double_job(batch=12))).failures(place) == ()
    decision = stoker.plan(again)
    assert not failures[0].rules_out(decision.chosen.plan)
    assert any("micro-batch 16 is not proposed" in line for line in decision.explanation)


def test_what_ran_out_in_one_of_several_processes_says_nothing_of_one_process() -> None:
    """Each had a part of this machine's memory; alone it has all of it."""
    prepared = resolve_job(blobs_job())
    [place] = planned_devices("cpu", attached_devices())
    failed = OutOfMemory(
        device_model=place.device.model,
        torch_version=torch.__version__,
        job=memory_identity(prepared),
        plan=dataclasses.replace(PLAN, layout=Layout(replicas=2)),
        run="run",
        at="2026-11-22T00:00:00+00:00",
    )
    log = out_of_memory_log(cache_root())
    log.append(failed)
    assert known_failures(prepared, place) == ()
    log.append(dataclasses.replace(failed, plan=PLAN))
    assert [one.plan for one in known_failures(prepared, place)] == [PLAN]


@pytest.mark.parametrize(("kind", "width"), [(Sized, 1), (Stateful, 2)])
def test_a_shortage_does_not_send_a_stream_back(kind: type[Sized], width: int) -> None:
    """The note for the next plan needs the shape of a sample; the stream is read no further for it."""
    reads = []
    for most in (10**9, 8):
        data = kind(96)
        job = stoker.Job(
            model=lambda: Cramped(width, 1),
            data=data,
            loss=lambda output, _: output.square().mean(1),
            batch=16,
            optimizer=stoker.SGD(lr=1e-6),
            until=stoker.epochs(1),
            valid=(torch.ones(4, width), torch.ones(4)),
            evaluation=stoker.Evaluation(every=stoker.updates(2)),
        )
        heard = Doing(64, set_most(most))
        stoker.train(job, plan=PLAN, sink=heard, run_dir=f"most-{most}")
        assert len(heard.of("replanned")) == (most == 8)
        reads.append(data.reads)
    assert reads[0] == reads[1]


class AwayForAMoment(torch.utils.data.Dataset):
    """Points whose disk's server is away once, in whichever process asks first."""

    def __init__(self, marker: Path | None) -> None:
        self.inputs, self.targets = blobs(100)
        self.marker = marker

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.marker is not None and index == 17 and self.marker.exists():
            self.marker.unlink()
            raise OSError(errno.ESTALE, "Stale file handle")
        return self.inputs[index] + torch.rand(()), self.targets[index]


@pytest.mark.parametrize("loader", ["inline", "workers"])
def test_a_disk_that_is_away_for_a_moment_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str
) -> None:
    """It is said, also where a worker read, and the weights are those of a run to which nothing happened."""
    monkeypatch.setattr("stoker.loading.samples.PAUSES_S", (0.0,))
    plan = dataclasses.replace(PLAN, loader=loader, num_workers=1 if loader == "workers" else 0)
    runs, heard = [], Heard()
    for marker in (None, tmp_path / "away"):
        prepared = blobs_job(data=AwayForAMoment(marker), valid=None)

        def sink(event: Event, marker: Path | None = marker) -> None:
            if event.kind == "planned" and marker is not None:
                marker.touch()
            heard(event)

        runs.append(stoker.train(prepared, plan=plan, sink=sink, new=True))
    assert_equal_weights(*runs)
    (fields,) = heard.of("recovered")
    assert (fields["what"], fields["why"]) == ("reading data", "1 reads failed and were repeated (Stale file handle)")
