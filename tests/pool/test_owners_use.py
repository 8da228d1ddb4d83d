"""When an owner has the machine back: by load, by the use and the temperature of a lent GPU, by what was sent."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stoker.errors import NoDevice
from stoker.pool import owners_use
from stoker.pool.owners_use import COOLED_C, GpuReading, GpuWatch, LentGpu, OwnersUse, UploadQuota, limited_power

PMON = """# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       4001     C       90     40      -      -      -      -    python
    0       4002     G       {game}      2      -      -      -      -    game
    0          -     -        -      -      -      -      -      -    -
"""


class FakeSmi:
    """A program `nvidia-smi` that answers from files, in the forms of driver 550."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        program = folder / "nvidia-smi"
        program.write_text(
            f"""#!/bin/sh
echo "$*" >> {folder}/asked
test -e {folder}/broken && {{ echo "Unable to determine the device handle"; exit 15; }}
case "$*" in
*temperature.gpu*) cat {folder}/temperature;;
*power.limit*) echo 450.00;;
pmon*) cat {folder}/pmon;;
esac
"""
        )
        program.chmod(0o755)
        self.says()

    def says(self, temperature: str = "60", game: int = 0) -> None:
        (self._folder / "temperature").write_text(f"{temperature}\n")
        (self._folder / "pmon").write_text(PMON.format(game=game))

    def breaks(self) -> None:
        (self._folder / "broken").touch()

    @property
    def asked(self) -> list[str]:
        return (self._folder / "asked").read_text().splitlines()


@pytest.fixture
def smi(tmp_path, monkeypatch) -> FakeSmi:
    """`nvidia-smi` of a cool GPU that the job alone uses."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return FakeSmi(folder)


def test_the_load_of_others_means_that_the_owner_is_back(tmp_path, monkeypatch) -> None:
    """More than half of the CPUs for three looks; what the job itself takes does not count, nor does a short peak."""
    clock, busy = [0.0], [0.0]
    cpus = frozenset({0, 1})
    monkeypatch.setattr(owners_use, "usable_cpus", lambda: cpus)
    monkeypatch.setattr(owners_use, "_busy_s", lambda: busy[0])
    use = OwnersUse(tmp_path / "paused", looks_at_load=True, clock=lambda: clock[0])

    def look(others: float, job: float) -> str:
        clock[0] += 2.5
        busy[0] += 2.5 * (others + job)
        jobs[0] += 2.5 * job
        return use.is_back(lambda: jobs[0])

    jobs = [0.0]
    assert [look(0.0, 2.0) for _ in range(5)] == [""] * 5
    assert [look(1.8, 0.2), look(1.8, 0.2), look(0.1, 1.9)] == [""] * 3
    assert [look(1.8, 0.2) for _ in range(3)][-1] == "the owner uses the machine"


def test_another_process_on_the_gpu_means_that_the_owner_is_back(smi, tmp_path) -> None:
    """For three looks; the job's own process does not count, nor does a desktop that takes a few percent."""
    watch = GpuWatch(LentGpu(0), pids=lambda: {4001})
    use = OwnersUse(tmp_path / "paused", looks_at_load=False, gpu=watch)

    def look(game: int) -> str:
        smi.says(game=game)
        watch.look()
        return use.is_back(lambda: 0.0)

    assert [look(5) for _ in range(4)] == [""] * 4
    assert [look(70), look(70), look(5)] == [""] * 3
    assert [look(70) for _ in range(3)] == ["", "", "the owner uses the GPU"]
    assert look(0) == ""


def test_of_several_gpus_the_hottest_and_the_most_used_one_counts(smi) -> None:
    """Each is asked by its number; a job's processes are its own on all of them."""

    class Other(LentGpu):
        def read(self, *, with_use: bool) -> GpuReading:
            return GpuReading(temperature_c=90.0, use={4001: 0.9, 9: 0.7})

    watch = GpuWatch(LentGpu(0), Other(3), pids=lambda: {4001}, max_temperature_c=83)
    watch.look()
    watch.look()
    assert watch.reason == "the GPU is at 90 °C, above 83 °C"
    assert {line.rpartition(" ")[2] for line in smi.asked} == {"0"}
    watch = GpuWatch(LentGpu(0), Other(3), pids=lambda: {4001})
    watch.look()
    watch.look()
    assert watch.reason == "the owner uses the GPU"


def test_a_hot_gpu_is_lent_again_once_it_is_cool(smi) -> None:
    """Above the highest temperature for three looks it goes back, and stays so until it is ten degrees below."""
    watch = GpuWatch(LentGpu(0), max_temperature_c=83)

    def look(temperature: float) -> str:
        smi.says(str(temperature))
        watch.look()
        return watch.reason

    assert [look(85), look(85)] == ["", ""]
    assert look(86) == "the GPU is at 86 °C, above 83 °C"
    assert look(80).startswith("the GPU is at 80 °C")
    assert look(83 - COOLED_C) == ""
    assert "pmon" not in " ".join(smi.asked)


def test_a_gpu_that_cannot_be_looked_at_is_not_lent(smi) -> None:
    """At the start that is an error; later on, after three looks, the owner has it back."""
    smi.says("[N/A]")
    with pytest.raises(NoDevice, match="no temperature of GPU 0"):
        GpuWatch(LentGpu(0), max_temperature_c=83)
    smi.says()
    watch = GpuWatch(LentGpu(0), max_temperature_c=83)
    smi.breaks()
    for _ in range(2):
        watch.try_look()
    assert watch.reason == ""
    watch.try_look()
    assert "cannot be watched any more" in watch.reason
    assert "Unable to determine the device handle" in watch.reason


def test_a_days_upload_is_counted_over_agents(tmp_path, monkeypatch) -> None:
    """A new agent of the same folder goes on counting; another day begins at nothing."""
    monkeypatch.setattr(owners_use, "_WRITE_S", 0.0)
    path, sent, day = tmp_path / "sent.json", [0], ["2026-11-27"]
    quota = UploadQuota(path, 1000, lambda: sent[0], lambda: day[0])
    sent[0] = 600
    assert quota.reason() == ""
    assert json.loads(path.read_text()) == {"day": "2026-11-27", "bytes": 600}
    sent[0] = 0
    again = UploadQuota(path, 1000, lambda: sent[0], lambda: day[0])
    sent[0] = 500
    assert "were sent today" in again.reason()
    day[0] = "2026-11-28"
    assert again.reason() == ""
    path.write_text("[]")
    assert UploadQuota(path, 1000, lambda: sent[0], lambda: day[0]).reason() == ""


def test_a_gpus_power_is_set_back_also_after_an_end_without_a_word(tmp_path, monkeypatch) -> None:
    """What it was is in a file: an agent that follows a killed one does not take the limit for the board's own."""
    now = [450.0]
    monkeypatch.setattr(LentGpu, "power_limit_w", lambda _: now[0])
    monkeypatch.setattr(LentGpu, "limit_power", lambda _, watts: now.__setitem__(0, watts))
    kept = tmp_path / "power.json"
    with limited_power(LentGpu(0), 250.0, kept):
        assert now == [250.0]
        left = kept.read_text()
    assert now == [450.0]
    assert not kept.exists()
    kept.write_text(left)
    now[0] = 250.0  # left by a killed agent
    with limited_power(LentGpu(0), 200.0, kept):
        assert now == [200.0]
    assert now == [450.0]
    kept.write_text(left)
    now[0] = 250.0  # left likewise; this agent limits nothing
    with limited_power(LentGpu(0), None, kept):
        assert now == [450.0]
    with limited_power(LentGpu(0), None, kept):
        assert not kept.exists()


def test_a_watch_that_hangs_gives_the_gpu_back(smi, monkeypatch) -> None:
    """A minute after its last look, whatever that said."""
    watch = GpuWatch(LentGpu(0), max_temperature_c=83)
    began = owners_use.time.monotonic()
    monkeypatch.setattr(owners_use.time, "monotonic", lambda: began + 70)
    assert "was last looked at" in watch.reason
    watch.look()
    assert watch.reason == ""
