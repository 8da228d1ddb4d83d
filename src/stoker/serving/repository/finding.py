"""Which models lie under the paths that a server was given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stoker import artifacts
from stoker.errors import BadArtifact


def find_models(places: Sequence[Path]) -> dict[str, Path]:
    """The directory of every model, by name, in the order of the names.

    A place is a model itself (`models/digits`), or a directory of models (`models`). A model is named for its
    directory; one without a version that is whole is not seen yet, and neither is one whose name begins with a dot.

    Raises:
        BadArtifact: a place is not a directory, or two models have one name.
    """
    found: dict[str, Path] = {}
    for place in places:
        if not place.is_dir():
            raise BadArtifact(
                f"{place} is not a directory",
                remedy="Give a model (models/digits) or a directory of models; see `stoker export`.",
            )
        for model in _models_in(place):
            name = model.resolve().name if model == place else model.name
            if name in found and found[name] != model:
                raise BadArtifact(f"{found[name]} and {model} are both named {name!r}", remedy="Rename one of them.")
            found[name] = model
    return dict(sorted(found.items()))


def _models_in(place: Path) -> tuple[Path, ...]:
    """`place` if it is a model, else the models in it."""
    if artifacts.versions(place):
        return (place,)
    inside = (path for path in place.iterdir() if not path.name.startswith("."))
    return tuple(path for path in sorted(inside) if artifacts.versions(path))
