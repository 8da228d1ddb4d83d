"""PyTorch: a live module as an engine, the reference that exported graphs are compared with.

It loads no artifact: in torch 2.13 `torch.export.load` unpickles parts of a program's file
(`torch/export/pt2_archive/_package.py`: `torch.load(…, weights_only=False)`, `pickle.loads`) and evaluates sizes given
as text (`sympy.sympify`), so an untrusted file could run code.
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
    """A module that takes tensors by position and returns a tuple; run in its current mode, without gradients.

    Args:
        module: takes its inputs in the order of `inputs`, returns a tuple in the order of `outputs`.
        inputs: names of the inputs.
        outputs: names of the outputs.
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
                outputs = self._module(*(as_tensor(inputs[name]).to(self._device) for name in self._inputs))
        except Exception as error:  # the module is user code
            raise cannot_run("PyTorch", error) from error
        return {name: as_array(tensor) for name, tensor in zip(self._outputs, outputs, strict=True)}

    def close(self) -> None:
        """Drop the module."""
        del self._module


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """The array as a tensor; shares memory if the array is writable and contiguous."""
    if not (array.flags.writeable and array.flags.c_contiguous):
        array = array.copy()
    if array.dtype == _BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """A copy of the tensor as an array."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().copy().view(_BF16)
    return tensor.numpy().copy()
