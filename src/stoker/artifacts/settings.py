"""How a model is served, beside its versions: `models/digits/service.json`."""

from __future__ import annotations

import json
from pathlib import Path

from stoker.errors import BadArtifact
from stoker.records import ServiceSettings, dumps, from_json
from stoker.store import write_atomic

SETTINGS = "service.json"
_MOST_BYTES = 1024 * 1024


def read_settings(model: Path) -> ServiceSettings:
    """A model's settings; the defaults where nobody wrote any. What a person writes needs no `record` and `schema`.

    Raises:
        BadArtifact: they cannot be read.
    """
    path = model / SETTINGS
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        document = json.loads(text)
        if isinstance(document, dict) and not {"record", "schema"} & document.keys():  # written by hand
            document |= {"record": ServiceSettings.__name__, "schema": ServiceSettings.schema}
        return from_json(document, ServiceSettings)
    except FileNotFoundError:
        return ServiceSettings()
    except (OSError, ValueError, RecursionError) as error:
        remedy = 'Mend or delete it; `{"versions": [1]}` is a whole one, and `stoker bench-serve` writes one.'
        raise BadArtifact(f"{path} cannot be read: {error}", remedy=remedy) from error


def write_settings(model: Path, settings: ServiceSettings) -> None:
    """Replace a model's settings, whole and durably.

    Raises:
        BadArtifact: the disk is full, or cannot be written.
    """
    write_atomic(model / SETTINGS, dumps(settings) + "\n", what=SETTINGS, error=BadArtifact)
