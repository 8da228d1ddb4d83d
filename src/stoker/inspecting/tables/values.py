"""What a value of a table is."""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any, Literal

Kind = Literal["number", "text", "bool", "list", "object", "bytes", "time"]

_TYPES: dict[type, Kind] = {bool: "bool", int: "number", float: "number", str: "text", list: "list", dict: "object",
                            bytes: "bytes"}  # fmt: skip
_LONGEST = 200
"""Characters or bytes, above which a value is told by its digest."""

_MOJIBAKE = re.compile("[\u00c2\u00c3][\u0080-\u00bf]|\u00e2\u20ac|\u00ef\u00bf\u00bd")
"""UTF-8 that was read as Latin-1 or Windows-1252: `Ã©` for `é`, `â€` for quotes, `ï¿½` for a replaced character."""


def number_of(value: Any, *, is_typed: bool) -> float | None:
    """The value as a number, if it is one or, where all is text, looks like one."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return _as_float(value)
    if is_typed or not isinstance(value, str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def kind_of(value: Any, *, is_typed: bool) -> Kind:
    """Its kind; where all is text, numbers are told from how they look."""
    if not is_typed and isinstance(value, str):
        return "text" if number_of(value, is_typed=False) is None else "number"
    return _TYPES.get(type(value), "time")


def shown(value: Any, most: int = 40) -> str:
    """The value in words, cut to `most` characters."""
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= most else f"{text[: most - 1]}…"


def key_of(value: Any) -> Any:
    """The value as something small that can be counted: equal for equal values; 1 and 1.0 are equal, "1" is not."""
    if isinstance(value, list | dict):
        value = json.dumps(value, sort_keys=True, default=repr)
    return None if isinstance(value, float) and math.isnan(value) else brief(value)


def brief(value: Any) -> Any:
    """The value; of one that is long, its digest."""
    if not isinstance(value, str | bytes) or len(value) <= _LONGEST:
        return value
    content = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=16).digest()


def same_as(value: Any, *, is_typed: bool) -> Any:
    """What two values have in common that are one value in files of several formats: 3, 3.0 and, in a CSV, "3".

    Whole numbers that no float holds, such as those of accounts, are themselves.
    """
    number = number_of(value, is_typed=is_typed)
    if number is not None:
        whole = _whole(value)
        return number if whole is None or whole == number else whole
    return value.strip() if isinstance(value, str) else key_of(value)


def encoding_fault(text: str) -> str:
    """What is wrong with how a text was decoded; empty where nothing is."""
    if any("\udc80" <= char <= "\udcff" for char in text):
        return "is not UTF-8"
    if "\ufffd" in text:
        return "holds U+FFFD, which stands for a character that was lost"
    if found := _MOJIBAKE.search(text):
        return f"holds {found[0]!r}: UTF-8 that was read as Latin-1"
    return "holds NUL" if "\x00" in text else ""


def _whole(value: Any) -> int | None:
    """The value as a whole number, if it is one or looks like one."""
    try:
        return int(value) if isinstance(value, int | str) else None
    except ValueError:
        return None


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
