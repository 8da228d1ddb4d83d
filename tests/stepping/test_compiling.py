from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from stoker.errors import DoesNotFit
from stoker.jobs import Loss
from stoker.stepping import named_losses, torch_compile
from stoker.stepping.losses import TrainingObjective
from stoker.stepping.step import Step
from stoker.stepping.torch_compile import Compilation, compile_in_place, compiled_regions
from tests.stepping.driving import SEPARABLE, are_equal, largest_difference, plan_of, tensors_of, train
from tests.stepping.models import CLASSES, FEATURES, make_job, mlp, vectors

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which inductor calls on a CPU")


class Block(nn.Module):
    """A block like any other of its width."""

    def __init__(self, width: int = FEATURES) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


class Branching(Block):
    """What happens depends on the numbers, which a graph cannot hold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if x.sum() > 0:
            return x
        return 2 * x


def stack(blocks: list[nn.Module]) -> nn.Module:
    """Blocks between two layers."""
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Sequential(*blocks), nn.Linear(FEATURES, CLASSES))


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Captured and differentiated as always, and run by PyTorch's own kernels: in a second rather than a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def steps_of(model: Any, **plan: Any) -> tuple[Step, Step]:
    """The same job as it is and compiled."""
    job = make_job(model, coupling_group=16)
    plans = (plan_of(16, compile=wanted, **plan) for wanted in (False, True))
    plain, compiled = (Step(job, each, SEPARABLE, fewer_draws=False) for each in plans)
    return plain, compiled


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # inductor's own import
def test_a_compiled_model_makes_the_same_updates() -> None:
    """To the rounding of fp32, under the same names; model and loss, for the plan's own micro-batch alone."""
    from torch._dynamo.utils import counters

    job = make_job(mlp, data=vectors(40))  # batches of 16, 16 and 8 samples
    plain, compiled = (Step(job, plan_of(16, compile=wanted), SEPARABLE) for wanted in (False, True))
    counters.clear()
    for step in (plain, compiled):
        train(job, step, 6)
        with step.evaluation() as measure:
            measure(vectors(16), 16)
    assert counters["stats"]["unique_graphs"] == 2
    assert list(tensors_of(compiled)) == list(tensors_of(plain))
    assert largest_difference(compiled, plain) < 1e-4  # on some numbers of threads the bits are equal


def test_without_a_compiler_a_compiled_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is built, with what was looked for and what to do."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        DoesNotFit, match=r"no C\+\+ compiler is found here \(looked for g\+\+, clang\+\+, c\+\+\)"
    ) as caught:
        Step(make_job(mlp), plan_of(16, compile=True), SEPARABLE)
    assert "compile false" in str(caught.value.remedy)


def test_a_compiler_that_is_named_and_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CXX` names the one that PyTorch will call."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DoesNotFit, match="looked for no-such-compiler"):
        compile_in_place(nn.Linear(2, 2), torch.device("cpu"))


def test_a_gpu_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a C compiler, with which Triton starts its kernels."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DoesNotFit, match="Triton, which writes kernels for a GPU, is not installed"):
        compile_in_place(nn.Linear(2, 2), torch.device("cuda", 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(DoesNotFit, match="no C compiler is found here"):
        compile_in_place(nn.Linear(2, 2), torch.device("cuda", 0))


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(("checkpointed", "checkpointing"), [(0, "full"), (2, "full"), (2, "selective")])
def test_blocks_that_are_alike_share_their_code(checkpointed: int, checkpointing: str) -> None:
    """Four blocks, one graph, and one of the loss, checkpointed or not.

    Draws, running statistics and weights are those of the model.
    """
    from torch._dynamo.utils import counters

    counters.clear()
    plain, compiled = steps_of(
        lambda: stack([Block() for _ in range(4)]), checkpointed_blocks=checkpointed, checkpointing=checkpointing
    )
    assert compiled.compilation is not None
    assert len(compiled.compilation.regions) == 4
    for step in (plain, compiled):
        train(step.job, step, 3)
    assert compiled.compilation.problem is None
    # Selective checkpointing is in the graph; blocks that keep everything have another one.
    assert counters["stats"]["unique_graphs"] == (3 if checkpointing == "selective" else 2)
    assert list(tensors_of(compiled)) == list(tensors_of(plain))
    assert largest_difference(compiled, plain) < 1e-5


class InPlace(nn.Module):
    """A residual layer that changes what a linear layer gave."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        return x_BW + self.out(self.linear(x_BW).mul_(3.0).tanh())


def test_what_is_compiled_by_itself_is_most_of_the_model() -> None:
    """Blocks of many kinds, few blocks, or blocks and a larger rest: then the model is one region."""
    alike = stack([Block() for _ in range(4)])
    assert compiled_regions(alike) == list(alike[1])
    for other in (
        stack([Block(), Block()]),
        nn.Sequential(*(nn.Sequential(Block(width), nn.Linear(width, width + 1)) for width in range(4, 8))),
        nn.Sequential(stack([Block() for _ in range(3)]), *(nn.Tanh() for _ in range(20))),
    ):
        assert compiled_regions(other) == [other]


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("checkpointed", [0, 4])
def test_a_model_that_cannot_be_captured_runs_as_it_is_and_says_which_line(checkpointed: int) -> None:
    """The same bits as uncompiled: nothing of the update was done, or drawn, before that was known."""
    plain, compiled = steps_of(lambda: stack([Branching() for _ in range(4)]), checkpointed_blocks=checkpointed)
    for step in (plain, compiled):
        train(step.job, step, 3)
    assert compiled.compilation is not None
    assert compiled.compilation.problem is not None
    assert "cannot be compiled and runs as it is: Data-dependent branching" in compiled.compilation.problem
    assert "test_compiling.py:" in compiled.compilation.problem
    assert "(`if x.sum() > 0:`)" in compiled.compilation.problem
    assert are_equal(compiled, plain)


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("most", [3, 64])
def test_inputs_of_too_many_shapes_run_as_they_are(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The limit is Stoker's own at every call, not PyTorch's 8; beyond it nothing fails, and the reason is reported."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch_compile, "MOST_SHAPES", most)
    counters.clear()
    model = nn.Sequential(nn.Linear(FEATURES, 2), nn.Tanh())
    batches = [torch.randn(size, FEATURES) for size in range(2, 13)]
    expected = [model(batch) for batch in batches]
    compilation = compile_in_place(model, torch.device("cpu"))
    for batch, output in zip(batches, expected, strict=True):
        torch.testing.assert_close(model(batch), output)
    assert counters["stats"]["unique_graphs"] == min(most, len(batches))
    if most < len(batches):
        assert "shapes, or values, that it was not yet compiled for (at most 3 are)" in str(compilation.problem)
    else:
        assert compilation.problem is None


@pytest.mark.usefixtures("traced_only")
def test_selective_checkpointing_goes_with_changes_in_place_in_compiled_code() -> None:
    """What is kept of a linear layer is what it gave, before it was changed."""
    make = lambda: stack([InPlace() for _ in range(3)])  # noqa: E731 - a model's constructor
    plain, compiled = steps_of(make, checkpointed_blocks=3, checkpointing="selective")
    for step in (plain, compiled):
        train(step.job, step, 3)
    assert compiled.compilation is not None
    assert compiled.compilation.problem is None
    assert largest_difference(compiled, plain) < 1e-5


@pytest.mark.parametrize(("checkpointed", "checkpointing"), [(0, "full"), (3, "full"), (3, "selective")])
def test_a_compiler_that_fails_on_the_backward_pass_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, checkpointed: int, checkpointing: str
) -> None:
    """Both passes are compiled before anything is computed, so that the first update can be made without.

    An evaluation before it, which runs uncompiled, makes no difference.
    """
    from torch._dynamo.backends.common import aot_autograd

    def failing(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    backend = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=failing)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    plain, compiled = steps_of(
        lambda: stack([Block() for _ in range(3)]), checkpointed_blocks=checkpointed, checkpointing=checkpointing
    )
    for step in (plain, compiled):
        with step.evaluation() as measure:
            measure(vectors(16), 16)
        train(step.job, step, 3)
    assert compiled.compilation is not None
    assert "no such kernel" in str(compiled.compilation.problem)
    assert are_equal(compiled, plain)
    torch._dynamo.reset()


def problem_of(objective: TrainingObjective) -> str | None:
    """Why its loss, asked to be compiled, is not."""
    compiled: Any = objective._compiled
    return None if compiled is None else compiled._compilation.problem


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_of_a_compiled_loss_no_logits_in_full_precision_are_kept() -> None:
    """Nor their softmax, each twice the logits; sum, count and gradient are those of the loss as it is."""
    logits = torch.randn(4, 6, 50, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    target = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(1))
    target[0, 0] = -100

    def result_of(*, is_compiled: bool) -> tuple[Loss, torch.Tensor, int]:
        objective = TrainingObjective(make_job(mlp, loss="token_cross_entropy"))
        if is_compiled:
            objective.compile(Compilation(()))
        num_wide = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal num_wide
            num_wide += tensor.dtype == torch.float32 and tensor.numel() >= logits.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = objective.loss(lambda given: given, (logits, target), 4)
        assert problem_of(objective) is None
        return loss, torch.autograd.grad(loss.sum, logits)[0].float(), num_wide

    (plain, gradient, some), (compiled, same, none) = (result_of(is_compiled=wanted) for wanted in (False, True))
    assert (some > 0, none) == (True, 0)
    assert torch.allclose(compiled.sum, plain.sum, rtol=1e-5)
    assert int(compiled.count) == int(plain.count) == 23
    assert torch.allclose(same, gradient, atol=1e-2)


@pytest.mark.usefixtures("traced_only")
def test_a_loss_that_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model stays compiled, and the loss is what it was."""

    def branching(output: torch.Tensor, target: torch.Tensor, **_settings: Any) -> torch.Tensor:
        total = nn.functional.cross_entropy(output, target, reduction="sum")
        return total if total > 0 else -total

    monkeypatch.setitem(named_losses.SUMS, "cross_entropy", branching)
    job, (plain, compiled) = make_job(mlp, coupling_group=16), steps_of(mlp)
    assert train(job, compiled, 2) == pytest.approx(train(job, plain, 2), rel=1e-5)
    assert compiled.compilation is not None
    assert compiled.compilation.problem is None
