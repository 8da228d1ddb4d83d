"""Trying a plan: what is timed, what it leaves behind, and how far a reduced precision is from fp32."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import stoker
from stoker.errors import DoesNotFit, RunFailed
from stoker.loading.batches import Batch
from stoker.loading.datasets import datasets_of
from stoker.profiling.plan_trial import gradient_error, try_plan
from stoker.records import Coupling, Measurement, Plan
from stoker.stepping.captured_updates import LENGTH
from stoker.stepping.step import Step
from stoker.stepping.torch_compile import Compilation
from stoker.testing import FakeClock

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="known")
PLAN = Plan(device="cpu", micro_batch=32)


def job_of(**changes) -> stoker.Job:
    """A classifier of 200 points in batches of 32: seven updates an epoch."""
    inputs = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    settings = {
        "model": lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)),
        "data": (inputs, inputs[:, :4].argmax(1)),
        "valid": stoker.holdout(0.1),
        "loss": "cross_entropy",
        "optimizer": stoker.SGD(lr=0.1, momentum=0.9),
        "batch": 32,
        "until": stoker.epochs(5),
    }
    return stoker.Job(**(settings | changes))


def tried(job: stoker.Job, plan: Plan = PLAN, **options) -> Measurement:
    """The plan tried on the job's own data."""
    return try_plan(job, plan, SEPARABLE, datasets_of(job), budget_s=options.pop("budget_s", 10.0), **options)


def test_a_trial_times_updates_and_weighs_the_state() -> None:
    """One time for each update after the first; weights, gradients and momentum in bytes; nothing where it is fp32."""
    job = job_of()
    found = tried(job)
    assert len(found.update_s) == 5  # six in the 180 samples of an epoch, less the first
    assert all(took > 0 for took in found.update_s)
    assert found.samples_per_update == 32
    assert found.plan == PLAN
    assert 0 < found.evaluate_s_per_sample < 1
    assert found.peak_bytes > 2**20
    assert found.gradient_error is None
    parameters = 16 * 32 + 32 + 32 * 4 + 4
    assert found.state_bytes == 3 * 4 * parameters


def test_a_trial_ends_when_its_budget_is_spent() -> None:
    """By a clock on which everything takes a second: four updates at least, then no more than there is time for."""
    found = tried(job_of(batch=4), dataclasses.replace(PLAN, micro_batch=4), clock=FakeClock(tick_s=1.0), budget_s=0.5)
    assert found.update_s == (1.0, 1.0, 1.0)
    assert found.took_s > 0


class Counting(nn.Linear):
    """Counts the batches that it is evaluated on."""

    evaluated = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        Counting.evaluated += not self.training
        return super().forward(x)


def test_an_evaluation_is_timed_over_batches_and_not_long() -> None:
    """Five of held-out points, the first of them twice before; by a slow clock only as many as there is time for."""
    job, plan = job_of(model=lambda: Counting(16, 4), batch=4), dataclasses.replace(PLAN, micro_batch=4)
    for tick_s, expected in ((0.001, 6), (1.0, 2)):
        Counting.evaluated = 0
        found = tried(job, plan, clock=FakeClock(tick_s=tick_s), budget_s=0.5)
        assert Counting.evaluated == expected
        assert found.evaluate_s_per_sample == pytest.approx(tick_s / 4)


@pytest.mark.parametrize(("until", "num_times"), [(stoker.updates(1), 1), (stoker.updates(3), 2)])
def test_a_trial_makes_no_more_updates_than_the_run(until: stoker.units.Duration, num_times: int) -> None:
    """With a single update its time is what there is, the slow first one or not."""
    assert len(tried(job_of(until=until)).update_s) == num_times


def test_a_trial_makes_the_runs_own_first_updates() -> None:
    """Its schedule is that of the whole run, not one squeezed into the trial: what breaks here breaks there."""
    seen: list[float] = []

    def schedule(progress: float) -> float:
        seen.append(progress)
        return 1.0

    tried(job_of(schedule=schedule, until=stoker.epochs(10)))
    assert seen == pytest.approx([update / 60 for update in range(6)])


def test_a_trial_makes_several_updates_in_a_call_where_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else updates of less than a millisecond are forecast to take the time of Python around them."""
    made, together = list[tuple[int, int]](), Step.updates

    def updates(step: Step, batches: Sequence[Batch], first: int, progresses: Sequence[float]) -> list[float]:
        losses = together(step, batches, first, progresses)
        made.append((first, len(losses)))
        return losses

    monkeypatch.setattr(Step, "updates", updates)
    plan = Plan(device="cpu", micro_batch=8, captured=True, optimizer_implementation="fused", loader="memory")
    found = tried(job_of(batch=8, valid=None), plan, budget_s=1e9)
    assert len(found.update_s) == 24  # 25 in an epoch, less the first
    assert made == [(first, LENGTH) for first in range(LENGTH, 24, LENGTH)]
    singly = tried(job_of(batch=8, valid=None), dataclasses.replace(plan, loader="inline"), budget_s=1e9)
    assert len(singly.update_s) == 24
    assert len(made) == 5


def test_a_run_of_seconds_is_tried_at_its_first_rate() -> None:
    """How far an update gets it is not known before the trial."""
    seen: list[float] = []
    tried(job_of(schedule=lambda progress: seen.append(progress) or 1.0, until=stoker.seconds(5)))
    assert set(seen) == {0.0}


def test_a_trial_leaves_the_job_and_the_threads_as_they_were() -> None:
    """The user's module, the number of threads and its own model are not touched by what is thrown away."""
    model = nn.Linear(16, 4)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    num_threads = torch.get_num_threads()
    tried(job_of(model=model), dataclasses.replace(PLAN, threads=2))
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert torch.get_num_threads() == num_threads


def test_a_loss_that_is_not_finite_fails_the_trial() -> None:
    """With the update at which it happened."""
    inputs = torch.full((64, 16), torch.nan)
    with pytest.raises(RunFailed, match="the loss is nan at update 1"):
        tried(job_of(data=(inputs, torch.zeros(64, dtype=torch.long)), valid=None))


def test_running_out_of_memory_is_a_plan_that_does_not_fit() -> None:
    """The plan and the device are named."""

    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    with pytest.raises(DoesNotFit, match=r"micro-batch 32 .* ran out of memory on cpu: tried to allocate 80 GiB"):
        tried(job_of(model=Huge))


def test_the_gradient_of_fp32_is_that_of_fp32() -> None:
    """The same plan twice differs by nothing at all."""
    job = job_of()
    assert gradient_error(job, PLAN, SEPARABLE, datasets_of(job)) == 0.0


def test_the_gradient_of_bf16_is_near_but_not_equal() -> None:
    """Eight bits of mantissa: within some per cent, and measured by the trial of a reduced plan."""
    job = job_of()
    plan = dataclasses.replace(PLAN, precision="bf16")
    error = gradient_error(job, plan, SEPARABLE, datasets_of(job))
    assert 1e-4 < error < 0.05
    assert tried(job, plan).gradient_error == pytest.approx(error)


def test_the_gradient_of_another_micro_batch_is_the_same_but_for_rounding() -> None:
    """Accumulated over parts against whole, in fp32."""
    job, plan = job_of(), dataclasses.replace(PLAN, micro_batch=7)
    whole = dataclasses.replace(plan, precision="bf16", micro_batch=32)
    errors = [gradient_error(job, one, SEPARABLE, datasets_of(job)) for one in (plan, whole)]
    assert errors[0] < 1e-6 < errors[1]


def test_a_precision_that_loses_the_gradient_is_seen() -> None:
    """Differences that hang on the ninth bit of a product come out far off in bf16, and so does their gradient."""

    class Cancelling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return (300.0 + self.layer(inputs)) @ torch.eye(4) - 300.0

    job = job_of(model=Cancelling)
    plan = dataclasses.replace(PLAN, precision="bf16")
    assert gradient_error(job, plan, SEPARABLE, datasets_of(job)) > 0.1


def test_augmentation_and_dropout_are_alike_on_both_sides_of_the_comparison() -> None:
    """Random draws are keyed, so that fp32 against fp32 differs by nothing with them as well."""
    images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 2))
    job = job_of(
        model=model, data=(images, (images.mean((1, 2, 3)) > 0.5).long()), augment=[stoker.transforms.RandomShift(2)]
    )
    assert gradient_error(job, PLAN, SEPARABLE, datasets_of(job)) == 0.0


def test_a_compiled_plan_is_compared_with_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that gets the model wrong is found out, though the precision is fp32; a trustworthy one is not."""
    as_it_is = Compilation(())
    as_it_is.problem = "nothing is compiled here, nor is the loss"

    def bad_compiler(model: nn.Module, *_: object) -> Compilation:
        forward = model.forward
        model.forward = lambda x: 2 * forward(x)
        return as_it_is

    compiled = dataclasses.replace(PLAN, compile=True)
    monkeypatch.setattr("stoker.stepping.step.compile_in_place", lambda *_: as_it_is)
    assert tried(job_of(), compiled).gradient_error == 0.0
    monkeypatch.setattr("stoker.stepping.step.compile_in_place", bad_compiler)
    assert tried(job_of(), compiled).gradient_error > 0.25


def test_what_is_checkpointed_stays_so_in_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fp32 gradient is computed within the memory that the plan needs."""
    seen: list[tuple[int, str]] = []

    def noted(model: object, count: int, conditions: object, *, checkpointing: str, **_: object) -> None:
        seen.append((count, checkpointing))

    monkeypatch.setattr("stoker.stepping.step.checkpoint", noted)
    tried(job_of(), dataclasses.replace(PLAN, checkpointed_blocks=3, checkpointing="selective", precision="bf16"))
    assert set(seen) == {(3, "selective")}
