import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stoker.errors import BadJob
from stoker.profiling.tracing.session import trace_step
from tests.profiling.tracing.jobs import allocator_sizes, peak_of, settings, sizes_of

BATCH = (torch.ones(8, 48), torch.zeros(8, dtype=torch.int64))

global_model = nn.Linear(48, 10)
global_optimizer = torch.optim.SGD(global_model.parameters(), lr=0.1, momentum=0.9)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(48, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 10))


def _closure():
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    losses = []

    def forward(inputs):
        return model(inputs)

    def step(batch):
        inputs, labels = batch
        loss = F.cross_entropy(forward(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())

    return step, model, optimizer, losses


def _global_loss(inputs, labels):
    return F.cross_entropy(global_model(inputs), labels)


def _global_step(batch):
    _global_loss(*batch).backward()
    global_optimizer.step()
    global_optimizer.zero_grad()


class _Trainer:
    def __init__(self):
        self.model = _model()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.count = 0

    def step(self, batch):
        inputs, labels = batch
        F.cross_entropy(self.model(inputs), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1

    __call__ = step


def _names(trace):
    return [trace.operations[one.operation].name for one in trace.occurrences]


@pytest.mark.parametrize(
    "make",
    [lambda: _closure()[0], lambda: _global_step, lambda: _Trainer().step, _Trainer],
    ids=["closure", "globals", "method", "callable"],
)
def test_peak_of_any_step_equals_the_allocators(make):
    """A closure, a function over globals, a method and a callable object are found their models and optimisers."""
    step = make()
    trace = trace_step(step, BATCH, settings())
    step(BATCH)
    real = peak_of(allocator_sizes(lambda: step(BATCH)))
    assert real - peak_of(sizes_of(trace)) in (0, 8, 12)
    assert {"parameter", "gradient", "optimizer state"} <= {storage.category for storage in trace.storages}


def test_step_is_left_as_it_was():
    """Neither weights, nor gradients, nor the optimiser, nor what the step keeps of its results change."""
    step, model, optimizer, losses = _closure()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trace = trace_step(step, BATCH, settings("cuda"))
    assert trace.flops > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state
    assert losses == []
    trainer = _Trainer()
    trace_step(trainer.step, BATCH, settings("cuda"))
    assert trainer.count == 0


def test_step_written_for_the_cpu_is_traced_on_the_target():
    """Models, optimisers and batches lie on the target, whose optimiser goes over lists of parameters."""
    on_cpu, on_gpu = (trace_step(_closure()[0], BATCH, settings(target)) for target in ("cpu", "cuda"))
    assert "_foreach_addcdiv_" in _names(on_gpu)
    assert "_foreach_addcdiv_" not in _names(on_cpu)
    assert on_cpu.flops == on_gpu.flops


def test_modules_and_lines_are_the_users():
    """Operations are reported by the model's own names and the user's lines."""
    trace = trace_step(_closure()[0], BATCH, settings("cuda"))
    products = {
        (trace.modules[one.module], trace.sources[one.source].partition(":")[0])
        for one in trace.occurrences
        if trace.operations[one.operation].name in ("addmm", "mm")
    }
    assert products == {("0", "test_step_function.py"), ("3", "test_step_function.py")}


def test_two_networks_are_told_apart():
    """The modules of several models are named after the variables that hold them."""
    first, second = nn.Linear(48, 48), nn.Linear(48, 10)

    def step(batch):
        second(first(batch[0])).sum().backward()

    trace = trace_step(step, BATCH, settings("cuda"))
    names = {trace.modules[one.module] for one in trace.occurrences} - {""}
    assert names == {"first", "second"}


def test_step_that_fails_is_told_with_its_line():
    """A step that would fail on real tensors fails here, with the user's line."""
    model = nn.Linear(3, 2)

    def step(batch):
        model(batch[0]).sum().backward()

    with pytest.raises(BadJob, match=r"mm.* at test_step_function.py:\d+ cannot be traced"):
        trace_step(step, BATCH, settings("cuda"))
