"""How a model is served, beside its versions: `models/digits/service.json`."""

from __future__ import annotations

from pathlib import Path

from stoker.errors import BadArtifact
from stoker.records import ServiceSettings, dumps, loads
from stoker.store import write_atomic

SETTINGS = "service.json"


def read_settings(model: Path) -> ServiceSettings:
    """A model's settings; the defaults where nobody wrote any.

    Raises:
        BadArtifact: they cannot be read.
    """
    path = model / SETTINGS
    try:
        return loads(path.read_bytes(), ServiceSettings)
    except FileNotFoundError:
        return ServiceSettings()
    except (OSError, ValueError) as error:
        remedy = "Mend or delete it; `stoker bench-serve` writes one."
        raise BadArtifact(f"{path} cannot be read: {error}", remedy=remedy) from error


def write_settings(model: Path, settings: ServiceSettings) -> None:
    """Replace a model's settings, whole and durably.

    Raises:
        BadArtifact: the disk is full, or cannot be written.
    """
    write_atomic(model / SETTINGS, dumps(settings) + "\n", what=SETTINGS, error=BadArtifact)
