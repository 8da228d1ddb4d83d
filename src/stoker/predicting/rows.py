"""Rows as they were read: columns, and which rows could not even be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pyarrow as pa

Column: TypeAlias = pa.Array | list[Any]
"""Values of one column: an Arrow array, or Python objects with None for nothing."""


@dataclass(frozen=True)
class Field:
    """A column that a source has.

    `type` is None where every row may hold another (JSON). `is_text` says that strings stand for values (CSV), and
    `is_image` that they are paths of image files.
    """

    name: str
    type: pa.DataType | None
    is_text: bool = False
    is_image: bool = False

    @property
    def holds_images(self) -> bool:
        """Whether its type is one that images, or their paths, have: nothing else could be made of it for a tensor."""
        if self.type is None or self.is_text:
            return False
        kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
        return self.is_image or pa.types.is_struct(self.type) or any(holds(self.type) for holds in kinds)


@dataclass(frozen=True)
class Rows:
    """Some rows of one source in its order, and only the columns asked for.

    `broken` has the rows (from 0) that hold no values at all, and why; their values are None. `names` are for sources
    in which each row is a file of its own.
    """

    source: str
    first_row: int
    num_rows: int
    columns: Mapping[str, Column]
    broken: Mapping[int, str] = field(default_factory=dict)
    names: Sequence[str] | None = None

    def origin(self, index: int) -> tuple[str, int]:
        """The file that row `index` of these comes from, and its number there."""
        return (self.source, self.first_row + index) if self.names is None else (self.names[index], 0)
