"""What a tracker is told, and what it has to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stoker.records.run import RunStatus


@dataclass(frozen=True, kw_only=True)
class About:
    """What does not change while a run goes on.

    `parameters` are the settings of its job and its plan, flat, by names such as `optimizer.lr`; `folder` is where a
    tracker may keep files of its own; `created_at` is in seconds since 1970 (UTC).
    """

    run: str
    job: str
    folder: Path
    created_at: float
    parameters: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Point:
    """Values at a place in training: after `samples` samples, at `at` seconds since 1970 (UTC)."""

    samples: int
    at: float
    values: Mapping[str, float]


class Tracker(Protocol):
    """A run at a tracker, new or continued. Any method may raise whatever the tracker's library raises."""

    id: str
    """What the tracker calls this run: kept, and handed back when it is continued."""
    where: str
    """Where people find it: a URL, or a path."""

    def log(self, points: list[Point]) -> None:
        """Take over these values, in this order."""

    def end(self, status: RunStatus, files: list[Path]) -> None:
        """Note how the run stands, and take over files worth keeping, such as the report."""

    def close(self) -> None:
        """Let go of files and connections; what was logged is where it belongs."""
