"""Discovery: the models under a server's paths, the versions to serve, and snapshots of files to detect changes."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stoker import artifacts
from stoker.errors import BadArtifact, first_line
from stoker.records.codec import parsed
from stoker.serving.refusals import BadRequest, Unsupported
from stoker.serving.service import Parameter

_NOT_MODELS = frozenset({"lost+found"})
"""Directories that a file system creates in its root."""


@dataclass(frozen=True)
class DiscoveredModels:
    """Models by name, sorted, and errors.

    `problems` has a sentence for each directory that may be a model and cannot be read, by its name. `faults` are
    errors of the places themselves: a server does not start with one, and continues if it occurs later.
    """

    models: dict[str, Path]
    problems: dict[str, str]
    faults: dict[str, BadArtifact]


def find_models(places: Sequence[Path]) -> DiscoveredModels:
    """The directory of every model.

    A place is a model itself (`models/digits`), or a directory of models (`models`). A model has its directory's name;
    directories without a complete version, and names with a leading dot, are ignored. An error in one directory or
    place does not affect the others.
    """
    models: dict[str, Path] = {}
    problems: dict[str, str] = {}
    faults: dict[str, BadArtifact] = {}
    for place in places:
        try:
            if not place.is_dir():
                raise BadArtifact(
                    f"{place} is not a directory",
                    remedy="Give a model (models/digits) or a directory of models; see `stoker export`.",
                )
            for model in _models_in(place, problems):
                name = model.resolve().name if model == place else model.name
                if name in models and models[name] != model:
                    faults[name] = BadArtifact(
                        f"{models[name]} and {model} are both named {name!r}", remedy="Rename one of them."
                    )
                else:
                    models[name] = model
        except BadArtifact as error:
            faults[str(place)] = error
        except OSError as error:
            faults[str(place)] = BadArtifact(f"{place} cannot be read: {first_line(error)}")
    return DiscoveredModels(dict(sorted(models.items())), problems, faults)


def _models_in(place: Path, problems: dict[str, str]) -> Iterator[Path]:
    """`place` if it is a model, else the models in it; directories that cannot be read are added to `problems`."""
    if artifacts.versions(place):
        yield place
        return
    for path in sorted(place.iterdir()):
        if path.name.startswith(".") or path.name in _NOT_MODELS:
            continue
        try:
            if not artifacts.versions(path):
                continue
            path.name.encode()
        except UnicodeEncodeError:
            name = path.name.encode(errors="backslashreplace").decode()
            problems[name] = "its directory's name is not UTF-8: rename it"
        except OSError as error:
            name = path.name.encode(errors="backslashreplace").decode()
            problems[name] = f"its directory cannot be read: {error.strerror or first_line(error)}"
        else:
            yield path


def versions_to_try(available: Sequence[int], asked: Sequence[int]) -> tuple[int, ...]:
    """Versions in the order to try them: the requested ones, or all available ones, newest first.

    Args:
        available: on disk.
        asked: versions to serve, all of them; empty: the newest that passes its checks.
    """
    return tuple(sorted(set(asked or available), reverse=True))


def asked_versions(parameters: Mapping[str, Parameter] | None, available: Sequence[int]) -> tuple[int, ...]:
    """The versions named by a load request's parameters; empty for the model's own setting.

    The parameter `config` may be a model configuration as JSON text; only its `version_policy` is used:
    `{"latest": {"num_versions": 2}}`, `{"all": {}}` or `{"specific": {"versions": [1]}}`.

    Raises:
        BadRequest: the configuration cannot be read.
        Unsupported: files are uploaded.
    """
    parameters = parameters or {}
    for name in parameters:
        if name.startswith("file:"):
            raise Unsupported(f"{name!r}: models are not uploaded; put a version into the repository and load it")
    text = parameters.get("config", "{}")
    try:
        config = parsed(str(text))
    except ValueError as error:
        raise BadRequest(f"the parameter 'config' is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadRequest(f"the parameter 'config' must be a JSON object, got {str(text)[:40]}")
    policy = config.get("version_policy")
    if not policy:
        return ()
    newest_first = sorted(available, reverse=True)
    match policy:
        case {"all": _}:
            return tuple(newest_first)
        case {"latest": {"num_versions": int(number)}} if number > 0:
            return tuple(newest_first[:number])
        case {"specific": {"versions": [_, *_] as numbers}} if all(isinstance(number, int | str) for number in numbers):
            with suppress(ValueError):  # a string that is no number: refused below, as every other policy
                return tuple(int(number) for number in numbers)  # protobuf's JSON writes 64-bit numbers as strings
    raise BadRequest(
        f"version_policy {json.dumps(policy)} is none of "
        '{"latest": {"num_versions": 1}}, {"all": {}}, {"specific": {"versions": [1]}}'
    )


Snapshot = tuple[tuple[str, int, int, int], ...]
"""Name, size [bytes], time of the last change [ns] and inode of every file of a model."""

MOST_FILES = 100_000
"""Limit on the files of a model in a snapshot, so that a large model does not delay the others."""


def snapshot(model: Path) -> Snapshot:
    """The files of a model's versions and its settings, sorted; empty if it is gone or cannot be read."""
    return tuple(sorted(itertools.islice(_files(model, "", depth=0), MOST_FILES)))


def settled_models(
    seen: Mapping[str, Snapshot], before: Mapping[str, Snapshot], tried: Mapping[str, Snapshot]
) -> list[str]:
    """Models to load: changed since they were last `tried`, and unchanged since the snapshot `before`.

    A directory that is still being copied into changes between two snapshots.
    """
    return [name for name, files in seen.items() if files == before.get(name) and files != tried.get(name)]


def _files(directory: Path, prefix: str, *, depth: int) -> Iterator[tuple[str, int, int, int]]:
    """Files below a directory. Links are followed to a version and to the settings, not within a version.

    Within a version a link is listed as a file: two links to `.` would be an endless tree.
    """
    try:
        entries = list(os.scandir(directory))
    except OSError:  # just deleted, or not readable: loading it reports that
        return
    for entry in entries:
        if entry.name.startswith(".") and depth == 0:
            continue
        try:
            about = entry.stat(follow_symlinks=depth == 0)
            is_directory = entry.is_dir(follow_symlinks=depth == 0)
        except OSError:
            continue
        if is_directory:
            if depth > 0 or entry.name.isdigit():
                yield from _files(Path(entry.path), f"{prefix}{entry.name}/", depth=depth + 1)
        else:
            yield f"{prefix}{entry.name}", about.st_size, about.st_mtime_ns, about.st_ino
