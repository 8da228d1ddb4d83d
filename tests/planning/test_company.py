"""Operations among processes that compute on the same CPU."""

from __future__ import annotations

from stoker.planning.company import InCompany
from stoker.records import Hardware, Operation
from tests.planning.spreading import product, shape
from tests.planning.trials import CPU


class ASecond:
    """Every operation takes a second, give or take a tenth."""

    def seconds(self, _operation: Operation) -> float:
        """Of one execution [s]."""
        return 1.0

    def relative_error(self, _operation: Operation) -> float:
        """A tenth."""
        return 0.1


def test_what_is_bound_by_memory_is_slowed_down_as_memory_is() -> None:
    """Large products nearly as arithmetic, elementwise operations as memory, small products in between."""
    times = InCompany(
        ASecond(), Hardware(device=CPU, dense_flops={}, bandwidth_bytes_per_s=None), {"arithmetic": 1.1, "memory": 2.0}
    )
    added = Operation(name="add", inputs=(shape(4),), outputs=(shape(4),), flops=0, bytes_read=16, bytes_written=16)
    assert times.seconds(added) == 2.0
    assert 1.1 < times.seconds(product(1024, 1024, 1024)) < 1.2
    assert times.seconds(product(1024, 1024, 1024)) < times.seconds(product(16, 16, 16)) < 2.0
    assert times.relative_error(added) == 0.1
