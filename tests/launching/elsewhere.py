"""A run at a fake place, from the side of the machine that sent it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import stoker.launching
from stoker.launching import launcher_of
from stoker.launching.follow import Follower
from stoker.records import Event, Launch, LaunchState, dumps
from stoker.store import RunDirectory
from stoker.store.run_files import LAUNCH
from stoker.testing import FakeClock

KINDS = Path(__file__).parent / "kinds"
RUNNING = LaunchState(phase="running", why="training", at="2026-11-25T10:00:10+00:00")
FINISHED = LaunchState(phase="finished", why="trained to its end", exit_code=0, at="2026-11-25T10:10:00+00:00")
STOPPED = LaunchState(phase="stopped", why="saved and left, as asked", exit_code=130, at="2026-11-25T10:05:00+00:00")
BEGAN_S = 1795600800.0
"""2026-11-25T10:00:00+00:00."""


@pytest.fixture
def fake_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kind of place `fake`, found as any other: by listing a folder."""
    monkeypatch.setattr(stoker.launching, "__path__", [*stoker.launching.__path__, str(KINDS)])
    launcher = launcher_of("fake")
    launcher.reset()  # type: ignore[attr-defined]
    yield launcher
    sys.modules.pop("stoker.launching.fake_place", None)


@dataclass
class Elsewhere:
    """A run here that is executed in the folder `there`."""

    here: RunDirectory
    there: Path
    launcher: Any
    shown: list[Event] = field(default_factory=list)
    clock: FakeClock = field(default_factory=FakeClock)

    @classmethod
    def make(cls, root: Path, launcher: Any, name: str = "blobs-1a2b3c", **launch: Any) -> Elsewhere:
        """A launch record here, and an empty directory there."""
        here, there = RunDirectory(root / "runs" / name), root / "there" / name
        here.path.mkdir(parents=True)
        there.mkdir(parents=True)
        settings: dict[str, Any] = {
            "run": name,
            "place": "fake:box",
            "kind": "fake",
            "handle": {"directory": str(there)},
            "identity": "1" * 64,
            "code_digest": "2" * 64,
            "environment_digest": "",
            "arguments": (),
            "submitted_at": "2026-11-25T09:59:00+00:00",
        }
        here.write(LAUNCH, Launch(**settings | launch))
        return cls(here, there, launcher)

    def log(self, kind: str, after_s: float, **fields: Any) -> None:
        """Add an event to the log there, `after_s` seconds after 10:00."""
        with (self.there / "events.jsonl").open("a") as file:
            file.write(dumps(Event(kind=kind, at=BEGAN_S + after_s, fields=fields), indent=None) + "\n")  # type: ignore[arg-type]

    def follower(self, **settings: Any) -> Follower:
        """One that waits on a fake clock."""
        return Follower(
            directory=self.here,
            launcher=self.launcher,
            sink=self.shown.append,
            clock=self.clock,
            sleep=self.clock.advance,
            **settings,
        )

    def messages(self) -> list[str]:
        """What notes and warnings say, in order."""
        return [str(event.fields["message"]) for event in self.shown if event.kind in ("noted", "warned")]
