from __future__ import annotations

import errno
import importlib.metadata
import io
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import PlaceFailed
from stoker.launching import environment_lock
from stoker.launching.environment_lock import EnvironmentLock, base_python_script, lock_of, make, pip_problem
from stoker.launching.lines import Answer, LocalLine
from stoker.launching.shipment import environment_at
from stoker.records import dumps


def _wheel(folder: Path, name: str, version: str) -> None:
    """A package of one line."""
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks for packages."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    _wheel(folder, "tinypackage", "1.0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


LOCK = EnvironmentLock(python="3.11", requirements=("tinypackage==1.0",))


@pytest.mark.slow
def test_a_lock_has_exact_versions_of_all_that_is_needed() -> None:
    """Stoker's requirements and what they require; of PyTorch the version without its build; no other packages."""
    lock = lock_of({"torch", "json", "nets"})
    versions = dict(requirement.split("==") for requirement in lock.requirements)
    assert versions["torch"] == importlib.metadata.version("torch").partition("+")[0]
    assert versions["sympy"] == importlib.metadata.version("sympy")
    assert "pytest" not in versions
    assert "stoker" not in versions
    assert not [name for name in versions if name.startswith("nvidia")]
    assert lock.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert lock_of({"torch"}) == lock
    assert "pytest" in dict(requirement.split("==") for requirement in lock_of({"pytest"}).requirements)


def test_what_the_job_imports_is_kept_whatever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of NVIDIA's packages the lock leaves out those that PyTorch brings, also where they share a module's name."""
    packages = {
        "torch": ("torch", "nvidia-cublas-cu99"),
        "nvidia-cublas-cu99": ("nvidia", ""),
        "nvidia_ml_py": ("pynvml", ""),
        "nvidia-dali-cuda120": ("nvidia", "nvidia-nvcomp"),
        "nvidia-nvcomp": ("nvcomp", ""),
    }
    for name, (module, needs) in packages.items():
        about = tmp_path / f"{name.replace('-', '_')}-9.0.dist-info"
        about.mkdir()
        requires = f"Requires-Dist: {needs}\n" if needs else ""
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n{requires}")
        (about / "top_level.txt").write_text(f"{module}\n")
    monkeypatch.syspath_prepend(tmp_path)
    versions = dict(requirement.split("==") for requirement in lock_of({"torch", "pynvml", "nvidia"}).requirements)
    assert versions["torch"] == "9.0"
    assert {name for name in versions if name.startswith("nvidia")} == {"nvidia-ml-py", "nvidia-dali-cuda120"}


def test_a_package_from_a_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No index has it, so the place cannot install it."""
    plain = importlib.metadata.PathDistribution.read_text

    def read_text(self: importlib.metadata.PathDistribution, name: str) -> str | None:
        if name == "direct_url.json" and (plain(self, "METADATA") or "").find("\nName: rich\n") >= 0:
            return '{"url": "file:///home/me/rich", "dir_info": {"editable": true}}'
        return plain(self, name)

    monkeypatch.setattr(importlib.metadata.PathDistribution, "read_text", read_text)
    with pytest.raises(PlaceFailed, match=r"rich .* was installed from a folder"):
        lock_of({"torch"})


@pytest.mark.slow
def test_an_environment_is_made_once(wheels: Path, tmp_path: Path) -> None:
    """Two at once: one installs, the other waits for it, and both get the Python that has the package."""
    logs = [io.StringIO(), io.StringIO()]
    with ThreadPoolExecutor(2) as pool:
        pythons = list(pool.map(lambda log: make(tmp_path / "root", LOCK, log=log), logs))
    assert pythons[0] == pythons[1]
    assert sorted(bool(log.getvalue()) for log in logs) == [False, True]
    said = subprocess.run(
        [pythons[0], "-c", "import tinypackage as t; print(t.version)"], capture_output=True, text=True, check=False
    )
    assert said.stdout.strip() == "1.0", said.stderr
    # The same by the line: what is there is found without a Python there, and the builder prints its path.
    assert environment_at(LocalLine(), str(tmp_path / "root"), "", LOCK, lambda _: None) == str(pythons[0])


@pytest.mark.slow
@pytest.mark.parametrize("left", [False, True])
def test_a_version_that_cannot_be_installed_is_named_and_leaves_nothing(
    wheels: Path, tmp_path: Path, *, left: bool
) -> None:
    """The sentence names the wheel; the half-made folder is gone, one of a killed builder as well."""
    lock = EnvironmentLock(python="3.11", requirements=("tinypackage==2.0",))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if left:
        (tmp_path / lock.folder(version) / "bin").mkdir(parents=True)
    with pytest.raises(PlaceFailed, match=r"tinypackage==2.0 cannot be installed there"):
        make(tmp_path, lock, log=io.StringIO())
    assert [path.name for path in (tmp_path / "environments").iterdir() if not path.name.startswith(".")] == []


@pytest.mark.slow
def test_the_builder_is_a_program_of_the_standard_library(wheels: Path, tmp_path: Path) -> None:
    """As a place runs it: the lock on standard input, the sentence on standard error, and no package but Python."""
    lock = EnvironmentLock(python="3.11", requirements=("tinypackage==3.0",))
    source = str(Path(environment_lock.__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "stoker.launching.environment_lock", str(tmp_path)],
        input=dumps(lock).encode(),
        env={"PYTHONPATH": source, "PIP_NO_INDEX": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 4
    assert ended.stderr.decode().splitlines()[-1] == (
        "tinypackage==3.0 cannot be installed there: no such wheel for its Python and platform"
    )


def test_a_python_is_chosen_there() -> None:
    """The minor version of this machine if it is there, else any that is new enough."""
    answer = LocalLine().shell(*base_python_script(EnvironmentLock(python="9.9", requirements=())), check=False)
    assert answer.code in {0, 3}
    assert answer.code == 3 or answer.text.startswith("/")


def test_what_pip_says_becomes_a_sentence() -> None:
    """A full disk, a quota that is used up, and anything else that pip says first."""
    for said in ("OSError: [Errno 28] No space left on device", "OSError: [Errno 122] Disk quota exceeded: '/home'"):
        assert pip_problem(said, LOCK) == "the disk is full, or its quota is used up: 1 packages do not fit"
    assert pip_problem("ERROR: Cannot connect\nERROR: more", LOCK).endswith("cannot be installed there: Cannot connect")


@pytest.mark.parametrize(
    ("problem", "said", "remedy"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk is full, or its quota", "Free some space"),
        (
            subprocess.CalledProcessError(1, "ensurepip", b"OSError: [Errno 28] No space left on device"),
            "the disk is full, or its quota",
            "Free some space",
        ),
        (subprocess.CalledProcessError(1, "ensurepip", b"No module named ensurepip"), "python3-venv", "Change the"),
    ],
)
def test_an_environment_that_cannot_be_made_is_a_sentence_with_its_own_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception, said: str, remedy: str
) -> None:
    """A disk that is full while pip is put in place is not for want of a wheel."""

    def fails(*_: Any) -> None:
        raise problem

    monkeypatch.setattr(environment_lock, "_install", fails)
    with pytest.raises(PlaceFailed, match=said) as made:
        make(tmp_path, LOCK, log=io.StringIO())
    answer = Answer(4, b"", made.value.message)
    monkeypatch.setattr(LocalLine, "run", lambda *_, **__: answer)
    monkeypatch.setattr(LocalLine, "exists", lambda *_: False)
    monkeypatch.setattr(LocalLine, "shell", lambda *_, **__: Answer(0, b"/usr/bin/python3", ""))
    with pytest.raises(PlaceFailed, match=said) as refused:
        environment_at(LocalLine(), str(tmp_path), "", LOCK, lambda _: None)
    assert str(refused.value.remedy).startswith(remedy)
