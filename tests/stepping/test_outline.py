from __future__ import annotations

import pytest
import torch
from torch import nn

from stoker.stepping.model import build_model, meta_model
from tests.stepping.models import make_job, mlp


def test_an_outline_has_sizes_and_no_weights() -> None:
    """Names, shapes and types are those of the model that would be made."""
    job = make_job(mlp)
    found = meta_model(job)
    assert {parameter.device.type for parameter in found.parameters()} == {"meta"}
    real = build_model(job)
    assert [(name, p.shape, p.dtype) for name, p in found.named_parameters()] == [
        (name, p.shape, p.dtype) for name, p in real.named_parameters()
    ]


def test_what_would_not_fit_is_outlined_all_the_same() -> None:
    """A layer of 4 TB is made in no memory."""
    found = meta_model(make_job(lambda: nn.Linear(10**6, 10**6)))
    assert sum(parameter.numel() for parameter in found.parameters()) == 10**12 + 10**6


def test_a_module_given_is_its_own_outline() -> None:
    """It is there already."""
    module = mlp()
    assert meta_model(make_job(module)) is module


def test_a_model_that_looks_at_its_weights_is_made_for_real() -> None:
    """A function that reads a value cannot run without weights."""

    def looks() -> nn.Module:
        layer = nn.Linear(4, 4)
        return nn.Sequential(layer, nn.ReLU() if layer.weight.sum().item() > -1e9 else nn.Tanh())

    found = meta_model(make_job(looks))
    assert {parameter.device.type for parameter in found.parameters()} == {"cpu"}


def test_the_outline_draws_nothing() -> None:
    """Random numbers that follow are as if there had been none, even where the model is made for real."""

    def looks() -> nn.Module:
        layer = nn.Linear(4, 4)
        layer.weight.sum().item()
        return layer

    for make in (mlp, looks):
        torch.manual_seed(5)
        wanted = torch.rand(3)
        torch.manual_seed(5)
        meta_model(make_job(make))
        assert torch.equal(torch.rand(3), wanted)


def by_way_of_numpy() -> nn.Module:
    """Takes rates of dropout from a tensor by `.numpy()`, which is a TypeError where there are no values."""
    rates = torch.linspace(0, 0.5, 2).numpy()
    return nn.Sequential(nn.Linear(6, 4), *[nn.Dropout(float(rate)) for rate in rates])


def test_a_model_that_looks_at_values_in_any_way_is_made_for_real() -> None:
    """Whatever the error its look at a tensor without values ends in."""
    model = meta_model(make_job(by_way_of_numpy))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.0, 0.5]


def test_a_function_that_fails_tells_the_error_of_the_real_model() -> None:
    """And not that of the attempt without memory, which may be another."""
    devices: list[str] = []

    def fails() -> nn.Module:
        devices.append(torch.empty(1).device.type)
        raise ValueError(f"on {devices[-1]}")

    with pytest.raises(ValueError, match="on cpu") as caught:
        meta_model(make_job(fails))
    assert devices == ["meta", "cpu"]
    assert caught.value.__context__ is None


def test_an_outline_has_the_sizes_of_what_would_be_drawn() -> None:
    """Normal draws are left out of it; what names a device or a generator is made as asked."""

    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = nn.Parameter(torch.randn(2, 3, dtype=torch.float64) * 0.02)
            self.filled = nn.Parameter(torch.empty(4).normal_(1.0, std=2.0))
            self.named = nn.Parameter(torch.mul(input=torch.randn(3, generator=None), other=0.5))
            self.register_buffer("given", torch.randn(5, device="cpu"))
            nn.init.normal_(self.scaled, std=0.02)

    found = meta_model(make_job(Drawn))
    described = {name: (t.device.type, tuple(t.shape), t.dtype) for name, t in found.state_dict().items()}
    assert described == {
        "scaled": ("meta", (2, 3), torch.float64),
        "filled": ("meta", (4,), torch.float32),
        "named": ("meta", (3,), torch.float32),
        "given": ("cpu", (5,), torch.float32),
    }
    assert found.get_buffer("given").count_nonzero() == 5


def test_a_model_that_fills_weights_it_may_not_is_made_for_real() -> None:
    """In place into a parameter that wants a gradient: the error is PyTorch's, of the model itself."""

    def fills() -> nn.Module:
        layer = nn.Linear(4, 4)
        layer.weight.normal_()
        return layer

    with pytest.raises(RuntimeError, match="leaf Variable"):
        meta_model(make_job(fills))
