"""Results that say beforehand what will be measured: written with a digest before, and again after."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from stoker.records import digest
from stoker.records.codec import JSON

RESULTS = Path(__file__).parents[1] / "results"


def surroundings() -> dict[str, JSON]:
    """The machine and the versions that results hold for."""
    found: dict[str, JSON] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def register(path: Path, what: str, command: str, registered: JSON) -> dict[str, JSON]:
    """Write what will be measured to `path`, with its digest and the time, and return the document.

    Nothing may have been measured yet. The digest is of `registered` alone, so that anybody can compute it again.
    """
    now = datetime.now(UTC)
    document: dict[str, JSON] = {
        "what": what,
        "command": command,
        "date": now.date().isoformat(),
        "registered_at": now.isoformat(timespec="seconds"),
        "registered_digest": digest(registered),
        "machine": surroundings(),
        "registered": registered,
    }
    write(path, document)
    return document


def write(path: Path, document: dict[str, JSON]) -> None:
    """Write a document with results so far.

    Raises:
        ValueError: what was registered is no longer what it was.
    """
    if digest(document["registered"]) != document["registered_digest"]:
        raise ValueError(f"{path.name}: what was registered has changed since")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    aside.replace(path)


def dated(name: str) -> Path:
    """`bench/results/NAME_DATE.json`."""
    return RESULTS / f"{name}_{datetime.now(UTC).date().isoformat()}.json"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
