"""The simulated GPU behaves as a GPU does, as far as code can tell but for its speed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stoker.testing.simulated_gpu import is_simulated

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_simulated(), reason="is about simulated GPUs")]


def trained(device: str, implementation: str) -> float:
    """The loss of the third update of a small network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **{implementation: True})
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_it_computes_what_the_cpu_does(implementation: str) -> None:
    """Bit for bit, forward, backward and optimiser."""
    assert trained("cuda:0", implementation) == trained("cpu", implementation)


def test_tensors_of_several_devices_do_not_mix() -> None:
    """Except for numbers of no dimension."""
    here = torch.ones(4, device="cuda:0")
    for other in (torch.ones(4), torch.ones(4, device=f"cuda:{torch.cuda.device_count() - 1}")):
        if other.device != here.device:
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                here.add(other)
    assert (here * torch.tensor(2.0)).sum().item() == 8


def test_memory_is_counted_and_has_an_end() -> None:
    """Storages that are resized, as FSDP does, too."""
    before = torch.cuda.memory_allocated()
    held = torch.empty(2**18, device="cuda")
    assert torch.cuda.memory_allocated() == before + 2**20
    held.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() >= before + 2**20
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(2**40, device="cuda")


def test_draws_are_the_devices_own() -> None:
    """Seeded by device; the CPU's generator stays where it is, also for operations that take no generator."""
    state = torch.random.get_rng_state()
    drawn = []
    for _ in range(2):
        torch.cuda.manual_seed(3)
        drawn.append(torch.cat([torch.rand(4, device="cuda"), nn.functional.dropout(torch.ones(9, device="cuda"))]))
    assert torch.equal(*drawn)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_graph_repeats_its_operations_on_the_same_memory() -> None:
    """Views and sums of them as well."""
    inputs, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = (inputs * 2 + 1).view(2, 2).sum(1)
    inputs.fill_(3)
    graph.replay()
    assert outputs.tolist() == [14, 14]
