"""What a model is made of, as far as dividing it among devices goes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from stoker.records.model_parts import Division, ModelParts, Parameter
from stoker.stepping import bytes_of, repeated_blocks


def model_parts(model: nn.Module, dims: Mapping[str, int] | None = None) -> ModelParts:
    """The parameters of `model`, which may be an outline, and its repeated blocks.

    Args:
        model: nothing of it is computed.
        dims: along which of its dimensions a tensor-parallel layout divides a parameter, by name; the others are whole
            (`stoker.stepping.layouts.tensor_plans.divided_dimensions`).
    """
    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    blocks = tuple(names[id(block)] for block in repeated_blocks(model))
    dims = dims or {}
    divided = {
        name.removesuffix(".weight"): _division(modules[name.removesuffix(".weight")], dim)
        for name, dim in dims.items()
        if name.endswith(".weight")
    }
    parameters = tuple(
        Parameter(
            name=name, shape=tuple(one.shape), item_bytes=one.element_size(), is_trained=one.requires_grad,
            block=_block_of(name, blocks), division=dims.get(name),
        )
        for name, one in model.named_parameters()
    )  # fmt: skip
    return ModelParts(
        name=type(model).__name__, parameters=parameters, blocks=blocks, buffer_bytes=bytes_of(model.buffers()),
        divided=divided,
    )  # fmt: skip


def _block_of(name: str, blocks: tuple[str, ...]) -> int | None:
    return next((number for number, block in enumerate(blocks) if name.startswith(f"{block}.")), None)


def _division(module: nn.Module, dim: int) -> Division:
    """PyTorch keeps a linear layer's outputs in the first dimension of its weight, an embedding's words as well."""
    if isinstance(module, nn.Embedding):
        return "vocabulary"
    return "columns" if dim == 0 else "rows"
