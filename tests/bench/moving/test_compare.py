"""The files in examples/moving learn the same before and after."""

from __future__ import annotations

import dataclasses

import pytest

from bench.moving.befores import Curve
from bench.moving.compare import CASES, LIMIT, Rounds, _theirs, by_stoker, job_of, lines_of_code, missing
from stoker.records import Plan


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    """Runs, and what a trainer leaves in the current folder, go elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_RUNS", str(tmp_path / "runs"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # theirs
@pytest.mark.parametrize(("name", "epochs"), [("own_loop", 3), ("lightning", 3), ("hugging_face", 2)])
def test_losses_are_the_same_before_and_after(name, epochs, tmp_path):
    """At each of at least 50 updates both losses are equal to 1e-5; the file after trains also where theirs cannot."""
    case = dataclasses.replace(CASES[name], epochs=epochs)
    if "transformers" in (absent := missing(case)):
        pytest.skip("transformers is not installed")
    job = job_of(case)
    ours = by_stoker(job, Plan(device="cpu", micro_batch=case.micro_batch, threads=1), tmp_path / "run")
    assert len(ours.losses) >= 50
    assert ours.losses[-1] < 0.8 * ours.losses[0]
    if absent:
        pytest.skip(f"{', '.join(absent)} is not installed; the file after was trained alone")
    theirs = _theirs(case, job, tmp_path / "theirs")
    assert max(abs(one - other) for one, other in zip(ours.losses, theirs.losses, strict=True)) <= LIMIT


def test_lines_of_code_are_without_comments_and_docstrings(tmp_path):
    """Three lines of code: a definition, a return, and a string that is no docstring."""
    path = tmp_path / "file.py"
    path.write_text('"""Doc."""\n\n# why\ndef f():\n    """Doc\n    of f."""\n    return 1  # one\n\nx = "text"\n')
    assert lines_of_code(path) == 3


def test_rounds_find_the_largest_difference_and_the_ratio():
    """Two updates of 10 samples: twice the rate in both rounds, and 0.5 between losses in the second."""
    rounds = Rounds()
    for apart in (0.0, 0.5):
        fast, slow = Curve([2.0, 1.0], [0.0, 1.0]), Curve([2.0, 1.0 + apart], [0.0, 2.0])
        rounds.add(fast, fast, slow, batch=10)
    assert rounds.gap == 0.5
    assert rounds.stoker == [10.0, 10.0]
    assert rounds.ratio(rounds.stoker)["median"] == 2.0
