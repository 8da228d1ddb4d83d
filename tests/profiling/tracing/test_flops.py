"""FLOPs against closed forms, on models whose counts are published."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stoker.loading.datasets import datasets_of
from stoker.profiling.tracing.update import trace_update
from stoker.zoo import GPT
from tests.profiling.tracing.jobs import SEPARABLE, make_job, settings


class _Bottleneck(nn.Module):
    def __init__(self, channels, width, stride):
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        is_same = stride == 1 and channels == out
        self.skip = (
            nn.Identity()
            if is_same
            else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


def _resnet50():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for block in range(count):
            layers.append(_Bottleneck(channels, 64 * 2**stage, 2 if stage and not block else 1))
            channels = 256 * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


@pytest.mark.slow
def test_resnet50_is_4_09_billion_multiply_adds_an_image():
    """He et al. 2015, table 1, in the variant that strides in the 3 × 3 convolution: 4.09e9 for 224 × 224 pixels."""
    data = torch.zeros(4, 3, 224, 224), torch.zeros(4, dtype=torch.int64)
    job = make_job(_resnet50, data)
    trace = trace_update(job, datasets_of(job), SEPARABLE, settings("cuda", micro_batch=4))
    flops = {"forward": 0, "backward": 0, "optimizer": 0}
    for one in trace.occurrences:
        flops[one.phase] += trace.operations[one.operation].flops
    assert round(flops["forward"] / 2 / 4 / 1e9, 2) == 4.09
    first_layer = 2 * 4 * 112 * 112 * 64 * 3 * 7 * 7  # whose input needs no gradient
    assert flops["backward"] == 2 * flops["forward"] - first_layer
    assert flops["optimizer"] == 0


def test_gpt2_forward_is_the_closed_form():
    """2 · tokens · (the blocks' matrices + vocabulary · width) + 4 · layers · tokens · context · width."""
    batch, context, layers, width, vocab = 2, 1024, 12, 768, 50257
    data = torch.zeros(batch, context, dtype=torch.int64), torch.zeros(batch, context, dtype=torch.int64)
    job = make_job(lambda: GPT(layers, width, 12, context, vocab, tied=True), data, loss="token_cross_entropy")
    tokens, matrices = batch * context, 12 * layers * width**2
    expected = 2 * tokens * (matrices + vocab * width) + 4 * layers * tokens * context * width
    trace = trace_update(job, datasets_of(job), SEPARABLE, settings("cuda", micro_batch=batch, precision="bf16"))
    forward = sum(trace.operations[o.operation].flops for o in trace.occurrences if o.phase == "forward")
    assert forward == expected
    assert round(matrices / 1e6, 2) == 84.93
