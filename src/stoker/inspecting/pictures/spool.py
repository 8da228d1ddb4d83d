"""Signatures of any number of samples: written to a temporary file as they come, then mapped."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Spool:
    """Rows of one dtype. The file has no name and goes with the object, whatever happens to the process."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._file = tempfile.TemporaryFile(prefix="stoker-data-")  # noqa: SIM115 - lives as long as the map of it
        self._rows = 0

    def append(self, rows: NDArray[Any]) -> None:
        """Write rows at the end."""
        self._file.write(np.ascontiguousarray(rows, self._dtype).tobytes())
        self._rows += len(rows)

    def rows(self) -> NDArray[Any]:
        """All of them, asked for once, at the end; pages that are not in use leave memory when it is needed."""
        if not self._rows:
            self._file.close()
            return np.empty(0, self._dtype)
        self._file.flush()
        mapped = np.memmap(self._file, self._dtype, "r", shape=(self._rows,))
        self._file.close()  # the map holds the file by itself
        return mapped
