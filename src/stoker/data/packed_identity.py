"""What tells a dataset that is to be packed from another one, before its samples are read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hashlib import _Hash

_WHOLE_BYTES = 2**30
_ROWS = 4096
_CONTENT = ("tensors", "data", "targets", "samples", "indices", "dataset")
"""What PyTorch's and torchvision's datasets call what they hold in memory, or are made around."""


def stated_of(dataset: Any) -> str:
    """A dataset's own `fingerprint`, else a digest of what it holds in memory.

    Arrays in memory count whole up to 1 GiB each; larger ones by 4,096 to 8,191 rows spread over them, as do mapped
    files, whose time of change counts besides. What is held otherwise does not count.
    """
    state = hashlib.sha256()
    if isinstance(dataset, Mapping):
        _add_all(state, dataset.items())
    elif isinstance(dataset, tuple):
        _add_all(state, enumerate(dataset))
    else:
        stated = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
        if isinstance(stated, str):
            return stated
        held = getattr(dataset, "__dict__", {})
        _add_all(state, ((name, held[name]) for name in _CONTENT if name in held))
    return state.hexdigest()


def _add_all(state: _Hash, entries: Iterable[tuple[Any, Any]]) -> None:
    for name, value in entries:
        state.update(f"{name}:".encode(errors="surrogateescape"))
        if name == "dataset":
            state.update(stated_of(value).encode())
        elif name == "tensors" and isinstance(value, tuple):
            _add_all(state, enumerate(value))
        elif hasattr(value, "__array__") and hasattr(value, "shape"):
            _add_array(state, value)
        elif isinstance(value, list | tuple | range):
            state.update(_as_text(value).encode())


def _add_array(state: _Hash, given: Any) -> None:
    array = np.asanyarray(given)
    state.update(f"{array.dtype}{array.shape}".encode())
    mapped = getattr(array, "filename", None)
    if mapped is not None and os.path.exists(mapped):  # noqa: PTH110 - a name of any type that NumPy was given
        state.update(f"{os.stat(mapped).st_mtime_ns}".encode())  # noqa: PTH116 - likewise
    is_whole = array.ndim == 0 or (mapped is None and array.nbytes <= _WHOLE_BYTES)
    state.update((array if is_whole else array[:: max(1, len(array) // _ROWS)]).tobytes())


def _as_text(values: list[Any] | tuple[Any, ...] | range) -> str:
    """Plain values as JSON; nothing of others, whose text may differ from one process to the next."""
    try:
        return json.dumps(list(values))
    except (TypeError, ValueError):
        return ""
