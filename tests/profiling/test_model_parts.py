"""What a model is made of, for layouts."""

from __future__ import annotations

import torch
from torch import nn

from stoker.profiling.job_profile import model_parts
from stoker.records import Layout
from stoker.stepping.layouts import divided_parts
from stoker.zoo import GPT


def test_parameters_have_names_shapes_and_blocks() -> None:
    """In the order of registration; what is frozen is said; nothing is computed."""
    with torch.device("meta"):
        model = GPT(layers=3, width=8, heads=2, context=4, vocab=6)
    model.positions.weight.requires_grad_(False)
    parts = model_parts(model)
    assert (parts.name, parts.blocks) == ("GPT", ("blocks.0", "blocks.1", "blocks.2"))
    assert [one.name for one in parts.parameters] == [name for name, _ in model.named_parameters()]
    by_name = {one.name: one for one in parts.parameters}
    assert by_name["blocks.2.mlp.into.weight"].shape == (32, 8)
    assert by_name["blocks.2.mlp.into.weight"].block == 2
    assert by_name["head.weight"].block is None
    assert not by_name["positions.weight"].is_trained
    assert parts.trained_bytes == sum(p.numel() for p in model.parameters() if p.requires_grad) * 4


def test_tied_parameters_are_there_once() -> None:
    """As the model names them first."""
    with torch.device("meta"):
        tied = GPT(layers=2, width=8, heads=2, context=4, vocab=6, tied=True)
    names = [one.name for one in model_parts(tied).parameters]
    assert "tokens.weight" in names
    assert "head.weight" not in names


def test_what_a_tensor_group_divides_is_told_by_layer() -> None:
    """Columns, rows, and words of an embedding; each parameter with its dimension."""
    with torch.device("meta"):
        model = GPT(layers=2, width=8, heads=2, context=4, vocab=6)
    parts = divided_parts(model_parts(model), model, Layout(tensor=2))
    assert parts.divided["blocks.1.mlp.into"] == "columns"
    assert parts.divided["blocks.1.mlp.out"] == "rows"
    assert parts.divided["tokens"] == "vocabulary"
    by_name = {one.name: one.division for one in parts.parameters}
    assert (by_name["blocks.0.mlp.into.weight"], by_name["blocks.0.mlp.out.weight"]) == (0, 1)
    assert by_name["norm.weight"] is None


def test_a_model_without_blocks_has_none() -> None:
    """Two layers of a perceptron repeat nothing."""
    assert model_parts(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))).blocks == ()
