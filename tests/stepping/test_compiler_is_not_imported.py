"""PyTorch's compiler stays where it is until something is compiled."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import sys, torch
from stoker.stepping.random_draws import RandomDraws
from stoker.stepping import torch_optimizers

parameter = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([parameter])
with RandomDraws() as draws:
    (parameter + torch.rand(3)).sum().backward()
optimizer.load_state_dict(optimizer.state_dict())
assert draws.elements["rand"] == 3
print("torch._dynamo" in sys.modules)
"""


def test_an_optimizer_and_a_watch_for_draws_do_without_the_compiler() -> None:
    """Making, saving and loading an optimiser, and seeing every operation, import no compiler."""
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
