"""Operations read from a Chrome trace of PyTorch's profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from stoker.profiling.chrome_trace import OperationCall, kernels, memory_timeline, operation_calls, peak_shares


def event(name: str, start: float, took: float, category: str = "cpu_op", **arguments: Any) -> dict[str, Any]:
    """A complete event of thread 1, times in microseconds."""
    return {"ph": "X", "cat": category, "name": name, "tid": 1, "ts": start, "dur": took, "args": arguments}


def named(calls: list[OperationCall], name: str) -> OperationCall:
    """The only call of that name."""
    (found,) = (call for call in calls if call.name == name)
    return found


def test_an_operation_keeps_the_time_it_does_not_hand_on() -> None:
    """Its own time is its length less that of the operations it calls."""
    calls = operation_calls([event("aten::linear", 0, 100), event("aten::addmm", 10, 60), event("aten::t", 80, 5)])
    assert [(call.name, call.own_us) for call in calls] == [("aten::linear", 35), ("aten::addmm", 60), ("aten::t", 5)]
    assert calls[1].parent is calls[0]


def test_an_operation_has_the_users_line_and_the_module_it_ran_in(tmp_path: Path) -> None:
    """The nearest function of the user's; frames of PyTorch pass it on, Stoker's own forget who called them."""
    job = tmp_path / "job.py"
    torch_file = Path(torch.__file__).parent / "nn/functional.py"
    stoker_file = Path(__file__).parents[2] / "src/stoker/training/loop.py"
    calls = operation_calls(
        [
            event(f"{job}(80): main", 0, 1000, "python_function"),
            event(f"{stoker_file}(10): run", 10, 900, "python_function"),
            event("aten::index", 20, 10),
            event(f"{job}(12): forward", 100, 500, "python_function"),
            event("nn.Module: Linear_3", 110, 200, "python_function"),
            event(f"{torch_file}(5): linear", 120, 100, "python_function"),
            event("aten::addmm", 130, 50),
            event("aten::relu", 400, 50),
        ]
    )
    assert [call.where for call in calls] == ["", "job.py:12 forward, Linear", "job.py:12 forward"]


def test_the_backward_pass_has_the_lines_of_the_forward_pass() -> None:
    """By the sequence number: the last forward operation that has it made the node."""
    calls = operation_calls(
        [
            event("/u/job.py(12): forward", 0, 100, "python_function"),
            event("nn.Module: Linear_0", 1, 50, "python_function"),
            event("aten::linear", 2, 40, **{"Sequence number": 6}),
            event("aten::addmm", 3, 30, **{"Sequence number": 7}),
            event("autograd::engine::evaluate_function: AddmmBackward0", 200, 80, **{"Sequence number": 7}),
            event("AddmmBackward0", 201, 70, **{"Sequence number": 7}),
            event("aten::mm", 202, 60),
        ]
    )
    assert named(calls, "aten::mm").where == "job.py:12 forward, Linear"


def test_time_on_a_gpu_belongs_to_who_started_it() -> None:
    """Kernels and copies carry the number of their operation; the table then ranks by the GPU's time."""
    calls = operation_calls(
        [
            event("aten::linear", 0, 50, **{"External id": 1}),
            event("aten::addmm", 5, 20, **{"External id": 2}),
            event("aten::add", 60, 40, **{"External id": 3}),
            event("sgemm_128x128", 30, 500, "kernel", **{"External id": 2}),
            event("Memcpy HtoD", 530, 70, "gpu_memcpy", **{"External id": 3}),
        ]
    )
    found = kernels(calls)
    assert [(kernel.operation, kernel.device_s) for kernel in found[:2]] == [("addmm", 500e-6), ("add", 70e-6)]


def test_flops_of_transposed_convolutions_are_counted_by_their_input() -> None:
    """Each position of the input meets all weights; the gradients take as much each."""
    settings = ["", "", "", "[2, 2]", "[0, 0]", "[1, 1]", "True", "[0, 0]", "2"]
    image, weight, output = [2, 6, 9, 9], [6, 2, 3, 3], [2, 4, 19, 19]
    backward = ["", "", "", "", "[2, 2]", "[0, 0]", "[1, 1]", "True", "[0, 0]", "2", "[True, True, False]"]
    calls = operation_calls(
        [
            event("aten::convolution", 20, 60, **{"Input Dims": [image, weight, []], "Concrete Inputs": settings}),
            event(
                "aten::convolution_backward",
                100,
                40,
                **{"Input Dims": [output, image, weight], "Concrete Inputs": backward},
            ),
        ]
    )
    rates = {kernel.operation: kernel.flops_per_s for kernel in kernels(calls)}
    forward = 2 * 2 * 9 * 9 * 6 * 2 * 3 * 3
    assert rates["convolution"] == pytest.approx(forward / 60e-6)
    assert rates["convolution_backward"] == pytest.approx(2 * forward / 40e-6)


def test_flops_are_counted_where_the_time_is() -> None:
    """A product's by its operands, a convolution's with the library's kernel that it calls, its gradients' by two."""
    settings = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
    image, weight, output = [8, 4, 16, 16], [32, 4, 3, 3], [8, 32, 8, 8]
    calls = operation_calls(
        [
            event("aten::addmm", 0, 10, **{"Input Dims": [[5], [3, 4], [4, 5], [], []]}),
            event("aten::convolution", 20, 60, **{"Input Dims": [image, weight, []], "Concrete Inputs": settings}),
            event("aten::mkldnn_convolution", 21, 50),
            event(
                "aten::convolution_backward",
                100,
                40,
                **{"Input Dims": [output, image, weight], "Concrete Inputs": ["", "[True, True, False]"]},
            ),
        ]
    )
    rates = {kernel.operation: kernel.flops_per_s for kernel in kernels(calls)}
    forward = 2 * 8 * 32 * 8 * 8 * 4 * 3 * 3
    assert rates["addmm"] == pytest.approx(2 * 3 * 4 * 5 / 10e-6)
    assert rates["mkldnn_convolution"] == pytest.approx(forward / 50e-6)
    assert rates["convolution_backward"] == pytest.approx(2 * forward / 40e-6)
    assert rates["convolution"] is None


def memory(at: float, change: int, address: int) -> dict[str, Any]:
    """An allocation or a free on the CPU."""
    arguments = {"Device Type": 0, "Bytes": change, "Addr": address}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "tid": 1, "ts": at, "args": arguments}


def test_memory_at_its_peak_is_told_by_who_asked_for_it() -> None:
    """What was freed before does not count; an allocation within `empty` belongs to the operation that called it."""
    events = [
        event("aten::mm", 0, 50),
        event("aten::empty", 5, 10),
        memory(6, 100, 1),
        memory(40, 30, 2),
        memory(45, -30, 2),
        event("aten::relu", 100, 50),
        memory(110, 70, 3),
        memory(400, -100, 1),
    ]
    timeline = memory_timeline(events, operation_calls(events), "cpu")
    assert [one.total for one in timeline] == [100, 130, 100, 170, 70]
    peak, shares = peak_shares(timeline)
    assert peak == 170
    assert [(share.what, share.value) for share in shares] == [("mm", 100.0), ("relu", 70.0)]
    assert memory_timeline(events, [], "cuda") == ()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(inputs)))


def test_a_trace_of_pytorch_itself_is_understood(tmp_path: Path) -> None:
    """This PyTorch writes what is read here: lines, ranges, sizes, sequence numbers and memory."""
    model, inputs = Net(), torch.randn(16, 32)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True, with_stack=True) as seen:
        with record_function("forward"):
            loss = model(inputs).sum()
        with record_function("backward"):
            loss.backward()
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    calls = operation_calls(events)
    table = kernels(calls)
    products = [kernel for kernel in table if kernel.operation in ("addmm", "mm")]
    assert {kernel.phase for kernel in products} == {"forward", "backward"}
    line = f"{Path(__file__).name}:{Net.forward.__code__.co_firstlineno} forward, Linear"
    assert {kernel.where for kernel in products} == {line}
    assert all(kernel.flops_per_s for kernel in products)
    peak, shares = peak_shares(memory_timeline(events, calls, "cpu"))
    assert peak >= 16 * 64 * 4
    assert shares
