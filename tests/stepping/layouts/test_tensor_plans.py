"""Which layers are divided, and what is said where they cannot be, without any process."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from torch import nn

from stoker.records import Layout
from stoker.stepping.layouts.tensor_plans import Fused, divided_dimensions, rules_of, tensor_plan_problem
from stoker.zoo import GPT, Llama


def gpt(**changed: int) -> GPT:
    """A small one."""
    return GPT(**{"layers": 2, "width": 24, "heads": 4, "context": 8, "vocab": 12, **changed})


def mlp(plan: object) -> nn.Module:
    """Two layers with a plan."""
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))
    model.tensor_plan = plan  # type: ignore[assignment]
    return model


class Published(nn.Module):
    """Carries a plan as Hugging Face models do: the base model's in its configuration, its own for the last layer."""

    base_model_prefix = "model"
    _tp_plan = {"last": "colwise_gather_output"}  # noqa: RUF012 - as there

    def __init__(self, style: str = "rowwise") -> None:
        super().__init__()
        self.config = SimpleNamespace(
            base_model_tp_plan={"layers.*.up": "colwise", "layers.*.down": style, "layers.*.router": "colwise"}
        )
        block = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
        self.model = nn.ModuleDict({"layers": nn.ModuleList([block])})
        self.last = nn.Linear(4, 6)


def test_every_layer_of_a_gpt_has_its_rule() -> None:
    """Blocks are named one by one; queries, keys and values are divided each."""
    rules = rules_of(gpt())
    assert isinstance(rules, dict)
    assert rules["blocks.1.attention.qkv"] == Fused(3)
    assert rules["blocks.0.mlp.out"] == "rowwise"
    assert rules["head"] == "output"


def test_the_parameters_divided_are_the_matrices() -> None:
    """By rows where outputs are divided, by columns where inputs are; norms and added biases stay whole."""
    found = divided_dimensions(gpt(layers=1), 2)
    assert found == {
        "tokens.weight": 0,
        "blocks.0.attention.qkv.weight": 0,
        "blocks.0.attention.out.weight": 1,
        "blocks.0.mlp.into.weight": 0,
        "blocks.0.mlp.into.bias": 0,
        "blocks.0.mlp.out.weight": 1,
        "head.weight": 0,
    }


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    """The layers of the vocabulary are left out, the others divided."""
    found = divided_dimensions(gpt(vocab=13), 2)
    assert "tokens.weight" not in found
    assert "head.weight" not in found
    assert "blocks.0.mlp.out.weight" in found


@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        (gpt(), Layout(tensor=3), r"4 heads, which 3 .* do not divide\. Use a tensor group of 2, 4\."),
        (Llama(1, 24, 6, 2, 12, 12, 8), Layout(tensor=6), r"attention\.key has 2 heads"),
        (Llama(1, 24, 6, 6, 10, 12, 8), Layout(tensor=6), r"gate has 10 features, .* group of 2, 5, 10"),
        (gpt(context=9), Layout(tensor=2, sequence=True), r"9 tokens .* group of 3, 9"),
        (nn.Sequential(nn.Linear(2, 2)), Layout(tensor=2), r"layers of Sequential .* tensor_plan"),
        (mlp({"0": "colwise", "3": "rowwise"}), Layout(tensor=2), r"'3' matches no module"),
        (mlp({"0": "columns"}), Layout(tensor=2), r"'0' is to be 'columns'"),
        (mlp({"1": "colwise"}), Layout(tensor=2), r"1 is to be colwise, but is a ReLU"),
        (mlp({"0": "colwise", "2": "rowwise"}), Layout(tensor=2, sequence=True), r"cannot be divided along the seq"),
        (Published("ep_router"), Layout(tensor=2), r"carries has 'ep_router'"),
    ],
)
def test_what_does_not_divide_is_said_with_numbers(model: nn.Module, layout: Layout, said: str) -> None:
    """Which number, and what would do."""
    found = tensor_plan_problem(model, layout)
    assert found is not None
    assert re.search(said, found), found


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(tensor=4), Layout(tensor=4, sequence=True), Layout()])
def test_what_divides_is_no_problem(layout: Layout) -> None:
    """Nothing is said of a GPT whose heads, features and context divide."""
    assert tensor_plan_problem(gpt(), layout) is None


def test_a_published_model_brings_its_plan() -> None:
    """Names of the base model are prefixed, what a variant lacks is left out, and styles are read as they are there."""
    assert rules_of(Published()) == {"model.layers.0.up": "colwise", "model.layers.0.down": "rowwise", "last": "output"}
    assert tensor_plan_problem(Published(), Layout(tensor=2)) is None
