"""The commands: what they print for people and as JSON, their exit codes, and how they hand on to each other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import stoker
from stoker import __main__ as entry_module
from stoker.cli import main as main_module
from stoker.cli.terminal import say, teller
from stoker.errors import BadJob
from stoker.records import Decision, from_json
from tests.flow.command import BLOBS, command, job_file, plan_file, stoker_here


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STOKER_RUNS", raising=False)
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def run(place: Path) -> stoker.Run:
    """A finished run of the job file `blobs.py`, under the plan in `plan.json`."""
    assert stoker_here("train", job_file(), "--plan", plan_file()).code == 0
    return stoker.load("latest")


def test_train_tells_people_on_standard_error_what_it_plans_does_and_found() -> None:
    """Plain lines where there is no terminal; standard output stays empty."""
    outcome = stoker_here("train", job_file(), "--set", "lr=0.2", "--plan", plan_file())
    assert (outcome.code, outcome.out) == (0, "")
    lines = [line for line in outcome.err.splitlines() if not line.endswith(" …")]  # of what takes over a second
    assert lines[0].startswith("planned in ")
    assert "micro-batch 16" in lines[0]
    metrics = stoker.load("latest").metrics
    assert f"{metrics['test/accuracy']:.2%}".replace("%", " %") in outcome.err
    assert lines[-1] == f"report: {stoker.load('latest').report_path}"


def test_train_with_json_prints_events_and_nothing_else() -> None:
    """One object a line, whatever the job itself prints: that goes to standard error."""
    path = job_file('print("made")', head='print("imported")\n')
    outcome = stoker_here("train", path, "--plan", plan_file(), "--json")
    assert outcome.code == 0
    kinds = [event["event"] for event in outcome.events]
    assert (kinds[0], kinds[-1]) == ("planned", "finished")
    assert all(isinstance(event["at"], float) for event in outcome.events)
    assert outcome.err == "imported\nmade\n"


def test_settings_of_the_job_are_given_on_the_command_line(run: stoker.Run) -> None:
    """They are part of the run's identity, and of what is kept of it."""
    other = stoker_here("train", "blobs.py", "--set", "lr=0.3", "--set", "width=4", "--plan", "plan.json", "--json")
    spec = stoker.load(other.of("finished")[0]["run"]).directory.read_spec()
    assert spec.parameters == {"lr": 0.3, "epochs": 3, "width": 4}
    assert spec.digest() != run.directory.read_spec().digest()


def test_the_same_command_goes_on_and_then_starts_anew(run: stoker.Run) -> None:
    """A finished run is followed by another one, which is said."""
    outcome = stoker_here("train", "blobs.py", "--plan", "plan.json", "--json")
    assert outcome.of("finished")[0]["run"] == f"{run.name}-2"
    assert f"{run.name} is finished" in outcome.of("warned")[0]["message"]


@pytest.mark.parametrize(
    "words",
    [
        ("--debug", "runs", "diff", "a", "b"),
        ("runs", "--debug", "diff", "a", "b"),
        ("runs", "diff", "a", "b", "--debug"),
        ("--debug", "pool", "contract", "show", "--chain", "http://127.0.0.1:1", "--contract", "none"),
        ("pool", "contract", "show", "--chain", "http://127.0.0.1:1", "--contract", "none", "--debug"),
    ],
)
def test_debug_counts_before_a_command_and_after_it(words: tuple[str, ...]) -> None:
    """Also where the command belongs to a group; without it there is no traceback."""
    debugged, plain = stoker_here(*words), stoker_here(*(word for word in words if word != "--debug"))
    assert debugged.code == plain.code
    assert debugged.code != 0
    assert debugged.err.startswith("Traceback")
    assert plain.err
    assert debugged.err.endswith(plain.err)


def test_plan_prints_a_decision_that_train_accepts() -> None:
    """Nothing is made by planning; what it printed pins the plan."""
    outcome = stoker_here("plan", job_file('print("made")'), "--json")
    assert (outcome.code, outcome.err) == (0, "made\n")
    decision = from_json(json.loads(outcome.out), Decision)
    assert not Path("runs").exists()
    Path("decision.json").write_text(outcome.out)
    trained = stoker_here("train", "blobs.py", "--plan", "decision.json", "--json")
    assert trained.code == 0
    kept = stoker.load("latest").directory.read_decision()
    assert kept is not None
    assert kept.chosen.plan == decision.chosen.plan


def test_plan_explains_itself_to_people() -> None:
    """The plan, its forecast and the reasons; what lost by what is there for the asking."""
    outcome = stoker_here("plan", job_file(), "--explain")
    assert outcome.code == 0
    for words in ("memory", "to finish", "samples are separable", "1 thread"):
        assert words in outcome.out


def test_the_model_of_a_run_comes_from_its_own_copy_of_the_job_file(run: stoker.Run) -> None:
    """With its settings and the modules of its folder, after both are gone from where they were."""
    Path("sizes.py").write_text("HIDDEN = 5\n")
    job_file("settings.update(model=lambda: nn.Linear(6, sizes.HIDDEN))", name="own.py", head="import sizes\n")
    outcome = stoker_here("train", "own.py", "--set", "lr=0.05", "--plan", "plan.json", "--json")
    Path("sizes.py").unlink()
    Path("own.py").unlink()
    loaded = stoker.load(outcome.of("finished")[0]["run"])
    model = loaded.model()
    assert model.weight.shape == (5, 6)
    assert all(torch.equal(tensor, loaded.weights()[name]) for name, tensor in model.state_dict().items())
    assert sorted(path.name for path in (loaded.path / "job").iterdir()) == ["own.py", "sizes.py"]


def test_report_writes_the_report_anew(run: stoker.Run) -> None:
    """By name or as the latest, with a summary for people or one document."""
    run.report_path.unlink()
    outcome = stoker_here("report", run.name)
    assert outcome.code == 0
    assert run.report_path.is_file()
    assert str(run.report_path) in outcome.out
    document = json.loads(stoker_here("report", "--json").out)
    assert Path(document["report"]) == run.report_path
    assert document["run"]["metrics"] == run.metrics


def test_report_of_an_unknown_run_is_refused_with_the_nearest(run: stoker.Run) -> None:
    """Exit code 2; a directory without a run has another message than an unknown name."""
    outcome = stoker_here("report", run.name[:-1] + "x")
    assert outcome.code == 2
    assert f"Did you mean '{run.name}'" in outcome.err
    Path("folder").mkdir()
    assert "folder is not a run: it has no run.json" in stoker_here("report", "folder").err


def test_runs_are_listed_and_compared(run: stoker.Run) -> None:
    """As tables for people, as one document for programs."""
    stoker_here("train", "blobs.py", "--set", "lr=0.3", "--plan", "plan.json")
    other = stoker.load("latest")
    listed = stoker_here("runs")
    assert run.name in listed.out
    assert other.name in listed.out
    assert len(json.loads(stoker_here("runs", "--json").out)["runs"]) == 2
    compared = stoker_here("runs", "diff", run.name, other.name)
    assert "optimizer.lr" in compared.out
    document = json.loads(stoker_here("runs", "diff", run.name, other.name, "--json").out)
    assert ["optimizer.lr", "0.1", "0.3"] in document["job"]


def test_without_runs_the_list_says_how_to_make_one() -> None:
    """That is no error."""
    outcome = stoker_here("runs")
    assert outcome.code == 0
    assert "stoker train" in outcome.out
    shutil.rmtree("runs", ignore_errors=True)
    assert json.loads(stoker_here("runs", "--json").out) == {"runs": []}


def test_ctrl_c_before_training_is_exit_code_130() -> None:
    """One word, no traceback, no run."""
    outcome = stoker_here("train", job_file("raise KeyboardInterrupt"))
    assert outcome.code == 130
    assert outcome.err.splitlines()[-1] == "interrupted"
    assert not Path("runs").exists()


def test_ctrl_c_while_the_command_is_imported_is_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The start takes a tenth of a second and more, in which there was a traceback."""

    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry_module, "importlib", SimpleNamespace(import_module=interrupted))
    with pytest.raises(SystemExit) as ended:
        entry_module.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["stoker"] == "stoker.__main__:main"


@pytest.mark.parametrize("arguments", [("devices",), ("runs", "--json"), ("--help",)])
def test_output_that_is_read_no_more_ends_the_command_quietly(arguments: tuple[str, ...]) -> None:
    """As in `stoker devices | head`: printed by Rich, by Python and by Typer."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command(*arguments), stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train",), "JOB"),
        (("train", "blobs.py", "--checkpoint-every", "0"), "--checkpoint-every"),
        (("trian", "blobs.py"), "trian"),
        (("train", "blobs.py", "--resum", "latest"), "--resum"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_exit_code_two(arguments: tuple[str, ...], words: str) -> None:
    """What is missing or unknown is named."""
    job_file()
    outcome = stoker_here(*arguments)
    assert outcome.code == 2
    assert words in outcome.err
    assert not Path("runs").exists()


def test_main_takes_words_or_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """`python -m stoker` and the installed command are the same function."""
    with pytest.raises(SystemExit) as ended:
        main_module.main(["runs", "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == {"runs": []}
    monkeypatch.setattr("sys.argv", ["stoker", "train", "absent.py"])
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    assert ended.value.code == 2
    assert "there is no job file absent.py" in capsys.readouterr().err


def test_verify_tells_what_holds_for_the_job() -> None:
    """One document with a verdict for each question, and whether all of them hold."""
    outcome = stoker_here("verify", job_file(), "--json")
    assert outcome.code == 0
    document = json.loads(outcome.out)
    assert document["passed"] is True
    assert {"question", "answer", "passed", "level", "evidence"} <= document["verdicts"][0].keys()
    assert any("resum" in verdict["question"] for verdict in document["verdicts"])


def test_the_job_file_of_these_tests_is_python() -> None:
    """What is put into its marked place is in the function, before the job is made."""
    assert BLOBS.index("# CHANGES") < BLOBS.index("return stoker.Job")
    assert "one = 1\n    two = 2\n    return" in job_file("one = 1\ntwo = 2").read_text()


def test_the_version_is_that_of_the_package() -> None:
    """On standard output, alone."""
    outcome = stoker_here("--version")
    assert (outcome.code, outcome.out, outcome.err) == (0, f"stoker {version('stoker')}\n", "")


@pytest.mark.parametrize("given", [lambda: None, "job.py"])
def test_what_is_no_job_is_told_from_python(given: object) -> None:
    """The function that makes one, or the file it is in."""
    with pytest.raises(BadJob, match=r"this takes a stoker\.Job, got .*(function|'job\.py')"):
        stoker.train(given)  # type: ignore[arg-type]


def test_texts_that_look_like_pictures_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A host called `moon` in `slurm:moon:gpu` is a host; so is one in a path."""
    say("report: runs/slurm:moon:gpu/[bold]")
    teller(quiet=False)("asking slurm:moon:gpu")
    teller(quiet=True)("asking slurm:star:gpu")
    assert tuple(capsys.readouterr()) == ("report: runs/slurm:moon:gpu/[bold]\n", "asking slurm:moon:gpu\n")
