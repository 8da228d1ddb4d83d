"""What both edges make of a request's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from stoker.serving.problems import BadRequest, Unsupported
from stoker.serving.service import Parameter

_SEQUENCE = frozenset({"sequence_id", "sequence_start", "sequence_end"})
_SHARED_MEMORY = "shared_memory_region"
_NONE: dict[str, Parameter] = {}


class Urgency(NamedTuple):
    """How soon a request wants its answer: seconds from its arrival, and 1 for the most urgent, 0 for the default."""

    deadline_s: float | None = None
    priority: int = 0


def checked(parameters: object, where: str) -> dict[str, Any]:
    """Parameters whose values are strings, numbers and booleans.

    Raises:
        BadRequest: they are something else.
    """
    if parameters is None:
        return _NONE
    if not isinstance(parameters, dict):
        raise BadRequest(f"the parameters of {where} must be an object")
    for name, value in parameters.items():
        if not isinstance(value, str | int | float | bool):
            raise BadRequest(f"parameter {name!r} of {where} must be a string, a number or a boolean")
    return parameters


def urgency(parameters: Mapping[str, Parameter]) -> Urgency:
    """Deadline and priority of a request; a `timeout` is in microseconds, and 0 is none.

    Raises:
        BadRequest: they are no whole numbers from 0.
        Unsupported: the request is part of a sequence.
    """
    if not parameters:
        return Urgency()
    for name in _SEQUENCE & parameters.keys():
        if parameters[name]:
            raise Unsupported(f"the parameter {name} asks for a sequence; this server keeps no state between requests")
    timeout_us = whole(parameters, "timeout", "the request")
    return Urgency(timeout_us / 1e6 if timeout_us else None, whole(parameters, "priority", "the request"))


def whole(parameters: Mapping[str, Parameter], name: str, where: str) -> int:
    """A parameter that is a whole number from 0; 0 where it is absent.

    Raises:
        BadRequest: it is something else.
    """
    value = parameters.get(name, 0)
    if type(value) is not int or value < 0:
        raise BadRequest(f"parameter {name!r} of {where} must be a whole number from 0, got {value!r}")
    return value


def flag(parameters: Mapping[str, Parameter], name: str, where: str, *, default: bool) -> bool:
    """A parameter that is true or false.

    Raises:
        BadRequest: it is something else.
    """
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise BadRequest(f"parameter {name!r} of {where} must be true or false, got {value!r}")
    return value


def refuse_shared_memory(parameters: Mapping[str, Parameter], where: str) -> None:
    """Say that tensors come over the wire alone.

    Raises:
        Unsupported: a region of shared memory is named.
    """
    if _SHARED_MEMORY in parameters:
        raise Unsupported(f"{where} names a region of shared memory, which this server has none of; send it as data")
