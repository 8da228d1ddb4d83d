"""The fuzz targets over their committed inputs; `make fuzz` goes on from these."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fuzz.targets import seeds_of, targets

TARGETS = targets()
FUZZ = Path(__file__).parents[2] / "bench" / "fuzz"


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_seed_and_every_earlier_finding_is_read_or_refused(name: str) -> None:
    """What writers made, and what once ended in another error, ends as the reader documents."""
    paths = seeds_of(name)
    assert paths
    for path in paths:
        TARGETS[name](path.read_bytes())


@pytest.mark.parametrize("name", ["csv", "jsonl", "records", "tar", "tfrecord", "tf_example", "golden"])
def test_what_writers_made_is_read_and_not_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus that every reader refuses would reach nothing behind the first check."""
    refused = []

    class Noting:
        def __init__(self, *kinds: type[BaseException]) -> None:
            self.kinds = kinds

        def __enter__(self) -> None:
            """Nothing is needed."""

        def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
            if is_refused := kind is not None and issubclass(kind, self.kinds):
                refused.append(kind)
            return is_refused

    monkeypatch.setattr("bench.fuzz.targets.suppress", Noting)
    seeds = [path for path in seeds_of(name) if path.parent.parent.name == "corpus"]
    for path in seeds:
        TARGETS[name](path.read_bytes())
    assert len(refused) < len(seeds)


def test_the_corpus_is_of_targets_and_small() -> None:
    """Each folder of inputs belongs to a target; together they stay below 200 KB."""
    assert {path.name for kind in ("corpus", "found") for path in (FUZZ / kind).iterdir()} <= set(TARGETS)
    files = [path for kind in ("corpus", "found") for path in (FUZZ / kind).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 200_000
