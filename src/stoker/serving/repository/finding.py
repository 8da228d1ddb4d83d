"""Which models lie under the paths that a server was given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker import artifacts
from stoker.errors import BadArtifact, first_line

_NOT_MODELS = frozenset({"lost+found"})
"""Directories that a file system makes in its root, for its administrator alone."""


@dataclass(frozen=True)
class Found:
    """Models by name, in the order of the names, and what could not be looked at.

    `problems` has a sentence for each directory that may be a model and cannot be read, by its name. `faults` are what
    is wrong with the places themselves: a server does not start with one, and goes on if it comes later.
    """

    models: dict[str, Path]
    problems: dict[str, str]
    faults: dict[str, BadArtifact]


def find_models(places: Sequence[Path]) -> Found:
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
    return Found(dict(sorted(models.items())), problems, faults)


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
