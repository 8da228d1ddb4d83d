"""Devices that are not there."""

from __future__ import annotations

import dataclasses
from typing import Any

from stoker.records import Device
from stoker.units import GIB

_LAPTOP = Device(
    name="fake-cpu", kind="cpu", model="Fake CPU", cores=4, memory_bytes=8 * GIB, fast_dtypes=("float32", "bfloat16")
)
_GPU = Device(
    name="fake-gpu", kind="cuda", model="Fake GPU", cores=64, memory_bytes=16 * GIB,
    fast_dtypes=("float32", "float16", "bfloat16"), driver="fake"
)  # fmt: skip


def fake_device(**changes: Any) -> Device:
    """A Device with 4 cores and 8 GiB, or with `kind="cuda"` a GPU with 16 GiB; any field may be changed.

    >>> fake_device(memory_bytes=2**30, name="tiny").name
    'tiny'
    """
    return dataclasses.replace(_GPU if changes.get("kind") == "cuda" else _LAPTOP, **changes)
