"""JSON Lines: an object a line; blank lines are no rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from stoker.data.reading.faults import RowFault
from stoker.data.reading.lines import Lines
from stoker.errors import first_line

_KINDS = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}


class Line(NamedTuple):
    """A line that is not blank, and where it begins [bytes]."""

    start: int
    content: bytes


def rows_in(lines: Lines) -> Iterator[Line]:
    """The lines that are rows."""
    start = lines.offset
    for content in lines:
        if content.strip():
            yield Line(start, content)
        start = lines.offset


def object_in(content: bytes) -> tuple[dict[str, Any], RowFault | None]:
    """What a line holds; nothing where it is no object, and why."""
    try:
        value = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        return {}, RowFault("encoding", f"is not UTF-8 at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return {}, RowFault("corrupt", f"is no JSON: {first_line(error)}")
    if not isinstance(value, dict):
        return {}, RowFault("corrupt", f"is no JSON object but a {kind_of(value)}")
    return value, None


def kind_of(value: Any) -> str:
    """What JSON calls the type of a value."""
    return _KINDS.get(type(value), "null")
