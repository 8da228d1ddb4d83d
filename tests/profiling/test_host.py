from __future__ import annotations

import itertools

from stoker.profiling.micro_benchmark import host_seconds


def test_the_host_takes_time_for_everything() -> None:
    """All four are known and small: well under a millisecond for an operation, a tenth of a second for an update."""
    host = host_seconds()
    assert host.keys() == {"forward", "backward", "optimizer", "update"}
    assert all(0 <= seconds < 1e-3 for name, seconds in host.items() if name != "update")
    assert 0 <= host["update"] < 0.1


def test_nothing_is_negative_where_readings_are_noise() -> None:
    """With a clock that counts its readings, every call takes as long, and differences are nothing."""
    readings = itertools.count()
    host = host_seconds(lambda: float(next(readings)))
    assert min(host.values()) == 0.0
