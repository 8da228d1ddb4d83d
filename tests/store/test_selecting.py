import math
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.errors import BadJob
from stoker.records import JobSpec, Run
from stoker.store.run_query import selected


def a_run(name: str, lr: float, accuracy: float | None, status: str = "finished") -> tuple[Path, Run, JobSpec]:
    """A run of a job with this rate, and what came of it."""
    spec = JobSpec(
        name="cnn",
        entry=None,
        entry_digest=None,
        parameters={"width": 32},
        data_class="indexed",
        settings={"optimizer": {"lr": lr, "type": "SGD"}, "schedule": {"lr": 7.0} if name == "odd" else None},
        data_fingerprint="f",
        num_train=9,
        weights_digest="w",
    )
    run = Run(
        name=name,
        status=status,
        created_at="2026-01-01",
        spec_digest=spec.digest(),
        total_samples=9,  # type: ignore[arg-type]
        metrics={} if accuracy is None else {"test/accuracy": accuracy, "valid/accuracy": accuracy},
    )
    return Path(name), run, spec


RUNS = [a_run("a", 0.1, 0.9), a_run("b", 0.01, 0.95), a_run("c", 0.2, None, "failed"), a_run("cnn-d", 0.05, 0.8)]


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("", "a b c cnn-d"),
        ("status=finished", "a b cnn-d"),
        ("status!=finished", "c"),
        ("lr<0.1", "b cnn-d"),
        ("lr<=1e-1 test/accuracy>=0.9", "a b"),
        ("optimizer.lr=0.2", "c"),
        ("name~CNN", "cnn-d"),
        ("width=32 accuracy>0.85", "a b"),
        ("created<2026-02", "a b c cnn-d"),
        ("test/accuracy!=0.9", "b c cnn-d"),
    ],
)
def test_runs_are_chosen_by_what_was_asked_and_what_came_of_it(where: str, names: str) -> None:
    """All conditions have to hold; a run without the metric holds none but `!=`."""
    assert " ".join(run.name for _, run, _ in selected(RUNS, where=where)) == names


@pytest.mark.parametrize(("sort", "names"), [("lr", "b cnn-d a c"), ("-test/accuracy", "b a cnn-d c")])
def test_runs_are_sorted_and_those_without_the_value_come_last(sort: str, names: str) -> None:
    """Numbers by their size; a minus is from the highest down."""
    assert " ".join(run.name for _, run, _ in selected(RUNS, sort=sort)) == names


@pytest.mark.parametrize(("sort", "names"), [("accuracy", "a b lost gone"), ("-accuracy", "b a lost gone")])
def test_what_is_not_a_number_comes_last_whichever_way(sort: str, names: str) -> None:
    """NaN is neither more nor less than anything: among the others it would mix up their order."""
    runs = [a_run("lost", 0.1, math.nan), a_run("b", 0.1, 0.95), a_run("gone", 0.1, math.nan), a_run("a", 0.1, 0.9)]
    assert " ".join(run.name for _, run, _ in selected(runs, sort=sort)) == names


@pytest.mark.parametrize("where", ["lr", "lr<", "acuracy>0.5", "type=SGD nothing~x", "lr<abc", "lr<<3"])
def test_a_condition_that_means_nothing_is_refused(where: str) -> None:
    """A typo must not look like a list without runs."""
    with pytest.raises(BadJob):
        selected(RUNS, where=where)


def of_splits(name: str, **metrics: float) -> tuple[Path, Run, JobSpec]:
    """A run with these accuracies, by their splits."""
    path, run, spec = a_run(name, 0.1, None)
    return path, replace(run, metrics={f"{split}/accuracy": value for split, value in metrics.items()}), spec


@pytest.mark.parametrize(
    "runs",
    [
        [of_splits("untested", valid=0.9), of_splits("tested", valid=0.9, test=0.8)],
        [of_splits("valid", valid=0.9), of_splits("test", test=0.9)],
    ],
    ids=["several in one", "another in each"],
)
def test_a_run_in_which_a_name_means_two_things_is_not_left_out_silently(runs: list[tuple[Path, Run, JobSpec]]) -> None:
    """Nor is the accuracy on one split compared with that on another."""
    for asked in ({"where": "accuracy>0.5"}, {"sort": "accuracy"}, {"names": ["accuracy"]}):
        with pytest.raises(BadJob, match="several things") as error:
            selected(runs, **asked)
        assert "valid/accuracy, test/accuracy" in str(error.value.remedy)


def test_what_diverged_on_every_split_is_not_ambiguous() -> None:
    """NaN is not equal to itself, and means one thing all the same."""
    lost = [of_splits("lost", valid=math.nan, test=float("nan"))]
    assert selected(lost, where="accuracy=nan") == lost
    assert selected(lost, where="accuracy!=nan") == []


@pytest.mark.parametrize(
    ("where", "count"), [("status==finished", 3), ("lr==0.1", 1), ("fast=True", 4), ("fast=no", 0)]
)
def test_conditions_are_understood_as_python_writes_them(where: str, count: int) -> None:
    """A second `=` is not part of the value, and True is true."""
    runs = [(path, run, replace(spec, parameters={"fast": True})) for path, run, spec in RUNS]
    assert len(selected(runs, where=where)) == count


def test_the_last_part_of_a_name_is_not_enough_where_it_means_two_things() -> None:
    """Two settings called `lr` with different values: the whole path is wanted."""
    odd = [a_run("odd", 0.1, 0.9)]
    with pytest.raises(BadJob, match="several things"):
        selected(odd, where="lr<1")
    assert selected(odd, where="optimizer.lr<1") == odd
