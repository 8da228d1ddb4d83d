from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import SGD, AdamW, Muon, Optimizer
from stoker.records import Plan
from stoker.stepping import muon as muon_module
from stoker.stepping.muon import MuonOptimizer as Implementation
from stoker.stepping.muon import divided, orthogonalized
from stoker.stepping.step import Step
from stoker.stepping.torch_optimizers import build_optimizer
from stoker.training.checkpoints import restore
from stoker.zoo import GPT
from tests.stepping.driving import grouped, largest_difference, trained
from tests.stepping.models import images, make_job, mlp, vectors
from tests.training.builders import advance, assert_bit_equal, everything_of, saved, step_of, tiny_job

RESTS: dict[str, Optimizer] = {
    "SGD": SGD(lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": AdamW(lr=1e-2, groups={"*bias": {"weight_decay": 0.0}}),
}


def muon(rest: str = "AdamW", **changed: Any) -> Muon:
    """Muon with one of RESTS."""
    return Muon(**{"lr": 0.02, "rest": RESTS[rest], **changed})


def cnn() -> nn.Module:
    """Two convolutions with batch norm over `images`, a hidden matrix and an output layer."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 8),
        nn.ReLU(),
        nn.Linear(8, 4),
    )


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16), (12, 3, 3, 3), (5, 1)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_singular_values_come_near_one(shape: tuple[int, ...], size: float) -> None:
    """Wide, tall, square and convolutional, small and large: the directions stay, their sizes are evened out."""
    (found,) = orthogonalized([size * random(*shape)], steps=7)
    assert found.shape == shape
    singular = torch.linalg.svdvals(found.flatten(1))
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    left, _, right = torch.linalg.svd(random(*shape).flatten(1), full_matrices=False)
    alike = torch.diagonal(left.mT @ found.flatten(1) @ right.mT)
    torch.testing.assert_close(alike.sort().values, singular.sort().values, rtol=1e-6, atol=1e-6)


def test_matrices_of_one_shape_do_together_what_each_does_alone() -> None:
    """The products are shared, the results are not; a zero gradient stays zero."""
    matrices = [random(6, 10, seed=1), random(10, 6, seed=2), random(6, 10, seed=3), torch.zeros(6, 10).double()]
    together = orthogonalized(matrices, steps=5, adjust="original")
    for matrix, found in zip(matrices, together, strict=True):
        torch.testing.assert_close(found, orthogonalized([matrix], 5, adjust="original")[0], rtol=1e-12, atol=1e-12)
    assert not together[3].any()


def test_large_matrices_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many may lie side by side, updates are the same."""
    moved = []
    for most in (1, 130, 2**22):
        monkeypatch.setattr(muon_module, "_MOST_TOGETHER", most)
        parameters = [nn.Parameter(random(6, 10, seed=seed)) for seed in range(5)]
        for parameter in parameters:
            parameter.grad = parameter.detach().cos()
        Implementation([{"params": parameters}], None, lr=0.1, weight_decay=0.1).step()
        moved.append([parameter.detach() for parameter in parameters])
    for found in moved[:2]:
        torch.testing.assert_close(found, moved[2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_updates_are_those_of_pytorchs_muon(adjust: str, shape: tuple[int, int]) -> None:
    """Several updates with weight decay against torch.optim.Muon, whose products are in bf16 always."""
    weights = random(*shape).float()
    mine, theirs = nn.Parameter(weights.clone()), nn.Parameter(weights.clone())
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3, "nesterov": True}
    ours = Implementation([{"params": [mine]}], None, adjust=adjust, products_in=torch.bfloat16, **settings)
    pytorchs = torch.optim.Muon([theirs], adjust_lr_fn=adjust, **settings)
    for update in range(5):
        mine.grad = theirs.grad = random(*shape, seed=update).float()
        ours.step()
        pytorchs.step()
    moved = (theirs - weights).norm()
    assert moved > 0.1
    assert (mine - theirs).norm() < 0.02 * moved


def test_who_moves_what() -> None:
    """Hidden matrices are Muon's; embeddings, vectors, the output layer and what `exclude` names are the rest's."""
    model = nn.ModuleDict(
        {
            "tokens": nn.Embedding(12, 8),
            "first": nn.Linear(8, 8),
            "norm": nn.LayerNorm(8),
            "frozen": nn.Linear(8, 8),
            "second": nn.Conv1d(8, 8, 3),
            "third": nn.Linear(8, 8, bias=False),
            "output": nn.Linear(8, 12, bias=False),
        }
    )
    model["frozen"].requires_grad_(requires_grad=False)
    hidden, others = divided(model, muon(exclude=("third.*",)))
    assert set(hidden) == {"first.weight", "second.weight"}
    assert set(others) == {
        "tokens.weight",
        "first.bias",
        "norm.weight",
        "norm.bias",
        "second.bias",
        "third.weight",
        "output.weight",
    }


def test_of_a_tied_output_layer_no_hidden_matrix_takes_the_place() -> None:
    """It is the embedding already; the last block's own matrix is as hidden as the others."""
    of_muon = [set(divided(GPT(layers=1, width=8, heads=2, vocab=12, tied=tied), muon())[0]) for tied in (True, False)]
    assert of_muon[0] == of_muon[1]
    assert "blocks.0.mlp.out.weight" in of_muon[0]


def test_a_model_without_hidden_matrices_is_refused() -> None:
    """So is a pattern that matches nothing; each says what is missing."""
    with pytest.raises(BadJob, match="Muon has nothing to do: Linear has no hidden matrix"):
        divided(nn.Linear(4, 2), muon())
    with pytest.raises(BadJob, match=r"exclude=…\): 'head.\*' matches no parameter"):
        divided(mlp(), muon(exclude=("head.*",)))


def test_normalized_matrices_keep_their_size() -> None:
    """Before each update a matrix has the norm sqrt(rows): with a rate of nearly 0 that is what is left."""
    parameter = nn.Parameter(random(9, 4, 2))
    parameter.grad = random(9, 4, 2, seed=1)
    Implementation([{"params": [parameter]}], None, lr=1e-12, normalize=True).step()
    assert float(parameter.detach().norm()) == pytest.approx(3.0)


def test_rates_of_both_parts_follow_the_schedule() -> None:
    """The factor multiplies the rate of matrices, of groups and of the rest."""
    job = make_job(mlp, optimizer=muon(groups={"0.*": {"lr": 0.5}}, lr=0.1), schedule=lambda _: 0.5)
    with pytest.raises(BadJob, match="nothing to do"):  # two layers: the hidden one and the output layer
        build_optimizer(make_job(mlp, optimizer=muon(exclude=("0.*",))), mlp(), Plan(device="cpu", micro_batch=16))
    step = step_of(job)
    step.set_rates(0.0)
    assert [group["lr"] for group in step.optimizer.param_groups] == [0.25, 0.005, 0.005]


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("implementation", ["default", "fused", "foreach"])
def test_a_checkpoint_goes_on_bit_equal(tmp_path: Path, rest: str, implementation: str) -> None:
    """Both parts' state comes back, and training on gives the same bits as never having stopped."""
    plan = Plan(device="cpu", micro_batch=16, optimizer_implementation=implementation)  # type: ignore[arg-type]
    job = tiny_job(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2)), optimizer=muon(rest)
    )
    whole, fresh = step_of(job, plan), step_of(job, plan)
    advance(whole, 0, 8)
    restore(fresh, *saved(whole, tmp_path, 8))
    assert_bit_equal(everything_of(fresh), everything_of(whole))
    assert sum(name.startswith("optimizer") for name in everything_of(whole)) >= 6
    advance(whole, 8, 15)
    advance(fresh, 8, 15)
    assert_bit_equal(everything_of(fresh), everything_of(whole))


@pytest.mark.parametrize("rest", RESTS)
def test_a_copy_goes_on_alike(rest: str) -> None:
    """A deep copy of model and optimiser together has both parts and their state, and shares nothing."""
    parameters = [nn.Parameter(random(4, 6)), nn.Parameter(random(6))]
    beside = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[rest](parameters[1:], **RESTS[rest].settings())
    optimizer = Implementation([{"params": parameters[:1]}], beside, lr=0.1)

    def move(weights: list[nn.Parameter], one: torch.optim.Optimizer) -> None:
        for parameter in weights:
            parameter.grad = parameter.detach().sin()
        one.step()

    move(parameters, optimizer)
    twins, twin = copy.deepcopy((parameters, optimizer))
    move(twins, twin)
    assert not torch.equal(twins[0], parameters[0])
    move(parameters, optimizer)
    assert all(map(torch.equal, twins, parameters))


def test_a_micro_batch_changes_nothing() -> None:
    """Cut into micro-batches, an update is the same to 1e-9 after twelve of them: nothing in it sees how it was cut."""
    job = make_job(mlp, data=vectors(150), batch=70, optimizer=muon("SGD"))
    assert largest_difference(trained(job, 7), trained(job, 70)) < 1e-9


def test_memory_format_changes_nothing() -> None:
    """Channels last, convolutions are the same matrices: equal to 1e-9 after twelve updates in float64."""
    job = make_job(cnn, data=images(), batch=16, optimizer=muon("SGD", normalize=True, adjust="none"))
    layouts = [trained(job, 16, grouped(16), memory_format=each) for each in ("contiguous", "channels_last")]
    assert largest_difference(*layouts) < 1e-9


def test_products_are_in_bf16_only_under_a_plan_in_bf16() -> None:
    """The plan's precision decides; weights and momenta stay in fp32, and the two plans move in the same way."""
    job = make_job(cnn, data=images(), batch=16, optimizer=muon("SGD"))
    moved = {}
    for precision in ("fp32", "bf16"):
        plan = Plan(device="cpu", micro_batch=16, precision=precision)
        step = Step(job, plan, grouped(16))
        before = {name: tensor.clone() for name, tensor in step.model.named_parameters()}
        for name, tensor in before.items():
            step.model.get_parameter(name).grad = torch.ones_like(tensor).cumsum(0)
        step.optimizer.step()
        moved[precision] = step.model.get_parameter("3.weight").detach() - before["3.weight"]
        assert all(value.dtype == torch.float32 for state in step.optimizer.state.values() for value in state.values())
    assert not torch.equal(moved["fp32"], moved["bf16"])
    torch.testing.assert_close(moved["fp32"], moved["bf16"], rtol=0.1, atol=2e-4)


def test_it_learns() -> None:
    """Thirty updates bring the loss of a problem that can be learned below half."""
    inputs = vectors(64)[0]
    job = make_job(lambda: mlp(width=32), optimizer=muon(lr=0.05), data=(inputs, inputs.argmax(1) % 4))
    step = step_of(job)

    def loss() -> float:
        return float(nn.functional.cross_entropy(step.model(inputs), inputs.argmax(1) % 4).detach())

    first = loss()
    advance(step, 0, 30)
    assert loss() < 0.5 * first
