r"""The one JSON codec: frozen dataclasses to JSON and back, each with its schema version.

A document is an object with two extra keys, `record` (the class) and `schema` (its version). Reading checks both,
checks every value against the field's type, and names the path of what does not fit. Floats that JSON cannot hold are
written as the strings "nan", "inf" and "-inf"; where a field takes any JSON, they are read as those strings. Bytes of
a file name that are not UTF-8, which Python holds as lone surrogates, are written as `\xff`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
import sys
import types
import typing
from itertools import accumulate
from typing import Any, ClassVar, Literal, Protocol, TypeVar, Union

JSON = Any
"""A value `json` can write: None, bool, int, float, str, list or dict of the same."""

_MOST_LEVELS = 200
"""Lists and objects inside each other that a document may have: far more than a record of ours, and few enough that
code which walks through one does not run out of stack."""
_TOO_DEEP = f"lists and objects lie more than {_MOST_LEVELS} deep in each other"
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")


class Record(Protocol):
    """A frozen dataclass with a schema version that is raised when its fields change meaning."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    schema: ClassVar[int]


R = TypeVar("R")


_WRITTEN_AS_THEY_ARE = frozenset({types.NoneType, bool, int})


def to_json(value: object) -> JSON:
    """Plain JSON values of a record, or of records inside lists, tuples and dicts."""
    if type(value) in _WRITTEN_AS_THEY_ARE:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        schema = getattr(value, "schema", None)
        return fields if schema is None else {"record": type(value).__name__, "schema": schema, **fields}
    if isinstance(value, dict):
        return {printable(str(key)): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return printable(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TypeError(f"{type(value).__name__} has no place in a record: {value!r}")


def dumps(value: object, *, indent: int | None = 2) -> str:
    """A record as JSON text; it can always be encoded as UTF-8."""
    return json.dumps(to_json(value), indent=indent, ensure_ascii=False, allow_nan=False)


def printable(text: str) -> str:
    r"""`text` with each byte of a file name that is not UTF-8 as `\xff`, so that it can be written anywhere.

    >>> printable("bad\udcff.png")
    'bad\\xff.png'
    """
    if text.isascii():
        return text
    shown = _NOT_UTF8.sub(lambda match: f"\\x{ord(match[0]) - 0xDC00:02x}", text)
    return shown.encode(errors="backslashreplace").decode()


def loads(text: str | bytes, record: type[R]) -> R:
    """A record from JSON text.

    Raises:
        ValueError: not JSON, too deep, another record, another schema version, or a field that does not fit (its path
            is named).
    """
    return from_json(parsed(text), record)


def parsed(text: str | bytes) -> JSON:
    """Plain JSON values of a text from elsewhere.

    Raises:
        ValueError: not JSON, or lists and objects lie more than 200 deep in each other.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    if text.count("[") + text.count("{") > _MOST_LEVELS:
        # Counted before the text is read: where the limit of recursion was raised, as the package `eth` does, Python's
        # reader would end the process on a deep document.
        brackets = _BRACKET.findall(_STRING.sub("", text))
        if max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0) > _MOST_LEVELS + 1:
            raise ValueError(_TOO_DEEP)
    return read_json(text)


def read_object(text: str | bytes) -> dict[str, JSON]:
    """The JSON object that a text from elsewhere is; an empty one where it is none.

    >>> read_object('{"a": 1}'), read_object("[1]"), read_object(b"torn")
    ({'a': 1}, {}, {})
    """
    try:
        value = parsed(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def read_json(text: str) -> JSON:
    """As `json.loads`, which reads whole numbers of up to 4,300 digits, or of another limit set in Python.

    Raises:
        ValueError: not JSON, or a whole number has more digits; the text begins like that of a JSONDecodeError.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        most = sys.get_int_max_str_digits()
        count = max(len(digits) for digits in re.findall(r"\d+", _STRING.sub("", text)))
        raise ValueError(f"A whole number has {count:,} digits, and at most {most:,} are read") from error


def from_json(value: JSON, record: type[R]) -> R:
    """A record from plain JSON values; see `loads`."""
    decoded: R = _decode(value, record, record.__name__)
    return decoded


def digest(value: object) -> str:
    """SHA-256 (hex) of the canonical JSON of `value`: equal content, equal digest, whatever the key order.

    A whole number is one content however it is held (5 and 5.0), as in RFC 8785, section 3.2.2.3; unlike there,
    integers keep all their digits.
    """
    canonical = _with_whole_numbers(to_json(value))
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _with_whole_numbers(value: JSON) -> JSON:
    """`value` with floats that are whole numbers as ints."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _with_whole_numbers(item) for key, item in value.items()}
    return [_with_whole_numbers(item) for item in value] if isinstance(value, list) else value


_hints = functools.cache(typing.get_type_hints)


def _decode(value: JSON, expected: Any, path: str) -> Any:
    """`value` as the type `expected`; `path` says where we are in the document."""
    if type(value) is expected:
        return value
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any:
        return value
    if isinstance(expected, type) and dataclasses.is_dataclass(expected):
        return _decode_record(value, expected, path)
    if origin in (Union, types.UnionType):
        return _decode_union(value, arguments, path)
    if origin is Literal:
        return value if value in arguments else _misfit(value, f"one of {list(arguments)}", path)
    if origin is tuple and isinstance(value, list):
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_decode(item, arguments[0], f"{path}[{i}]") for i, item in enumerate(value))
        if len(arguments) == len(value):
            return tuple(_decode(v, t, f"{path}[{i}]") for i, (v, t) in enumerate(zip(value, arguments, strict=True)))
    if origin is dict and isinstance(value, dict):
        return {key: _decode(item, arguments[1], f"{path}.{key}") for key, item in value.items()}
    if expected is float:
        return _decode_float(value, path)
    return _misfit(value, str(expected), path)


def _decode_union(value: JSON, choices: tuple[Any, ...], path: str) -> Any:
    if value is None and types.NoneType in choices:
        return None
    problems: list[str] = []
    for choice in (c for c in choices if c is not types.NoneType):
        try:
            return _decode(value, choice, path)
        except ValueError as problem:
            problems.append(str(problem))
    raise ValueError(problems[0] if len(problems) == 1 else f"{path}: {' / '.join(problems)}")


def _decode_float(value: JSON, path: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            _misfit(value, "a number that a float can hold", path)
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return float(_misfit(value, "a number", path))


def _decode_record(value: JSON, record: type, path: str) -> Any:
    if not isinstance(value, dict):
        return _misfit(value, f"an object ({record.__name__})", path)
    content = dict(value)
    schema = getattr(record, "schema", None)
    if schema is not None:
        name, version = content.pop("record", None), content.pop("schema", None)
        if name != record.__name__:
            raise ValueError(f"{path}: this is a {name!r} record, wanted {record.__name__!r}")
        if version != schema:
            is_newer = isinstance(version, int) and version > schema
            hint = "a newer Stoker wrote it: update this one" if is_newer else "make it again with this one"
            raise ValueError(f"{path}: schema version {version!r}, this Stoker reads version {schema}; {hint}")
    names, required = _names_of(record)
    if unknown := sorted(content.keys() - names):
        raise ValueError(f"{path}: unknown field {unknown[0]!r}")
    hints = _hints(record)
    decoded = {name: _decode(item, hints[name], f"{path}.{name}") for name, item in content.items()}
    for name in required:
        if name not in decoded:
            raise ValueError(f"{path}: field {name!r} is missing")
    try:
        return record(**decoded)
    except ValueError as problem:  # what the record itself forbids
        raise ValueError(f"{path}: {problem}") from problem


@functools.cache
def _names_of(record: type) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names of a record's fields: all, and those that have no default."""
    fields, no_default = dataclasses.fields(record), dataclasses.MISSING
    required = [f.name for f in fields if f.default is no_default and f.default_factory is no_default]
    return frozenset(f.name for f in fields), tuple(required)


def _misfit(value: JSON, expected: str, path: str) -> JSON:
    shown = json.dumps(value)
    raise ValueError(f"{path}: wanted {expected}, found {shown if len(shown) < 80 else shown[:77] + '...'}")
