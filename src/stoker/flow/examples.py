"""The samples that a run shows of its held-out sets: kept beside its report, which is made of them."""

from __future__ import annotations

from stoker.records import dumps, loads
from stoker.records.examples import ExampleSet, ExampleSets
from stoker.store import RunDirectory, write_atomic

EXAMPLES = "examples.json"
"""Where they are, in the run's directory."""


def write_examples(directory: RunDirectory, sets: tuple[ExampleSet, ...]) -> None:
    """Keep them; nothing is written where there are none.

    Raises:
        RunFailed: they cannot be written.
    """
    if sets:
        write_atomic(directory.path / EXAMPLES, dumps(ExampleSets(sets=sets), indent=None) + "\n", what="the examples")


def read_examples(directory: RunDirectory) -> tuple[ExampleSet, ...]:
    """Those of a run; empty if it has none, or they cannot be read, which costs a report nothing else."""
    try:
        return loads((directory.path / EXAMPLES).read_bytes(), ExampleSets).sets
    except (OSError, ValueError):
        return ()
