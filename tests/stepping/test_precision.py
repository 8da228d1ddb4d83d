"""The arithmetic a plan names is the arithmetic that runs; the flags behind it are as they were afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from stoker.errors import BadJob
from stoker.records import Plan
from stoker.stepping.precision import products_in
from stoker.stepping.step import Step
from stoker.testing.simulated_gpu import is_simulated
from tests.stepping.driving import SEPARABLE, plan_of, train
from tests.stepping.models import cnn, images, make_job, mlp

GPU = torch.device("cuda", 0)
"""Flags can be set and read where there is no GPU."""


def flags() -> tuple[str, str, str]:
    """How matrix products, convolutions and recurrent layers of fp32 tensors are computed on a GPU."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision


def set_flags(matmul: str, conv: str, rnn: str) -> None:
    """Set them as PyTorch 2.9 and later have it."""
    torch.backends.cuda.matmul.fp32_precision = matmul
    torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision = conv, rnn


@pytest.fixture
def user_flags(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, str]]:
    """What a user's job file has set, in PyTorch's newer way or its older one."""
    before = flags()
    if request.param == "older":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    elif request.param == "newer":
        set_flags("tf32", "ieee", "tf32")
    try:
        yield flags()
    finally:
        torch.set_float32_matmul_precision("highest")
        set_flags(*before)


every_users = pytest.mark.parametrize("user_flags", ["none", "older", "newer"], indirect=True)


@every_users
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fp32_is_fp32(user_flags: tuple[str, str, str], precision: str) -> None:
    """PyTorch's default lets convolutions of fp32 tensors run in tf32, and so may a user's: a plan of fp32 does not."""
    with products_in(precision, GPU):
        assert "tf32" not in flags()
        assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "highest"
    assert flags() == user_flags


@every_users
def test_tf32_is_tf32(user_flags: tuple[str, str, str]) -> None:
    """Products, convolutions and recurrent layers, in the flags that the compiler reads as well."""
    with products_in("tf32", GPU):
        assert flags() == ("tf32", "tf32", "tf32")
        assert torch.get_float32_matmul_precision() == "high"
    assert flags() == user_flags


@pytest.mark.parametrize("user_flags", ["none", "older"], indirect=True)
def test_older_flags_can_be_read_afterwards(user_flags: tuple[str, str, str]) -> None:
    """PyTorch refuses to read them where they contradict the newer ones; the compiler would fail on that."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for precision in ("tf32", "fp32"):
        with pytest.raises(ZeroDivisionError), products_in(precision, GPU):
            raise ZeroDivisionError
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_a_cpu_keeps_its_flags() -> None:
    """They are a GPU's."""
    before = flags()
    with products_in("fp32", torch.device("cpu")):
        assert flags() == before


def test_a_cpu_has_no_tf32() -> None:
    """A plan made for a GPU is not silently run in fp32."""
    with pytest.raises(BadJob, match="precision is tf32, which a CPU does not have") as caught:
        Step(make_job(mlp), plan_of(16, precision="tf32"), SEPARABLE)
    assert "fp32" in str(caught.value.remedy)


def test_an_old_gpu_has_no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be run in fp32 as well; its compute capability decides."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    with pytest.raises(BadJob, match=r"cuda:0 has compute capability 7\.5; tf32 came with 8\.0"):
        Step(make_job(mlp), Plan(device="cuda:0", micro_batch=16, precision="tf32"), SEPARABLE)


@pytest.mark.gpu
@pytest.mark.skipif(is_simulated(), reason="a simulated GPU rounds as the CPU does")
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_products_on_a_gpu_are_rounded_as_told(precision: str) -> None:
    """Products and convolutions under fp32 are right to 1e-5; under tf32, with 10 bits of mantissa, they are not."""
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=random) for _ in range(2))
    image, kernel = torch.randn(8, 64, 16, 16, generator=random), torch.randn(64, 64, 3, 3, generator=random)
    with products_in(precision, GPU):
        results = [a.to(GPU) @ b.to(GPU), F.conv2d(image.to(GPU), kernel.to(GPU))]
    for found, exact in zip(results, [a.double() @ b.double(), F.conv2d(image.double(), kernel.double())], strict=True):
        error = float((found.cpu().double() - exact).norm() / exact.norm())
        assert (error < 1e-5) == (precision == "fp32")


@pytest.mark.gpu
@pytest.mark.skipif(is_simulated(), reason="a simulated GPU rounds as the CPU does")
def test_updates_on_a_gpu_obey_the_plans_precision() -> None:
    """From the same state, a convolutional network's update in tf32 is another than in fp32, and close to it."""
    job = make_job(cnn, data=images(32))
    steps = [Step(job, Plan(device="cuda:0", micro_batch=16, precision=p), SEPARABLE) for p in ("fp32", "fp32", "tf32")]
    for step in steps:
        train(job, step, 1)
    one, again, coarse = (torch.cat([p.detach().flatten() for p in step.model.parameters()]) for step in steps)
    torch.testing.assert_close(one, again, rtol=0, atol=1e-7)
    assert 0 < float((one - coarse).norm() / one.norm()) < 1e-2
