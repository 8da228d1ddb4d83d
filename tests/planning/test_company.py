"""Operations among processes that compute on the same CPU."""

from __future__ import annotations

import pytest

from stoker.planning.model.shared_cpu import ContendedTimes
from stoker.records import Operation
from tests.planning.spreading import product, shape


class ASecond:
    """Every operation takes a second, give or take a tenth, and a mebibyte comes and goes in one."""

    def seconds(self, _operation: Operation) -> float:
        """Of one execution [s]."""
        return 1.0

    def traffic_seconds(self, operation: Operation) -> float:
        """Of its bytes [s]."""
        return (operation.bytes_read + operation.bytes_written) / 2**20

    def relative_error(self, _operation: Operation) -> float:
        """A tenth."""
        return 0.1


def added(num_bytes: int) -> Operation:
    """Without FLOPs."""
    return Operation(
        name="add",
        inputs=(shape(4),),
        outputs=(shape(4),),
        flops=0,
        bytes_read=num_bytes // 2,
        bytes_written=num_bytes // 2,
    )


def test_of_an_operations_time_its_traffic_is_slowed_down_as_memory_is() -> None:
    """All of it, a quarter of it, next to none; whether it has FLOPs says nothing: max-pooling has none either."""
    times = ContendedTimes(ASecond(), {"arithmetic": 1.1, "memory": 2.0})
    assert times.seconds(added(2**23)) == 2.0
    assert times.seconds(added(2**18)) == pytest.approx(0.25 * 2.0 + 0.75 * 1.1)
    assert times.seconds(product(16, 16, 16)) == pytest.approx(1.1, abs=0.01)
    assert times.relative_error(added(16)) == 0.1
