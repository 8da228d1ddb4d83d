"""Describing a Job as data, for its JobSpec: values as they are, functions by name and source."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

from stoker.jobs.job import Job
from stoker.records.codec import JSON

_NOT_SETTINGS = ("model", "data", "valid", "test", "name")
"""Fields of a Job that its spec identifies by content (weights, data) rather than by description."""


def describe_settings(job: Job) -> dict[str, JSON]:
    """Everything a Job resolved to, as JSON, except its model and data, which are identified by content."""
    fields = (f.name for f in dataclasses.fields(job) if f.name not in _NOT_SETTINGS)
    return {name: describe(getattr(job, name)) for name in fields}


def describe(value: Any) -> JSON:
    """A setting as JSON. A function is its name, the digest of its source, and the plain values it closes over."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__qualname__, **fields}
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, functools.partial):
        return {"partial": describe(value.func), "arguments": describe([*value.args, value.keywords])}
    if callable(value):
        return _describe_callable(value)
    return {"type": f"{type(value).__module__}.{type(value).__qualname__}"}


def _describe_callable(value: Any) -> JSON:
    if not inspect.isroutine(value) and not isinstance(value, type):
        simple = {key: describe(item) for key, item in sorted(vars(value).items()) if _is_plain(item)}
        return {"type": f"{type(value).__module__}.{type(value).__qualname__}", **simple}
    described: dict[str, JSON] = {"function": f"{value.__module__}.{value.__qualname__}", "source": _source_digest(value)}
    if inspect.isfunction(value):
        closed_over = inspect.getclosurevars(value).nonlocals
        described["closure"] = {key: describe(item) for key, item in sorted(closed_over.items()) if _is_plain(item)}
        described["defaults"] = describe([item for item in value.__defaults__ or () if _is_plain(item)])
    return described


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _source_digest(function: Any) -> str:
    try:
        source = inspect.getsource(function).strip()
    except (OSError, TypeError):  # typed at a prompt, or built in: the bytecode stands for it
        code = getattr(function, "__code__", None)
        source = repr(function) if code is None else f"{code.co_code!r}{code.co_consts!r}{code.co_names!r}"
    return hashlib.sha256(source.encode()).hexdigest()[:16]
