"""How a minute is divided among what `stoker doctor` measures."""

from __future__ import annotations

import pytest

from stoker.profiling import diagnosis
from stoker.records import Device
from stoker.records.hardware import MicroBenchmark
from stoker.store.record_caches import RecordCache
from stoker.testing import fake_device


def test_what_one_number_of_threads_does_not_need_is_left_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cores come first, with half of the time; they need a fifth of it, and one core has the rest."""
    budgets: list[tuple[int | None, float]] = []

    def measured(device: Device, *, threads: int | None, budget_s: float, **_settings: object) -> MicroBenchmark:
        budgets.append((threads, budget_s))
        return MicroBenchmark(
            device=device,
            threads=threads or device.cores,
            timings=(),
            launch_s=0.0,
            took_s=budget_s / 5,
            measured_at="2026-11-22T12:00:00+00:00",
            torch_version="2.13.0",
            host_s={},
        )

    monkeypatch.setattr(
        diagnosis,
        "survey",
        lambda: type(
            "Found",
            (),
            {
                "devices": (fake_device(),),
                "usable": (fake_device(),),
                "problems": (),
            },
        ),
    )
    monkeypatch.setattr(diagnosis, "measure_ceilings", lambda _device, **_: None)
    monkeypatch.setattr(diagnosis, "measure_operations", measured)
    monkeypatch.setattr(RecordCache, "write", lambda *_: None)
    diagnosis.doctor(fresh=True)
    assert budgets == [(None, 25.0), (1, 45.0)]
