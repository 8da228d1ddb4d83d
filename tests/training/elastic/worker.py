"""A worker of the tests: meets, sends an event for each of its updates, and does as its arguments say.

Updates are in lockstep through files, as they would be by exchanging gradients: who sees that another one is gone has
lost its generation. What it learns is how many updates were made, which newcomers learn from veterans.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from stoker.training.elastic.rendezvous import Rendezvous, WorkerRetired
from stoker.training.elastic.worker import ElasticWorker


class Lost(Exception):
    """Another member does not come along."""


class Work:
    """Updates of one generation, done together with its other members, through files in a folder."""

    def __init__(self, member: ElasticWorker, meeting: Rendezvous, folder: Path) -> None:
        self.member, self.meeting, self.folder = member, meeting, folder
        self.write("pid", meeting.rank, os.getpid())

    def place(self, what: str, rank: int) -> Path:
        return self.folder / f"{self.meeting.name}-{what}-{rank}"

    def write(self, what: str, rank: int, value: object) -> None:
        aside = self.place(f"{what}.new", rank)
        aside.write_text(str(value), encoding="utf-8")
        aside.replace(self.place(what, rank))

    def read(self, what: str, rank: int) -> int | None:
        place = self.place(what, rank)
        return int(place.read_text(encoding="utf-8")) if place.exists() else None

    def agreed(self, done: int) -> int:
        """What the furthest of the veterans has done."""
        is_veteran = self.meeting.rank < self.meeting.num_veterans
        self.write("done", self.meeting.rank, done if is_veteran else 0)
        return max(self.exchanged("done"))

    def exchanged(self, what: str) -> list[int]:
        """What all ranks have written under this name."""
        while True:
            if STATE["stop"]:
                sys.exit(130)
            found = [self.read(what, rank) for rank in range(self.meeting.size)]
            if all(one is not None for one in found):
                return [one for one in found if one is not None]
            for rank in range(self.meeting.size):
                pid = self.read("pid", rank)
                if self.read("left", rank) is not None or (pid is not None and not lives(pid)):
                    raise Lost(f"rank {rank} is gone")
            time.sleep(0.005)

    def tell(self, kind: str, **fields: object) -> None:
        """Send an event, on rank 0."""
        if self.meeting.rank == 0:
            about = {"kind": kind, "generation": self.meeting.number, "size": self.meeting.size}
            self.member.event(json.dumps({**about, **fields}))

    def train(self, done: int, updates: int, pause_s: float) -> int:
        """Do updates until there are so many; how many this member has done, also where the generation is lost."""
        self.tell("met", done=done, veterans=self.meeting.num_veterans, notes=self.meeting.notes)
        for update in range(done, updates):
            if self.member.is_called():
                raise Lost("called")
            self.write(f"update{update}", self.meeting.rank, 1)
            self.exchanged(f"update{update}")
            STATE["done"] = update + 1
            self.tell("update", update=update)
            time.sleep(pause_s)
        return updates


STATE = {"done": 0, "stop": 0}


def lives(pid: int) -> bool:
    """Whether a process runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> int:
    """Train; the exit code."""
    folder, updates, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    member = ElasticWorker.from_environment()
    assert member is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: STATE.update(stop=1))
    (folder / f"pid-of-{member.worker}").write_text(str(os.getpid()), encoding="utf-8")
    try:
        meeting = member.meet()
        while True:
            work = Work(member, meeting, folder)
            try:
                STATE["done"] = work.agreed(STATE["done"])
                work.train(STATE["done"], updates, pause_s)
            except Lost as why:
                work.write("left", meeting.rank, 1)
                meeting = member.lost(str(why), {"done": STATE["done"], f"from {member.worker}": True})
            else:
                member.finished()
                return 0
    except WorkerRetired as dismissed:
        return dismissed.exit_code


if __name__ == "__main__":
    sys.exit(main())
