import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.profiling.tracing.session import trace_step
from stoker.profiling.tracing.target_kernels import onednn_workspace_bytes
from tests.profiling.tracing.jobs import settings, traced


class _Workspaces(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            self.sizes.append(out[3].numel())
        return out


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch is built without oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("steps", "batch", "inputs", "hidden"), [(32, 8, 64, 128), (10, 3, 50, 33), (7, 2, 300, 256)])
def test_workspace_is_what_onednn_allocates(dtype, steps, batch, inputs, hidden):
    """The formula gives the bytes that a real LSTM layer keeps for its backward pass."""
    layer = nn.LSTM(inputs, hidden, dtype=dtype)
    with _Workspaces() as seen:
        layer(torch.zeros(steps, batch, inputs, dtype=dtype, requires_grad=True))
    expected = onednn_workspace_bytes(steps=steps, batch=batch, inputs=inputs, hidden=hidden, scalar=dtype.itemsize)
    assert seen.sizes in ([expected], [])  # empty: oneDNN has no such layer for this processor


def _recurrent_operations(layer, target):
    def step(batch):
        layer(batch)[0].sum().backward()

    trace = trace_step(step, torch.zeros(12, 4, 8), settings(target))
    return [trace.operations[o.operation] for o in trace.occurrences if "rnn" in trace.operations[o.operation].name]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_an_lstm_that_projects_has_states_of_two_widths():
    """Outputs and hidden state are as narrow as the projection, the cell's state is not."""
    layer = nn.LSTM(8, 16, num_layers=2, proj_size=4)

    def step(batch):
        output, (hidden, cell) = layer(batch)
        assert [one.shape[-1] for one in (output, hidden, cell)] == [4, 4, 16]
        output.sum().backward()

    trace = trace_step(step, torch.zeros(12, 4, 8), settings("cuda"))
    names = {operation.name for operation in trace.operations}
    assert {"_cudnn_rnn", "_cudnn_rnn_backward"} <= names


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_on_a_gpu_are_one_operation(kind, gates):
    """One pass runs all steps of all layers at once, forward and backward, and keeps a reserve between the two."""
    forward, backward = _recurrent_operations(kind(8, 16, num_layers=2), "cuda")
    assert (forward.name, backward.name) == ("_cudnn_rnn", "_cudnn_rnn_backward")
    assert forward.flops == 2 * 12 * 4 * gates * (16 * 8 + 16 * 16 + 16 * 16 + 16 * 16)
    assert backward.flops == 2 * forward.flops
    assert any(shape.dtype == "uint8" and shape.numel > 0 for shape in forward.outputs)


def test_a_job_with_a_recurrent_layer_is_traced_for_a_gpu_in_silence():
    """What PyTorch has to say of a build without cuDNN is no news of the job."""
    with warnings.catch_warnings(record=True, action="always") as said:
        trace = traced("gru", "cuda", micro_batch=4)
    assert [str(one.message) for one in said] == []
    assert any(operation.name == "_cudnn_rnn" for operation in trace.operations)
