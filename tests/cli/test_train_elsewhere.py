from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.main import main
from stoker.errors import BadJob
from tests.launching.elsewhere import fake_place
from tests.launching.test_launch import JOB

__all__ = ["fake_place"]


@pytest.fixture
def job(place: Path) -> Path:
    """A job file in the working directory."""
    path = place / "blobs.py"
    path.write_text(JOB)
    return path


def _train(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["train", "blobs.py", *words])
    return int(ended.value.code or 0)


def test_options_of_a_run_elsewhere_reach_the_place(
    job: Path, fake_place: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is typed is what is submitted; --detach returns at once with the record, and secrets are names."""
    given: list[Any] = []
    monkeypatch.setattr(fake_place, "start", lambda submission, tell: given.append(submission) or {"directory": "/x"})
    monkeypatch.setenv("TOKEN", "hunter2")
    (job.parent / "notes.txt").write_text("x")
    (job.parent / "train.csv").write_text("a\n")
    code = _train(
        "--on",
        "fake:box",
        "--env",
        "theirs",
        "--set",
        "lr=0.3",
        "--threads",
        "2",
        "--profile",
        "--secret",
        "TOKEN",
        "--send",
        "notes.txt",
        "--data",
        "train.csv",
        "--var",
        "A=1",
        "--place-option",
        "root=/shared",
        "--send-limit",
        "1MiB",
        "--time-limit",
        "2h",
        "--detach",
        "--json",
    )
    assert code == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["record"], document["place"], document["secrets"]) == ("Launch", "fake:box", ["TOKEN"])
    assert "hunter2" not in json.dumps(document)
    (submission,) = given
    assert submission.arguments == ("--set", "lr=0.3", "--threads", "2", "--profile")
    assert [file.path for file in submission.code.files] == ["blobs.py", "notes.txt", "train.csv"]
    assert dict(submission.options) == {"root": "/shared"}
    assert (submission.variables, submission.send_limit, submission.time_limit_s) == ({"A": "1"}, 2.0**20, 7200.0)


def test_dry_run_prints_the_script(job: Path, fake_place: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard output, alone, so that it can be kept."""
    assert _train("--on", "fake:box", "--env", "theirs", "--dry-run") == 0
    assert capsys.readouterr().out.startswith("run blobs-")
    assert not (job.parent / "runs").exists()


def test_a_pools_options_are_typed_as_its_page_says(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of them is known to the place; one that is misspelt does not become a default."""
    words = [
        "pool=http://127.0.0.1:1#" + "0" * 64,
        "key=renter",
        "bond=1usd",
        "block=4s",
        "window=1s",
        "isolation=gvisor",
    ]
    options = [part for word in [*words, "value=2usd"] for part in ("--place-option", word)]
    assert _train("--on", "pool", "--verify", "50%", "--deadline", "2h", *options, "--env", "theirs", "--dry-run") == 0
    assert "blocks of 4.0 s, 50% of them replayed by others; isolation gvisor or stronger" in capsys.readouterr().out
    assert _train("--on", "pool", "--place-option", "blok=4s", "--env", "theirs", "--dry-run") == 2
    assert "Did you mean 'block'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--on", "fakee:box"), "Did you mean 'fake'?"),
        (("--on", "fake:a!"), "--on fake:a! cannot be read"),
        (("--on", "here", "--detach"), "--detach is for runs elsewhere"),
        (("--secret", "TOKEN"), "--secret is for runs elsewhere"),
        (("--on", "fake:box", "--fork", "x"), "does not travel"),
        (("--on", "fake:box", "--ui"), "--ui shows a run on this machine"),
        (("--on", "fake:box", "--new", "--run-dir", "x"), "exclude each other"),
        (("--on", "fake:box", "--var", "A"), "--var A: wanted NAME=VALUE"),
        (("--on", "fake:box", "--secret", "NOT_SET_HERE"), "no environment variable NOT_SET_HERE"),
        (("--on", "fake:box", "--set", "lrr=1"), "no setting 'lrr'"),
        (("--on", "fake:box", "--track", "tensorbord"), "Did you mean 'tensorboard'?"),
        (("--on", "fake:box", "--slice", "5parsecs"), "--slice 5parsecs: wanted a time"),
        (("--on", "fake:box", "--memory", "6XB"), "--memory 6XB: wanted an amount"),
        (("--on", "fake:box", "--threads", "0"), "--threads 0: wanted a positive number"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    words: tuple[str, ...], said: str, job: Path, fake_place: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's input, exit code 2, and nothing is left."""
    assert _train(*words) == BadJob.exit_code
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (job.parent / "runs").exists()


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--plan", ["micro_batch=8"]),
        ("--network", ["8x200gbit"]),
        ("--preempted-every", ["6h"]),
        ("--slice", ["1h"]),
        ("--explain", []),
    ],
)
@pytest.mark.parametrize("on", ["fake:box", "here,fake:box"])
def test_options_of_plans_for_devices_are_refused_for_places(
    job: Path, fake_place: Any, on: str, option: str, values: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A comparison without them would look like the answer."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", "blobs.py", "--on", on, option, *values])
    assert ended.value.code == BadJob.exit_code
    assert f"{option} is for devices, and --on {on} compares places" in " ".join(capsys.readouterr().err.split())
