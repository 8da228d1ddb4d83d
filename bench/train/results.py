"""Files of results: what was measured where, with what, and the command that measures it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from bench.forecast.registration import surroundings
from stoker.records.codec import JSON


def document(what: str, command: str, versions: Mapping[str, str]) -> dict[str, JSON]:
    """The head of a file of results."""
    return {
        "what": what,
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": surroundings(),
        "versions": dict(versions),
    }


def save(path: Path, content: dict[str, JSON]) -> None:
    """Write results so far, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    aside.replace(path)


def read(path: Path) -> dict[str, JSON]:
    """Results written before; empty where there are none."""
    if not path.exists():
        return {}
    found: dict[str, JSON] = json.loads(path.read_text(encoding="utf-8"))
    return found
