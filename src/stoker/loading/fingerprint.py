"""Digests of samples, so that other data are noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_WHOLE_BYTES = 2**30
_ROWS = 4096


def digest_of_arrays(leaves: Iterable[Any]) -> str:
    """SHA-256 of arrays, as "sha256:…"; of an array beyond 1 GiB, of 4,096 to 8,191 rows spread over it."""
    state = hashlib.sha256()
    for leaf in leaves:
        is_whole = not isinstance(leaf, torch.Tensor) or leaf.numel() * leaf.element_size() <= _WHOLE_BYTES
        state.update(f"{getattr(leaf, 'shape', '')}".encode())
        _add(state, leaf if is_whole else leaf[:: max(1, leaf.shape[0] // _ROWS)])
    return f"sha256:{state.hexdigest()}"


def digest_of_items(what: str, items: Iterable[Any]) -> str:
    """SHA-256 of a few samples and of `what` they are of, as "sha256:…"."""
    state = hashlib.sha256(what.encode())
    for item in items:
        for leaf in leaves_of(item):
            _add(state, leaf)
    return f"sha256:{state.hexdigest()}"


def leaves_of(value: Any) -> list[Any]:
    """What dicts, tuples and lists within `value` hold in the end, keys included, in order."""
    if isinstance(value, Mapping):
        return [leaf for key in value for leaf in (key, *leaves_of(value[key]))]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves_of(item)]
    return [value]


def _add(state: hashlib._Hash, leaf: Any) -> None:
    """Feed a leaf to `state`; of what has no bytes to show, only its type."""
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        state.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
        state.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    elif isinstance(leaf, bool | int | float | str | bytes) or leaf is None:
        state.update(repr(leaf).encode())
    else:
        size = getattr(leaf, "shape", getattr(leaf, "size", ""))  # of an array; of an image of PIL
        state.update(f"{type(leaf).__name__}{getattr(leaf, 'dtype', '')}{'' if callable(size) else size}".encode())
        state.update(leaf.tobytes() if hasattr(leaf, "tobytes") else b"")
