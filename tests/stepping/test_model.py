from __future__ import annotations

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.stepping.model import build_model, bytes_of, num_parameters, weights_digest
from tests.stepping.models import make_job, mlp


def test_factory_is_seeded_by_the_job() -> None:
    """The same seed makes the same weights whatever was drawn before; another seed makes others."""
    first = weights_digest(build_model(make_job(mlp, seed=1)))
    torch.rand(10)
    torch.manual_seed(5)
    assert weights_digest(build_model(make_job(mlp, seed=1))) == first
    assert weights_digest(build_model(make_job(mlp, seed=2))) != first


def test_making_a_model_leaves_the_generator_alone() -> None:
    """What the caller draws next does not depend on whether a model was made."""
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    build_model(make_job(mlp))
    assert torch.equal(torch.rand(3), expected)


def test_module_given_is_copied() -> None:
    """Training a job whose model is a module leaves that module as it was."""
    module = mlp()
    model = build_model(make_job(module))
    with torch.no_grad():
        model[0].weight.zero_()
    assert float(module[0].weight.detach().abs().sum()) > 0


def test_model_is_in_training_mode() -> None:
    """A module given in evaluation mode is trained in training mode."""
    assert build_model(make_job(mlp().eval())).training


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (lambda: 3, "made a int, wanted a torch.nn.Module"),
        (lambda: nn.Sequential(nn.ReLU()), "Sequential has no parameter to train"),
        (lambda: mlp().requires_grad_(False), "Sequential has no parameter to train"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), r"0\.weight of Sequential has no size before the first batch"),
    ],
    ids=["a number", "no parameters", "frozen parameters", "lazy layer"],
)
def test_what_cannot_be_trained_is_refused(made: object, problem: str) -> None:
    """A factory must return a module with something to train."""
    with pytest.raises(BadJob, match=problem):
        build_model(make_job(made))  # type: ignore[arg-type]


class Holding(nn.Linear):
    """A layer with one more buffer."""

    def __init__(self, value: torch.Tensor, *, persistent: bool = True) -> None:
        super().__init__(3, 2)
        self.register_buffer("held", value, persistent=persistent)


class Extra(nn.Linear):
    """A layer whose state has more than tensors."""

    def get_extra_state(self) -> dict[str, list[str]]:
        """Words."""
        return {"words": ["a"]}


@pytest.mark.parametrize(
    ("make", "problem", "remedy"),
    [
        (lambda: Holding(torch.eye(3).to_sparse()), r"held .* is a sparse tensor \(sparse_coo\)", "two buffers"),
        (lambda: Holding(torch.eye(3).to_sparse_csr()), r"is a sparse tensor \(sparse_csr\)", "two buffers"),
        (lambda: Holding(torch.eye(3).to_sparse(), persistent=False), r"held .* is a sparse tensor", "two buffers"),
        (lambda: Holding(torch.ones(2, dtype=torch.complex128)), "held .* is a tensor of complex128", "complex64"),
        (lambda: Extra(3, 2), "_extra_state .* is a dict", "Make it a tensor"),
    ],
    ids=["sparse", "sparse rows", "sparse, not in the state", "complex", "extra state"],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_state_that_no_checkpoint_holds_is_refused(make: object, problem: str, remedy: str) -> None:
    """Before anything is spent: a run failed at its first checkpoint, or the model could not be described."""
    with pytest.raises(BadJob, match=problem) as caught:
        build_model(make_job(make))  # type: ignore[arg-type]
    assert remedy in (caught.value.remedy or "")


def test_a_complex_buffer_that_is_not_in_the_state_is_taken() -> None:
    """As rotations of positions in double precision, which no checkpoint has to hold."""
    model = build_model(make_job(lambda: Holding(torch.ones(2, dtype=torch.complex128), persistent=False)))
    assert model.held.dtype is torch.complex128


def test_digest_sees_every_bit() -> None:
    """Names, types, shapes and values of parameters and buffers are all part of the digest."""
    plain, changed = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    assert weights_digest(plain) == weights_digest(changed)
    changed.running_mean[0] = torch.finfo(torch.float32).tiny
    assert weights_digest(plain) != weights_digest(changed)
    assert weights_digest(nn.BatchNorm1d(3).double()) != weights_digest(plain)
    assert weights_digest(nn.Sequential(nn.BatchNorm1d(3))) != weights_digest(plain)


def test_tied_parameters_count_once() -> None:
    """Sizes count what memory holds."""
    one, two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    two.weight = one.weight
    tied = nn.Sequential(one, two)
    assert num_parameters(tied) == 9
    assert bytes_of(tied.parameters()) == 36
