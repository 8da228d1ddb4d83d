"""Collectives with gradients are what one process computes with the whole tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from stoker.records import Layout
from stoker.stepping.layouts import tensor_layers
from stoker.stepping.world import World
from stoker.testing.ranks import on_ranks

SIZE = 2


def inputs() -> list[torch.Tensor]:
    """Each rank's [B, T, D]."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 6, generator=random, dtype=torch.float64) for _ in range(SIZE)]


def weights(*shape: int) -> torch.Tensor:
    """Gradients of an output of that shape, which do not lie one after the other in memory."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64).view(*reversed(shape)).permute(*reversed(range(len(shape)))) / count


def _found(world: World) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Output and gradient of each collective, for a gradient of its output that is `weights` times 1 + rank."""
    group = dist.group.WORLD
    assert group is not None
    calls = {
        "shared": lambda x: tensor_layers.copy_to_group(x, group),
        "summed": lambda x: tensor_layers.reduce_from_group(x, group),
        "gathered": lambda x: tensor_layers.gather_from_group(x, 1, group, is_shared=False),
        "gathered and shared": lambda x: tensor_layers.gather_from_group(x, 1, group, is_shared=True),
        "part": lambda x: tensor_layers.scatter_to_group(x, 1, group),
        "part of sum": lambda x: tensor_layers.reduce_scatter_to_group(x, 1, group),
    }
    found = {}
    for name, call in calls.items():
        x = inputs()[world.rank].requires_grad_()
        out = call(x)
        out.backward(weights(*out.shape) * (1 + world.rank))
        assert x.grad is not None
        found[name] = out.detach(), x.grad
    return found


def test_outputs_and_gradients_are_sums_and_parts_of_the_whole() -> None:
    """Of gradients that are not contiguous too, of which gloo would take wrong values."""
    both = inputs()
    same, long, short = weights(2, 4, 6), weights(2, 8, 6), weights(2, 2, 6)
    whole = torch.cat(both, 1)
    for rank, found in enumerate(on_ranks(Layout(tensor=SIZE), _found)):
        part = slice(2 * rank, 2 * rank + 2)
        mine = slice(4 * rank, 4 * rank + 4)
        expected = {
            "shared": (both[rank], 3 * same),
            "summed": (both[0] + both[1], (1 + rank) * same),
            "gathered": (whole, (1 + rank) * long[:, mine]),
            "gathered and shared": (whole, 3 * long[:, mine]),
            "part": (both[rank][:, part], torch.cat([short, 2 * short], 1)),
            "part of sum": ((both[0] + both[1])[:, part], torch.cat([short, 2 * short], 1)),
        }
        for name, (output, gradient) in expected.items():
            torch.testing.assert_close(found[name][0], output, msg=name)
            torch.testing.assert_close(found[name][1], gradient, msg=name)
