"""Batch norms over the processes that share a batch: their messages, and the work that they add.

On GPUs kernels of their own read tensors as often as those of one process, with small ones on statistics between them.
"""

from __future__ import annotations

from stoker.layouts.base import Traffic
from stoker.layouts.trace_division import bytes_of
from stoker.records import Operation, TensorShape, Trace


def norm_traffic(trace: Trace, data_size: int, passes: int) -> tuple[Traffic, ...]:
    """Messages of an update over `data_size` processes: statistics forward, the sums of two gradients backward.

    Statistics are gathered by a sum: each process has a row of its own, and zeros in the others'.
    """
    channels = [norm.inputs[0].shape[1] for norm in batch_norms_of(trace)]
    gathered = tuple(4 * (2 * count + 1) * data_size for count in channels)
    summed = tuple(8 * count for count in channels)
    return (
        Traffic(what="batch statistics gathered", collective="all-reduce", axis="data", sizes=gathered, times=passes),
        Traffic(what="gradients of batch statistics", collective="all-reduce", axis="data", sizes=summed, times=passes),
    )


def batch_norms_of(trace: Trace) -> tuple[Operation, ...]:
    """The batch norms in the forward pass of one micro-batch."""
    operations = (
        trace.operations[one.operation] for one in trace.occurrences if one.part == 0 and one.phase == "forward"
    )
    return tuple(one for one in operations if "batch_norm" in one.name)


def synced_norm_work(norm: Operation) -> Operation:
    """One of the `WORK_PER_NORM` elementwise operations that a batch norm over several processes adds to PyTorch's.

    Each is over tensors as large as the norm's input.
    """
    x = norm.inputs[0]
    num_bytes = bytes_of(x)
    return Operation(
        name="mul", inputs=(x, x), outputs=(x,), flops=0, bytes_read=2 * num_bytes, bytes_written=num_bytes
    )


WORK_PER_NORM = 5
"""Passes of `stoker.stepping.batch_norm` over a tensor on a CPU, less those of PyTorch's own kernels."""


def statistics_kernel(norm: Operation) -> Operation:
    """One of the `SMALL_KERNELS` operations on statistics of each batch norm over several GPUs."""
    row = TensorShape(shape=(norm.inputs[0].shape[1],), dtype="fp32")
    num_bytes = bytes_of(row)
    return Operation(name="mul", inputs=(row,), outputs=(row,), flops=0, bytes_read=num_bytes, bytes_written=num_bytes)


SMALL_KERNELS = 33
"""Kernels of `stoker.stepping.batch_norm` on a GPU that go over one number for each channel: 21 around the statistics'
message, 7 for running statistics, 5 in the backward pass; counted in the source."""
