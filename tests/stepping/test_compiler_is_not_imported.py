"""PyTorch's compiler stays where it is until something is compiled, and sympy until something is traced."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import sys, torch
from torch import nn
from stoker.jobs import SGD, AdamW, Job
from stoker.loading.datasets import datasets_of
from stoker.profiling.tracing.update import trace_update
from stoker.records import Plan, TraceSettings
from stoker.stepping.coupling import unprobed
from stoker.stepping.model import meta_model
from stoker.stepping.random_draws import RandomDraws
from stoker.stepping.torch_optimizers import build_optimizer
from stoker.units import updates
from tests.stepping.models import make_job, mlp

torch.set_num_threads(1)
parameter = nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([parameter])
with RandomDraws() as draws:
    (parameter + torch.rand(3)).sum().backward()
optimizer.load_state_dict(optimizer.state_dict())
assert draws.elements["rand"] == 3
assert "torch._dynamo" not in sys.modules
for optimizer in (AdamW(lr=0.1), SGD(lr=0.1, momentum=0.9)):
    job = make_job(mlp, optimizer=optimizer)
    model = mlp()
    optimizer = build_optimizer(job, model, Plan(device="cpu", micro_batch=16))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for implementation in ("default", "fused"):
        settings = TraceSettings(
            target="cpu", capability="", micro_batch=16, optimizer_implementation=implementation
        )
        assert trace_update(job, datasets_of(job), unprobed(job), settings).operations
table = torch.linspace(0, 1, 32)[16:]  # a view of a real tensor, which a trace makes a fake of

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return (x.cpu() * table).to(x.device)

inputs = torch.zeros(16, 16)
job = Job(model=Blocks, data=(inputs, inputs), loss="mse", optimizer=AdamW(lr=0.1), batch=16, until=updates(2))
for kind in ("full", "selective"):
    settings = TraceSettings(
        target="cuda", capability="8.0", micro_batch=16, precision="bf16", checkpointed_blocks=2, checkpointing=kind
    )
    assert trace_update(job, datasets_of(job), unprobed(job), settings).operations
meta_model(make_job(lambda: nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2))))
assert "torch._dynamo" not in sys.modules
assert "_dynamo" not in vars(torch)
compiled = torch.compile(lambda x: x * 2, backend="eager")  # the whole of it is there when it is asked for
assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert not hasattr(torch.utils.checkpoint.checkpoint.__wrapped__, "__dynamo_disable")  # it is compiled as ever
print("done")
"""

_UPDATE = """
import sys, torch
from torch import nn
import torch.nn.functional as F
from stoker.jobs import AdamW, Job
from stoker.loading.datasets import datasets_of
from stoker.records import Plan
from stoker.stepping.coupling import at_first
from stoker.stepping.model import meta_model
from stoker.stepping.step import Step
from stoker.loading.batches import in_order
from stoker.training.train import train
from stoker.units import updates

torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(8, 4)
        self.place = nn.Parameter(0.02 * torch.randn(4) * 2)
        self.head = nn.Linear(4, 3)
        nn.init.normal_(self.head.weight, std=0.02)
        self.head.bias.data.normal_(std=0.02)

    def forward(self, x):
        return self.head(self.tokens(x).mean(1) + self.place)

data = torch.zeros(16, 5, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)
job = Job(model=Net, data=data, loss=lambda output, target: F.cross_entropy(output, target), optimizer=AdamW(lr=0.1),
          batch=8, until=updates(2))
samples = datasets_of(job).train
assert {p.device.type for p in meta_model(job).parameters()} == {"meta"}
step = Step(job, Plan(device="cpu", micro_batch=8), at_first(job, samples))
step.gradients(next(iter(in_order(samples, step.pipeline(samples, augmented=True), 8))), 0)
slow = {"torch._dynamo", "sympy", "torch.distributed._functional_collectives", "numpy.ma", "jinja2"} & {*sys.modules}
assert not slow, slow
print("done")
"""


def _says_done(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.slow
def test_what_stands_before_the_first_update_does_without_sympy() -> None:
    """Normal draws of an outline, the check of a loss of the user's own, and a pass; nor is there what others need."""
    _says_done(_UPDATE)


@pytest.mark.slow
def test_an_update_and_its_trace_do_without_the_compiler() -> None:
    """Making, saving and loading an optimiser, seeing every operation, initial weights without memory, a step, a trace.

    So do traces for a GPU, of checkpointed blocks and of tensors that are not the model's. And it works when it is
    asked for.
    """
    _says_done(_SCRIPT)
