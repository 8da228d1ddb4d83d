import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.profiling.tracing.fake_device import answer_for_engine, pretending
from stoker.profiling.tracing.target_kernels import AttentionCall, attention_kernel, attention_of
from tests.profiling.tracing.jobs import settings

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class _Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = answer_for_engine(func)
        if answer is not None:
            return answer
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _call(dtype=BF16, head_dim=64, **changed):
    given = {"value_dim": head_dim, "queries": 16, "keys": 16}
    return AttentionCall(dtype=dtype, head_dim=head_dim, **{**given, **changed})


@pytest.mark.parametrize(
    ("call", "capability", "kernel"),
    [
        (_call(), (8, 0), "flash"),
        (_call(FP16, is_causal=True, is_grouped=True), (9, 0), "flash"),
        (_call(head_dim=100), (8, 0), "flash"),
        (_call(head_dim=264), (8, 0), "memory efficient"),
        (_call(has_mask=True), (9, 0), "memory efficient"),
        (_call(is_causal=True, keys=32), (9, 0), "memory efficient"),
        (_call(head_dim=208), (8, 9), "memory efficient"),
        (_call(head_dim=208, needs_gradient=False), (8, 9), "flash"),
        (_call(FP32), (8, 0), "memory efficient"),
        (_call(FP32, head_dim=30), (8, 0), "math"),
        (_call(FP32, head_dim=30), (7, 5), "memory efficient"),
        (_call(FP16), (7, 0), "memory efficient"),
        (_call(BF16), (7, 5), "math"),
        (_call(torch.float64), (9, 0), "math"),
        (_call(FP32, is_grouped=True), (8, 0), "math"),
    ],
)
def test_kernel_follows_the_target(call, capability, kernel):
    """dtype, mask, sizes and the target's compute capability decide, as in PyTorch's own choice."""
    assert attention_kernel(call, capability) == kernel


def test_users_switches_are_respected():
    """A kernel that the user turned off is not chosen."""
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        assert attention_kernel(_call(), (9, 0)) == "math"
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert attention_kernel(_call(), (9, 0)) == "memory efficient"


def _kernels(capability, *, precision=None, mask=None, heads=2):
    with pretending(settings("cuda", capability=capability)), attention_of(capability), _Names() as seen:
        query = torch.ones(2, 2, 16, 64, device="cuda", requires_grad=True)
        key = torch.ones(2, heads, 16, 64, device="cuda", requires_grad=True)
        mask = None if mask is None else torch.ones(16, 16, dtype=mask, device="cuda")
        with torch.autocast("cuda", precision or BF16, enabled=precision is not None):
            out = F.scaled_dot_product_attention(query, key, key, attn_mask=mask, enable_gqa=heads == 1)
        out.float().sum().backward()
        assert query.grad.shape == query.shape
        assert key.grad.shape == key.shape
    return [name for name in seen.names if "attention" in name]


def test_kernel_runs_forward_and_backward_below_autocast():
    """Under autocast attention of fp32 tensors is the flash kernel of bf16 ones, and its own backward pass follows."""
    flash, efficient = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
    assert _kernels("9.0", precision=BF16) == [flash, f"{flash}_backward"]
    assert _kernels("9.0", precision=BF16, heads=1) == [flash, f"{flash}_backward"]
    assert _kernels("9.0") == [efficient, f"{efficient}_backward"]
    assert _kernels("9.0", precision=BF16, mask=torch.bool) == [efficient, f"{efficient}_backward"]
    assert _kernels("7.5", precision=BF16) == []


def test_attention_of_real_tensors_is_what_it_was():
    """After a trace, attention on the CPU gives the same numbers as before it."""
    query = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    before = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    _kernels("9.0")
    assert torch.equal(F.scaled_dot_product_attention(query, query, query, is_causal=True), before)
