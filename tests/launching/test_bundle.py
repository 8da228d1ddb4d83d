from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stoker.data.reading.file_listing import files_below
from stoker.errors import BadJob
from stoker.jobs.local_imports import local_sources
from stoker.launching.bundle import (
    Bundle,
    TreeFile,
    code_bundle,
    commit_of,
    data_of,
    largest,
    require_sendable,
    secret_values,
    sending_text,
    stoker_bundle,
)
from stoker.launching.lines import LocalLine


@pytest.fixture
def project(place: Path) -> Path:
    """A folder with a job below it, a module that it imports, a file that it does not, and data."""
    files = {
        "jobs/gpt.py": "import nets\n",
        "jobs/nets.py": "x = 1\n",
        "jobs/other.py": "secret = 1\n",
        "data/train.csv": "a,b\n1,2\n",
        "data/pictures/cat/1.png": "meow",
        "data/pictures/dog/2.png": "wuff",
    }
    for name, text in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return place


def _code(project: Path, *data: str, send: tuple[str, ...] = ()) -> Bundle:
    job = project / "jobs" / "gpt.py"
    found = [data_of(project / name, project) for name in data]
    return code_bundle(job, local_sources(job), found, [project / name for name in send])


def test_code_is_the_job_and_what_it_imports(project: Path) -> None:
    """The layout below the working directory stays, and what is not imported stays here."""
    assert [file.path for file in _code(project).files] == ["jobs/gpt.py", "jobs/nets.py"]
    more = _code(project, send=("jobs/other.py", "data/pictures"))
    assert [file.path for file in more.files][:3] == [
        "data/pictures/cat/1.png",
        "data/pictures/dog/2.png",
        "jobs/gpt.py",
    ]


def test_the_digest_is_of_the_content(project: Path) -> None:
    """An edit gives another folder at the place, uncommitted or not; touching a file does not."""
    before = _code(project).digest
    (project / "jobs" / "nets.py").touch()
    assert _code(project).digest == before
    (project / "jobs" / "nets.py").write_text("x = 2\n")
    changed = _code(project).digest
    assert changed != before
    (project / "jobs" / "nets.py").chmod(0o755)
    assert _code(project).digest not in {before, changed}


def test_data_are_links_that_hold_at_the_place(project: Path, tmp_path: Path) -> None:
    """The job's relative paths lead to data that lie under their digest, files and folders."""
    names = ("data/train.csv", "data/pictures")
    data = [data_of(project / name, project) for name in names]
    code = _code(project, *names)
    root = tmp_path / "root"
    for bundle in (*(one.bundle for one in data), code):
        LocalLine().send_tree(bundle.files, str(root / bundle.folder))
    there = root / code.folder
    assert (there / "data/train.csv").read_text() == "a,b\n1,2\n"
    assert (there / "data/pictures/dog/2.png").read_text() == "wuff"


def test_linked_folders_travel_as_they_are_read(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is sent is what `stoker.data` reads here: linked folders too, none twice, and loops end."""
    disk, pictures = tmp_path_factory.mktemp("disk"), project / "data/pictures"
    for name in ("bird/3.png", "bird/more/4.png"):
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        (disk / name).write_text("tweet")
    (pictures / "bird").symlink_to(disk / "bird")
    (pictures / "cat2").symlink_to("cat")
    (pictures / "bird/more/up").symlink_to(pictures)
    (pictures / ".kept/fish").mkdir(parents=True)
    (pictures / ".kept/fish/5.png").write_text("blub")
    (pictures / "fish").symlink_to(".kept/fish")
    sent = [file.path for file in data_of(pictures, project).bundle.files]
    assert [path for path in sent if not path.startswith(".")] == list(files_below(pictures))
    assert set(sent) == {
        "cat/1.png",
        "dog/2.png",
        "bird/3.png",
        "bird/more/4.png",
        "fish/5.png",
        ".kept/fish/5.png",
    }


def test_data_outside_are_refused_with_the_folder(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A path that would mean something else at the place does not travel."""
    other = tmp_path_factory.mktemp("elsewhere") / "train.csv"
    other.write_text("a\n")
    with pytest.raises(BadJob, match="is outside of"):
        data_of(other, project)
    with pytest.raises(BadJob, match="is not there"):
        data_of(project / "none.csv", project)


def test_too_much_is_refused_with_the_largest_files() -> None:
    """Before anything is sent, with the numbers."""
    files = tuple(TreeFile(path=f"{size}.bin", num_bytes=size << 20) for size in (1, 40, 7))
    bundle = Bundle(kind="data", name="pictures", files=files)
    assert [name for name, _ in largest([bundle], 2)] == ["pictures: 40.bin", "pictures: 7.bin"]
    require_sendable([bundle], 48 << 20)
    with pytest.raises(BadJob, match=r"48.*MiB would be sent.*20.*MiB.*40.bin \(40"):
        require_sendable([bundle], 20 << 20)
    assert "40.bin" in sending_text([bundle], "box")


def test_stoker_travels_as_a_folder_that_python_imports(tmp_path: Path) -> None:
    """With it alone on PYTHONPATH, Python finds this version and starts the program of places."""
    there = tmp_path / "stoker"
    LocalLine().send_tree(stoker_bundle().files, str(there))
    program = "import stoker.launching.at_place as a, importlib.metadata as m; print(a.__file__, m.version('stoker'))"
    said = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": str(there)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    file, version = said.split()
    assert Path(file).is_relative_to(tmp_path)
    assert version == "0.1.0"


def test_a_secret_that_is_not_set_is_named() -> None:
    """By its name alone; values of those that are set come from the environment."""
    assert secret_values(["A"], {"A": "x", "B": "y"}) == {"A": "x"}
    with pytest.raises(BadJob, match="no environment variable B here"):
        secret_values(["A", "B"], {"A": "x"})


def test_the_commit_and_what_is_not_in_it(project: Path) -> None:
    """Without a repository nothing is known, and that is no error; with one the changes are a patch."""
    assert commit_of(project / "jobs") == commit_of(project / "none")
    git = ["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "jobs"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    clean = commit_of(project / "jobs")
    assert len(clean.name) == 40
    assert clean.diff == ""
    (project / "jobs" / "nets.py").write_text("x = 2\n")
    assert "+x = 2" in commit_of(project / "jobs").diff
