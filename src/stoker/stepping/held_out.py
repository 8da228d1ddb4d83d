"""Which held-out set was evaluated when something went wrong: else the mistake is looked for in the training data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stoker.errors import BadJob, RunFailed

_BEGINS = "evaluating "


@contextmanager
def evaluating(split: str) -> Iterator[None]:
    """Within the block errors name the set: Stoker's own in their message, others in a note for `set_in_words`."""
    try:
        yield
    except (BadJob, RunFailed) as problem:
        problem.message = f"{_BEGINS}{split}=…: {problem.message}"
        raise
    except Exception as problem:
        problem.add_note(f"{_BEGINS}{split}=…")
        raise


def set_in_words(problem: BaseException) -> str:
    """` evaluating test=…`, if that is where an error came from; else nothing."""
    notes = getattr(problem, "__notes__", ())
    return next((f" {note}" for note in notes if note.startswith(_BEGINS)), "")
