"""Errors of held-out sets, by the name of the set."""

from __future__ import annotations

import pytest

from stoker.errors import BadJob, RunFailed, StokerError
from stoker.loading.samples import BadSample
from stoker.stepping.step_failures import evaluating, held_out_set_in_words


@pytest.mark.parametrize("kind", [BadJob, BadSample, RunFailed])
def test_errors_in_words_say_which_set_is_meant(kind: type[StokerError]) -> None:
    """In front, with its type and its remedy as they were."""
    with pytest.raises(kind) as told, evaluating("test"):
        raise kind("labels go from 7 to 8", remedy="Look.")
    assert str(told.value) == "evaluating test=…: labels go from 7 to 8\nLook."


def test_other_errors_carry_it_along() -> None:
    """Code that turns them into a sentence asks for it; their own text stays."""
    with pytest.raises(ValueError, match="no") as told, evaluating("valid"):
        raise ValueError("no")
    assert str(told.value) == "no"
    assert held_out_set_in_words(told.value) == " evaluating valid=…"
    assert held_out_set_in_words(ValueError("no")) == ""
