"""What is frozen stays bit for bit, what thaws is trained from its update on, and nothing remembers the way there."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadJob
from stoker.jobs.freezing import Freeze
from stoker.loading.datasets import datasets_of
from stoker.profiling.tracing.update import trace_update
from stoker.records import TraceSettings
from stoker.stepping.coupling import find_coupling
from stoker.stepping.frozen_parameters import describe_trained_share, with_all_unfrozen
from stoker.stepping.model import build_model, meta_model
from stoker.stepping.step import Step
from tests.stepping.driving import SEPARABLE, grouped, largest_difference, plan_of, source_of, train, trained
from tests.stepping.models import CLASSES, FEATURES, make_job, samples_of

GRADUAL = {"0.*": stoker.updates(4), "2.*": stoker.updates(2)}
OPTIMIZERS = {
    "sgd": stoker.SGD(lr=0.1),
    "momentum": stoker.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": stoker.AdamW(lr=0.01),
    "closure": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
}


def three_layers() -> nn.Module:
    """Three linear layers, numbers 0, 2 and 4."""
    layers = [nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers)


def with_norm() -> nn.Module:
    """A linear layer and its batch norm, then another layer."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))


def changed_in(step: Step, job: stoker.Job, updates: int) -> list[list[str]]:
    """Names of what changes in each of the first updates, of parameters and buffers."""
    found = []
    for update in range(updates):
        before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
        train(job, step, 1, begin=update)
        found.append([name for name, now in step.model.state_dict().items() if not torch.equal(now, before[name])])
    return found


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    [
        *itertools.product(("sgd", "momentum", "adamw"), ({}, {"optimizer_implementation": "fused"})),
        *itertools.product(("momentum", "adamw"), ({"captured": True}, {"micro": 5})),
        ("closure", {"micro": 5}),  # knows neither implementations nor captured passes
    ],
)
def test_each_layer_is_trained_from_its_update_on_and_stays_bit_for_bit_before(optimizer: str, plan: Any) -> None:
    """Under every way of executing an update, weight decay and momentum included."""
    job = make_job(three_layers, freeze=GRADUAL, optimizer=OPTIMIZERS[optimizer])
    plan = dict(plan)
    step = Step(job, plan_of(plan.pop("micro", 16), **plan), SEPARABLE)
    layers = [sorted({name.split(".")[0] for name in names}) for names in changed_in(step, job, 6)]
    assert layers == [["4"]] * 2 + [["2", "4"]] * 2 + [["0", "2", "4"]] * 2


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_every_plan_learns_the_same(optimizer: str) -> None:
    """In float64: other micro-batches, the fused implementation, and captured passes, which are noted again."""
    job = make_job(three_layers, freeze=GRADUAL, optimizer=OPTIMIZERS[optimizer], clip_norm=0.5, average=0.9)
    whole = trained(job, 16)
    assert largest_difference(trained(job, 3), whole) < 1e-12
    assert largest_difference(trained(job, 16, optimizer_implementation="fused"), whole) < 1e-12
    assert largest_difference(trained(job, 16, captured=True), whole) < 1e-12


def test_it_is_what_a_loop_by_hand_does() -> None:
    """Requiring gradients layer by layer, with PyTorch's own optimiser: the same weights, bit for bit."""
    job = make_job(three_layers, freeze=GRADUAL, optimizer=stoker.SGD(lr=0.1, momentum=0.9))
    step, model = Step(job, plan_of(16), SEPARABLE), build_model(job)
    batches = [batch.cut(0, batch.size) for batch in _batches(job, step, 6)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for update, (inputs, targets) in enumerate(batches):
        for layer, release in ((0, 4), (2, 2)):
            model[layer].requires_grad_(update >= release)  # type: ignore[index]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    train(job, step, 6)
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), model.parameters(), strict=True))


def test_nothing_is_remembered_so_that_going_back_is_exact() -> None:
    """A step that is asked for an early update after a late one freezes again what is frozen there."""
    job = make_job(three_layers, freeze=GRADUAL)
    step = Step(job, plan_of(16), SEPARABLE)
    train(job, step, 1, begin=5)
    assert [sorted({n.split(".")[0] for n in names}) for names in changed_in(step, job, 1)] == [["4"]]


def test_frozen_parameters_have_neither_gradient_nor_state_until_they_thaw() -> None:
    """Memory grows with what is trained."""
    job = make_job(three_layers, freeze=GRADUAL, optimizer=stoker.AdamW(lr=0.01))
    step = Step(job, plan_of(16), SEPARABLE)
    counts = []
    for update in range(5):
        train(job, step, 1, begin=update)
        counts.append(sum(1 for values in step.optimizer.state.values() if values))
    assert counts == [2, 2, 4, 4, 6]


@pytest.mark.parametrize("release", [None, stoker.updates(2)])
def test_statistics_of_a_frozen_batch_norm_are_kept(release: Any) -> None:
    """Neither moved nor looked past: it normalises by them until it thaws, and as in training from then on."""
    job = make_job(with_norm, freeze={"0.*": release, "1.*": release})
    step = Step(job, plan_of(16), grouped(16))
    moved = [any("running" in name for name in names) for names in changed_in(step, job, 4)]
    assert moved == [False, False, release is not None, release is not None]


def test_statistics_of_a_frozen_batch_norm_move_where_that_is_asked_for() -> None:
    """Its weight and bias stay nevertheless."""
    job = make_job(with_norm, freeze=Freeze(["0.*", "1.*"], "moving"))
    names = changed_in(Step(job, plan_of(16), grouped(16)), job, 1)[0]
    assert names == ["1.running_mean", "1.running_var", "1.num_batches_tracked", "3.weight", "3.bias"]


def test_a_batch_norm_without_parameters_goes_with_what_is_around_it() -> None:
    """Of a frozen part it keeps its statistics, of a trained one it does not."""

    def model() -> nn.Module:
        parts = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES, affine=False)) for _ in "ab"]
        return nn.Sequential(*parts, nn.Linear(FEATURES, CLASSES))

    names = changed_in(Step(job := make_job(model, freeze=("0.*",)), plan_of(16), grouped(16)), job, 1)[0]
    assert not any(name.startswith("0.") for name in names)
    assert "1.1.running_mean" in names


def test_dropout_of_a_frozen_part_goes_on() -> None:
    """As in a loop that says `model.train()`: freezing is about weights."""
    job = make_job(
        lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)), freeze=("0.*",)
    )
    assert build_model(job)[1].training  # type: ignore[index]


def test_a_frozen_batch_norm_couples_nothing_unless_it_thaws() -> None:
    """The probe looks at the model as it is at the end."""
    for release, kind in ((None, "separable"), (stoker.updates(2), "batch_norm")):
        job = make_job(with_norm, freeze={"0.*": release, "1.*": release})
        assert find_coupling(job, samples_of(job)).kind == kind


def test_a_tied_weight_is_frozen_by_either_name() -> None:
    """It is one parameter, whichever name the pattern has."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
            self.head.weight = self.first.weight

    for pattern in ("first.weight", "head.weight"):
        model = build_model(make_job(Tied, freeze=(pattern,)))
        assert not model.first.weight.requires_grad
        assert model.head.bias.requires_grad


def test_what_is_forecast_is_the_end_of_the_run() -> None:
    """The trace has the gradients and states of all that thaws; frozen for good, they are missing."""

    def state_bytes(**changed: Any) -> int:
        job = make_job(three_layers, optimizer=stoker.AdamW(lr=0.01), **changed)
        trace = trace_update(
            job, datasets_of(job), SEPARABLE, TraceSettings(target="cpu", capability="", micro_batch=4)
        )
        return sum(one.num_bytes for one in trace.storages if one.category == "optimizer state")

    whole, gradual, frozen = state_bytes(), state_bytes(freeze=GRADUAL), state_bytes(freeze=("0.*", "2.*"))
    assert frozen < gradual == whole


def test_outlines_are_frozen_as_models_are_and_the_users_module_is_left_alone() -> None:
    """Plans over several devices count what is trained by the outline."""
    module = three_layers()
    for model in (module, three_layers):
        found = meta_model(make_job(model, freeze=("0.*",)))
        assert [p.requires_grad for p in found.parameters()] == [False, False, True, True, True, True]
    assert all(p.requires_grad and p.device.type == "cpu" for p in module.parameters())


def test_what_is_trained_is_said_with_its_share() -> None:
    """Where it is not all, and where something thaws."""
    frozen, gradual, whole = (
        make_job(three_layers, freeze=one) for one in (("0.*", "2.*"), {"0.*": stoker.updates(3)}, None)
    )
    assert describe_trained_share(frozen, meta_model(frozen)) == "36 of 164 parameters are trained (22 %)"
    assert describe_trained_share(gradual, meta_model(gradual)) == (
        "164 of 164 parameters are trained (100 %); of these are trained 0.* after 3 updates"
    )
    assert describe_trained_share(whole, meta_model(whole)) is None


def test_a_thawed_job_trains_all_that_ever_is() -> None:
    """From the first update on: what has to be measured."""
    job = with_all_unfrozen(make_job(three_layers, freeze={"0.*": stoker.epochs(3), "2.*": None}))
    names = changed_in(Step(job, plan_of(16), SEPARABLE), job, 1)[0]
    assert {name.split(".")[0] for name in names} == {"0", "4"}


@pytest.mark.parametrize(
    ("freeze", "problem"),
    [
        (("body.*",), "'body.*' matches none of the 6 parameters of Sequential"),
        (("*",), "leaves nothing of Sequential to train"),
        (Freeze(["0.*"], but=("head.*",)), "'head.*' matches none"),
        ({"*": stoker.updates(2)}, "leaves nothing of Sequential to train at first"),
    ],
)
def test_patterns_that_leave_nothing_to_do_are_refused(freeze: Any, problem: str) -> None:
    """No match, or nothing left to train."""
    with pytest.raises(BadJob, match=problem.replace("*", r"\*")):
        build_model(make_job(three_layers, freeze=freeze))


def test_epochs_have_to_be_counted_first() -> None:
    """A step knows updates; the job's preparation knows its data."""
    with pytest.raises(BadJob, match=r"frozen for 1 epochs, and its updates were not counted"):
        Step(make_job(three_layers, freeze={"0.*": stoker.epochs(1)}), plan_of(16), SEPARABLE)


def _batches(job: stoker.Job, step: Step, updates: int) -> Any:
    return source_of(job, step).batches(datasets_of(job).extent(job).position(0), updates)


class Thawing(nn.Sequential):
    """Thaws its first layer in its third pass."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 8).requires_grad_(False), nn.Linear(8, CLASSES))
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes > 2:
            self[0].requires_grad_(True)
        return super().forward(x)


def test_a_model_that_thaws_itself_is_refused() -> None:
    """What is frozen at the start is not the optimiser's: it stayed as it was, and nothing said so."""
    job = make_job(Thawing)
    step = trained(job, 16, updates=2)
    with pytest.raises(BadJob, match=r"set requires_grad of 0\.weight and 1 more") as caught:
        train(job, step, 1, begin=2)
    assert "freeze" in (caught.value.remedy or "")
