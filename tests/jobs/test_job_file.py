from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.errors import BadJob
from stoker.jobs import Job, load_job
from stoker.jobs.code_digest import JOB_MODULE
from stoker.jobs.local_imports import FolderFinder

HEAD = """
import stoker

def make(**changes):
    settings = dict(model=object, data=((), ()), loss="mse", optimizer=stoker.SGD(lr=0.1), batch=4,
                    until=stoker.epochs(1))
    return stoker.Job(**settings | changes)

"""


@pytest.fixture(autouse=True)
def clean_modules(tmp_path: Path) -> Iterator[None]:
    """Leave no finder and no module of these job files behind."""
    yield
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, FolderFinder)]
    for name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", {})  # asked without calling a module's own __getattr__
        places = [names.get("__file__") or "", *(names.get("__path__") or ())]
        if any(str(place).startswith(str(tmp_path)) for place in places):
            del sys.modules[name]


def write(folder: Path, others: dict[str, str] | None = None, **modules: str) -> Path:
    """Files `name.py` in `folder`, and `others` by their path there; returns the path of train_me.py."""
    for name, text in {**{f"{module}.py": text for module, text in modules.items()}, **(others or {})}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return folder / "train_me.py"


def with_job(text: str) -> str:
    """A job file with `make` and this text."""
    return HEAD + textwrap.dedent(text)


def test_a_job_file_gives_a_job_and_says_where_it_came_from(tmp_path: Path) -> None:
    """Settings from the command line reach the function; the entry has its file, parameters and text."""
    path = write(tmp_path, train_me=with_job("def job(width: int = 8, lr: float = 1): return make(batch=width)"))
    job, entry = load_job(path, {"width": "16"})
    assert isinstance(job, Job)
    assert job.batch == 16
    assert entry.path == path.resolve()
    assert entry.parameters == {"width": 16, "lr": 1}
    assert entry.sources == {"train_me.py": path.read_text()}
    assert re.fullmatch("[0-9a-f]{64}", entry.digest)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", r"train_me.py has no function `job`.\nAdd `def job"),
        ("def jobb(): pass\ndef other(): pass", "has no function `job`. It has jobb, other."),
        ("job = 3", "has no function `job`"),
        ("x = 1\ny = = 2\ndef job(): pass", r"train_me.py, line 2: invalid syntax\n    y = = 2"),
        ("def job():\npass", "train_me.py, line 2: expected an indented block"),
        ("x = 1\ny = 1 / 0", r"train_me.py, line 2: `y = 1 / 0` raised ZeroDivisionError on import: division by zero"),
        ("import nothing_like_it", "line 1: `import nothing_like_it` raised ModuleNotFoundError on import: No module"),
        ("raise ValueError", "line 1: `raise ValueError` raised ValueError on import\nRun again with --debug"),
        ("raise SystemExit(2)", "line 1: `raise SystemExit.2.` raised SystemExit on import: 2"),
        ("def job():\n    return 1 / 0", r"line 2: `return 1 / 0` raised ZeroDivisionError while job\(…\) ran: div"),
        ("def job():\n    return eval('1 +')", "line 1: invalid syntax"),
        ("def job(): pass", r"job\(…\) returned nothing \(None\), wanted a stoker.Job\nEnd the function with"),
        ("def job(): return 3", r"job\(…\) returned a int, wanted a stoker.Job"),
        ("def job(): return job", r"returned a function, wanted a stoker.Job"),
        (
            "import stoker\ndef job():\n    return stoker.SGD(lr=-1)",
            r"lr must be positive and finite, got -1\nSet another, or change .*line 3: `return stoker.SGD\(lr=-1\)`\.",
        ),
        ("def job(path): return 3", "setting 'path' has no default"),
    ],
)
def test_a_job_file_that_cannot_be_used_is_explained(tmp_path: Path, text: str, problem: str) -> None:
    """The error names the file, the user's own line and what is wrong, and keeps the cause for --debug."""
    path = write(tmp_path, train_me=text)
    with pytest.raises(BadJob, match=problem) as caught:
        load_job(path, {})
    assert "job_file.py" not in str(caught.value)


def test_a_stoker_error_passes_as_it_is(tmp_path: Path) -> None:
    """What Job says of a setting needs no further words."""
    path = write(tmp_path, train_me=with_job("def job(): return make(batch=0)"))
    with pytest.raises(BadJob, match=r"^Job\(batch=…\): wanted a positive whole number of samples, got 0$"):
        load_job(path, {})


def test_a_file_that_is_not_there_is_answered_with_the_nearest(tmp_path: Path) -> None:
    """A typing error in the name costs one look; an empty folder has nothing to suggest."""
    with pytest.raises(BadJob, match=r"there is no job file .*train_me.py$"):
        load_job(tmp_path / "train_me.py", {})
    write(tmp_path, train_me="", other="")
    with pytest.raises(BadJob, match=r"there is no job file .*trainme.py\nDid you mean 'train_me.py'\?"):
        load_job(tmp_path / "trainme.py", {})
    with pytest.raises(BadJob, match="there is no job file"):
        load_job(tmp_path / "no folder" / "train_me.py", {})
    with pytest.raises(BadJob, match="there is no job file"):
        load_job(tmp_path, {})


def test_a_file_that_is_no_python_is_refused(tmp_path: Path) -> None:
    """By its name, before anything in it runs; a null byte is a syntax error."""
    (tmp_path / "train_me.txt").write_text("def job(): pass")
    with pytest.raises(BadJob, match=r"train_me.txt is no Python file"):
        load_job(tmp_path / "train_me.txt", {})
    (tmp_path / "train_me.py").write_bytes(b"x = 1\0")
    with pytest.raises(BadJob, match=r"train_me.py"):
        load_job(tmp_path / "train_me.py", {})


def test_an_error_in_a_module_beside_the_file_names_its_line(tmp_path: Path) -> None:
    """The innermost line of the user's own, not the import statement that led there."""
    path = write(tmp_path, train_me="import nets\ndef job(): pass", nets="x = 1\n\ny = [][0]")
    with pytest.raises(BadJob, match=r"nets.py, line 3: `y = \[\]\[0\]` raised IndexError on import"):
        load_job(path, {})


def test_an_error_in_an_installed_package_names_the_users_line(tmp_path: Path) -> None:
    """Lines of a virtual environment inside the folder are not the user's."""
    package = tmp_path / "venv" / "lib" / "site-packages"
    package.mkdir(parents=True)
    (package / "installed_thing.py").write_text("def fail():\n    raise OSError('deep inside')")
    path = write(
        tmp_path,
        train_me=f"import sys; sys.path.append({str(package)!r})\nimport installed_thing\n"
        "def job():\n    installed_thing.fail()",
    )
    try:
        with pytest.raises(BadJob, match=r"train_me.py, line 4: `installed_thing.fail.*deep inside"):
            load_job(path, {})
    finally:
        sys.path.remove(str(package))


def test_loading_leaves_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go where the command was given, wherever the job file is moved."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    there = "def job():\n    assert os.path.basename(os.getcwd()) == 'elsewhere'\n    return make()"
    path = write(tmp_path, train_me=with_job(f"import os\nos.chdir('elsewhere')\n{there}"))
    load_job(Path("train_me.py"), {})
    assert Path.cwd() == tmp_path
    write(tmp_path, train_me="import os\nos.chdir('elsewhere')\n1 / 0")
    with pytest.raises(BadJob, match="ZeroDivisionError"):
        load_job(path, {})
    assert Path.cwd() == tmp_path


def test_loading_leaves_no_files_and_no_search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bytecode in the user's folders, and sys.path as it was."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = write(tmp_path, train_me=with_job("import nets\ndef job(): return make(batch=nets.batch)"), nets="batch = 2")
    before = list(sys.path)
    load_job(path, {})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["nets.py", "train_me.py"]
    assert sys.path == before


def test_a_failed_import_leaves_no_module(tmp_path: Path) -> None:
    """Nothing half made can be found later."""
    path = write(tmp_path, train_me="1 / 0")
    before = {name for name in sys.modules if name.startswith(JOB_MODULE)}
    with pytest.raises(BadJob, match="ZeroDivisionError"):
        load_job(path, {})
    assert {name for name in sys.modules if name.startswith(JOB_MODULE)} == before


def test_the_file_as_it_is_now_is_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit counts at once, even one within a second that keeps the file's size."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    text = with_job("import nets\ndef job(): return make(batch=nets.batch)")
    for batch in (2, 3, 4):
        path = write(tmp_path, train_me=text, nets=f"batch = {batch}")
        for file in tmp_path.glob("*.py"):
            os.utime(file, (1e9, 1e9))
        job, entry = load_job(path, {})
        assert job.batch == batch
        assert entry.sources["nets.py"] == f"batch = {batch}"


def test_a_class_of_the_job_file_finds_its_module(tmp_path: Path) -> None:
    """Dataclasses with deferred annotations look their module up by name."""
    text = (
        "from __future__ import annotations\nimport dataclasses"
        + HEAD
        + textwrap.dedent("""
        @dataclasses.dataclass
        class Config:
            size: int = 5

        def job(): return make(batch=Config().size)
    """)
    )
    assert load_job(write(tmp_path, train_me=text), {})[0].batch == 5
