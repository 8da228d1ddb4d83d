from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.stepping.model import build_model, on_meta
from stoker.stepping.model_copies import copied
from tests.stepping.models import make_job


class Noting(nn.Module):
    """A layer whose output a hook notes in an attribute of the model, which the hook's closure names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.noted: dict[str, torch.Tensor] = {}
        self.layer.register_forward_hook(lambda *args: self.noted.__setitem__("output", args[-1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """The gradients of a sum of outputs, by parameter."""
    model.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_kept(register: str) -> None:
    """A copy clips gradients where the model's hooks of its parameters do."""

    def clip(value: torch.Tensor) -> torch.Tensor | None:
        if value.grad is None:
            return value.clamp(max=0.5)
        value.grad.clamp_(max=0.5)
        return None

    model = nn.Linear(3, 3)
    for parameter in model.parameters():
        getattr(parameter, register)(clip)
    assert [float(gradient.max()) for gradient in gradients(copied(model))] == [0.5, 0.5]


def test_attributes_of_parameters_are_kept() -> None:
    """Marks by which an optimiser's groups are chosen are at the copy's parameters, also on the meta device."""
    model = nn.Linear(3, 3)
    model.weight.decays = False  # type: ignore[attr-defined]
    assert copied(model).weight.decays is False  # type: ignore[union-attr]
    assert on_meta(model).weight.decays is False  # type: ignore[union-attr]


def test_hook_that_names_its_model_notes_in_the_copy() -> None:
    """What a hook's closure calls the model is the copy in the copy's hook; the original is left alone."""
    model = Noting()
    own = copied(model)
    own(torch.ones(1, 3))
    assert isinstance(own, Noting)
    assert set(own.noted) == {"output"}
    assert not model.noted


@pytest.mark.parametrize("how", ["default", "bound method", "function in a function", "recursion", "replaced forward"])
def test_parts_are_found_however_a_function_names_them(how: str) -> None:
    """A copy's output follows its own weights, whatever way a hook or a replaced method refers to them."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if how == "default":
        model[0].register_forward_hook(lambda _module, _inputs, output, layer=model[1]: output + layer(output))
    elif how == "bound method":
        other = model[1].forward
        model[0].register_forward_hook(lambda *args: args[-1] + other(args[-1]))
    elif how == "function in a function":

        def added(output: torch.Tensor) -> torch.Tensor:
            return output + model[1](output)

        model[0].register_forward_hook(lambda *args: added(args[-1]))
    elif how == "recursion":

        def repeated(output: torch.Tensor, times: int) -> torch.Tensor:
            return repeated(model[1](output), times - 1) if times else output

        model.register_forward_hook(lambda *args: repeated(args[-1], 2))
    else:
        ordinary = model[0].forward
        model[0].forward = lambda x: 2 * ordinary(x)  # type: ignore[method-assign]
    own, x = copied(model), torch.ones(1, 3)
    assert torch.equal(own(x), model(x))
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.zero_()
    assert not own(x).any()


def test_functions_that_share_a_variable_share_it_in_the_copy() -> None:
    """Hooks that count in one variable, and name the model, go on counting together."""
    model = nn.Linear(3, 3)

    def counting(factor: int) -> Any:
        return functools.partial(lambda layer, *_, step: layer.counts.append(step), step=factor)

    model.counts = []  # type: ignore[assignment]
    shared: Any = model

    def first(*_: Any) -> None:
        shared.counts.append("first")

    def second(*_: Any) -> None:
        shared.counts.append("second")

    for hook in (first, second, counting(3)):
        model.register_forward_hook(hook)
    own: Any = copied(model)
    own(torch.ones(1, 3))
    assert own.counts == ["first", "second", 3]
    assert not shared.counts


def test_copied_functions_keep_their_names_and_attributes() -> None:
    """As `functools.wraps` does, but for the function that was copied."""
    model: Any = nn.Linear(3, 3)

    def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        """Scale the output."""
        return output * scale * (model.bias is not None)

    hook.priority = 1  # type: ignore[attr-defined]
    model.hook = hook
    own: Any = copied(model).hook
    assert own is not hook
    names = ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "__kwdefaults__", "__dict__")
    assert all(getattr(own, name) == getattr(hook, name) for name in names)


def test_what_is_not_of_the_model_stays_shared() -> None:
    """A list outside the model, in which a hook notes, is the same list for a copy."""
    model, outside = nn.Linear(3, 3), list[int]()
    model.register_forward_hook(lambda *_: outside.append(1))
    copied(model)(torch.ones(1, 3))
    assert outside == [1]


def test_parameters_given_in_place_of_copies_are_left_alone() -> None:
    """A copy that shares its parameters registers no hook twice."""
    model = nn.Linear(3, 3)
    calls: list[int] = []
    model.weight.register_hook(lambda _: calls.append(1))
    gradients(copied(model, {id(parameter): parameter for parameter in model.parameters()}))
    assert calls == [1]


def test_module_that_cannot_be_copied_is_refused() -> None:
    """A given model that still holds a result of a pass with its graph is refused with a remedy."""
    model = Noting()
    model(torch.ones(1, 3))
    with pytest.raises(BadJob, match="what is trained is a copy of the given Noting") as refused:
        build_model(make_job(model))
    assert "model=lambda" in str(refused.value.remedy)
