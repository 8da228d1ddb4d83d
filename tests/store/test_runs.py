from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.errors import BadRun
from stoker.records import JobSpec
from stoker.store import (
    CheckpointStore,
    RunDirectory,
    RunLock,
    choose_directory,
    find_run,
    list_runs,
    name_in,
    require_same_spec,
    unfinished_before,
)
from stoker.store.run_identity import describe_changes
from tests.store.builders import make_run, save, spec

JOB = spec()
DEFAULT = f"mlp-{JOB.digest()[:6]}"


def choose(root: Path, of=JOB, **asked):
    """The choice for a job named mlp."""
    return choose_directory(root, of, job_name="mlp", **asked)


def told(choice) -> tuple[str, bool]:
    """Name of the directory, and whether it is continued."""
    return choice.directory.name, choice.continues


def test_the_first_run_is_named_after_the_job_and_its_digest(tmp_path: Path) -> None:
    """Nothing is made by choosing; a name no directory can have is changed."""
    choice = choose(tmp_path / "runs")
    assert told(choice) == (DEFAULT, False)
    assert choice.directory.path == tmp_path / "runs" / DEFAULT
    assert not (tmp_path / "runs").exists()
    odd = choose_directory(tmp_path, JOB, job_name="../my job/é ")
    assert odd.directory.path == tmp_path / f"my-job-{JOB.digest()[:6]}"
    assert choose_directory(tmp_path, JOB, job_name="..").directory.name == f"job-{JOB.digest()[:6]}"


def test_an_unfinished_run_is_continued_and_named(tmp_path: Path) -> None:
    """The same command goes on where it was cut off, and says how far that was."""
    make_run(tmp_path / DEFAULT, samples=1500)
    choice = choose(tmp_path)
    assert told(choice) == (DEFAULT, True)
    assert choice.because == f"{DEFAULT} is unfinished, at 1,500 of 5,000 samples, and is continued."


def test_a_killed_run_is_said_to_be_where_its_newest_checkpoint_is(tmp_path: Path) -> None:
    """Its record still has the count of its beginning; what is half written is no checkpoint."""
    make_run(tmp_path / DEFAULT)
    for name in ("000000000500", "000000001000", "000000001500.partial"):
        (tmp_path / DEFAULT / "checkpoints" / name).mkdir(parents=True)
    assert choose(tmp_path).because == f"{DEFAULT} is unfinished, at 1,000 of 5,000 samples, and is continued."


def test_a_failed_run_is_continued_and_its_failure_said(tmp_path: Path) -> None:
    """From its last checkpoint, or from the beginning where it has none."""
    run = make_run(tmp_path / DEFAULT, status="failed", failure="the disk is full")
    choice = choose(tmp_path)
    assert told(choice) == (DEFAULT, True)
    failed = "failed at 0 of 5,000 samples (the disk is full) and "
    assert f"{failed}begins again, for it has no checkpoint" in choice.because
    save(CheckpointStore(run.checkpoints), 100)
    failed = failed.replace("at 0", "at 100")
    assert f"{failed}is continued from its last checkpoint" in choose(tmp_path).because


def test_a_finished_run_starts_anew_next_to_it(tmp_path: Path) -> None:
    """In -2, then -3; the finished ones are named."""
    make_run(tmp_path / DEFAULT, status="finished")
    choice = choose(tmp_path)
    assert told(choice) == (f"{DEFAULT}-2", False)
    assert choice.because == f"{DEFAULT} is finished; {DEFAULT}-2 is a new run."
    make_run(tmp_path / f"{DEFAULT}-2", status="finished")
    assert told(choose(tmp_path)) == (f"{DEFAULT}-3", False)


def test_the_newest_unfinished_of_the_family_is_continued(tmp_path: Path) -> None:
    """-10 is newer than -9; gaps and finished ones do not matter."""
    for name, status in [("", "unfinished"), ("-9", "unfinished"), ("-10", "unfinished"), ("-11", "finished")]:
        make_run(tmp_path / f"{DEFAULT}{name}", status=status)
    assert told(choose(tmp_path)) == (f"{DEFAULT}-10", True)
    assert told(choose(tmp_path, new=True)) == (f"{DEFAULT}-12", False)


def test_new_starts_another_run_even_if_one_could_be_continued(tmp_path: Path) -> None:
    """And afterwards the same command without it continues that one."""
    make_run(tmp_path / DEFAULT)
    choice = choose(tmp_path, new=True)
    assert told(choice) == (f"{DEFAULT}-2", False)
    make_run(choice.directory.path)
    assert told(choose(tmp_path)) == (f"{DEFAULT}-2", True)


def test_a_run_that_never_came_to_be_makes_way(tmp_path: Path) -> None:
    """A directory without run.json is no run: its name is used."""
    run = make_run(tmp_path / DEFAULT)
    (run.path / "run.json").unlink()
    assert told(choose(tmp_path)) == (DEFAULT, False)
    assert told(choose(tmp_path, new=True)) == (DEFAULT, False)


def test_somebody_elses_files_and_runs_under_a_default_name_are_left_alone(tmp_path: Path) -> None:
    """Neither a directory of other things nor a run whose digest has the same beginning is used."""
    (tmp_path / DEFAULT).mkdir()
    (tmp_path / DEFAULT / "notes.txt").touch()
    assert told(choose(tmp_path)) == (f"{DEFAULT}-2", False)
    make_run(tmp_path / f"{DEFAULT}-2", spec(lr=7))
    assert told(choose(tmp_path)) == (f"{DEFAULT}-3", False)


def test_a_run_that_cannot_be_read_is_told_not_passed_over(tmp_path: Path) -> None:
    """It might be the one to continue: starting over silently would lose its work."""
    run = make_run(tmp_path / DEFAULT)
    (run.path / "run.json").write_text("{")
    with pytest.raises(BadRun, match=r"run\.json cannot be used"):
        choose(tmp_path)


@pytest.mark.parametrize("empty", [True, False])
def test_a_given_directory_is_used_if_absent_or_empty(tmp_path: Path, empty: bool) -> None:
    """Whether or not it was made beforehand."""
    if empty:
        (tmp_path / "mine").mkdir()
    choice = choose(tmp_path / "runs", run_dir=tmp_path / "mine")
    assert (choice.directory.path, choice.continues) == (tmp_path / "mine", False)


def test_a_given_directory_is_continued_or_gets_a_sibling(tmp_path: Path) -> None:
    """Unfinished: continued; finished, or with --new: the next sibling, which is said."""
    mine = tmp_path / "mine"
    run = make_run(mine)
    assert told(choose(tmp_path, run_dir=mine)) == ("mine", True)
    assert told(choose(tmp_path, run_dir=mine, new=True)) == ("mine-2", False)
    (run.path / "run.json").unlink()
    make_run(mine, status="finished")
    choice = choose(tmp_path, run_dir=mine)
    assert told(choice) == ("mine-2", False)
    assert choice.because == "mine is finished; mine-2 is a new run."
    make_run(tmp_path / "mine-2")
    assert told(choose(tmp_path, run_dir=mine)) == ("mine-2", True)


@pytest.mark.parametrize("status", ["unfinished", "finished"])
def test_a_changed_spec_in_the_same_directory_fails_with_the_differences(tmp_path: Path, status: str) -> None:
    """What is asked now, what the run has, and the ways out; --new starts next to it."""
    make_run(tmp_path / "mine", spec(lr=0.5, batch=64), status=status)
    with pytest.raises(BadRun) as caught:
        choose(tmp_path, run_dir=tmp_path / "mine")
    assert "lr: 0.5 -> 0.1" in caught.value.message
    assert "batch: 64 -> 512" in caught.value.message
    assert {"--new", "--fork"} <= {word.strip(",.") for word in str(caught.value.remedy).split()}
    assert told(choose(tmp_path, run_dir=tmp_path / "mine", new=True)) == ("mine-2", False)


def test_only_twelve_differences_are_listed(tmp_path: Path) -> None:
    """The rest is counted."""
    run = make_run(tmp_path / "a", spec(parameters={f"p{i}": i for i in range(20)}))
    with pytest.raises(BadRun, match="and 9 more") as caught:
        require_same_spec(run, spec(parameters={"q": 1}))
    assert caught.value.message.count(" -> ") == 12
    require_same_spec(run, spec(parameters={f"p{i}": i for i in range(20)}))


def test_a_given_directory_of_other_things_is_refused(tmp_path: Path) -> None:
    """A user's own files, a file, and a run whose record is lost."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(BadRun, match=r"mine is not a run: it holds thesis\.tex"):
        choose(tmp_path, run_dir=tmp_path / "mine")
    (tmp_path / "file").touch()
    with pytest.raises(BadRun, match="file is not a run: it is a file"):
        choose(tmp_path, run_dir=tmp_path / "file")
    (tmp_path / "lost" / "checkpoints").mkdir(parents=True)
    with pytest.raises(BadRun, match=r"has checkpoints but no run\.json"):
        choose(tmp_path, run_dir=tmp_path / "lost", new=True)


def test_a_fork_and_a_plain_run_do_not_continue_each_other(tmp_path: Path) -> None:
    """They start from other weights, so they are not the same training, though their specs are equal."""
    make_run(tmp_path / DEFAULT, status="finished")
    make_run(tmp_path / f"{DEFAULT}-2", forked_from="other")
    assert told(choose(tmp_path)) == (f"{DEFAULT}-3", False)
    assert told(choose(tmp_path, forked_from="other")) == (f"{DEFAULT}-2", True)
    assert told(choose(tmp_path, forked_from="third")) == (f"{DEFAULT}-3", False)


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    """By when they were made; a damaged one is listed too, other directories and files are not."""
    assert list_runs(tmp_path / "absent") == ()
    make_run(tmp_path / "b", created_at="2025-03-02T12:00:00+00:00")
    make_run(tmp_path / "a", created_at="2025-03-02T13:00:00+00:00")
    make_run(tmp_path / "c", created_at="2025-03-02T13:30:00+02:00")
    make_run(tmp_path / "a-2", created_at="2025-03-02T13:00:00+00:00")
    (make_run(tmp_path / "damaged").path / "run.json").write_text("[" * 100_000)  # deeper than a parser goes
    (tmp_path / "other").mkdir()
    (tmp_path / "file").touch()
    assert [run.name for run in list_runs(tmp_path)] == ["damaged", "a-2", "a", "b", "c"]


def test_a_run_that_is_removed_while_runs_are_listed_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when the directory was looked at, and is gone when its record is read."""
    for name in ("a", "b"):
        make_run(tmp_path / name)
    read = RunDirectory.read_run

    def removed(self: RunDirectory) -> object:
        if self.name == "a":
            (self.path / "run.json").unlink(missing_ok=True)
        return read(self)

    monkeypatch.setattr(RunDirectory, "read_run", removed)
    assert [directory.name for directory in list_runs(tmp_path)] == ["b", "a"]


def test_a_run_is_found_by_name_beginning_path_or_as_the_latest(tmp_path: Path, monkeypatch) -> None:
    """A whole name comes before a beginning."""
    make_run(tmp_path / "runs" / "cnn-1a", created_at="2025-03-01T00:00:00+00:00")
    make_run(tmp_path / "runs" / "cnn-1a-2", created_at="2025-03-03T00:00:00+00:00")
    make_run(tmp_path / "runs" / "gpt-77", created_at="2025-03-02T00:00:00+00:00")
    make_run(tmp_path / "elsewhere")
    root = tmp_path / "runs"
    monkeypatch.chdir(tmp_path)
    words = {"cnn-1a": "cnn-1a", "cnn-1a-": "cnn-1a-2", "g": "gpt-77", "latest": "cnn-1a-2", "elsewhere": "elsewhere"}
    for word, name in {**words, str(root / "gpt-77"): "gpt-77", "runs/gpt-77/": "gpt-77"}.items():
        assert find_run(root, word).name == name


def test_a_run_that_is_not_found_is_told_with_the_nearest(tmp_path: Path) -> None:
    """None, several, not a run, and no runs at all."""
    with pytest.raises(BadRun, match="there are no runs in"):
        find_run(tmp_path, "latest")
    make_run(tmp_path / "cnn-1a")
    make_run(tmp_path / "cnn-2b")
    with pytest.raises(BadRun, match="no run 'cmn-1a'") as caught:
        find_run(tmp_path, "cmn-1a")
    assert "Did you mean 'cnn-1a'?" in str(caught.value.remedy)
    with pytest.raises(BadRun, match="'cnn' is the start of 2 runs: cnn-"):
        find_run(tmp_path, "cnn")
    with pytest.raises(BadRun, match="There is no run ''"):
        find_run(tmp_path, "")
    with pytest.raises(BadRun, match=r"has no run\.json"):
        find_run(tmp_path, str(tmp_path))


def test_a_run_is_found_again_by_the_word_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, its path in the folder of runs, as a study's trials have, or its whole path elsewhere."""
    root, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    monkeypatch.chdir(tmp_path)
    for path, word in (
        (root / "one", "one"),
        (root / "study/trials/0003", "study/trials/0003"),
        (elsewhere / "one", str(elsewhere / "one")),
    ):
        make_run(path)
        assert name_in(Path("runs"), RunDirectory(path)) == word
        assert find_run(root, word).path == path


def test_unfinished_runs_of_a_job_file_are_found_though_the_job_has_changed(tmp_path: Path) -> None:
    """Those with a checkpoint, newest first; not another file's, a finished one, or one that a process works in."""
    mine = spec(entry="a.py", lr=1)
    for number, (name, changes, status) in enumerate(
        (
            ("same", {"entry": "a.py", "lr": 1}, "unfinished"),
            ("old", {"entry": "a.py"}, "unfinished"),
            ("new", {"entry": "a.py", "lr": 2}, "unfinished"),
            ("other", {"entry": "b.py"}, "unfinished"),
            ("done", {"entry": "a.py", "lr": 3}, "finished"),
            ("busy", {"entry": "a.py", "lr": 4}, "unfinished"),
            ("empty", {"entry": "a.py", "lr": 5}, "unfinished"),
        )
    ):
        run = make_run(tmp_path / name, spec(**changes), status=status, created_at=f"2025-03-0{number + 1}T12:00:00")
        if name != "empty":
            save(CheckpointStore(run.checkpoints), 100)
    with RunLock(tmp_path / "busy"):
        assert [run.name for run, _ in unfinished_before(tmp_path, mine)] == ["new", "old"]
    assert [run.name for run, _ in unfinished_before(tmp_path, mine)] == ["busy", "new", "old"]
    assert unfinished_before(tmp_path, spec()) == []


def test_without_a_job_file_an_unfinished_run_is_found_if_only_values_in_functions_differ(tmp_path: Path) -> None:
    """A script's arguments may hold the time of its start, so that none is continued; another batch is another job."""

    def started(at: str, **changes: Any) -> JobSpec:
        held = {"args": {"type": "argparse.Namespace", "lr": 1, "run_name": at}}
        return spec(settings={"loss": {"function": "loss", "source": "s", "closure": held}, **changes})

    before = make_run(tmp_path / "mlp-1", started("10:00"), samples=100)
    save(CheckpointStore(before.checkpoints), 100)
    ((found, theirs),) = unfinished_before(tmp_path, started("11:00"))
    assert found.name == before.name
    assert describe_changes(started("11:00"), theirs) == ["loss.closure.args.run_name: 10:00 -> 11:00"]
    assert unfinished_before(tmp_path, started("10:00")) == []
    assert unfinished_before(tmp_path, started("11:00", batch=2)) == []
