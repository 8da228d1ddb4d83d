"""A space of settings from text, a file, or Python; its points, and the seeds that they are drawn with.

lr=log(1e-4,1e-1)    evenly in the logarithm
dropout=float(0,0.5)    depth=int(2,6)    batch=int(32,256,step=32)    width=logint(8,256)
optimizer=choice(sgd,adamw)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from stoker.errors import BadJob, nearest
from stoker.records.codec import JSON
from stoker.records.study import Parameter, ParameterKind

Space = tuple[Parameter, ...]

GRID_POINTS = 5
"""Points of a range that has no step of its own, in a grid."""

_WORD = re.compile(r"([A-Za-z_]\w*)\s*=\s*([A-Za-z_]\w*)\s*\(([^()]*)\)")
_CALL = re.compile(r"([A-Za-z_]\w*)\s*\(([^()]*)\)")
_KINDS: tuple[str, ...] = get_args(ParameterKind)
_EXAMPLE = "Write it as lr=log(1e-4,1e-1) width=choice(16,32,64) depth=int(2,6), or in a JSON or TOML file."
_MOST_GRID = 100_000

_STARTUP = 10
"""Trials at random before TPE and GP have enough to go by, at least; Optuna's own number."""


def parse_space(given: str | Path | Mapping[str, object] | Sequence[str]) -> Space:
    """The parameters that words, files (`.json`, `.toml`) or a mapping name, in their order.

    In a mapping, and in files, a value is a text such as `log(1e-4,1e-1)`, a list of choices, or a Parameter.

    Raises:
        BadJob: a word is no parameter, a kind is unknown, a range is empty, or a name is there twice.
    """
    if isinstance(given, Mapping):
        parameters = [_of_value(str(name), value) for name, value in given.items()]
    else:
        words = [given] if isinstance(given, str | Path) else list(given)
        parameters = [parameter for word in words for parameter in _of_word(str(word))]
    names = [parameter.name for parameter in parameters]
    for name in names:
        if names.count(name) > 1:
            raise BadJob(f"the space has {name!r} twice", remedy="Give each parameter once.")
    if not parameters:
        raise BadJob("the space is empty: nothing is to be tried", remedy=_EXAMPLE)
    return tuple(parameters)


def describe_space(parameter: Parameter) -> str:
    """A parameter as it is written: `lr=log(0.0001,0.1)`."""
    if parameter.kind == "choice":
        return f"{parameter.name}=choice({','.join(as_text(value) for value in parameter.choices)})"
    step = "" if parameter.step is None else f",step={_short(parameter.step)}"
    return f"{parameter.name}={parameter.kind}({_short(parameter.low)},{_short(parameter.high)}{step})"


def as_text(value: JSON) -> str:
    """A value as `--set NAME=VALUE` takes it."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def points_of(parameter: Parameter) -> tuple[JSON, ...]:
    """The values of a parameter in a grid: all of a choice or of a range with a step, else `GRID_POINTS` of it."""
    if parameter.kind == "choice":
        return parameter.choices
    low, high = parameter.low, parameter.high
    if parameter.step is not None:
        count = round((high - low) / parameter.step) + 1
        values = [low + parameter.step * index for index in range(count)]
    elif parameter.kind == "int" and high - low < GRID_POINTS:
        values = [low + index for index in range(int(high - low) + 1)]
    else:
        values = [_between(parameter, index / (GRID_POINTS - 1)) for index in range(GRID_POINTS)]
    return tuple(dict.fromkeys(_of_kind(parameter, value) for value in values))


def grid(space: Space, seed: int) -> tuple[dict[str, JSON], ...]:
    """Every combination of the points, shuffled by `seed`, so that a part of the grid favours none.

    Raises:
        BadJob: there are more than a hundred thousand.
    """
    points = [points_of(parameter) for parameter in space]
    if (count := math.prod(map(len, points))) > _MOST_GRID:
        raise BadJob(f"the grid has {count:,} points", remedy="Use --sampler random or tpe, or larger steps.")
    settings = [dict(zip((p.name for p in space), values, strict=True)) for values in itertools.product(*points)]
    random.Random(seed).shuffle(settings)
    return tuple(settings)


def examples(space: Space, count: int, seed: int) -> tuple[dict[str, JSON], ...]:
    """At most `count` different configurations for a forecast: both ends, the middle, then random ones."""
    shares: Iterable[float] = (1.0, 0.0, 0.5)
    settings = [{parameter.name: _at(parameter, share) for parameter in space} for share in shares]
    draws = random.Random(seed)
    settings += [{parameter.name: drawn(parameter, draws) for parameter in space} for _ in range(max(0, count - 3))]
    different = {json.dumps(setting, sort_keys=True): setting for setting in settings}
    return tuple(different.values())[:count]


def drawn(parameter: Parameter, draws: random.Random) -> JSON:
    """A value of a parameter at random."""
    return _at(parameter, draws.random())


def _of_word(text: str) -> list[Parameter]:
    """The parameters of a text of words, or of a file."""
    if Path(text).suffix in (".json", ".toml") and "(" not in text:
        return [_of_value(name, value) for name, value in _read(Path(text)).items()]
    rest = _WORD.sub(" ", text).replace(";", " ").strip()
    if rest:
        raise BadJob(f"{rest!r} is no part of a space", remedy=_EXAMPLE)
    return [_of_call(name, kind, values) for name, kind, values in _WORD.findall(text)]


def _read(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except FileNotFoundError:
        raise BadJob(f"there is no file {path} with a space", remedy=_EXAMPLE) from None
    except (OSError, ValueError) as problem:
        raise BadJob(f"{path} holds no space: {problem}", remedy=_EXAMPLE) from problem
    if not isinstance(content, dict):
        raise BadJob(f"{path} holds no space: wanted an object of names, got a {type(content).__name__}")
    return content


def _of_value(name: str, value: object) -> Parameter:
    if isinstance(value, Parameter):
        return value
    if isinstance(value, list | tuple):
        return _made(name, "choice", choices=tuple(value))
    call = _CALL.fullmatch(value.strip()) if isinstance(value, str) else None
    if call is None:
        raise BadJob(f"{name}: {value!r} is no range and no choice", remedy=_EXAMPLE)
    return _of_call(name, call[1], call[2])


def _of_call(name: str, kind: str, inside: str) -> Parameter:
    if kind not in _KINDS:
        raise BadJob(f"{name}={kind}({inside}): there is no {kind!r}. {nearest(kind, _KINDS)}")
    values = [value.strip() for value in inside.split(",") if value.strip()]
    if kind == "choice":
        return _made(name, kind, choices=tuple(_value(text) for text in values))
    steps = [value.partition("=")[2].strip() for value in values if value.replace(" ", "").startswith("step=")]
    ends = [value for value in values if "=" not in value]
    if len(ends) != 2 or len(ends) + len(steps) != len(values):
        raise BadJob(f"{name}={kind}({inside}): wanted the two ends of a range, and perhaps step=…", remedy=_EXAMPLE)
    low, high, *step = (_number(name, text) for text in (*ends, *steps))
    return _made(name, kind, low=low, high=high, step=step[0] if step else None)


def _made(name: str, kind: str, **values: object) -> Parameter:
    try:
        return Parameter(name=name, kind=kind, **values)  # type: ignore[arg-type]  # checked by the record itself
    except ValueError as problem:
        raise BadJob(f"the space: {problem}", remedy=_EXAMPLE) from problem


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadJob(f"{name}: {text!r} is no number", remedy=_EXAMPLE) from None


def _value(text: str) -> JSON:
    """A value of a choice: a number, true, false or none where it reads like one, else the text."""
    constants: dict[str, JSON] = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("\"'")


def _at(parameter: Parameter, share: float) -> JSON:
    """The value a share of the way from the first to the last; of choices that are numbers, in their order."""
    if parameter.kind != "choice":
        return _of_kind(parameter, _between(parameter, share))
    values = list(parameter.choices)
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        values.sort()
    return values[min(len(values) - 1, int(share * len(values)))]


def _between(parameter: Parameter, share: float) -> float:
    low, high = parameter.low, parameter.high
    if not parameter.is_logarithmic:
        return low + share * (high - low)
    return min(high, max(low, math.exp(math.log(low) + share * (math.log(high) - math.log(low)))))


def _of_kind(parameter: Parameter, value: float) -> JSON:
    """A number of the parameter: on a step if it has one, whole if it is."""
    if parameter.step is not None:
        value = parameter.low + parameter.step * round((value - parameter.low) / parameter.step)
    return round(value) if parameter.is_whole else float(f"{value:.12g}")


def _short(value: float) -> str:
    return f"{value:.12g}"


def seed_of(seed: int, number: int) -> int:
    """Seed of one trial's draws [number below 2^32]: a study that is continued draws what it would have drawn."""
    return int.from_bytes(hashlib.sha256(f"stoker tune {seed} {number}".encode()).digest()[:4])


def startup_trials(space: Space) -> int:
    """Number of trials proposed at random first [trials]: TPE counts ended ones, the Gaussian process finished ones."""
    return max(_STARTUP, 2 * len(space))
