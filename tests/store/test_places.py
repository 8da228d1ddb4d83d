from __future__ import annotations

from pathlib import Path

import pytest

from stoker.errors import BadRun
from stoker.store import cache_root, runs_root
from stoker.store.locations import is_on_network


def test_runs_are_made_in_the_working_directory_unless_told_otherwise() -> None:
    """`$STOKER_RUNS` comes first; an empty one counts as none."""
    assert runs_root({"STOKER_RUNS": "/data/runs"}) == Path("/data/runs")
    assert runs_root({"STOKER_RUNS": ""}) == runs_root({}) == Path("runs")


def test_the_cache_follows_the_xdg_specification() -> None:
    """`$STOKER_CACHE`, then an absolute `$XDG_CACHE_HOME`, then the home directory."""
    assert cache_root({"STOKER_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c")
    assert cache_root({"XDG_CACHE_HOME": "/x"}) == Path("/x/stoker")
    assert cache_root({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "stoker"


def test_a_user_without_a_home_has_a_cache_among_the_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container started with a bare user number."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_root({}).name.startswith("stoker-cache-")


@pytest.mark.parametrize("kind", ["open to others", "a link", "another user's"])
def test_a_cache_among_the_temporary_files_is_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its name is known beforehand: its first maker would decide what is read from it."""

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = cache_root({})
    assert place.parent == tmp_path
    assert place.stat().st_mode & 0o777 == 0o700
    if kind == "open to others":
        place.chmod(0o777)
    elif kind == "a link":
        place.rename(tmp_path / "theirs")
        place.symlink_to(tmp_path / "theirs")
    else:
        monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(BadRun, match="is not this user's alone") as caught:
        cache_root({})
    assert "STOKER_CACHE" in str(caught.value.remedy)


MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:40 / /home rw shared:1 - nfs4 server:/home rw
31 30 0:41 / /home/me/scratch rw - xfs /dev/sdb rw
32 22 0:42 / /my\\040data rw - fuse.sshfs host:/ rw
33 22 0:43 / /fast rw - lustre x rw
"""


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("/var/a", False),
        ("/home/me", True),
        ("/home/me/scratch/x", False),
        ("/homes", False),
        ("/my data/x", True),
        ("/fast", True),
    ],
)
def test_file_systems_of_several_machines_are_known(tmp_path: Path, place: str, expected: bool) -> None:
    """By the innermost mount; an unknown system says no."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert is_on_network(Path(place), mounts) is expected
    assert not is_on_network(Path(place), tmp_path / "nowhere")
