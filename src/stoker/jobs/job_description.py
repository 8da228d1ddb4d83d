"""A Job as data, for its JobSpec: values as they are, functions and objects by what they do.

A function is its name, the digest of its source (`stoker.jobs.code_digest`), its defaults and its closure; a callable
object is its class, the digest of that class's source, and its attributes; an array is a digest of its content; an
object that holds only such values, as a namespace of settings, is its class and its attributes. Code of installed
packages is only named: its version belongs to the Environment. What a function reads from its module is not
followed: for a job file, the digest of what is executed of it and its local imports covers it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from stoker.jobs.batch_size import AutoBatch, TokenBatch
from stoker.jobs.code_digest import name_of, source_digest
from stoker.jobs.job import Job
from stoker.jobs.optimizers import Optimizer
from stoker.records import digest
from stoker.records.codec import JSON

NOT_SETTINGS = ("model", "init", "data", "valid", "test", "name")
"""Fields of a Job that its spec identifies by content (weights, data) rather than by description."""

_MOST_PLAIN = 10_000
"""Entries of a collection in an object that is described by its attributes."""

_WORDS = ("torch.dtype", "torch.device")
"""Types whose values are described by their text. By name: jobs are described without torch."""


def describe_settings(job: Job) -> dict[str, JSON]:
    """All settings of a Job as JSON, except its model and data, which are identified by content."""
    names = [field.name for field in dataclasses.fields(job) if field.name not in NOT_SETTINGS]
    settings = {name: getattr(job, name) for name in names}
    settings |= {"loss": job.objective, "numerics": sorted(job.numerics)}
    return {name: describe(value) for name, value in settings.items()}


def describe(value: Any) -> JSON:
    """A setting as JSON; the same in every process, and different if something else would be learned."""
    return _describe(value, ())


def _describe(value: Any, within: tuple[int, ...]) -> JSON:
    """`within` are the ids on the path to `value`: a function may close over itself."""
    if isinstance(value, AutoBatch | TokenBatch):
        return _describe_batch(value, within)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PurePath | enum.Enum) or name_of(type(value)) in _WORDS:
        return str(value)
    if id(value) in within:
        return {"again": name_of(type(value))}
    within = (*within, id(value))
    if isinstance(value, Mapping):
        return _describe_mapping(value, within)
    if isinstance(value, list | tuple):
        return [_describe(item, within) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_describe(item, within) for item in value), key=digest)
    if isinstance(value, functools.partial):
        return {"partial": _describe(value.func, within), "arguments": _describe([*value.args, value.keywords], within)}
    if inspect.ismethod(value):
        return {"method": _describe(value.__func__, within), "of": _describe(value.__self__, within)}
    if inspect.isroutine(value) or isinstance(value, type):
        return _describe_routine(value, within)
    # An array by its attributes: a tensor is described without importing torch.
    if all(hasattr(value, name) for name in ("shape", "dtype", "tolist")):
        return {"type": name_of(type(value)), **_content(value, within)}
    return _describe_object(value, within)


def _describe_batch(batch: AutoBatch | TokenBatch, within: tuple[int, ...]) -> JSON:
    """An open batch by its base; one of tokens without its number of samples, which depends on the data."""
    if isinstance(batch, AutoBatch):
        return batch.base
    return {"tokens": batch.num_tokens, "padded": batch.is_padded, "length_of": _describe(batch.length_of, within)}


def _describe_mapping(value: Mapping[Any, Any], within: tuple[int, ...]) -> JSON:
    if any(callable(key) and not isinstance(key, type) for key in value):  # predicates of groups, in their order
        return [[_describe(key, within), _describe(item, within)] for key, item in value.items()]
    return {str(key): _describe(item, within) for key, item in value.items()}


def _describe_routine(value: Any, within: tuple[int, ...]) -> JSON:
    described: dict[str, JSON] = {"function": name_of(value), **_source(value)}
    if inspect.isfunction(value):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        described["closure"] = {key: _describe(item, within) for key, item in sorted(_closed_over(value).items())}
        described["defaults"] = [_describe(item, within) for item in defaults]
    return described


def _describe_object(value: Any, within: tuple[int, ...]) -> JSON:
    """The state of a callable object, a dataclass or settings; of others, such as a data set, only the type."""
    described: dict[str, JSON] = {"type": name_of(type(value))}
    is_data = dataclasses.is_dataclass(value)
    if not (is_data or callable(value)):
        settings = vars(value) if _is_plain(value) else {}
        return described | {key: _describe(item, within) for key, item in settings.items()}
    described |= _source(type(value))
    if is_data:
        state = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        # The first pattern that matches decides. Digests sort keys, so that an order of its own is stated.
        order = [*value.groups] if isinstance(value, Optimizer) else []
        if all(isinstance(group, str) for group in order) and order != sorted(map(str, order)):
            state["order"] = order
    elif hasattr(value, "state_dict"):  # a module: its parts are in its repr, and its tensors are registered
        public = {key: item for key, item in sorted(vars(value).items()) if not key.startswith("_")}
        state = {**public, "prints": repr(value), "state_dict": dict(value.state_dict())}
    else:
        slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
        attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        state = dict(sorted((attributes | getattr(value, "__dict__", {})).items()))
    return described | {key: _describe(item, within) for key, item in state.items()}


def _is_plain(value: Any, within: tuple[int, ...] = ()) -> bool:
    """Whether a value is made of numbers, texts, arrays and functions alone, as an `argparse.Namespace` is.

    An object that can be indexed, such as a data set, is not; nor is one that holds something else, such as a file.
    """
    if value is None or isinstance(value, bool | int | float | str | PurePath | enum.Enum | type):
        return True
    if inspect.isroutine(value) or all(hasattr(value, name) for name in ("dtype", "shape", "tolist")):
        return True
    if id(value) in within:
        return False
    if isinstance(value, Mapping):
        items: Any = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    elif callable(value) or hasattr(type(value), "__getitem__") or not hasattr(value, "__dict__"):
        return name_of(type(value)) in _WORDS
    else:
        items = vars(value).values()
    return len(items) <= _MOST_PLAIN and all(_is_plain(item, (*within, id(value))) for item in items)


def _source(value: Any) -> dict[str, JSON]:
    digest_of_source = source_digest(value)
    return {} if digest_of_source is None else {"source": digest_of_source}


def _closed_over(function: Any) -> dict[str, Any]:
    closure: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            closure[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            closure[name] = None
    return closure


def _content(array: Any, within: tuple[int, ...]) -> dict[str, JSON]:
    on_cpu = array.detach().cpu() if hasattr(array, "detach") else array
    try:
        if getattr(array.dtype, "hasobject", False):  # of NumPy: its bytes are addresses
            content = digest(_describe(array.tolist(), within)).encode()
        else:
            content = (on_cpu.numpy() if hasattr(on_cpu, "numpy") else on_cpu).tobytes()
    except TypeError:  # a dtype that NumPy lacks, such as bfloat16
        content = repr(on_cpu.tolist()).encode()
    shape: list[JSON] = list(array.shape)
    return {"dtype": str(array.dtype), "shape": shape, "sha256": hashlib.sha256(content).hexdigest()[:16]}
