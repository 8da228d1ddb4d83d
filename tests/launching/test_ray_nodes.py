"""What the driver of a run of several nodes leaves in the folder that all of them see."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stoker.errors import PlaceFailed
from stoker.launching import ray_nodes
from stoker.launching.at_place import LaunchOrder
from stoker.launching.logged_run import EXPECTED, LINKS, ORDER, state_in
from stoker.records.codec import dumps

RUN = LaunchOrder(run="x", kind="ray", code="code", job_file="job.py", num_hosts=2, owner="me@here:/runs/x")


class Actor:
    """An actor of Ray: its methods have `remote`, which answers at once."""

    def __init__(self, sees: Path | None) -> None:
        self.sees, self.started = sees, list[tuple[Any, ...]]()
        self.about, self.start, self.wait = (self._method(f) for f in (self._about, self._start, lambda _: 0))

    def _method(self, function: Any) -> Any:
        return type("Method", (), {"remote": staticmethod(function)})

    def _about(self, mark: str) -> dict[str, Any]:
        """A node of the folder `sees`, or one with a disk of its own, which has a run of that name, too."""
        path = Path(mark) if self.sees is None else self.sees / Path(mark).name
        return {"address": "192.0.2.1", "port": 20000, "node": "1", "sees": path.exists()}

    def _start(self, *about: Any) -> None:
        self.started.append(about)


class Cluster:
    """The modules of Ray that the driver imports, with two nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, second_sees: Path | None = None) -> None:
        self.actors = [Actor(None), Actor(second_sees)]
        waiting = iter(self.actors)
        made = type("Made", (), {"options": lambda _, **kw: type("Made", (), {"remote": lambda _: next(waiting)})()})
        group = type("Group", (), {"ready": lambda _: None})
        modules: dict[str, dict[str, Any]] = {
            "ray": {"init": lambda **_: None, "get": lambda answer: answer, "remote": lambda _: made()},
            "ray.exceptions": {"RayError": RuntimeError},
            "ray.util": {},
            "ray.util.placement_group": {"placement_group": lambda *_, **__: group()},
            "ray.util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": lambda *_, **__: None},
        }
        for name, contents in modules.items():
            module = ModuleType(name)
            vars(module).update(contents)
            monkeypatch.setitem(sys.modules, name, module)
        vars(sys.modules["ray"])["exceptions"] = sys.modules["ray.exceptions"]
        monkeypatch.setattr(ray_nodes.signal, "signal", lambda *_: None)

    def run(self, sent: Path, root: Path) -> int:
        """The driver's exit code."""
        return ray_nodes.run_on_nodes(sent, root, 2, {"CPU": 1.0}, "", ())


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    """A folder as Ray unpacks it on each node."""
    folder = tmp_path / "node" / "_ray_pkg_1"
    folder.mkdir(parents=True)
    for name, text in ((ORDER, dumps(RUN)), (LINKS, "{}"), (EXPECTED, "[]"), ("code.py", "x = 1")):
        (folder / name).write_text(text)
    return folder


def test_a_run_leaves_no_copy_of_what_was_sent(tmp_path: Path, sent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the copies that drivers had begun which were killed; its directory stays, and has the order."""
    root, cluster = tmp_path / "shared", Cluster(monkeypatch)
    (root / "sent" / ".writing-_ray_pkg_1-0a").mkdir(parents=True)
    assert cluster.run(sent, root) == 0
    assert [len(actor.started) for actor in cluster.actors] == [1, 1]
    assert list((root / "sent").iterdir()) == []
    assert (root / "runs/x/launch" / ORDER).exists()
    assert not list((root / "runs/x/launch").glob(".seen-*"))


def test_a_node_with_an_older_run_of_that_name_on_its_own_disk_is_refused(
    tmp_path: Path, sent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would train another run. Nothing is left, so that the name is free."""
    root, own = tmp_path / "shared", tmp_path / "own/runs/x/launch"
    own.mkdir(parents=True)
    (own / ORDER).write_text(dumps(RUN))
    cluster = Cluster(monkeypatch, own)
    with pytest.raises(PlaceFailed, match=r"192\.0\.2\.1 does not see"):
        cluster.run(sent, root)
    assert not any(actor.started for actor in cluster.actors)
    assert [path for path in root.rglob("*") if path.is_file()] == []
    assert not (root / "runs/x").exists()


def test_a_run_that_is_refused_after_it_waited_has_failed(
    tmp_path: Path, sent: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """A driver whose last word is that it waits counts as killed, and the reason would be lost."""
    Cluster(monkeypatch, tmp_path / "own")
    monkeypatch.chdir(sent)
    assert ray_nodes.main(["2", '{"CPU": 1.0}', "", "", str(tmp_path / "shared")]) == PlaceFailed.exit_code
    state = state_in(capfdbinary.readouterr().out)
    assert state is not None
    assert (state.phase, state.exit_code) == ("failed", PlaceFailed.exit_code)
    assert "192.0.2.1 does not see" in state.why


def test_a_driver_that_copies_more_slowly_than_another_takes_its_copy(
    tmp_path: Path, sent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was killed may have been about to finish."""
    root, copy = tmp_path / "shared", ray_nodes.shutil.copytree

    def late(source: Path, target: Path, **options: Any) -> None:
        copy(source, target, **options)
        copy(source, root / "sent" / sent.name)

    monkeypatch.setattr(ray_nodes.shutil, "copytree", late)
    with ray_nodes._shared_copy(sent, root) as shared:
        assert (shared / "code.py").read_text() == "x = 1"
        assert [path.name for path in shared.parent.iterdir()] == [sent.name]


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, sent: Path) -> None:
    """A file is in its place."""
    (tmp_path / "shared").write_text("")
    with (
        pytest.raises(PlaceFailed, match="what was sent cannot be written to"),
        ray_nodes._shared_copy(sent, tmp_path / "shared"),
    ):
        pass
