"""Which statements count as executed by a GPU alone."""

from __future__ import annotations

import pytest

from tests.gpu.cuda_lines import for_cuda_alone

CASES = {
    "a body for CUDA": (
        """
        if device.type == "cuda":
            a()
        b()
    """,
        {3},
    ),
    "the rest after a return for CPUs": (
        """
        if device.kind == "cpu":
            return a()
        b()
        c()
    """,
        {4, 5},
    ),
    "an alternative for others": (
        """
        if tensor.is_cuda:
            a()
        else:
            b()
    """,
        {3},
    ),
    "what CUDA shares with other conditions": (
        """
        if device.type == "cuda" and is_large:
            a()
        if device.type == "cuda" or is_large:
            b()
    """,
        {3},
    ),
    "what is for a machine without CUDA": (
        """
        if device.type == "cuda" and not torch.cuda.is_available():
            raise NoDevice
    """,
        set(),
    ),
    "a function of CUDA's": (
        """
        stream = torch.cuda.Stream()
        a(stream)
    """,
        {2, 3},
    ),
    "questions that a CPU answers": (
        """
        devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        torch.backends.cuda.matmul.allow_tf32 = False
        a(devices)
    """,
        set(),
    ),
    "a conditional expression": (
        """
        free = torch.cuda.memory_reserved() if device.type == "cuda" else 0
        a(free)
    """,
        set(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_counts(name: str) -> None:
    """By line of a function whose first line is 1."""
    body, expected = CASES[name]
    assert for_cuda_alone("def f(device):" + body) == expected


def test_an_argument_called_torch_is_not_pytorch() -> None:
    """As a record of its build."""
    assert for_cuda_alone("def f(torch):\n    return torch.cuda is None\n") == set()
