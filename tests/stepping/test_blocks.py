from __future__ import annotations

import pytest
import torch
from torch import nn

from stoker.stepping.activation_checkpointing import num_blocks, repeated_blocks
from stoker.zoo import GPT, MLP, ResNet9


class Layer(nn.Module):
    """A layer of its own class over a width, with experts if asked for."""

    def __init__(self, width: int = 4, experts: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))


class Expert(nn.Module):
    """What a mixture has many of."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 4)


class Weight(nn.Module):
    """A user's layer that holds its weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


def names_of(model: nn.Module) -> list[str]:
    """The blocks by name."""
    names = {id(module): name for name, module in model.named_modules()}
    assert num_blocks(model) == len(repeated_blocks(model))
    return [names[id(block)] for block in repeated_blocks(model)]


def stage(*widths: int) -> nn.Sequential:
    """Layers of these widths."""
    return nn.Sequential(*map(Layer, widths))


def test_the_layers_of_a_transformer() -> None:
    """Its equal blocks, in the order in which they run."""
    assert names_of(GPT(layers=3, width=8, heads=2, context=4)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_layers_rather_than_the_experts_in_them() -> None:
    """There are more experts than layers; each is within a layer, and would be repeated with it."""
    model = nn.Sequential(nn.Embedding(3, 4), nn.ModuleList(Layer(experts=8) for _ in range(2)))
    assert names_of(model) == ["1.0", "1.1"]
    assert names_of(Layer(experts=8)) == [f"experts.{index}" for index in range(8)]


def test_all_of_the_class_whatever_their_width() -> None:
    """Stages of a residual network: the longest run has the class, and those that widen count as well."""
    model = nn.Sequential(stage(4, 4), stage(8, 8, 8), nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2)), stage(16))
    assert names_of(model) == ["0.0", "0.1", "1.0", "1.1", "1.2", "3.0"]


def test_where_no_two_are_equal_the_class_with_most_parameters() -> None:
    """Stages that all differ: those of one class, not the odd one; members of a dict likewise."""
    stages = nn.Sequential(*[nn.Sequential(nn.Linear(w, 2 * w), nn.ReLU()) for w in (2, 4, 8)], Layer(32))
    assert names_of(stages) == ["0", "1", "2"]
    assert names_of(nn.ModuleDict({"first": Layer(2), "second": Layer(3)})) == ["first", "second"]


@pytest.mark.parametrize(
    "model",
    [MLP(4), nn.Linear(2, 2), nn.Sequential(Layer()), nn.Sequential(nn.Identity(), nn.ReLU()), nn.LSTM(2, 2, 3)],
    ids=["MLP", "Linear", "one block", "without weights", "LSTM"],
)
def test_models_that_repeat_nothing(model: nn.Module) -> None:
    """Single layers of PyTorch keep little but their inputs, and one block is no repetition."""
    assert names_of(model) == []


def test_a_users_single_layer_is_a_block() -> None:
    """What it keeps for its backward pass is not known."""
    assert names_of(nn.Sequential(Weight(), Weight())) == ["0", "1"]


def test_a_block_that_is_used_twice_counts_once() -> None:
    """Shared layers are one module."""
    shared = Layer()
    assert names_of(nn.Sequential(shared, shared, Layer())) == ["0", "2"]


def test_blocks_within_blocks_of_their_class_are_left_out() -> None:
    """A convolution, batch norm and ReLU are a block of the zoo's ResNet; all eight of them, none twice."""
    found = names_of(ResNet9(width=2))
    assert len(found) == 8
    assert not any(other.startswith(f"{name}.") for name in found for other in found)


class Stage(nn.Module):
    """Parts as attributes, in no container."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(f"part{number}", part)


def test_blocks_that_are_attributes_count_where_no_container_has_any() -> None:
    """A stage may hold its blocks without a list: they are found, those that widen as well."""
    model = Stage(Stage(Layer(2), Layer(4), Layer(4)), Stage(Layer(8), Layer(8)))
    assert names_of(model) == ["part0.part0", "part0.part1", "part0.part2", "part1.part0", "part1.part1"]
