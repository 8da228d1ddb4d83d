from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.errors import BadJob
from stoker.jobs import load_job
from stoker.jobs.local_imports import FolderFinder, install_finder, local_sources
from tests.jobs.test_job_file import clean_modules, with_job, write

__all__ = ["clean_modules"]

USES_NETS = with_job("import nets\ndef job(): return make(batch=nets.batch)")


def digest(path: Path) -> str:
    """Of the job file and what it imports."""
    return load_job(path, {})[1].digest


def test_modules_of_one_name_beside_two_job_files_are_not_mixed(tmp_path: Path) -> None:
    """Each job gets its own `nets`, and a package's own parts, in whatever order they are loaded."""
    text = with_job("import nets\nfrom parts.sizes import extra\ndef job(): return make(batch=nets.batch + extra)")
    folders = [tmp_path / "one", tmp_path / "two"]
    for batch, folder in enumerate(folders, start=1):
        parts = {"parts/__init__.py": "", "parts/sizes.py": f"extra = {10 * batch}"}
        write(folder, parts, train_me=text, nets=f"batch = {batch}")
    loaded = [load_job(folder / "train_me.py", {}) for folder in (*folders, *folders)]
    assert [job.batch for job, _ in loaded] == [11, 22, 11, 22]
    assert [entry.sources["nets.py"] for _, entry in loaded] == ["batch = 1", "batch = 2"] * 2


def test_an_earlier_job_keeps_its_own_modules(tmp_path: Path) -> None:
    """Its functions hold on to what they imported."""
    text = with_job("import nets\ndef job(): return make(model=lambda: nets.batch)")
    for batch, folder in ((1, tmp_path / "one"), (2, tmp_path / "two")):
        write(folder, train_me=text, nets=f"batch = {batch}")
    first, _ = load_job(tmp_path / "one" / "train_me.py", {})
    second, _ = load_job(tmp_path / "two" / "train_me.py", {})
    assert (first.model(), second.model()) == (1, 2)


def test_imports_that_run_later_look_beside_the_job_file(tmp_path: Path) -> None:
    """A model may import its parts when it is made; they belong to the job's text from the start."""
    text = with_job("""
        def model():
            import nets
            return nets.batch

        def job(): return make(model=model)
    """)
    job, entry = load_job(write(tmp_path, train_me=text, nets="batch = 7"), {})
    assert set(entry.sources) == {"train_me.py", "nets.py"}
    assert job.model() == 7


IMPORTS = {
    "import nets": {"nets.py"},
    "import nets as n, shapes": {"nets.py", "shapes.py"},
    "from nets import batch": {"nets.py"},
    "import parts.sizes": {"parts/__init__.py", "parts/sizes.py", "shapes.py"},
    "from parts import sizes": {"parts/__init__.py", "parts/sizes.py", "shapes.py"},
    "from parts.sizes import extra": {"parts/__init__.py", "parts/sizes.py", "shapes.py"},
    "from parts.deep import up": {
        "parts/__init__.py",
        "parts/deep/__init__.py",
        "parts/deep/up.py",
        "parts/sizes.py",
        "shapes.py",
    },
    "import bare.inner": {"bare/inner.py"},
    "import json, torch": set(),
    "try:\n    import broken\nexcept SyntaxError:\n    pass": {"broken.py"},
    "import importlib; importlib.import_module('shapes')": {"shapes.py"},
}

FILES = {
    "nets.py": "batch = 1",
    "shapes.py": "",
    "unrelated.py": "",
    "broken.py": "def",
    "bare/inner.py": "",
    "parts/__init__.py": "",
    "parts/sizes.py": "import shapes\nextra = 1",
    "parts/deep/__init__.py": "",
    "parts/deep/up.py": "from ..sizes import extra",
}


@pytest.mark.parametrize("statement", IMPORTS)
def test_the_text_of_a_job_has_all_it_imports_from_its_folder(tmp_path: Path, statement: str) -> None:
    """Directly or through others, whole or in part, and nothing else."""
    path = write(tmp_path, FILES, train_me=with_job(f"{statement}\ndef job(): return make()"))
    _, entry = load_job(path, {})
    assert set(entry.sources) == {"train_me.py"} | IMPORTS[statement]
    assert all(entry.sources[name] == (tmp_path / name).read_text() for name in entry.sources)


def test_a_change_of_what_is_imported_changes_the_digest(tmp_path: Path) -> None:
    """And so does one of the job file; one of another file or of a comment does not; nor does the folder's place."""
    path = write(tmp_path, train_me=USES_NETS, nets="batch = 1", other="x = 1")
    first = digest(path)
    write(tmp_path, other="x = 2")
    assert digest(path) == first
    assert digest(write(tmp_path / "copy", train_me=USES_NETS, nets="batch = 1")) == first
    write(tmp_path, nets="batch = 1  # ")
    assert digest(path) == first
    write(tmp_path, nets="batch = 2")
    second = digest(path)
    write(tmp_path, train_me=USES_NETS + "\nx = 1", nets="batch = 1")
    assert len({first, second, digest(path)}) == 3


def test_what_the_program_itself_imported_from_the_folder_is_shared(tmp_path: Path, monkeypatch) -> None:
    """A script in its job file's folder sees one `nets`, and the job's text is the same as from the command line."""
    path = write(tmp_path, train_me=USES_NETS, nets="batch = 3", script="x = 1")
    alone = digest(path)
    install_finder(tmp_path / "nothing" / "train_me.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    nets, _ = importlib.import_module("nets"), importlib.import_module("script")
    nets.batch = 5
    job, entry = load_job(path, {})
    assert job.batch == 5
    assert sys.modules["nets"] is nets
    assert entry.digest == alone


@pytest.mark.parametrize("is_same", [True, False])
def test_another_module_of_that_name_is_not_taken_for_it(tmp_path: Path, monkeypatch, is_same: bool) -> None:
    """If the program has imported another `nets`, the job would silently get that one; a copy of it will do."""
    path = write(tmp_path / "job", train_me=USES_NETS, nets="batch = 3")
    write(tmp_path / "program", nets="batch = 3" if is_same else "batch = 4")
    monkeypatch.syspath_prepend(str(tmp_path / "program"))
    importlib.import_module("nets")
    if is_same:
        assert load_job(path, {})[0].batch == 3
        return
    with pytest.raises(BadJob, match=r"imports nets from .*job/nets.py, but .* already imported .*program/nets.py"):
        load_job(path, {})


def test_installed_packages_do_not_belong_to_the_job(tmp_path: Path) -> None:
    """Neither a virtual environment in the folder, nor what is next to a job file that is installed itself."""
    write(tmp_path / "venv" / "lib" / "site-packages", nets="batch = 1")
    path = write(tmp_path, train_me=with_job("import json\ndef job(): return make()"))
    assert set(load_job(path, {})[1].sources) == {"train_me.py"}
    installed = write(tmp_path / "site-packages", train_me="import nets", nets="batch = 1")
    assert set(local_sources(installed)) == {"train_me.py"}


def test_a_folder_of_files_does_not_hide_an_installed_package(tmp_path: Path) -> None:
    """A folder called like a package, but without __init__.py, is a package only if there is no other."""
    (tmp_path / "wsgiref").mkdir()
    (tmp_path / "figures").mkdir()
    path = write(tmp_path, train_me=with_job("import wsgiref.util, figures\ndef job(): return make()"))
    load_job(path, {})
    assert sys.modules["wsgiref"].__file__ is not None


def test_text_in_another_encoding_is_read_as_python_does(tmp_path: Path) -> None:
    """A module may declare its own; one that Python could not read does not stop the others."""
    path = write(tmp_path, train_me=with_job("import latin\ndef lazy(): import odd\ndef job(): return make()"))
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"))
    (tmp_path / "odd.py").write_bytes(b"name = '\xff'\n")
    sources = load_job(path, {})[1].sources
    assert "é" in sources["latin.py"]
    assert "odd.py" in sources


@pytest.fixture
def finders() -> Callable[[], list[FolderFinder]]:
    """A function that returns the finders in force."""

    def now() -> list[FolderFinder]:
        return [finder for finder in sys.meta_path if isinstance(finder, FolderFinder)]

    return now


def test_one_folder_is_looked_in_at_a_time(tmp_path: Path, finders) -> None:
    """Loading a hundred jobs does not make imports slower."""
    for name in ("one", "two", "three"):
        load_job(write(tmp_path / name, train_me=with_job("def job(): return make()")), {})
    assert [finder.folder for finder in finders()] == [(tmp_path / "three").resolve()]
