"""What workers print: one speaks for all, the others are heard only where they say something else."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable

KEPT, REMEMBERED = 60, 1000
"""Lines of each worker that are kept, and lines shown that are known again."""


class Printed:
    """Lines from a worker's output.

    Args:
        descriptor: where they are read from, without waiting.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.last: deque[str] = deque(maxlen=KEPT)
        self._begun = b""

    def pending(self) -> tuple[list[str], bool]:
        """Whole lines that are here already, and whether more may come; at the end also what has no end of line."""
        chunks: list[bytes] = []
        is_open = True
        while is_open:
            try:
                chunk = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:
                break
            is_open = bool(chunk)
            chunks.append(chunk)
        return self._lines(b"".join(chunks), is_open=is_open), is_open

    def rest(self) -> list[str]:
        """All that is left, also without an end of line: nothing more will be read."""
        return [*self.pending()[0], *self._lines(b"", is_open=False)]

    def _lines(self, read: bytes, *, is_open: bool) -> list[str]:
        *whole, self._begun = (self._begun + read).split(b"\n")
        if not is_open and self._begun:
            whole, self._begun = [*whole, self._begun], b""
        lines = [line.decode(errors="replace") for line in whole]
        self.last.extend(lines)
        return lines


class Speaker:
    """Shows lines, and remembers which, so that the same is not said twice.

    Args:
        show: called with each line.
    """

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self._show = show or _to_standard_error
        self._shown: deque[str] = deque(maxlen=REMEMBERED)

    def say(self, lines: Iterable[str]) -> None:
        """Show lines of the one that speaks for all."""
        for line in lines:
            self._shown.append(line)
            self._show(line)

    def add(self, title: str, lines: Iterable[str]) -> None:
        """Show lines of another one under a title, unless all of them were shown before."""
        lines = list(lines)
        if any(line.strip() and line not in self._shown for line in lines):
            self.say([title, *lines])


def _to_standard_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - what workers print belongs there
