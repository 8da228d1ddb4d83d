from __future__ import annotations

import inspect
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker import errors
from stoker.errors import BadJob, StokerError, nearest

TREE = [item for item in vars(errors).values() if inspect.isclass(item) and issubclass(item, StokerError)]

# The public contract: 2 is the user's input, 3 that nothing fits, 4 that a run failed.
EXIT_CODES = {
    "StokerError": 4, "BadJob": 2, "DoesNotFit": 3, "NoDevice": 2, "RunFailed": 4, "BadRun": 2, "BadArtifact": 2,
    "ServiceError": 4,
}  # fmt: skip


def test_exit_codes_are_those_promised() -> None:
    """Scripts rely on them."""
    assert {error.__name__: error.exit_code for error in TREE} == EXIT_CODES


@pytest.mark.parametrize("error", TREE, ids=lambda error: error.__name__)
def test_the_tree_in_the_docstring_is_the_tree(error: type[StokerError]) -> None:
    """Name, exit code and HTTP status are documented as they are."""
    if error is not StokerError:
        line = next(line for line in (errors.__doc__ or "").splitlines() if f" {error.__name__} " in line)
        assert line.split()[-2:] == [str(error.exit_code), str(error.http_status)]


@pytest.mark.parametrize("error", TREE, ids=lambda error: error.__name__)
def test_the_remedy_is_a_line_of_its_own(error: type[StokerError]) -> None:
    """What is wrong first, then what to do; without a remedy the message stands alone."""
    assert str(error("3 of 4 are missing")) == "3 of 4 are missing"
    with_remedy = error("3 of 4 are missing", remedy="Add them.")
    assert str(with_remedy) == "3 of 4 are missing\nAdd them."
    assert (with_remedy.message, with_remedy.remedy) == ("3 of 4 are missing", "Add them.")


def test_an_error_crosses_processes() -> None:
    """A worker's error keeps its message and remedy."""
    again = pickle.loads(pickle.dumps(BadJob("no", remedy="yes")))  # noqa: S301 - of our own making
    assert (again.message, again.remedy) == ("no", "yes")


@given(st.lists(st.text("abc", min_size=1), min_size=1, unique=True), st.data())
def test_a_known_word_is_nearest_to_itself(known: list[str], data: st.DataObject) -> None:
    """The suggestion is one of the known words, all of which are listed."""
    word = data.draw(st.sampled_from(known))
    text = nearest(word, known)
    assert text.startswith(f"Did you mean {word!r}?")
    assert text.endswith(f"Known: {', '.join(sorted(known))}.")


def test_without_a_near_word_all_are_listed() -> None:
    """A wild guess is not answered with another one."""
    assert nearest("width", ["lr", "epochs"]) == "Known: epochs, lr."
    assert nearest("width", []) == "There are none to choose from."
