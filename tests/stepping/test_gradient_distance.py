"""The distance between two gradients."""

from __future__ import annotations

import pytest
import torch

from stoker.stepping.gradient_distance import gradient_distance


def test_the_distance_is_that_of_all_elements_together() -> None:
    """In the norm of the whole vector, of tensors of any shape and type, complex ones by both parts."""
    expected = [torch.tensor([[3.0, 0.0], [0.0, 0.0]]), torch.tensor([4.0j])]
    tensors = [torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.bfloat16), torch.tensor([4.0j])]
    assert gradient_distance(tensors, expected) == pytest.approx(1 / 5)
    assert gradient_distance(expected, expected) == 0
    assert gradient_distance([], []) == 0


def test_gradients_of_other_parameters_are_not_compared() -> None:
    """A number is missing, or one too many."""
    with pytest.raises(ValueError, match="argument"):
        gradient_distance([torch.ones(2)], [torch.ones(2), torch.ones(2)])
