"""A place that is a folder here, and says what a test lets it say."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from stoker.errors import NoDevice, PlaceUnreachable
from stoker.launching.launcher import Handle, HostRanks, Launcher, LaunchTarget, Offer, Probe, Request, Submission
from stoker.records import LaunchState


class FakePlace(Launcher):
    """`fake:NAME`; the run's directory there is the handle's."""

    kind = "fake"
    syntax = "fake:name[/[N×]DEVICE]"

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what earlier tests let it say."""
        self.answers: list[LaunchState | PlaceUnreachable] = []
        self.after_stop: list[LaunchState] = []
        self.cut_for = 0
        self.meanwhile: Callable[[], None] = lambda: None
        self.offered: tuple[Offer, ...] = ()
        self.probed = Probe(facts={"python": "3.11"})
        self.calls: list[str] = []

    def parse(self, text: str) -> LaunchTarget:
        if "!" in text:
            raise NoDevice(f"--on fake:{text} cannot be read.", remedy=f"The form is {self.syntax}.")
        return LaunchTarget(text=f"fake:{text}", kind=self.kind, address=text.partition("/")[0])

    def probe(self, target: LaunchTarget, options: Mapping[str, str]) -> Probe:
        if target.address == "gone":
            raise PlaceUnreachable("gone cannot be reached: no route")
        return self.probed

    def offers(self, request: Request) -> tuple[Offer, ...]:
        if request.target.address == "gone":
            raise PlaceUnreachable("gone cannot be reached: no route")
        return self.offered

    def script(self, submission: Submission) -> str:
        limit = "" if submission.most_held_s is None else f", at most {submission.most_held_s:g} s"
        return f"run {submission.run}{limit}\n"

    def start(self, submission: Submission, tell: Callable[[str], None]) -> Handle:
        self.calls.append("start")
        return {}

    def ranks(self, environ: Mapping[str, str]) -> HostRanks:
        return HostRanks()

    def state(self, handle: Handle) -> LaunchState:
        self.calls.append("state")
        self.meanwhile()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, PlaceUnreachable):
            raise answer
        return answer

    def events(self, handle: Handle, offset: int) -> bytes:
        self.calls.append("events")
        if self.cut_for > 0:
            self.cut_for -= 1
            raise PlaceUnreachable("fake cannot be reached: the connection was lost")
        log = Path(handle["directory"]) / "events.jsonl"
        return log.read_bytes()[offset:] if log.exists() else b""

    def stop(self, handle: Handle) -> None:
        self.calls.append("stop")
        self.answers = list(self.after_stop)

    def fetch(self, handle: Handle, into: Path) -> None:
        self.calls.append("fetch")
        shutil.copytree(handle["directory"], into, dirs_exist_ok=True)


LAUNCHER = FakePlace()
