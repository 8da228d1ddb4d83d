"""Where a run was executed elsewhere, in words."""

from __future__ import annotations

import pytest

from stoker.records import Event, Launch
from stoker.reporting.launch_text import launch_words


@pytest.mark.parametrize(("wait_s", "words"), [(0.2, "ssh:box"), (90.0, "ssh:box · waited 1 min 30 s")])
def test_a_wait_is_said_where_there_was_one(wait_s: float, words: str) -> None:
    """A host without a queue starts at once."""
    launch = Launch(
        run="a",
        place="ssh:box",
        kind="ssh",
        handle={},
        identity="",
        code_digest="",
        environment_digest="",
        arguments=(),
        submitted_at="2026-11-25T10:00:00+00:00",
    )
    assert launch.submitted_s is not None
    assert launch_words(launch, [Event(kind="planned", at=launch.submitted_s + wait_s, fields={})]) == words
