"""Which file of a run holds what is said once, and whoever reads a run's files gets the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from stoker.errors import BadRun
from stoker.records import Plan, PlanSwitch, RankTimes, dumps
from stoker.records.run import ExampleSet, ExampleSets
from stoker.store import RunDirectory, run_files
from stoker.store.run_files import RunFile, RunFiles
from stoker.testing import fake_device
from stoker.web.run_index import ForeignRun
from tests.reporting import story

FILES = {name: value for name, value in vars(run_files).items() if isinstance(value, RunFile)}


class FilesInMemory(RunFiles):
    """The files of a run by their paths in it."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.path, self.files = Path("memory"), files

    def content(self, name: str) -> bytes | None:
        """One of them."""
        return self.files.get(name)

    def listed(self, folder: str) -> Sequence[str]:
        """Those of a folder."""
        return sorted(name.removeprefix(f"{folder}/") for name in self.files if name.startswith(f"{folder}/"))


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run with records, switches, times of a process and examples."""
    report = story.report(story.whole_run())
    assert report.decision is not None
    made = RunDirectory.create(
        tmp_path / "run", report.run, report.spec, decision=report.decision, device=fake_device(), coupling=None
    )
    for event in report.events:
        made.append_event(event)
    plan = Plan(device="cpu", micro_batch=8)
    made.append_switch(PlanSwitch(update=3, samples=24, plan=plan, kind="changed", why="memory ran out"))
    times = RankTimes(rank=0, size=1, worker=0, host="a", began_at=1.0, first_update=0, updates=3)
    made.write_rank_times(times)
    made.write(run_files.EXAMPLES, ExampleSets(sets=(ExampleSet(split="valid", num_samples=3),)))
    return made


def test_every_record_has_a_file_of_its_own() -> None:
    """No two entries of the table name one file, and the module's text draws each of them."""
    names = [file.name for file in FILES.values()]
    assert len(set(names)) == len(names)
    assert all(name.rpartition("/")[2] in str(run_files.__doc__) for name in names)


def test_whoever_reads_the_files_gets_the_same_report(directory: RunDirectory) -> None:
    """A run's own directory, the page, which follows no link, and files from anywhere."""
    events, path = directory.read_events(), directory.path
    files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    report = directory.read_report()
    assert report.schedule is not None
    assert (len(report.schedule.switches), len(report.ranks)) == (1, 1)
    for reader in (FilesInMemory(files), ForeignRun(path.parent, path.name, 2**20)):
        assert reader.report_with(events) == report
        assert reader.read_examples() == directory.read_examples() != ()


def test_damage_is_named_with_its_file(directory: RunDirectory) -> None:
    """A record that every run has, one that it may have, and a switch of plan."""
    path = directory.path
    (path / "spec.json").unlink()
    with pytest.raises(BadRun, match=r"run/spec\.json cannot be read: No such file"):
        directory.read_spec()
    (path / "device.json").write_text(dumps(dataclasses.replace(fake_device(), index=1)).replace("index", "place"))
    with pytest.raises(BadRun, match=r"run/device\.json cannot be used: Device: unknown field 'place'"):
        directory.read(run_files.DEVICE)
    with (path / "plans.jsonl").open("ab") as log:
        log.write(b"{}\n")
    with pytest.raises(BadRun, match=r"run/plans\.jsonl cannot be used"):
        directory.read_schedule()
