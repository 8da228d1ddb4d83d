"""A run that tries plans on its own updates: what it learns is that of its schedule, whatever interrupted it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import platform
import shutil
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import stoker
from stoker.devices import malloc
from stoker.devices.cpu import attached_cpu
from stoker.devices.hardware import mtbf_h
from stoker.devices.malloc import resident_bytes
from stoker.errors import BadJob, BadRun, RunFailed, StokerError
from stoker.jobs.job_file import load_job
from stoker.planning import decision as decision_module
from stoker.planning import safe_start
from stoker.planning.live_search import Timed
from stoker.stepping.captured_updates import LENGTH
from stoker.stepping.step import Step
from stoker.store import RunDirectory
from stoker.training import plan_trials
from stoker.training import run as run_module
from stoker.training.plan_in_force import PlanInForce
from stoker.training.plan_trials import PlanTrials
from tests.flow.builders import Heard, assert_equal_tensors
from tests.flow.command import stoker_process

UPDATES = 150


@pytest.fixture(autouse=True)
def _bf16_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU that is not fast in it."""
    monkeypatch.setattr(plan_trials, "precisions", lambda _device, _numerics: ("fp32", "bf16"))


class Net(nn.Module):
    """Images [B, 1, 8, 8] to logits [B, 3]; convolutions, statistics of the batch, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(512, 3),
        )

    def forward(self, x_B1HW: torch.Tensor) -> torch.Tensor:
        """Logits [B, 3]."""
        logits_B3: torch.Tensor = self.layers(x_B1HW)
        return logits_B3


class FailsInChannelsLast(Net):
    """Written for contiguous tensors: `view` refuses others."""

    def forward(self, x_B1HW: torch.Tensor) -> torch.Tensor:
        """Logits [B, 3]."""
        features = self.layers[:5](x_B1HW)
        logits_B3: torch.Tensor = self.layers[7](self.layers[6](features.view(len(features), -1)))
        return logits_B3


class CountsAndFails(FailsInChannelsLast):
    """Its logits grow with the number of its passes, which it counts before it fails."""

    passes = 0

    def forward(self, x_B1HW: torch.Tensor) -> torch.Tensor:
        """Logits [B, 3]."""
        self.passes += self.training
        return super().forward(x_B1HW) * (1 + self.passes / 100)


def job(model: Any = Net, **changes: Any) -> stoker.Job:
    """Updates in epochs of six of random images."""
    random = torch.Generator().manual_seed(0)
    images, labels = torch.randn(90, 1, 8, 8, generator=random), torch.randint(3, (90,), generator=random)
    settings: dict[str, Any] = {
        "model": model,
        "data": (images, labels),
        "loss": "cross_entropy",
        "batch": 16,
        "name": "tried",
        "optimizer": stoker.AdamW(lr=1e-2),
        "until": stoker.updates(UPDATES),
        **changes,
    }
    return stoker.Job(**settings)


def trained(
    to: stoker.Job, folder: str, *, stop_at: int | None = None, sink: Heard | None = None, **asked: Any
) -> stoker.Run:
    """The run in `folder`, begun or continued; asked to stop in update `stop_at`."""

    def stop(update: Any) -> None:
        if update.updates == stop_at:
            signal.raise_signal(signal.SIGTERM)

    heard = Heard() if sink is None else sink
    return stoker.train(to, run_dir=folder, hooks=[stoker.on("updated", stop)], sink=heard, **asked)


def given_schedule(to: stoker.Job, of: stoker.Run, folder: str) -> stoker.Run:
    """A run of the same job that is never interrupted, under the final schedule of another."""
    begun = trained(to, folder, stop_at=1)
    shutil.rmtree(begun.directory.checkpoints)
    for name in ("plans.jsonl", "plan.json", "coupling.json"):
        shutil.copy(of.directory.path / name, begun.directory.path / name)
    return stoker.train(to, run_dir=folder, sink=Heard())


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param((2,), id="comparing", marks=pytest.mark.slow),
        pytest.param((7,), id="trying"),
        pytest.param((5, 12), id="twice", marks=pytest.mark.slow),
        pytest.param((11, 16, 40), id="to the end"),
    ],
)
def test_an_interrupted_run_equals_an_uninterrupted_one_under_its_schedule(stops: tuple[int, ...]) -> None:
    """Bit for bit; it goes on choosing where it was not settled, and replays what comes after its last checkpoint."""
    for stop in stops:
        run = trained(job(), "interrupted", stop_at=stop)
        assert run.status == "unfinished"
    if len(stops) > 1:  # as if killed: the last checkpoint was never written, the schedule goes on beyond the one left
        newest = max(run.directory.checkpoints.glob("*[0-9]"))
        assert len(list(run.directory.checkpoints.glob("*[0-9]"))) > 1
        shutil.rmtree(newest)
    heard = Heard()
    run = trained(job(), "interrupted", sink=heard)
    assert run.status == "finished"
    schedule = run.directory.read_schedule()
    assert schedule is not None
    assert len({switch.plan for switch in schedule.switches}) > 1
    assert_equal_tensors(run.weights(), given_schedule(job(), run, "reference").weights())


@pytest.mark.slow
@pytest.mark.parametrize("model", [FailsInChannelsLast, CountsAndFails])
def test_a_candidate_that_raises_is_left_out_and_its_update_made_again(model: type[nn.Module]) -> None:
    """Said once for each plan, its pass not counted; it ends as one given the schedule, also where it was resumed."""
    heard = Heard()
    run = trained(job(model), "fails", stop_at=30, sink=heard)
    run = trained(job(model), "fails", sink=heard)
    assert run.status == "finished"
    lost = [change for change in heard.of("replanned") if "left out" in change["why"]]
    assert lost
    assert all(change["old"]["memory_format"] == "channels_last" for change in lost)
    names = [str(change["old"]) for change in lost]
    assert len(names) == len(set(names))
    schedule = run.directory.read_schedule()
    assert schedule is not None
    assert schedule.last.memory_format == "contiguous"
    reference = given_schedule(job(model), run, "reference")
    assert_equal_tensors(run.weights(), reference.weights())


class Notes(Net):
    """Notes of each training pass whether it is in bf16, and whether the heap is kept small."""

    passes: ClassVar[list[tuple[bool, bool]]] = []

    def forward(self, x_B1HW: torch.Tensor) -> torch.Tensor:
        """Logits [B, 3]."""
        if self.training and torch.is_grad_enabled():
            self.passes.append((torch.is_autocast_enabled("cpu"), malloc._maps_more))
        return super().forward(x_B1HW)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the GNU C library")
def test_what_comparisons_take_is_not_kept_by_the_heap() -> None:
    """Gradients in bf16 are computed with the heap kept small, the run's own updates as ever."""
    Notes.passes.clear()
    trained(job(Notes), "noted", stop_at=4)
    compared = [is_small for is_bf16, is_small in Notes.passes if is_bf16]
    assert compared[:3] == [True] * 3
    assert sum(not is_bf16 and not is_small for is_bf16, is_small in Notes.passes) >= 4


class SlowInFullPrecision(Net):
    """Writes 80 MB more in an update that is not in reduced precision."""

    def forward(self, x_B1HW: torch.Tensor) -> torch.Tensor:
        """Logits [B, 3]."""
        if torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
            torch.ones(20_000_000)
        return super().forward(x_B1HW)


def test_the_forecast_at_settling_has_the_peak_that_is_behind_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan took more than the one that is settled on: that was the run's peak."""
    peaks = itertools.chain([0, 10**9], itertools.repeat(5 * 10**8))  # the first is replaced before any turn

    class Peak(contextlib.nullcontext[Any]):
        def __init__(self, _device: str) -> None:
            super().__init__(self)
            self.num_bytes = next(peaks)

    monkeypatch.setattr(plan_trials, "PeakMemory", Peak)
    heard = Heard()
    trained(job(SlowInFullPrecision), "peak", sink=heard)
    (settled,) = heard.of("settled")
    assert settled["plan"]["precision"] == "bf16"
    assert settled["forecast"]["peak_bytes"]["value"] == pytest.approx(10**9, rel=0.01)


def test_a_heap_that_grew_is_renewed_once_and_not_before_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a plan needs more, as the turn after the renewal shows, it may have it."""
    held, renewals = [1000], list[int]()
    monkeypatch.setattr(plan_trials, "resident_bytes", lambda: held[0])
    monkeypatch.setattr(plan_trials, "renew_heap", lambda: renewals.append(held[0]))
    keep = PlanTrials._keep_heap_small

    def growing(trials: PlanTrials, plan: Any) -> None:
        keep(trials, plan)
        held[0] = 1200  # from the second turn on, also in a new heap

    monkeypatch.setattr(PlanTrials, "_keep_heap_small", growing)
    heard = Heard()
    trained(job(), "grown", sink=heard)
    assert len(heard.of("settled")) == 1
    before_settling = renewals[: len(renewals) - 1] if not heard.of("settled")[0]["plan"]["captured"] else renewals
    assert before_settling == [1200]


class Ends(FailsInChannelsLast):
    """Ends the process without an error in its first passes in channels-last, as the system does for memory."""

    endings = 0

    def forward(self, x_B1HW: torch.Tensor) -> torch.Tensor:
        """Logits [B, 3]."""
        if self.endings and torch.is_grad_enabled() and not self.get_parameter("layers.3.weight").is_contiguous():
            type(self).endings -= 1
            raise SystemExit
        return super().forward(x_B1HW)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endings", "reason"), [(1, "it raised RuntimeError"), (2, "two processes ended")], ids=["once", "twice"]
)
def test_a_candidate_under_which_a_process_ended_is_left_out_on_resume(
    endings: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once is no proof: it is tried again, and left out where it raises then; the second time it is not tried."""
    monkeypatch.setattr(Ends, "endings", endings)
    for _ in range(endings):
        with pytest.raises(SystemExit):
            trained(job(Ends), "ended")
    heard = Heard()
    run = trained(job(Ends), "ended", sink=heard)
    assert run.status == "finished"
    first, *_ = heard.of("replanned")
    assert first["old"]["memory_format"] == "channels_last"
    assert f"is left out: {reason}" in first["why"]
    schedule = run.directory.read_schedule()
    assert schedule is not None
    assert schedule.last.memory_format == "contiguous"
    assert_equal_tensors(run.weights(), given_schedule(job(Ends), run, "reference").weights())


def test_turns_of_a_captured_plan_are_made_as_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several updates in a call, by whose times it is chosen and forecast; what is learned is that of the schedule."""
    monkeypatch.setattr(plan_trials, "_CAPTURE_S", 0.0)
    monkeypatch.setattr(plan_trials, "precisions", lambda *_: ("fp32",))  # whose turns would take the share of trials
    turns, after = list[tuple[bool, int]](), PlanTrials.after

    def noted(trials: PlanTrials, position: Any, num_updates: int = 1) -> None:
        turns.append((trials._step.plan.captured, num_updates))
        after(trials, position, num_updates)

    monkeypatch.setattr(PlanTrials, "after", noted)
    random = torch.Generator().manual_seed(0)
    data = torch.randn(400, 6, generator=random), torch.randint(3, (400,), generator=random)
    to = job(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), data=data, until=stoker.updates(1500))
    run = stoker.train(to, run_dir="captured", sink=Heard())  # a hook that sees every update would see them singly
    assert {is_captured for is_captured, num_updates in turns if num_updates == LENGTH} == {True}
    assert {num_updates for _, num_updates in turns} == {1, LENGTH}
    assert_equal_tensors(run.weights(), given_schedule(to, run, "reference").weights())


def test_an_error_under_every_plan_is_the_users() -> None:
    """A bug in the model surfaces as it would under a plan that was given."""

    class Broken(Net):
        calls = 0

        def forward(self, x_B1HW: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            if self.calls > 40:
                raise ZeroDivisionError("a bug of the user's")
            return super().forward(x_B1HW)

    with pytest.raises(StokerError, match="a bug of the user's"):
        trained(job(Broken), "broken")


def test_comparing_gradients_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, statistics and draws are those of a run under the same plan whose gradients were not compared."""
    monkeypatch.setattr(plan_trials, "FEWEST_UPDATES", 0)
    monkeypatch.setattr(PlanTrials, "after", lambda *_: None)  # the safe plan throughout
    to, compared = job(until=stoker.updates(12)), list[int]()
    own = PlanTrials._compare

    def noted(trials: PlanTrials, batch: Any, update: int) -> None:
        compared.append(update)
        own(trials, batch, update)

    monkeypatch.setattr(PlanTrials, "_compare", noted)
    run = trained(to, "compared")
    monkeypatch.setattr(PlanTrials, "before", lambda *_: None)
    assert_equal_tensors(run.weights(), trained(to, "plain").weights())
    assert compared == [1, 2, 3]


def test_a_precision_whose_gradient_is_off_takes_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are compared on the run's own batches, also by a run that goes on under it."""
    exact = Step.gradients_under
    monkeypatch.setattr(Step, "gradients_under", lambda *given: [-gradient for gradient in exact(*given)])
    run = trained(job(), "off")
    schedule, decision = run.directory.read_schedule(), run.directory.read_decision()
    assert schedule is not None
    assert decision is not None
    assert {switch.plan.precision for switch in schedule.switches} == {"fp32"}


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize("settings", [{}, {"until": stoker.updates(3)}], ids=["tried", "too short to try"])
def test_a_set_that_cannot_be_evaluated_fails_before_the_first_update(split: str, settings: dict[str, Any]) -> None:
    """Not after an epoch of training; no run is left behind."""
    wrong = torch.randn(8, 1, 5, 5), torch.zeros(8, dtype=torch.long)
    heard = Heard()
    with pytest.raises(BadJob, match=rf"evaluating {split}="):
        trained(job(**settings, **{split: wrong}), "wrong", sink=heard)
    assert not heard.of("progress")
    assert not Path("wrong").exists()


def test_sets_are_checked_by_every_run_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under a plan that was kept or given, but not when a run goes on."""
    checked: list[str] = []
    check = run_module.check_held_out
    monkeypatch.setattr(
        run_module, "check_held_out", lambda step, sets, size: checked.extend(sets) or check(step, sets, size)
    )
    given = {"valid": (torch.randn(8, 1, 8, 8), torch.zeros(8, dtype=torch.long))}
    trained(job(**given), "first", stop_at=2)
    trained(job(**given), "first")
    assert checked == ["valid"]
    trained(job(**given), "kept")
    trained(job(**given), "given", plan=stoker.records.Plan(device="cpu", micro_batch=16))
    assert checked == ["valid"] * 3


def test_a_label_at_the_end_of_valid_is_checked_where_plans_were_tried_first() -> None:
    """Trials of a given plan evaluate the first batches; the label out of range is in none of them."""
    labels = torch.zeros(640, dtype=torch.long)
    labels[-1] = 7
    heard = Heard()
    plan = stoker.records.Plan(device="cpu", micro_batch=16)
    with pytest.raises(BadJob, match="labels go from 0 to 7"):
        trained(job(valid=(torch.randn(640, 1, 8, 8), labels)), "wrong", sink=heard, plan=plan)
    assert not heard.of("progress")


def test_plans_of_other_precisions_are_captured_too_where_they_are_about_as_fast() -> None:
    """Capturing leaves out what the host does, of which autocast takes more: the order may change."""
    best, bf16, slow, other = (
        stoker.records.Plan(device="cpu", micro_batch=size, precision=precision, threads=threads)
        for size, precision, threads in ((16, "fp32", 1), (16, "bf16", 1), (16, "tf32", 1), (16, "bf16", 2))
    )
    times_s = {best: 1.0, bf16: 1.1, slow: 1.3, other: 1.05, dataclasses.replace(best, micro_batch=8): 1.01}
    timed = {plan: Timed(plan, by_round={1: update_s}) for plan, update_s in times_s.items()}
    untried = stoker.records.Plan(device="cpu", micro_batch=16, precision="fp16", threads=1)
    timed[untried] = Timed(untried)
    captured = plan_trials.to_capture(best, timed, gain=0.2)
    assert captured == [dataclasses.replace(plan, captured=True) for plan in (best, bf16)]


class FailsInBf16(Net):
    """Raises whatever `problem` is in reduced precision once it trains under it."""

    problem: BaseException = torch.OutOfMemoryError("CPU out of memory")
    compared = 3

    def forward(self, x_B1HW: torch.Tensor) -> torch.Tensor:
        """Logits [B, 3]."""
        if torch.is_autocast_enabled("cpu") and torch.is_grad_enabled():
            type(self).compared -= 1
            if self.compared < 0:
                raise self.problem
        return super().forward(x_B1HW)


def test_a_candidate_that_runs_out_of_memory_is_left_out_with_the_same_result() -> None:
    """Said once for each plan, written down, and not taken for a lack of memory of the safe plan."""
    heard = Heard()
    run = trained(job(FailsInBf16), "short", sink=heard)
    assert run.status == "finished"
    lost = heard.of("replanned")
    assert lost
    assert all("left out: it raised OutOfMemoryError" in change["why"] for change in lost)
    assert len({str(change["old"]) for change in lost}) == len(lost)
    schedule = run.directory.read_schedule()
    assert schedule is not None
    assert {switch.left_out.precision for switch in schedule.switches if switch.left_out is not None} == {"bf16"}
    assert {switch.plan.micro_batch for switch in schedule.switches} <= {16, 8, 4, 2, 1}
    assert schedule.last.precision == "fp32"
    reference = given_schedule(job(FailsInBf16), run, "reference")
    assert_equal_tensors(run.weights(), reference.weights())


class LargeInBf16(Net):
    """Takes 300 MB more in an update under reduced precision."""

    def forward(self, x_B1HW: torch.Tensor) -> torch.Tensor:
        """Logits [B, 3]."""
        if torch.is_autocast_enabled("cpu") and torch.is_grad_enabled():
            torch.ones(75_000_000)
        return super().forward(x_B1HW)


def test_the_memory_that_a_run_begins_with_is_that_of_its_process() -> None:
    """As every later forecast is, and what is measured: a guess of the update's own memory is a hundredth of it."""
    heard = Heard()
    before = resident_bytes()
    trained(job(), "begun", sink=heard, stop_at=1)
    (planned,) = heard.of("planned")
    assert planned["forecast"]["peak_bytes"]["value"] > before


@pytest.mark.slow
def test_a_candidate_that_takes_more_than_the_run_may_is_left_out() -> None:
    """By the peak of its own updates; what was settled on is kept for starts under the same limits."""
    limits: dict[str, Any] = {"memory": resident_bytes() + 150_000_000, "threads": 1}
    trained(job(LargeInBf16), "limited", stop_at=9, **limits)
    run = trained(job(LargeInBf16), "limited")  # resumed, with the limits that it began under
    decision = run.directory.read_decision()
    assert decision is not None
    too_large = [one.plan.precision for one in decision.rejected if "and may take" in one.reason]
    assert set(too_large) == {"bf16"}
    assert decision.chosen.plan.precision == "fp32"
    assert decision.chosen.memory_bytes == limits["memory"]
    heard = Heard()
    trained(job(LargeInBf16), "again", sink=heard, **limits)
    assert not heard.of("settled")
    trained(job(LargeInBf16), "unlimited", sink=heard)
    assert heard.of("settled")


@pytest.mark.slow
def test_a_run_that_goes_on_where_there_is_more_memory_may_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine had on which it began is no limit of its user's; nor is the plan kept as if it were."""
    started = safe_start.safe_start

    def on_a_smaller_machine(prepared: Any, place: Any, _before: Any) -> Any:
        found = started(prepared, place)
        assert found is not None
        few_bytes = resident_bytes() + 150_000_000
        chosen = dataclasses.replace(found[0].chosen, memory_bytes=few_bytes)
        return dataclasses.replace(found[0], candidates=(chosen,)), found[1]

    with monkeypatch.context() as smaller:
        smaller.setattr(decision_module, "safe_start", on_a_smaller_machine)
        trained(job(LargeInBf16), "moved", stop_at=9)
    decision = trained(job(LargeInBf16), "moved").directory.read_decision()
    assert decision is not None
    assert not [one for one in decision.rejected if "and may take" in one.reason]
    heard = Heard()
    trained(job(LargeInBf16), "again", sink=heard)
    assert not heard.of("settled")


HANGS = """
import threading

import torch
from torch import nn

import stoker


class Hangs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))

    def forward(self, x):
        if not self.layers[1].weight.is_contiguous():  # in channels-last
            threading.Event().wait()
        return self.layers(x)


def job() -> stoker.Job:
    random = torch.Generator().manual_seed(0)
    images, labels = torch.randn(90, 1, 8, 8, generator=random), torch.randint(3, (90,), generator=random)
    return stoker.Job(model=Hangs, data=(images, labels), loss="cross_entropy", batch=16, name="hangs",
                      optimizer=stoker.AdamW(lr=1e-2), until=stoker.updates(150))
"""


@pytest.mark.slow
def test_a_candidate_that_hangs_ends_the_process_and_the_same_command_leaves_it_out() -> None:
    """The watchdog writes which one it was; the run ends as one that was given its schedule."""
    Path("hangs.py").write_text(HANGS, encoding="utf-8")
    arguments = ("train", "hangs.py", "--run-dir", "hung", "--json")
    codes: list[int] = []
    for _ in range(4):  # one for each precision that is tried in channels-last, at most
        codes.append(stoker_process(*arguments, STOKER_WATCHDOG="0.2").code)
        if codes[-1] == 0:
            break
    assert codes[0] == RunFailed.exit_code
    assert codes[-1] == 0
    directory = RunDirectory(Path("hung"))
    schedule = directory.read_schedule()
    assert schedule is not None
    lost = [switch for switch in schedule.switches if switch.left_out is not None]
    assert len(lost) == len(codes) - 1
    assert all("its update did not end" in switch.why for switch in lost)
    assert schedule.last.memory_format == "contiguous"
    hung, (to, entry) = stoker.load("hung"), load_job(Path("hangs.py"), {})
    begun = stoker.train(to, run_dir="reference", entry=entry, sink=Heard(), hooks=[stoker.on("updated", _stop_at_one)])
    shutil.rmtree(begun.directory.checkpoints)
    for name in ("plans.jsonl", "plan.json", "coupling.json"):
        shutil.copy(directory.path / name, begun.directory.path / name)
    reference = stoker.train(load_job(Path("hangs.py"), {})[0], run_dir="reference", entry=entry, sink=Heard())
    assert_equal_tensors(hung.weights(), reference.weights())


def _stop_at_one(update: Any) -> None:
    if update.updates == 1:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
def test_the_safe_plan_may_be_asked_for() -> None:
    """Nothing is tried, whatever is kept; a run that began by trying plans does not go on under it."""
    stopped = trained(job(), "tried", stop_at=9)
    trained(job(), "settled")
    heard = Heard()
    run = stoker.train(job(), run_dir="safe", plan="safe", sink=heard)
    schedule = run.directory.read_schedule()
    assert schedule is not None
    assert schedule.switches == ()
    assert (schedule.began.precision, schedule.began.micro_batch) == ("fp32", 16)
    assert not heard.of("settled")
    pinned = stoker.train(job(), run_dir="pinned", plan=schedule.began, sink=Heard())
    assert_equal_tensors(run.weights(), pinned.weights())
    with pytest.raises(BadRun, match="began by trying plans"):
        stoker.train(job(), run_dir=stopped.directory.path, plan="safe", sink=Heard())


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"optimizer": stoker.AdamW(lr=3e-3)}, {"until": stoker.updates(2 * UPDATES)}])
def test_another_rate_or_length_goes_on_under_the_plan_that_was_settled_on(changes: dict[str, Any]) -> None:
    """As in a notebook: the second call tries nothing."""
    settled = trained(job(), "first").directory.read_schedule()
    heard = Heard()
    run = trained(job(**changes), "second", sink=heard)
    schedule = run.directory.read_schedule()
    assert settled is not None
    assert schedule is not None
    assert settled.is_settled
    assert schedule.switches == ()
    assert dataclasses.replace(schedule.began, checkpoint_every_s=30) == dataclasses.replace(
        settled.last, checkpoint_every_s=30
    )
    assert not heard.of("settled")


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"checkpoint_every": stoker.seconds(7)}, {"device_mtbf_h": 0.1}])
def test_how_often_a_run_was_to_save_is_not_kept_with_its_plan(asked: dict[str, Any]) -> None:
    """The next start tries nothing, and saves as often as without the setting."""
    trained(job(), "first", **asked)
    heard = Heard()
    schedule = trained(job(), "second", sink=heard).directory.read_schedule()
    assert schedule is not None
    assert (schedule.switches, heard.of("settled")) == ((), [])
    assert schedule.began.device_mtbf_h == mtbf_h("cpu")


def test_plans_of_a_float64_model_stay_in_float64() -> None:
    """Its gradients were compared in no other precision, and none may be settled on, reported or kept."""
    images, labels = torch.randn(90, 1, 8, 8, dtype=torch.float64), torch.randint(3, (90,))
    run = trained(job(lambda: Net().double(), data=(images, labels)), "double")
    schedule = run.directory.read_schedule()
    assert schedule is not None
    assert len({switch.plan for switch in schedule.switches}) > 1
    assert {switch.plan.precision for switch in schedule.switches} == {schedule.began.precision}


def test_another_checkpoint_interval_leaves_the_schedule_as_it_is() -> None:
    """Beyond the newest checkpoint too: those updates were made under these plans, and trials go on from them."""
    run = trained(job(), "interval", stop_at=20)
    shutil.rmtree(run.directory.checkpoints)

    def switches() -> list[tuple[object, ...]]:
        schedule = run.directory.read_schedule()
        assert schedule is not None
        unsaved = [
            dataclasses.replace(switch.plan, checkpoint_every_s=1.0, device_mtbf_h=None) for switch in schedule.switches
        ]
        return [(s.update, s.kind, s.left_out, plan) for s, plan in zip(schedule.switches, unsaved, strict=True)]

    before = switches()
    assert len(before) > 1
    plans = PlanInForce.of(run.directory)
    plans.save_every(stoker.seconds(7), None)
    assert switches() == before
    assert plans.schedule.last.checkpoint_every_s == 7


def test_an_interval_that_is_asked_for_later_holds_while_plans_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns come from plans that were made before it; a plan that failed by then is not tried again."""
    ticks = itertools.count()  # all updates take one: no plan is slower, so that trials go on whatever the machine does
    timed = functools.partialmethod(PlanTrials.__init__, clock=lambda: 0.01 * next(ticks))
    monkeypatch.setattr(PlanTrials, "__init__", timed)
    trained(job(FailsInChannelsLast), "later", stop_at=30)
    heard = Heard()
    run = trained(job(FailsInChannelsLast), "later", stop_at=60, sink=heard, checkpoint_every=stoker.seconds(3600))
    schedule = run.directory.read_schedule()
    assert schedule is not None
    tried = [switch.plan for switch in schedule.switches if switch.update > 30]
    assert len(set(tried)) > 1
    assert {(plan.checkpoint_every_s, plan.device_mtbf_h) for plan in tried} == {(3600, None)}
    names = [plan.in_words() for plan in (switch.left_out for switch in schedule.switches) if plan is not None]
    assert names
    assert len(names) == len(set(names))


class NotesThreads(Net):
    """Notes the number of threads of each pass."""

    threads: ClassVar[list[int]] = []

    def forward(self, x_B1HW: torch.Tensor) -> torch.Tensor:
        """Logits [B, 3]."""
        self.threads.append(torch.get_num_threads())
        return super().forward(x_B1HW)


@pytest.mark.skipif(attached_cpu().cores < 2, reason="one core has nothing to leave to others")
def test_cores_that_others_use_are_left_to_them_from_the_first_update_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for a core holds up all the others. All cores take part again once others are gone."""
    cores = attached_cpu().cores
    monkeypatch.setattr(safe_start, "used_by_others", lambda _began: 1 / cores)
    NotesThreads.threads.clear()
    run = trained(job(NotesThreads), "beside", threads=cores)
    schedule = run.directory.read_schedule()
    assert schedule is not None
    tried = [switch for switch in schedule.switches if switch.kind == "trial"]
    assert schedule.at(0).threads == tried[0].plan.threads == cores - 1
    assert set(NotesThreads.threads[: 4 * tried[0].update]) <= {1, cores - 1}


def test_an_update_made_again_has_the_threads_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a replay of the schedule makes it: with other threads its last bits may differ."""
    seen, threads = list[int](), list[int]()
    original = PlanTrials.leave_out

    def with_one_thread(self: PlanTrials, error: Exception, position: Any) -> Any:
        change = original(self, error, position)
        assert change is not None
        seen.append(position.updates)
        return dataclasses.replace(change, new=dataclasses.replace(change.new, threads=1))

    class Counted(FailsInChannelsLast):
        def forward(self, x_B1HW: torch.Tensor) -> torch.Tensor:
            threads.append(torch.get_num_threads() if seen else 0)
            return super().forward(x_B1HW)

    monkeypatch.setattr(PlanTrials, "leave_out", with_one_thread)
    trained(job(Counted), "threads", stop_at=30)
    assert seen
    assert next(number for number in threads if number) == 1
