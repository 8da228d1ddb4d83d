"""How each model is to be served: its `service.json`, and what the command line sets over it.

How many instances of a model, and threads in each, where nobody has measured what is best.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from stoker.artifacts import read_settings
from stoker.errors import BadJob, nearest
from stoker.records import ServiceSettings, from_json, to_json
from stoker.records.codec import JSON

EVERY_MODEL = "*"
_FIELDS = tuple(field.name for field in fields(ServiceSettings) if field.name != "basis")


@dataclass(frozen=True, kw_only=True)
class Override:
    """A setting of one model, or of every one (`*`), that outranks its `service.json`."""

    model: str
    name: str
    value: JSON


def parse_overrides(words: Iterable[str]) -> tuple[Override, ...]:
    """Overrides from `MODEL.NAME=VALUE`, `*.NAME=VALUE` or `NAME=VALUE`; lists are written `16,32,64`.

    Raises:
        BadJob: a word has another form, an unknown name, or a value of another type.
    """
    found = tuple(_override(word) for word in words)
    for one in found:
        overridden(ServiceSettings(), (one,), one.model)
    return found


def overridden(settings: ServiceSettings, overrides: Iterable[Override], model: str) -> ServiceSettings:
    """`settings` of a model with what is set over them; the last word counts, and one model's before every one's.

    Raises:
        BadJob: the outcome is no setting a server can follow.
    """
    mine = [one for one in overrides if one.model in (EVERY_MODEL, model)]
    mine.sort(key=lambda one: one.model == model)
    if not mine:
        return settings
    document = to_json(settings) | {one.name: one.value for one in mine}
    try:
        return from_json(document, ServiceSettings)
    except ValueError as error:
        raise BadJob(f"--set {model}: {error}") from error


def model_settings(
    name: str, model: Path, *, given: ServiceSettings | None = None, overrides: Iterable[Override] = ()
) -> ServiceSettings:
    """Those given, or those of `service.json` in the model's directory, or the defaults; with what is set over them.

    Raises:
        BadArtifact: the file cannot be read, or has no settings a server can follow.
        BadJob: what is set over them does not go with them.
    """
    return overridden(given or read_settings(model), overrides, name)


def require_models(overrides: Iterable[Override], known: Collection[str]) -> None:
    """See that every override is of a model there is; with none at all, that is what is to be told.

    Raises:
        BadJob: one is not, and would change nothing.
    """
    for one in overrides:
        if known and one.model != EVERY_MODEL and one.model not in known:
            raise BadJob(
                f"--set {one.model}.{one.name}: there is no model {one.model!r}", remedy=nearest(one.model, known)
            )


def _override(word: str) -> Override:
    where, equals, text = word.partition("=")
    model, dot, name = where.strip().rpartition(".")
    if not equals or not name:
        raise BadJob(f"--set {word}: wanted MODEL.NAME=VALUE, such as digits.max_batch_rows=16")
    if name not in _FIELDS:
        raise BadJob(f"--set {word}: there is no setting {name!r}", remedy=nearest(name, _FIELDS))
    return Override(model=model if dot else EVERY_MODEL, name=name, value=_value(name, text.strip()))


def _value(name: str, text: str) -> JSON:
    """The JSON value that is meant; `16,32` is a list, and what is no JSON stays a text for the codec to refuse."""
    is_list = name in {"buckets", "versions"} and not text.startswith("[")
    try:
        return json.loads(f"[{text}]" if is_list else text)
    except ValueError:
        return text


CORES_PER_INSTANCE = 4
"""One instance for so many cores: a few threads shorten a lone request, more instances answer several at once."""


def sized(settings: ServiceSettings, cores: int) -> ServiceSettings:
    """`settings` with both numbers chosen: instances × threads never exceed the usable cores unless they were given.

    >>> [(s.instances, s.threads) for s in (sized(ServiceSettings(), cores) for cores in (1, 2, 4, 8, 32))]
    [(1, 1), (1, 2), (1, 4), (2, 4), (8, 4)]
    """
    instances, threads = settings.instances, settings.threads
    if instances is None:
        instances = max(1, cores // (threads or CORES_PER_INSTANCE))
    if threads is None:
        threads = max(1, cores // instances)
    return replace(settings, instances=instances, threads=threads)
