"""PyTorch as the oracle."""

import numpy as np
import pytest
import torch

from stoker.artifacts import dtype_of
from stoker.errors import ServiceError
from stoker.exporting.torch_export import answering, as_array, as_tensor


class Twice(torch.nn.Module):
    """Twice the first, and the sum of both."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return 2 * a, a + b


def test_a_module_answers_by_name_and_owns_nothing() -> None:
    """Inputs by their names in order; outputs are copies, inputs stay."""
    answer = answering(Twice(), ["a", "b"], ["twice", "sum"])
    asked = {"b": np.ones(2, np.float32), "a": np.arange(2, dtype=np.float32)}
    found = answer(asked)
    assert found["twice"].tolist() == [0, 2]
    assert found["sum"].tolist() == [1, 2]
    found["sum"][:] = 9
    assert answer(asked)["sum"].tolist() == [1, 2]


def test_what_the_module_raises_is_told_on_one_line() -> None:
    """A service's error, as of other engines."""
    with pytest.raises(ServiceError, match="PyTorch could not compute this: The size of tensor"):
        answering(Twice(), ["a", "b"], ["t", "s"])({"a": np.ones(2), "b": np.ones(3)})


@pytest.mark.parametrize("dtype", [np.dtype(np.uint8), np.dtype(np.float16), dtype_of("BF16"), np.dtype(bool)])
def test_arrays_become_tensors_and_arrays_again(dtype: np.dtype) -> None:
    """Read-only and strided ones too."""
    array = np.arange(8).astype(dtype)[::2]
    array.flags.writeable = False
    again = as_array(as_tensor(array))
    assert again.dtype == dtype
    assert (again == array).all()
