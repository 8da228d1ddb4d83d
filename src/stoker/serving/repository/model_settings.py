"""Settings of each model: its `service.json`, overrides of the command line, and default instances and threads."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from stoker.artifacts import read_settings
from stoker.errors import BadJob, nearest
from stoker.records import ServiceSettings, from_json, to_json
from stoker.records.codec import JSON, parsed

EVERY_MODEL = "*"
_FIELDS = tuple(field.name for field in fields(ServiceSettings) if field.name != "basis")


@dataclass(frozen=True, kw_only=True)
class Override:
    """A setting of one model, or of every model (`*`), that overrides its `service.json`."""

    model: str
    name: str
    value: JSON


def parse_overrides(words: Iterable[str]) -> tuple[Override, ...]:
    """Overrides from `MODEL.NAME=VALUE`, `*.NAME=VALUE` or `NAME=VALUE`; lists are written `16,32,64`.

    Raises:
        BadJob: an override has another form, an unknown name, or a value of another type.
    """
    overrides = []
    for text in words:
        target, equals, value = text.partition("=")
        model, dot, name = target.strip().rpartition(".")
        if not equals or not name:
            raise BadJob(f"--set {text}: wanted MODEL.NAME=VALUE, such as digits.max_batch_rows=16")
        if name not in _FIELDS:
            raise BadJob(f"--set {text}: there is no setting {name!r}", remedy=nearest(name, _FIELDS))
        override = Override(model=model if dot else EVERY_MODEL, name=name, value=_value(name, value.strip()))
        overridden(ServiceSettings(), (override,), override.model)
        overrides.append(override)
    return tuple(overrides)


def overridden(settings: ServiceSettings, overrides: Iterable[Override], model: str) -> ServiceSettings:
    """`settings` of a model with its overrides; the last one counts, and a model's own before those of every model.

    Raises:
        BadJob: the result is not valid.
    """
    own = [override for override in overrides if override.model in (EVERY_MODEL, model)]
    own.sort(key=lambda override: override.model == model)
    if not own:
        return settings
    document = to_json(settings) | {override.name: override.value for override in own}
    try:
        return from_json(document, ServiceSettings)
    except ValueError as error:
        raise BadJob(f"--set {model}: {error}") from error


def model_settings(
    name: str, model: Path, *, given: ServiceSettings | None = None, overrides: Iterable[Override] = ()
) -> ServiceSettings:
    """The given settings, or those of the model's `service.json`, or the defaults; with overrides.

    Raises:
        BadArtifact: the file cannot be read, or is not valid.
        BadJob: the overrides contradict it.
    """
    return overridden(given or read_settings(model), overrides, name)


def require_models(overrides: Iterable[Override], known: Collection[str]) -> None:
    """Check that every override names a known model; not checked without any model.

    Raises:
        BadJob: one does not, and would change nothing.
    """
    for override in overrides:
        name = override.model
        if known and name != EVERY_MODEL and name not in known:
            raise BadJob(f"--set {name}.{override.name}: there is no model {name!r}", remedy=nearest(name, known))


def _value(name: str, text: str) -> JSON:
    """The JSON value of a text; `16,32` is a list, and invalid JSON stays text, which the codec refuses."""
    is_list = name in {"buckets", "versions"} and not text.startswith("[")
    try:
        return parsed(f"[{text}]" if is_list else text)
    except ValueError:
        return text


CORES_PER_INSTANCE = 4
"""Cores per instance: some threads shorten a single request, more instances answer several at once."""


def sized(settings: ServiceSettings, cores: int) -> ServiceSettings:
    """`settings` with instances and threads chosen; their product exceeds the cores only if both were given.

    >>> [(s.instances, s.threads) for s in (sized(ServiceSettings(), cores) for cores in (1, 2, 4, 8, 32))]
    [(1, 1), (1, 2), (1, 4), (2, 4), (8, 4)]
    """
    instances, threads = settings.instances, settings.threads
    if instances is None:
        instances = max(1, cores // (threads or CORES_PER_INSTANCE))
    if threads is None:
        threads = max(1, cores // instances)
    return replace(settings, instances=instances, threads=threads)
