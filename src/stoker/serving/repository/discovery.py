"""Which models lie under the paths that a server was given.

Which versions of a model to serve. Values in, values out.

What lies in a model's directory, as far as a glance tells: whether to look again at what is served.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker import artifacts
from stoker.errors import BadArtifact, first_line
from stoker.records.codec import JSON
from stoker.serving.refusals import BadRequest, Unsupported
from stoker.serving.service import Parameter

_NOT_MODELS = frozenset({"lost+found"})
"""Directories that a file system makes in its root, for its administrator alone."""


@dataclass(frozen=True)
class DiscoveredModels:
    """Models by name, in the order of the names, and what could not be looked at.

    `problems` has a sentence for each directory that may be a model and cannot be read, by its name. `faults` are what
    is wrong with the places themselves: a server does not start with one, and goes on if it comes later.
    """

    models: dict[str, Path]
    problems: dict[str, str]
    faults: dict[str, BadArtifact]


def find_models(places: Sequence[Path]) -> DiscoveredModels:
    """The directory of every model.

    A place is a model itself (`models/digits`), or a directory of models (`models`). A model is named for its
    directory; one without a version that is whole is not seen yet, and neither is one whose name begins with a dot.
    What is wrong with one directory or place says nothing of the others.
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
    """`place` if it is a model, else the models in it; why others may be models and are not is added to `problems`."""
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
    """Versions in the order to try them: those asked for, newest first; without any, all of those there are.

    Args:
        available: those on disk.
        asked: those to serve, all of them; empty: the newest that passes its checks.
    """
    return tuple(sorted(set(asked or available), reverse=True))


def asked_versions(parameters: Mapping[str, Parameter] | None, available: Sequence[int]) -> tuple[int, ...]:
    """The versions that the parameters of a load request ask for; none for the model's own setting.

    They may have `config`, a model configuration as JSON text; all that is followed of it is
    `version_policy`: `{"latest": {"num_versions": 2}}`, `{"all": {}}` or `{"specific": {"versions": [1]}}`.

    Raises:
        BadRequest: the configuration cannot be read.
        Unsupported: files are sent along.
    """
    parameters = parameters or {}
    for name in parameters:
        if name.startswith("file:"):
            raise Unsupported(f"{name!r}: models are not uploaded; put a version into the repository and load it")
    text = parameters.get("config", "{}")
    try:
        config = json.loads(str(text))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the parameter 'config' is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadRequest(f"the parameter 'config' must be a JSON object, got {str(text)[:40]}")
    policy = config.get("version_policy")
    return () if not policy else _chosen(policy, available)


def _chosen(policy: JSON, available: Sequence[int]) -> tuple[int, ...]:
    """The versions that a Triton `version_policy` means."""
    newest_first = sorted(available, reverse=True)
    match policy:
        case {"all": _}:
            return tuple(newest_first)
        case {"latest": {"num_versions": int(number)}} if number > 0:
            return tuple(newest_first[:number])
        case {"specific": {"versions": [_, *_] as numbers}} if all(isinstance(one, int | str) for one in numbers):
            try:
                return tuple(int(one) for one in numbers)  # protobuf's JSON writes 64-bit numbers as strings
            except ValueError:
                pass
    raise BadRequest(
        f"version_policy {json.dumps(policy)} is none of "
        '{"latest": {"num_versions": 1}}, {"all": {}}, {"specific": {"versions": [1]}}'
    )


Snapshot = tuple[tuple[str, int, int, int], ...]
"""Name, size [bytes], time of the last change [ns] and inode of every file of a model."""

MOST_FILES = 100_000
"""Files of a model that a glance looks at; a model with more of them does not hold up the others."""


def snapshot(model: Path) -> Snapshot:
    """The files of a model's versions and its settings, sorted; nothing where it is gone or cannot be read."""
    return tuple(sorted(itertools.islice(_files(model, "", depth=0), MOST_FILES)))


def settled_models(
    seen: Mapping[str, Snapshot], before: Mapping[str, Snapshot], tried: Mapping[str, Snapshot]
) -> list[str]:
    """Models to look at: those that changed since they were last `tried`, and rest since the glance `before`.

    A directory that is still being copied into changes from one glance to the next.
    """
    return [name for name, one in seen.items() if one == before.get(name) and one != tried.get(name)]


def _files(directory: Path, prefix: str, *, depth: int) -> Iterator[tuple[str, int, int, int]]:
    """Files below a directory. Links are followed to a version and to the settings, not within a version.

    Within a version a link is listed as one: two links to `.` would otherwise be an endless tree.
    """
    try:
        entries = list(os.scandir(directory))
    except OSError:  # gone between two looks, or not ours to read: loading it would say so
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
