"""PyTorch: a live module as an engine, the oracle that exported graphs are held against.

No artifact is loaded into it. `torch.export.load` would have to open a program, and in torch 2.13 it unpickles what a
program's file says is to be unpickled (`torch/export/pt2_archive/_package.py`: `torch.load(…, weights_only=False)`,
`pickle.loads`), and evaluates sizes given as text (`sympy.sympify`): a file from elsewhere could run code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.artifacts.dtypes import Arrays, dtype_of
from stoker.engines.base import cannot_run

_BF16 = dtype_of("BF16")


class TorchModule:
    """A module of tensors by position, which returns a tuple of tensors; run as it is, in its mode, without gradients.

    Args:
        module: takes the inputs by position, in the order of `inputs`; gives a tuple, in the order of `outputs`.
        inputs: their names.
        outputs: theirs.
    """

    def __init__(self, module: torch.nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self._module = module
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        parameter = next(module.parameters(), None)
        self._device = torch.device("cpu") if parameter is None else parameter.device

    def run(self, inputs: Arrays) -> Arrays:
        """Every output for these inputs."""
        try:
            with torch.no_grad():
                found = self._module(*(as_tensor(inputs[name]).to(self._device) for name in self._inputs))
        except Exception as error:  # the module is anybody's code
            raise cannot_run("PyTorch", error) from error
        return {name: as_array(tensor) for name, tensor in zip(self._outputs, found, strict=True)}

    def close(self) -> None:
        """Forget the module."""
        del self._module


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A tensor of the array's content, and of its memory where that is writable."""
    if not (array.flags.writeable and array.flags.c_contiguous):
        array = array.copy()
    if array.dtype == _BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor's content as an array of its own."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().copy().view(_BF16)
    return tensor.numpy().copy()
