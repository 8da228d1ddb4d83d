"""The worker processes of one machine: started, heard, and seen to end. Decides nothing."""

from __future__ import annotations

import secrets
import selectors
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from stoker.launching.channel import Message
from stoker.launching.words import Speaker
from stoker.launching.worker import Address, Worker

_PAUSE_S = 1.0


class Crew:
    """Workers by number, of which one speaks for all.

    Args:
        command: program and arguments of each.
        environment: variables for them, beside those of this process.
        store: where the store is.
        speaker: shows what they print.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], store: Address, speaker: Speaker
    ) -> None:
        self._command, self._environment, self._store, self._speaker = command, environment, store, speaker
        self._secret = secrets.token_hex(32)
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, Worker] = {}
        self._looked_at: float | None = None

    def start(self, number: int) -> None:
        """Start a process in this place."""
        worker = Worker(number, self._command, self._environment, self._store, self._secret)
        self._workers[number] = worker
        self._selector.register(worker.channel, selectors.EVENT_READ, (worker, "channel"))
        self._selector.register(worker.printed.descriptor, selectors.EVENT_READ, (worker, "printed"))

    @property
    def running(self) -> list[int]:
        """Numbers of those that have not been seen to end."""
        return list(self._workers)

    def send(self, worker: int, kind: str, /, **fields: Any) -> None:
        """Send a message to a worker, if it still runs."""
        if worker in self._workers:
            self._workers[worker].channel.send(kind, **fields)

    def signal(self, number: int, signal_number: int) -> None:
        """Send a signal to a worker, if it still runs."""
        if number in self._workers:
            self._workers[number].signal(signal_number)

    def kill(self, number: int, verdict: str) -> None:
        """End a worker at once, if it still runs; `verdict` says what for."""
        if number in self._workers:
            self._workers[number].kill(verdict)

    def look(self, longest_s: float, leader: int) -> Iterator[tuple[int, Message]]:
        """Messages that come within a time [s], each with its worker; `leader` is the one that speaks for all.

        The last of a worker is `ended`, with its `code`, `why`, how long it had run, `lasted_s`, and its last `words`:
        lines that were not shown, unless we have killed it.
        """
        ready = self._selector.select(longest_s)
        self._forgive_pause(longest_s)
        for key, _ in ready:
            worker, what = key.data
            yield from self._heard(worker, what, leader)
        for worker in [one for one in self._workers.values() if one.code is not None]:
            yield from self._ended(worker, leader)

    def silent(self, silence_s: float) -> list[tuple[int, float, bool]]:
        """Workers without a sign of life for so long [s]: for how long [s], and whether the process was stopped."""
        now = time.monotonic()
        return [
            (number, now - worker.heard_at, worker.is_stopped)
            for number, worker in self._workers.items()
            if now - worker.heard_at > silence_s
        ]

    def close(self) -> None:
        """End whoever still runs."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._selector.close()

    def _forgive_pause(self, longest_s: float) -> None:
        """If this process itself stood still, it could not hear anybody."""
        now = time.monotonic()
        if self._looked_at is not None and now - self._looked_at > longest_s + _PAUSE_S:
            for worker in self._workers.values():
                worker.heard_at += now - self._looked_at
        self._looked_at = now

    def _heard(self, worker: Worker, what: Literal["channel", "printed"], leader: int) -> Iterator[tuple[int, Message]]:
        if what == "printed":
            lines, is_open = worker.printed.pending()
            self._say(worker, lines, leader)
            if not is_open:
                self._selector.unregister(worker.printed.descriptor)
            return
        messages, is_open = worker.channel.pending()
        if messages:
            worker.heard_at = time.monotonic()
        if not is_open:
            self._selector.unregister(worker.channel)
        for message in messages:
            if message["kind"] != "alive":
                yield worker.number, message

    def _ended(self, worker: Worker, leader: int) -> Iterator[tuple[int, Message]]:
        """What was still under way, then the end. Its children may hold its ends open: nothing is waited for."""
        messages, _ = worker.channel.pending()
        for message in messages:
            if message["kind"] != "alive":
                yield worker.number, message
        self._say(worker, worker.printed.rest(), leader)
        is_heard = worker.verdict is not None or worker.number == leader
        ended = {
            "code": worker.code, "why": worker.end_in_words, "lasted_s": time.monotonic() - worker.started_at,
            "words": [] if is_heard else list(worker.printed.last),
        }  # fmt: skip
        for end in (worker.channel, worker.printed.descriptor):
            if end in self._selector.get_map():
                self._selector.unregister(end)
        del self._workers[worker.number]
        worker.close()
        yield worker.number, {"kind": "ended", **ended}

    def _say(self, worker: Worker, lines: list[str], leader: int) -> None:
        if worker.number == leader:
            self._speaker.say(lines)
