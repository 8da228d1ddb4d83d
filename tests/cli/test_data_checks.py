from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench.data.planted import plant_csv
from stoker.cli.data_check import _Lines
from stoker.cli.main import app

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with faults."""
    place = tmp_path_factory.mktemp("data") / "csv"
    plant_csv(place)
    return place


@pytest.fixture
def suspect(tmp_path: Path) -> Path:
    """A table with nothing worse than a missing value."""
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "\n".join(f"{n},{n % 7 or ''}" for n in range(40)))
    return path


@pytest.mark.parametrize(
    ("which", "fail_on", "code"),
    [
        ("faulty", "any", 1),
        ("faulty", "corrupt", 1),
        ("faulty", "nothing", 0),
        ("suspect", "any", 0),
        ("suspect", "suspect", 1),
        ("suspect", "corrupt", 0),
    ],
)
def test_the_exit_code_is_as_asked(which: str, fail_on: str, code: int, request: pytest.FixtureRequest) -> None:
    """1 where there are findings as grave as asked for, else 0."""
    path = request.getfixturevalue(which)
    assert RUNNER.invoke(app, ["data", "check", str(path), "--fail-on", fail_on]).exit_code == code


def test_one_document_on_standard_output(faulty: Path) -> None:
    """With --json there is nothing else, and it holds findings and list."""
    done = RUNNER.invoke(app, ["data", "check", str(faulty), "--json"])
    document = json.loads(done.stdout)
    assert {"check", "clean"} == set(document)
    assert document["clean"]["record"] == "CleanList"
    assert len(document["check"]["findings"]) > 10


def test_a_person_sees_what_was_found(faulty: Path, tmp_path: Path) -> None:
    """The table has a line for each kind; what was written is named."""
    done = RUNNER.invoke(app, ["data", "check", str(faulty), "-o", str(tmp_path / "out")])
    for words in ("target leak", "ragged", "train.csv:20", "samples kept", "clean.json"):
        assert words in done.stdout
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_mistake_is_told_in_words(faulty: Path) -> None:
    """A column that is not there, and a path that is not there, end with exit code 2."""
    wrong = RUNNER.invoke(app, ["data", "check", str(faulty), "--target", "lable"])
    assert wrong.exit_code == 2
    assert "Did you mean 'label'?" in wrong.stderr
    assert RUNNER.invoke(app, ["data", "check", str(faulty / "no")]).exit_code == 2


def test_lines_are_not_many() -> None:
    """Without a terminal, progress is reported every ten seconds, with what is left."""
    stream, now = io.StringIO(), [0.0]
    lines = _Lines(Console(file=stream, width=80), clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        lines("decoding", second * 4, 100)
    assert stream.getvalue().splitlines() == ["decoding: 40 of 100, 15.0 s to go", "decoding: 80 of 100, 5.0 s to go"]
