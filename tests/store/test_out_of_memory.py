"""What ran out of memory, on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.errors import RunFailed
from stoker.records import Plan
from stoker.records.plan import OutOfMemory
from stoker.store.record_caches import out_of_memory_log
from stoker.testing import FaultyDisk


def failure(device_model: str = "A", job: str = "j", micro_batch: int = 8) -> OutOfMemory:
    """One on that device."""
    return OutOfMemory(
        device_model=device_model,
        torch_version="2",
        job=job,
        plan=Plan(device="cpu", micro_batch=micro_batch),
        run="r",
        at="2025-03-01",
        forecast_bytes=1.0,
        reachable_bytes=2,
    )


def test_failures_come_back_by_device_and_job(tmp_path: Path) -> None:
    """Oldest first; lines that cannot be read are passed over."""
    log = out_of_memory_log(tmp_path)
    assert log.read(device_model="A", job="j") == ()
    for one in (failure(), failure("B"), failure(job="k"), failure(micro_batch=4)):
        log.append(one)
    with log.path.open("a") as file:
        file.write("{}\n")
    log.append(failure(micro_batch=2))
    found = out_of_memory_log(tmp_path).read(device_model="A", job="j")
    assert [one.plan.micro_batch for one in found] == [8, 4, 2]
    assert found[0] == failure()


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """As an error that training may ignore."""
    with FaultyDisk(tmp_path, room_bytes=0), pytest.raises(RunFailed):
        out_of_memory_log(tmp_path).append(failure())
