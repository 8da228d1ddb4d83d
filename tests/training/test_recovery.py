"""Updates that break: what is redone, with what result, and what is reported."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadJob, DoesNotFit, RunFailed
from stoker.records import Coupling, Plan, Position
from stoker.stepping.buffers import Buffers, FrozenWatch
from stoker.stepping.step import Step
from stoker.training.plan_in_force import Replanned
from stoker.training.recovery import MOST_SKIPPED, Recovery, RollBack
from tests.training.builders import assert_bit_equal, everything_of, source_of, tiny_job

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="known")
BY_NORMS = Coupling(kind="batch_norm", group=4, causes=("1 BatchNorm1d",), evidence="known")
WHOLE = Coupling(kind="whole_group", group=16, causes=("the loss",), evidence="known")


class Cramped(nn.Module):
    """Passes its input on; from call number `since` on, more than `most` samples at once are too many."""

    def __init__(self, most: int, since: int = 0, error: Callable[[], Exception] | None = None) -> None:
        super().__init__()
        self.most, self.since, self.calls = most, since, 0
        self.error = error or (lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The input, if there is room."""
        self.calls += self.training
        if self.training and self.calls > self.since and len(inputs) > self.most:
            raise self.error()
        return inputs


def net(*extra: nn.Module) -> nn.Module:
    """Two layers with batch statistics between them, in double precision, with `extra` behind these."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), *extra, nn.Linear(8, 2)).double()


def job_of(*extra: nn.Module, **changes: Any) -> stoker.Job:
    """A classifier of points in double precision, without random draws."""
    inputs = torch.randn(80, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    settings = {"model": lambda: net(*extra), "data": (inputs, (inputs.sum(1) > 0).long()), "coupling_group": 4}
    return tiny_job(**(settings | changes))


class Trained:
    """A job trained for some updates through a Recovery, with what was reported and written down."""

    def __init__(self, job: stoker.Job, plan: int | Plan, coupling: Coupling = BY_NORMS, **settings: Any) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.changes: list[Replanned] = []
        plan = Plan(device="cpu", micro_batch=plan) if isinstance(plan, int) else plan
        self.step = Step(job, plan, coupling)
        self.recovery = Recovery(
            self.step,
            tell=lambda kind, **fields: self.told.append((kind, fields)),
            replanned=self.changes.append,
            **settings,
        )

    def run(self, updates: int = 10) -> Trained:
        """Make so many updates."""
        source = source_of(self.step)
        for update, batch in enumerate(source.batches(Position(), updates)):
            make_update(self.recovery, batch, source.extent.position(update), update / 15)
        return self


def make_update(recovery: Recovery, batch: Any, position: Position, progress: float) -> None:
    """An update as the training loop makes it."""
    recovery.keep()
    shortage = None
    try:
        recovery.step.update(batch, position.updates, progress)
    except Exception as error:  # noqa: BLE001 - raised again where there is no recovery
        shortage = recovery.judge(error, batch, position)
    recovery.repeat(shortage, batch, position, progress)


def assert_same_mathematics(one: Step, other: Step) -> None:
    """Equal to 1e-9, weights, buffers and the optimiser's state."""
    mine, theirs = everything_of(one), everything_of(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-12, msg=name)


OUT_OF_MEMORY = [
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    lambda: MemoryError("std::bad_alloc"),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"),
]


@pytest.mark.parametrize(
    ("error", "since"), list(zip(OUT_OF_MEMORY, (0, 5, 9), strict=True)), ids=["GPU", "Python", "CPU"]
)
def test_memory_that_runs_out_makes_micro_batches_smaller_and_changes_nothing_else(
    error: Callable[[], Exception], since: int
) -> None:
    """At once or later: redone at the next smaller legal size until it fits; as if nothing had happened, to 1e-9."""
    found = Trained(job_of(Cramped(4, since, error)), 16).run()
    assert found.step.plan.micro_batch == 4
    assert [(c.old.micro_batch, c.new.micro_batch) for c in found.changes] == [(16, 8), (8, 4)]
    told = [fields for kind, fields in found.told if kind == "replanned"]
    assert [fields["samples"] for fields in told] == [16 * since] * 2
    assert "out of memory" in told[0]["why"]
    assert told[0]["free_bytes"] > 0
    assert (told[0]["old"]["micro_batch"], told[0]["new"]["micro_batch"]) == (16, 8)
    assert_same_mathematics(found.step, Trained(job_of(nn.Identity()), 16).run().step)
    if since == 0:
        assert_bit_equal(everything_of(found.step), everything_of(Trained(job_of(nn.Identity()), 4).run().step))


def test_an_update_that_breaks_half_way_is_redone_as_a_whole() -> None:
    """Its first micro-batch moved statistics and left a gradient: both are put back before the update begins over."""
    found = Trained(job_of(Cramped(4, since=3)), 8).run()
    assert [fields["samples"] for kind, fields in found.told if kind == "replanned"] == [16]
    assert_same_mathematics(found.step, Trained(job_of(nn.Identity()), 8).run().step)


class Moody(nn.Module):
    """Scales by draws from Python's and NumPy's generators, and keeps the last scale in a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Two draws a call."""
        self.last = torch.tensor(random.random() + float(np.random.random()), dtype=torch.float64)  # noqa: NPY002
        return inputs * self.last


def test_generators_and_replaced_buffers_begin_the_update_anew() -> None:
    """What the failed attempt drew is drawn again: the same as under the smaller micro-batch from there on."""
    trained: list[Trained] = []
    for cramped in (Cramped(8), nn.Identity()):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - the generator that users draw from
        size = 16 if isinstance(cramped, Cramped) else 8
        trained.append(Trained(job_of(Moody(), cramped), size, SEPARABLE).run(6))
    assert_bit_equal(*(everything_of(one.step) for one in trained))


class Following(nn.Module):
    """A scale that is trained, and a frozen one that follows it with each pass in training."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.slow = nn.Parameter(torch.zeros(6, dtype=torch.float64), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The input, scaled."""
        with torch.no_grad():
            self.slow.lerp_(self.fast, 0.1)
        return inputs * self.fast


def following(last: nn.Module) -> nn.Module:
    """Two layers behind scales, with `last` after them."""
    return nn.Sequential(Following(), nn.Linear(6, 2).double(), last)


def test_frozen_parameters_that_follow_others_begin_the_update_anew() -> None:
    """From the second update on what the failed attempt did to them is undone, as with buffers."""
    job = job_of(model=lambda: following(Cramped(8, since=1)))
    found = Trained(job, 16, SEPARABLE).run(2)
    assert found.step.plan.micro_batch == 8
    expected = Trained(job_of(model=lambda: following(nn.Identity())), 16, SEPARABLE).run(1)
    for _ in range(2):  # the second update, in two halves
        expected.step.model[0].slow.lerp_(expected.step.model[0].fast.detach(), 0.1)
    assert torch.equal(found.step.model[0].slow, expected.step.model[0].slow)


def test_frozen_parameters_are_kept_whatever_moved_in_a_model_that_is_gone() -> None:
    """As many were known before, of another model."""

    def moved(model: Following, watch: FrozenWatch) -> None:
        for _ in range(2):
            watch.look()
            model(torch.ones(6, dtype=torch.float64))
        watch.look()

    earlier, model = Following(), Following()
    moved(earlier, FrozenWatch(earlier))
    buffers = Buffers(model)
    buffers.keep()
    del earlier
    gc.collect()
    moved(model, FrozenWatch(model))
    buffers.keep()
    before = model.slow.clone()
    model(torch.ones(6, dtype=torch.float64))
    assert buffers.restore()
    assert torch.equal(model.slow, before)


def test_frozen_parameters_that_move_in_the_first_update_cannot_be_put_back() -> None:
    """No copy of them was made: training begins again."""
    with pytest.raises(RollBack):
        Trained(job_of(model=lambda: following(Cramped(8))), 16, SEPARABLE).run(1)


def test_a_ragged_batch_goes_to_a_size_below_its_own() -> None:
    """Of 80 samples in batches of 60 the second has 20: the next size that could help it is 15, not 30."""
    job = job_of(Cramped(15, since=1), batch=60, coupling_group=None)
    found = Trained(job, 60, SEPARABLE).run(2)
    assert [change.new.micro_batch for change in found.changes] == [15]


def test_samples_that_belong_together_are_not_cut() -> None:
    """The error names the group, what ties it, and what would be a change of Job."""
    found = Trained(job_of(Cramped(4)), 16, WHOLE)
    with pytest.raises(DoesNotFit, match=r"a micro-batch of 16 ran out of memory on cpu at update 1 .*free") as caught:
        found.run()
    assert "groups of 16 by the loss" in caught.value.message
    assert "change of Job" in (caught.value.remedy or "")
    assert found.changes == []


def test_no_size_is_small_enough() -> None:
    """Each is tried once; the last one's failure is the verdict, and the weights are as they were."""
    job = tiny_job(model=lambda: nn.Sequential(nn.Linear(6, 2), Cramped(0)))
    found = Trained(job, 16, SEPARABLE)
    before = {name: tensor.clone() for name, tensor in everything_of(found.step).items()}
    with pytest.raises(DoesNotFit, match="a micro-batch of 1 ran out of memory"):
        found.run()
    assert [change.new.micro_batch for change in found.changes] == [8, 4, 2, 1]
    assert_bit_equal(everything_of(found.step), before)
    assert all(parameter.grad is None for parameter in found.step.model.parameters())


def test_batches_that_cannot_be_cut_say_so_with_the_reason() -> None:
    """Out of memory is the reason; that the batch has no rows is why it ends."""
    inputs = [{"x": torch.randn(6, dtype=torch.float64), "y": index % 2} for index in range(32)]
    fields = stoker.Fields(
        inputs="x", target="y", collate=lambda items: {key: Rows([item[key] for item in items]) for key in ("x", "y")}
    )
    job = job_of(
        Cramped(8),
        data=Items(inputs),
        fields=fields,
        coupling_group=None,
        loss=lambda model, batch: stoker.Loss(model(batch["x"].all()).sum(), 16),
    )
    with pytest.raises(DoesNotFit, match=r"ran out of memory at update 1 .*cannot be cut"):
        Trained(job, 16, SEPARABLE).run()


class Items(torch.utils.data.Dataset):
    """A list as a data set."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Rows:
    """A batch that nothing can be cut from."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def all(self) -> torch.Tensor:
        """The rows as one tensor."""
        return torch.stack(self.rows)


class FullSGD(torch.optim.SGD):
    """Runs out of memory in the middle of step number `at`."""

    at = 3

    def step(self, closure: Any = None) -> Any:
        """Move some weights, then fail."""
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == self.at:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise torch.OutOfMemoryError("no room for the optimiser's state")
        return super().step(closure)


def test_weights_that_had_begun_to_move_are_had_from_the_last_checkpoint() -> None:
    """Nothing is redone here: the caller is asked to make the loop again, under a smaller micro-batch."""
    found = Trained(job_of(optimizer=lambda parameters: FullSGD(parameters, lr=0.1)), 16)
    with pytest.raises(RollBack) as caught:
        found.run()
    assert (caught.value.change.old.micro_batch, caught.value.change.new.micro_batch) == (16, 8)
    assert found.step.plan.micro_batch == 16
    assert found.changes == []


def test_memory_short_in_an_evaluation_makes_it_smaller_and_puts_nothing_back() -> None:
    """After updates too: no roll-back, and weights and buffers stay as the last of them left them."""
    found = Trained(job_of(), 16).run(3)
    before = {name: tensor.clone() for name, tensor in everything_of(found.step).items()}

    def evaluate() -> int:
        if found.step.plan.micro_batch > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found.step.plan.micro_batch

    assert found.recovery.without_weights(evaluate, Position(updates=3, samples=48)) == 4
    assert [(c.old.micro_batch, c.new.micro_batch) for c in found.changes] == [(16, 8), (8, 4)]
    assert_bit_equal(everything_of(found.step), before)


def test_other_errors_are_left_alone() -> None:
    """A shape that does not fit is no want of memory."""
    with pytest.raises(RuntimeError, match=r"^shapes$"):
        Trained(job_of(Cramped(0, error=lambda: RuntimeError("shapes"))), 16).run()
    with pytest.raises(BadJob, match=r"^no$"):
        Trained(job_of(Cramped(0, error=lambda: BadJob("no"))), 16).run()


class Breaking(nn.Module):
    """Divides by zero in calls `since` up to `until`, counted from 1."""

    def __init__(self, since: int, until: int) -> None:
        super().__init__()
        self.since, self.until, self.calls = since, until, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The input, or infinities of its signs."""
        self.calls += 1
        return inputs / 0 if self.since <= self.calls <= self.until else inputs


def test_a_number_that_is_not_finite_stops_the_run_with_a_dump(tmp_path: Path) -> None:
    """The message names the module, the file has the update, its samples, rates and gradients; weights stay."""
    found = Trained(job_of(Breaking(3, 4), clip_norm=1.0), 16, dumps=tmp_path / "dumps")
    with pytest.raises(
        RunFailed, match=r"the loss is \w+ at update 3; the first was in the output of 2 \(Breaking\)"
    ) as caught:
        found.run()
    path = tmp_path / "dumps" / "not-finite-000000000032.json"
    assert str(path) in (caught.value.remedy or "")
    dump = json.loads(path.read_text())
    assert (dump["update"], dump["samples"], dump["epoch"], len(dump["indices"])) == (3, 32, 0, 16)
    assert dump["learning_rates"] == [0.1]
    assert dump["loss"] in ("nan", "inf")
    assert dump["gradient_norms"].keys() == {name for name, _ in found.step.model.named_parameters()}
    assert "nan" in dump["gradient_norms"].values()
    assert_same_mathematics(found.step, Trained(job_of(nn.Identity(), clip_norm=1.0), 16).run(2).step)


def test_a_bad_sample_is_named_by_its_index(tmp_path: Path) -> None:
    """Of the data, not of the batch."""
    job = job_of()
    inputs, targets = job.data
    inputs[37, 2] = float("nan")
    with pytest.raises(RunFailed, match=r"the first was in the input \(samples 37\)"):
        Trained(job_of(data=(inputs, targets)), 16, dumps=tmp_path).run()


def own_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """PyTorch's mean over the targets that are not -100: of none of them 0 / 0."""
    return nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize("loss", ["cross_entropy", nn.CrossEntropyLoss(), own_mean])
def test_a_batch_without_a_valid_target_is_named_as_such(loss: Any, tmp_path: Path) -> None:
    """A lower learning rate would not help: the remedy is about the targets."""
    inputs, targets = job_of().data
    without = job_of(data=(inputs, torch.full_like(targets, -100)), loss=loss)
    with pytest.raises(RunFailed, match="the loss itself: no target of its 16 samples counts") as caught:
        Trained(without, 16, dumps=tmp_path).run()
    assert (caught.value.remedy or "").startswith("Leave samples without a valid target out of the data")
    assert json.loads(next(tmp_path.iterdir()).read_text())["counts_nothing"] is True


def test_a_loss_that_is_not_finite_over_valid_targets_is_not_one_of_them(tmp_path: Path) -> None:
    """The advice about learning rate and data stays where targets count."""
    with pytest.raises(RunFailed, match="the loss itself: every module's output was finite") as caught:
        Trained(job_of(loss=lambda output, _target: output.sum(1) / 0), 16, dumps=tmp_path).run()
    assert "valid target" not in (caught.value.remedy or "")


class Overflowing(nn.Module):
    """Infinite where an input is large."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The input, times the exponential of its square's hundredth."""
        return inputs * (inputs.square() / 100).exp()


def test_a_captured_plan_names_the_module_too(tmp_path: Path) -> None:
    """The redo passes through the modules, which repeating what was captured would not."""
    layers = (nn.Linear(6, 8), Overflowing(), nn.Linear(8, 2))
    job = job_of(model=lambda: nn.Sequential(*layers).double(), clip_norm=1.0, coupling_group=None)
    found = Trained(job, Plan(device="cpu", micro_batch=16, captured=True), SEPARABLE, dumps=tmp_path)
    source = source_of(found.step)
    second = list(source.batches(Position(), 2))[1]
    with torch.no_grad():
        job.data[0][second.indices[0]] *= 1e5
    with pytest.raises(RunFailed, match=r"at update 2; the first was in the output of 1 \(Overflowing\)"):
        found.run()


def test_under_fp16_the_module_is_named_too(tmp_path: Path) -> None:
    """The redo looks for no loss scale, which would end before there is a report."""
    inputs, targets = job_of().data
    layers = (nn.Linear(6, 8), Breaking(3, 4), nn.Linear(8, 2))
    job = job_of(
        model=lambda: nn.Sequential(*layers), data=(inputs.float(), targets), numerics=["fp16"], coupling_group=None
    )
    found = Trained(job, Plan(device="cpu", micro_batch=16, precision="fp16"), SEPARABLE, dumps=tmp_path)
    with pytest.raises(RunFailed, match=r"at update 3; the first was in the output of 1 \(Breaking\)"):
        found.run()
    [path] = tmp_path.iterdir()
    dump = json.loads(path.read_text())
    assert (dump["loss"], dump["problem"], len(dump["gradient_norms"])) == ("nan", None, 4)


def test_bad_weights_are_named() -> None:
    """Where an update before this one broke them, no module is to blame."""
    found = Trained(job_of(), 16)
    with torch.no_grad():
        found.step.model[2].bias[0] = float("inf")
    with pytest.raises(RunFailed, match=r"in the weights before the update: 2\.bias"):
        found.run()


def test_updates_that_are_not_finite_are_left_out_where_the_job_says_so() -> None:
    """Weights, statistics and optimiser stay as they were before each; the next ones are made from there."""
    found = Trained(job_of(Breaking(3, 4), on_non_finite="skip"), 16).run(4)
    assert_same_mathematics(found.step, Trained(job_of(nn.Identity()), 16).run(2).step)
    told = [fields for kind, fields in found.told if kind == "skipped"]
    assert [(fields["samples"], fields["in_a_row"]) for fields in told] == [(32, 1), (48, 2)]
    assert len(told[0]["indices"]) == 16


def test_a_gradient_that_is_not_finite_is_left_out_too() -> None:
    """The loss is finite: the square root's slope at zero is not."""

    def rooted(model: nn.Module, batch: Any) -> stoker.Loss:
        output = model(batch[0])
        return stoker.Loss(output.pow(2).sum() + (output.sum() * 0).abs().sqrt(), len(output))

    found = Trained(job_of(loss=rooted, on_non_finite="skip", metrics=[]), 16)
    before = {name: tensor.clone() for name, tensor in everything_of(found.step).items()}
    found.run(1)
    assert "gradient's norm" in found.told[0][1]["why"]
    assert_bit_equal(everything_of(found.step), before)


def test_too_many_skipped_in_a_row_end_the_run() -> None:
    """A run that skips everything learns nothing."""
    with pytest.raises(RunFailed, match=rf"{MOST_SKIPPED + 1} updates in a row were not finite"):
        Trained(job_of(Breaking(3, 99), on_non_finite="skip"), 16).run(15)


def test_rolling_back_asks_for_fp32_and_in_fp32_for_nothing() -> None:
    """The same again would come to the same again."""
    step = Step(tiny_job(on_non_finite="roll_back"), Plan(device="cpu", micro_batch=16, precision="bf16"), SEPARABLE)
    with torch.no_grad():
        step.model[0].weight[0] = float("nan")
    batch = next(source_of(step).batches(Position(), 1))
    with pytest.raises(RollBack) as caught:
        make_update(Recovery(step), batch, Position(), 0.0)
    assert (caught.value.change.old.precision, caught.value.change.new.precision) == ("bf16", "fp32")
    with pytest.raises(RunFailed, match="in fp32 already"):
        Trained(job_of(Breaking(2, 9), on_non_finite="roll_back"), 16).run()
