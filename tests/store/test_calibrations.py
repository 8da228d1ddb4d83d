from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stoker.errors import RunFailed
from stoker.records import Calibration, Ceilings, MicroBenchmark, Operation, TensorShape, Timing
from stoker.store import calibration_log, ceilings_cache, operations_cache, record_caches
from stoker.testing import FaultyDisk, fake_device


def calibration(run: str, device_model: str = "A") -> Calibration:
    """One for that run."""
    return Calibration(
        device_model=device_model,
        torch_version="2",
        run=run,
        quantity="total_s",
        forecast=1.0,
        measured=1.1,
        at="2025-03-01T00:00:00+00:00",
    )


CEILINGS = Ceilings(
    device=fake_device(),
    threads=2,
    gemm_flops={"float32": 1e11},
    copy_bytes_per_s=1e10,
    fresh_copy_bytes_per_s=5e9,
    host_to_device_bytes_per_s=None,
    took_s=1.0,
    measured_at="2025-03-01T00:00:00+00:00",
    torch_version="2",
)


def test_calibrations_come_back_in_order_and_by_device(tmp_path: Path) -> None:
    """All of them, or those of one device model."""
    log = calibration_log(tmp_path)
    assert log.read() == ()
    for run, device in (("1", "A"), ("2", "B"), ("3", "A")):
        log.append(calibration(run, device))
    assert [c.run for c in calibration_log(tmp_path).read()] == ["1", "2", "3"]
    assert [c.run for c in log.read(device_model="A")] == ["1", "3"]


def test_a_long_log_is_not_decoded_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of other devices are not, nor more than the newest that are asked for; text in other fields may match."""
    log = calibration_log(tmp_path)
    for number in range(9):
        log.append(calibration(f"{number}", 'Gerät "A"' if number % 3 else "B"))
    log.append(calibration("B", "C"))
    decoded = []
    original = record_caches.loads
    monkeypatch.setattr(record_caches, "loads", lambda line, kind: decoded.append(line) or original(line, kind))
    assert [c.run for c in log.read(device_model='Gerät "A"')] == ["1", "2", "4", "5", "7", "8"]
    assert len(decoded) == 6
    decoded.clear()
    assert [c.run for c in log.read(newest=2, device_model="B")] == ["3", "6"]
    assert len(decoded) == 3


def test_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    """Damaged lines, those of another version, and a torn end: the rest still counts."""
    log = calibration_log(tmp_path)
    log.append(calibration("1"))
    line = log.path.read_bytes()
    log.path.write_bytes(line + b"{\n\xff\n" + line.replace(b'"schema": 1', b'"schema": 2') + line[:30])
    assert [c.run for c in log.read()] == ["1"]
    log.append(calibration("2"))
    assert [c.run for c in log.read()] == ["1", "2"]


def test_ceilings_are_kept_by_key(tmp_path: Path) -> None:
    """Any string is a key; nothing, or something damaged, reads as nothing."""
    cache = ceilings_cache(tmp_path)
    assert cache.read("cpu/2 threads") is None
    cache.write(CEILINGS, "cpu/2 threads")
    assert cache.read("cpu/2 threads") == CEILINGS
    assert cache.read("cpu/4 threads") is None
    [path] = (tmp_path / "ceilings").iterdir()
    path.write_bytes(path.read_bytes()[:50])
    assert cache.read("cpu/2 threads") is None
    cache.write(CEILINGS, "cpu/2 threads")
    assert cache.read("cpu/2 threads") == CEILINGS


def test_times_of_operations_are_kept_by_key_and_threads(tmp_path: Path) -> None:
    """One key, a file for each number of threads and one for none; something damaged reads as nothing."""
    shape = TensorShape(shape=(2, 3), dtype="fp32")
    relu = Operation(
        name="relu",
        inputs=(shape,),
        outputs=(shape,),
        flops=0,
        bytes_read=24,
        bytes_written=24,
        attributes=(("dim", [1]),),
    )
    on_one = MicroBenchmark(
        device=fake_device(),
        threads=1,
        timings=(Timing(operation=relu, seconds=1e-6),),
        launch_s=1e-6,
        took_s=1.0,
        measured_at="2025-03-01T00:00:00+00:00",
        torch_version="2",
        host_s={"forward": 2e-6},
    )
    on_all = replace(on_one, threads=2)
    cache = operations_cache(tmp_path)
    assert cache.read("cpu") is None
    cache.write(on_one, "cpu", "1 threads")
    assert (cache.read("cpu", "1 threads"), cache.read("cpu", "2 threads"), cache.read("cpu")) == (on_one, None, None)
    cache.write(on_all, "cpu")
    assert (cache.read("cpu", "1 threads"), cache.read("cpu")) == (on_one, on_all)
    for path in (tmp_path / "operations").iterdir():
        path.write_text("{}")
    assert cache.read("cpu") is None


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    """The caller may go on without it."""
    with FaultyDisk.read_only(tmp_path):
        with pytest.raises(RunFailed, match=r"a calibration.*read-only"):
            calibration_log(tmp_path / "a").append(calibration("1"))
        with pytest.raises(RunFailed, match=r"measured ceilings.*read-only"):
            ceilings_cache(tmp_path / "a").write(CEILINGS, "key")
