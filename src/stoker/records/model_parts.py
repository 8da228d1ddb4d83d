"""What a model is made of, as far as dividing it among devices goes: its parameters by name, shape and block."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

Division = Literal["columns", "rows", "vocabulary"]
"""How the matrix of a layer is divided among the processes of a tensor group: by its outputs, by its inputs, or, of an
embedding, by the words it knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter. `block` is the repeated block it belongs to, from 0 (None: it lies outside of them).

    `division` says along which of its dimensions a tensor-parallel layout divides it (None: it is kept whole).
    """

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    block: int | None = None
    is_trained: bool = True
    division: int | None = None

    @property
    def num_bytes(self) -> int:
        """Of the whole parameter [bytes]."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """A model's parameters in the order of registration, each tied one once, and what else stands in a layout's way.

    `blocks` are the dotted names of its repeated blocks, in order. `divided` says for the dotted name of each layer
    that a tensor-parallel layout divides, how. `buffer_bytes` are kept whole by every process.
    """

    schema: ClassVar[int] = 1
    name: str
    parameters: tuple[Parameter, ...]
    blocks: tuple[str, ...] = ()
    divided: dict[str, Division] = field(default_factory=dict)
    buffer_bytes: int = 0

    def in_blocks(self, blocks: tuple[str, ...]) -> ModelParts:
        """The same model, other modules of which count as its blocks."""
        numbered = tuple(
            dataclasses.replace(
                one, block=next((n for n, block in enumerate(blocks) if one.name.startswith(f"{block}.")), None)
            )
            for one in self.parameters
        )
        return dataclasses.replace(self, parameters=numbered, blocks=blocks)

    @property
    def trained_bytes(self) -> int:
        """Of all parameters that are trained, whole [bytes]."""
        return sum(one.num_bytes for one in self.parameters if one.is_trained)
