from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker import errors, schedules, transforms
from stoker.errors import BadJob, BadSetting, StokerError, nearest

TREE = [item for item in vars(errors).values() if inspect.isclass(item) and issubclass(item, StokerError)]

# The public contract: 2 is the user's input, 3 that nothing fits, 4 that a run failed.
EXIT_CODES = {
    "StokerError": 4,
    "BadJob": 2,
    "BadSetting": 2,
    "DoesNotFit": 3,
    "NoDevice": 2,
    "RunFailed": 4,
    "BadRun": 2,
    "BadArtifact": 2,
    "ServiceError": 4,
    "PlaceFailed": 4,
    "PlaceUnreachable": 4,
}


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: stoker.SGD(lr=-1),
        lambda: stoker.SGD(lr="0.1"),  # type: ignore[arg-type]
        lambda: stoker.AdamW(lr=1e-3, weight_decay=-1),
        lambda: stoker.AdamW(lr=1e-3, groups={"*.bias": {"wieght_decay": 0.0}}),
        lambda: stoker.AdamW(lr=1e-3, groups=["*.bias"]),  # type: ignore[arg-type]
        lambda: stoker.holdout(2.0),
        lambda: stoker.holdout("0.1"),  # type: ignore[arg-type]
        lambda: stoker.updates(0),
        lambda: stoker.epochs(-1),
        lambda: stoker.samples(None),  # type: ignore[arg-type]
        lambda: stoker.seconds("an hour"),  # type: ignore[arg-type]
        lambda: stoker.EMA(2),
        lambda: stoker.SWA(start=1.5),
        lambda: stoker.Target("accuracy", float("nan")),
        lambda: stoker.Target("accuracy", "0.95"),  # type: ignore[arg-type]
        lambda: stoker.EarlyStopping(patience=5),  # type: ignore[arg-type]
        lambda: stoker.Freeze("encoder.*"),
        lambda: stoker.Weights("model.pt"),
        lambda: stoker.DiLoCo(every=50),  # type: ignore[arg-type]
        lambda: stoker.l2(-1.0),
        lambda: schedules.warmup("long"),  # type: ignore[arg-type]
        lambda: schedules.multi_step(at=[30, 60]),
        lambda: transforms.Mixup(alpha=-1),
        lambda: transforms.RandomFlip(2.0),
        lambda: transforms.RandomFlip("often"),  # type: ignore[arg-type]
        lambda: transforms.RandomErasing(scale=0.5),  # type: ignore[arg-type]
    ],
    ids=map(str, range(26)),
)
def test_a_value_that_cannot_be_meant_is_one_error_everywhere(make: Callable[[], object]) -> None:
    """Wherever it is given: a StokerError, so that programs catch one tree, and a ValueError, as Python has it."""
    with pytest.raises(BadSetting) as caught:
        make()
    assert isinstance(caught.value, StokerError)
    assert isinstance(caught.value, ValueError)
    assert caught.value.exit_code == BadJob.exit_code


@given(st.lists(st.text("abc", min_size=1), min_size=1, unique=True), st.data())
def test_a_known_word_is_nearest_to_itself(known: list[str], data: st.DataObject) -> None:
    """The suggestion is one of the known words; where these are few, all are listed."""
    word = data.draw(st.sampled_from(known))
    text = nearest(word, known)
    assert text.startswith(f"Did you mean {word!r}?")
    if len(known) <= 20:
        assert text.endswith(f"Known: {', '.join(sorted(known))}.")


def test_of_many_names_the_nearest_five_are_told() -> None:
    """Hundreds of runs are no help: those that are most like it, and how many others there are."""
    text = nearest("bert-1a2b3d", ["bert-1a2b3c", *(f"cnn-{n:03}" for n in range(300))])
    assert text.startswith("Did you mean 'bert-1a2b3c'? Known: bert-1a2b3c, cnn-")
    assert text.count(",") == 4
    assert text.endswith(" and 296 others.")


def test_without_a_near_word_all_are_listed() -> None:
    """A wild guess is not answered with another one."""
    assert nearest("width", ["lr", "epochs"]) == "Known: epochs, lr."
    assert nearest("width", []) == "There are none to choose from."
