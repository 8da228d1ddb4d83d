"""Errors a user can act on.

```
StokerError                      exit  HTTP
├── BadJob          the user's input is wrong            2   422
│   └── BadSetting  one value cannot be meant            2   422
├── DoesNotFit      no legal plan fits the device        3   409
├── NoDevice        the place named by `--on` is absent  2   404
├── RunFailed       training started and could not go on 4   500
├── BadRun          a run directory cannot be used       2   409
├── BadArtifact     an exported model cannot be used     2   422
├── ServiceError    a service cannot answer              4   503
└── PlaceFailed     a place elsewhere refuses            4   502
    └── PlaceUnreachable  it does not answer             4   504
```
Every message says what is wrong with its numbers and what to do; the exit code and the HTTP status sit on the class,
so that the command line and the web only render. A traceback of one of these is shown under `--debug` alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import ClassVar

_MOST_LISTED, _FEW = 20, 5
"""Up to so many names are all listed; of more, a few."""


class StokerError(Exception):
    """Something the user can mend. `message` says what is wrong, `remedy` what to do."""

    exit_code: ClassVar[int] = 4
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        """The message, and the remedy on a line of its own."""
        return self.message if self.remedy is None else f"{self.message}\n{self.remedy}"


class BadJob(StokerError):
    """The job file, its settings, its data or its functions cannot be used."""

    exit_code = 2
    http_status = 422


class BadSetting(BadJob, ValueError):
    """A value that cannot be meant, found where it is given: `SGD(lr=-1)`, `epochs(0)`.

    A ValueError too, as Python's own objects raise: a Job that is made of such values adds the name of its field.
    """


class DoesNotFit(StokerError):
    """No plan that keeps the contract fits the device."""

    exit_code = 3
    http_status = 409


class NoDevice(StokerError):
    """The place asked for is unknown, or is not attached to this machine."""

    exit_code = 2
    http_status = 404


class RunFailed(StokerError):
    """Training had started and could not go on; what was saved is intact."""

    exit_code = 4
    http_status = 500


class BadRun(StokerError):
    """A run directory is locked, damaged, of another job or of another version."""

    exit_code = 2
    http_status = 409


class BadArtifact(StokerError):
    """An exported model is damaged or of another version."""

    exit_code = 2
    http_status = 422


class ServiceError(StokerError):
    """A service cannot answer."""

    exit_code = 4
    http_status = 503


class PlaceFailed(StokerError):
    """A place elsewhere refused, or cannot run the job: no login, no such partition, no room, a missing wheel."""

    exit_code = 4
    http_status = 502


class PlaceUnreachable(PlaceFailed):
    """A place elsewhere does not answer; what runs there is unknown, so nothing is ended or restarted."""

    http_status = 504


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like `word` as ` Did you mean 'x'?`, and what is known: all of it, or of much the nearest.

    >>> nearest("lrr", ["lr", "width"])
    "Did you mean 'lr'? Known: lr, width."
    >>> nearest("tune", [f"run-{n}" for n in range(99)])
    'Known: run-9, run-8, run-7, run-6, run-5 and 94 others.'
    """
    names = sorted(known)
    if not names:
        return "There are none to choose from."
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    return f"{guess}Known: {listed_in_part(names, word)}."


def listed_in_part(names: Sequence[str], word: str = "") -> str:
    """Names between commas; of a long list the names that are most like `word`, and how many others."""
    if len(names) <= _MOST_LISTED:
        return ", ".join(names)
    near = difflib.get_close_matches(word, names, n=_FEW, cutoff=0.0)
    return f"{', '.join(near)} and {len(names) - len(near)} others"
