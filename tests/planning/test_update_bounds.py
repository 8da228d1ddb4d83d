"""What an update waits for, from its trace."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from stoker.planning.model.bottleneck import UpdateBounds, as_profiled, update_bounds
from stoker.planning.model.update_time import UpdateWork, counted, update_time
from stoker.records import (
    Ceilings,
    Device,
    Hardware,
    Kernel,
    KernelTable,
    Occurrence,
    Operation,
    Phase,
    Storage,
    TensorShape,
    Trace,
    TraceSettings,
)

CPU = Hardware(
    device=Device(name="cpu", kind="cpu", model="x", cores=2, memory_bytes=2**34, fast_dtypes=("fp32",)),
    dense_flops={"fp32": 1e11},
    bandwidth_bytes_per_s=1e10,
)
GPU = dataclasses.replace(CPU, device=dataclasses.replace(CPU.device, name="cuda:0", kind="cuda"))


def square(size: int) -> TensorShape:
    """A matrix."""
    return TensorShape(shape=(size, size), dtype="fp32")


PRODUCT = Operation(
    name="mm",
    inputs=(square(1000), square(1000)),
    outputs=(square(1000),),
    flops=2 * 10**9,
    bytes_read=8 * 10**6,
    bytes_written=4 * 10**6,
)
THIN = dataclasses.replace(PRODUCT, flops=10**6)
ADDITION = dataclasses.replace(PRODUCT, name="add", flops=0)


class Times:
    """Every operation takes as long as its name says [s]."""

    def seconds(self, operation: Operation) -> float:
        return {"mm": 0.02, "add": 0.004}[operation.name]

    def relative_error(self, operation: Operation) -> float:
        return 0.1


def work_of(*operations: tuple[Operation, Phase]) -> UpdateWork:
    """An update that does these once each, on 40 MB of input."""
    trace = Trace(
        settings=TraceSettings(target="cpu", capability="", micro_batch=8),
        operations=tuple(operation for operation, _ in operations),
        occurrences=tuple(
            Occurrence(operation=index, phase=phase, part=0, module=0, source=0)
            for index, (_, phase) in enumerate(operations)
        ),
        storages=(Storage(num_bytes=40_000_000, category="input", born=-1, died=None),),
        events=(1,),
        modules=("",),
        sources=("",),
    )
    return counted(trace)


def bounds_of(*operations: tuple[Operation, Phase], hardware: Hardware = CPU, **given: Any) -> UpdateBounds:
    """The bounds of that update."""
    work = work_of(*operations)
    update = update_time(work, Times(), hardware, is_compiled=given.get("is_compiled", False))
    return update_bounds(work, update, Times(), hardware, **given)


def test_products_are_arithmetic_and_additions_are_memory() -> None:
    """With all of their forecast time but what starting them takes; together they are the whole update."""
    found = bounds_of((PRODUCT, "forward"), (ADDITION, "forward"), (PRODUCT, "backward"))
    assert found.seconds["arithmetic"] == pytest.approx(0.04, rel=0.01)
    assert found.seconds["memory bandwidth"] == pytest.approx(0.004, rel=0.01)
    assert found.flops == found.model_flops == {"fp32": 4e9}
    assert found.num_bytes == 36e6
    assert (found.num_operations, found.basis) == (3, "datasheet")


def test_a_product_of_few_flops_a_byte_is_memory() -> None:
    """The roof that counts is the measured one where there is one: slow products are arithmetic again."""
    assert bounds_of((THIN, "forward")).seconds.get("arithmetic", 0.0) == 0.0
    slow = Ceilings(
        device=CPU.device,
        threads=2,
        gemm_flops={"fp32": 1e8},
        copy_bytes_per_s=1e10,
        fresh_copy_bytes_per_s=1e9,
        host_to_device_bytes_per_s=None,
        took_s=1.0,
        measured_at="2026-11-21",
        torch_version="2.13.0",
    )
    assert bounds_of((THIN, "forward"), ceilings=slow).seconds["arithmetic"] > 0


@pytest.mark.parametrize("hardware", [CPU, GPU], ids=["cpu", "gpu"])
def test_the_parts_are_the_whole(hardware: Hardware) -> None:
    """Nothing of the forecast update is lost or counted twice, on a CPU or on a GPU's host."""
    parts: tuple[tuple[Operation, Phase], ...] = ((PRODUCT, "forward"), (ADDITION, "backward"), (ADDITION, "optimizer"))
    update = update_time(work_of(*parts), Times(), hardware)
    assert bounds_of(*parts, hardware=hardware).total_s == pytest.approx(update.step_s.value)


def test_a_batch_has_to_cross_to_a_gpu() -> None:
    """As `update_time` has it, under the same name; on a CPU nothing crosses."""
    found = bounds_of((PRODUCT, "forward"), hardware=dataclasses.replace(GPU, host_link_bytes_per_s=1e10))
    assert found.seconds["copies"] == pytest.approx(0.004)
    assert bounds_of((PRODUCT, "forward")).seconds["copies"] == 0.0


def test_recomputation_is_left_out_of_the_models_flops() -> None:
    """They are those of the update without checkpointing."""
    once = work_of((PRODUCT, "forward"))
    found = bounds_of((PRODUCT, "forward"), (PRODUCT, "backward"), without_recomputation=once)
    assert (found.flops, found.model_flops) == ({"fp32": 4e9}, {"fp32": 2e9})


def test_tf32_is_computed_as_what_it_is() -> None:
    """It traces as fp32."""
    assert bounds_of((PRODUCT, "forward"), precision="tf32").flops == {"tf32": 2e9}


def test_compiling_leaves_less_of_chains() -> None:
    """Three additions in a row become one kernel."""
    chain: list[tuple[Operation, Phase]] = [(ADDITION, "forward")] * 3
    eager, compiled = (bounds_of(*chain, is_compiled=one) for one in (False, True))
    assert compiled.num_operations == pytest.approx(eager.num_operations / 3)


def kernel(operation: str, seconds: float, phase: str = "forward") -> Kernel:
    """An operation that a profile saw."""
    return Kernel(operation=operation, where="", phase=phase, calls=1, host_s=seconds, device_s=0.0)


def test_a_profile_tells_arithmetic_from_memory() -> None:
    """By the time that operations took within updates; evaluations, loading and autograd's nodes are left out."""
    seen = (
        kernel("addmm", 1.0),
        kernel("convolution_backward", 1.0, "backward"),
        kernel("batch_norm", 6.0),
        kernel("mm", 50.0, "other"),
        kernel("index", 9.0, "data"),
        kernel("AddmmBackward0", 7.0),
    )
    table = KernelTable(device="cpu", first_update=5, updates=5, kernels=seen, peak_bytes=0, peak_shares=(), files={})
    forecast = bounds_of((PRODUCT, "forward"), (ADDITION, "forward"))
    found = as_profiled(forecast, table)
    busy = forecast.seconds["arithmetic"] + forecast.seconds["memory bandwidth"]
    assert found.seconds["arithmetic"] == pytest.approx(busy / 4)
    assert found.total_s == pytest.approx(forecast.total_s)
    assert as_profiled(forecast, dataclasses.replace(table, kernels=())) == forecast
