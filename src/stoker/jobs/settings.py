"""Settings as typed on a command line, turned into the arguments of a job file's function by its type hints."""

from __future__ import annotations

import collections.abc
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from stoker.errors import BadJob, nearest
from stoker.records.codec import JSON

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_DICTS = (dict, collections.abc.Mapping)
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "none"}
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse_settings(function: Callable[..., Any], settings: Mapping[str, str], where: str) -> dict[str, Any]:
    """The typed arguments for `function` from texts.

    Types understood: bool, int, float, str, Path, Literal, unions and optional ones, and lists, tuples and dicts of
    these, written as JSON. Without a hint the default's type counts.

    Args:
        function: the job file's `job`.
        settings: text by parameter name.
        where: the job file's name, for errors.

    Raises:
        BadJob: a setting is unknown, missing, or of another type; it names the nearest setting, or what was wanted.
    """
    parameters = {name: p for name, p in inspect.signature(function).parameters.items() if p.kind in _NAMED}
    for name in settings:
        if name not in parameters:
            raise BadJob(f"{where}: job() has no setting {name!r}. {nearest(name, parameters)}")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in settings:
            raise BadJob(f"{where}: setting {name!r} has no default", remedy=f"Give it: --set {name}=VALUE")
    return {name: _converted(text, _type_of(parameters[name], function), name) for name, text in settings.items()}


def values_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, JSON]:
    """What every setting of `function` is, given or by default, as JSON.

    A default that could not be typed on a command line is left out: it belongs to the job file's text.
    """
    parameters = inspect.signature(function).parameters.items()
    values = {name: p.default for name, p in parameters if p.kind in _NAMED} | dict(arguments)
    return {name: _plain(value) for name, value in values.items() if _is_plain(value)}


def _type_of(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    hint, default = parameter.annotation, parameter.default
    if hint is not inspect.Parameter.empty:
        alone = types.SimpleNamespace(__annotations__={"it": hint})
        try:
            return typing.get_type_hints(alone, globalns=getattr(function, "__globals__", {}))["it"]
        except (NameError, AttributeError, SyntaxError, TypeError):  # known to the type checker only
            pass
    return str if default is inspect.Parameter.empty or default is None else type(default)


def _converted(text: str, wanted: Any, name: str) -> Any:
    try:
        return _of_text(text, wanted)
    except ValueError:
        known = [str(choice) for choice in typing.get_args(wanted)] if typing.get_origin(wanted) is Literal else None
        hint = nearest(text, known) if known else f"wanted {_in_words(wanted)}"
        raise BadJob(f"--set {name}={text}: {hint}") from None


def _of_text(text: str, wanted: Any) -> Any:
    """`text` as the type `wanted`, or ValueError."""
    choices = typing.get_args(wanted)
    if _is_union(wanted):
        # Any text is a str: the other choices come first.
        return _first_that_fits(lambda one: _of_text(text, one), sorted(choices, key=lambda one: one is str))
    if typing.get_origin(wanted) is Literal:
        return _lookup({str(choice): choice for choice in choices}, text)
    if wanted is bool:
        return _lookup(_TRUTHS, text.lower())
    if wanted is types.NoneType:
        return _lookup({"none": None, "null": None}, text.lower())
    if wanted in (int, float, str) or (isinstance(wanted, type) and issubclass(wanted, Path)):
        return wanted(text)
    return _of_json(json.loads(text), wanted)


def _of_json(value: JSON, wanted: Any) -> Any:
    """A JSON value as the type `wanted`, or ValueError."""
    kind, arguments = typing.get_origin(wanted) or wanted, typing.get_args(wanted)
    if wanted is Any:
        return value
    if _is_union(wanted):
        return _first_that_fits(lambda one: _of_json(value, one), arguments)
    if kind is Literal:
        return value if value in arguments else _refuse()
    if kind in (tuple, *_LISTS) and isinstance(value, list):
        return _of_list(value, tuple if kind is tuple else list, arguments)
    if kind in _DICTS and isinstance(value, dict):
        return {key: _of_json(item, (*arguments, Any, Any)[1]) for key, item in value.items()}
    if wanted is float and type(value) is int:
        return float(value)
    if wanted is Path and isinstance(value, str):
        return Path(value)
    return value if wanted in _WORDS and type(value) is wanted else _refuse()


def _of_list(value: list[JSON], kind: Callable[[list[Any]], Any], arguments: tuple[Any, ...]) -> Any:
    if kind is not tuple or not arguments or arguments[-1] is Ellipsis:
        return kind([_of_json(item, arguments[0] if arguments else Any) for item in value])
    return kind([_of_json(item, one) for item, one in zip(value, arguments, strict=True)])


def _first_that_fits(convert: Callable[[Any], Any], choices: collections.abc.Iterable[Any]) -> Any:
    for choice in choices:
        try:
            return convert(choice)
        except ValueError:
            continue
    return _refuse()


def _lookup(values: Mapping[str, Any], text: str) -> Any:
    return values[text] if text in values else _refuse()


def _refuse() -> Any:
    raise ValueError("of another type")


def _is_union(wanted: Any) -> bool:
    return typing.get_origin(wanted) in (typing.Union, types.UnionType)


def _in_words(wanted: Any) -> str:
    if _is_union(wanted):
        return " or ".join(_in_words(choice) for choice in typing.get_args(wanted))
    if typing.get_origin(wanted) is Literal:
        return " or ".join(map(str, typing.get_args(wanted)))
    if typing.get_origin(wanted) is None and isinstance(wanted, type) and wanted not in (list, tuple, dict):
        return _WORDS.get(wanted, f"a {wanted.__name__}, which cannot be given as text")
    return f"{wanted.__name__ if isinstance(wanted, type) else wanted} written as JSON"


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Path)


def _plain(value: Any) -> JSON:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
