from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from stoker.errors import DoesNotFit
from stoker.stepping import Step
from stoker.stepping.compiling import compile_in_place
from tests.stepping.driving import SEPARABLE, largest_difference, plan_of, tensors_of, train
from tests.stepping.models import make_job, mlp, vectors

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which inductor calls on a CPU")


@needs_compiler
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # inductor's own import
def test_a_compiled_model_makes_the_same_updates() -> None:
    """To the rounding of fp32, under the same names; only the plan's own micro-batch is compiled."""
    from torch._dynamo.utils import counters

    job = make_job(mlp, data=vectors(40))  # batches of 16, 16 and 8 samples
    plain, compiled = (Step(job, plan_of(16, compile=wanted), SEPARABLE) for wanted in (False, True))
    counters.clear()
    for step in (plain, compiled):
        train(job, step, 6)
        with step.evaluation() as measure:
            measure(vectors(16), 16)
    assert counters["frames"] == {"total": 1, "ok": 1}
    assert list(tensors_of(compiled)) == list(tensors_of(plain))
    assert 0 < largest_difference(compiled, plain) < 1e-4


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
