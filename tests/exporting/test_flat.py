"""A module as exporters take it."""

import pytest
import torch
from torch import nn

from stoker.errors import BadArtifact
from stoker.exporting.torch_export import Flat, by_name, by_position, named_outputs, names_of_arguments


class Several(nn.Module):
    """Arguments of several kinds."""

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None, shift: torch.Tensor | None = None) -> dict:
        return {"sum": x + (shift if shift is not None else 0), "nothing": None, "scaled": x * scale}


def test_inputs_in_order_reach_arguments_by_name() -> None:
    """Keyword arguments too; outputs that are None are left out."""
    flat = Flat(Several(), by_name(("scale", "x", "shift")))
    found = flat(torch.tensor(2.0), torch.tensor(3.0), torch.tensor(1.0))
    assert [float(one) for one in found] == [4.0, 6.0]
    assert list(named_outputs(flat.call(torch.tensor(2.0), torch.tensor(3.0), torch.tensor(1.0)))) == ["sum", "scaled"]


def test_a_flat_module_is_in_the_mode_of_its_module() -> None:
    """It is asked as it is."""
    assert not Flat(nn.Linear(1, 1).eval(), by_position).training
    assert Flat(nn.Linear(1, 1), by_position).module.training


def test_outputs_have_names() -> None:
    """One, several, or their own."""
    one = torch.zeros(1)
    assert list(named_outputs(one)) == ["output"]
    assert list(named_outputs((one, one))) == ["output_0", "output_1"]
    assert list(named_outputs({"a": one})) == ["a"]
    for wrong in (3, "text", (one, 3), {"a": [one]}):
        with pytest.raises(BadArtifact, match="an exported one gives tensors"):
            named_outputs(wrong)


def test_arguments_have_the_names_that_forward_gives_them() -> None:
    """And made-up ones where it takes any number."""

    class Any(nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return inputs[0]

    assert names_of_arguments(nn.Linear(1, 1), 1) == ("input",)
    assert names_of_arguments(Any(), 1) == ("input",)
    assert names_of_arguments(Any(), 2) == ("input_0", "input_1")
