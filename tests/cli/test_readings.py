from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.cli.doctor import interpret
from tests.cli.machines import ON_CPU, ON_GPU


@pytest.mark.parametrize(
    ("bf16", "meaning"),
    [
        (430e9, "2.1x fp32: a plan may use it"),
        (210e9, "only 1.1x fp32: no gain for a plan"),
        (2e9, "100.0x slower than fp32: no gain for a plan"),
    ],
)
def test_what_bf16_means_follows_its_ratio(bf16, meaning):
    """The ratio decides: faster by a fifth is a gain, less is none, slower is called slower."""
    readings = interpret(replace(ON_CPU, gemm_flops={"fp32": 200e9, "bf16": bf16}))
    assert readings[1].meaning == meaning


def test_readings_relate_rates_to_each_other():
    """Shares are of the fastest product and of the copy in used memory; the ridge is fp32 over bandwidth."""
    fp32, bf16, copy, fresh = interpret(ON_CPU)
    assert (fp32.share, bf16.share, copy.share, fresh.share) == pytest.approx((200 / 430, 1.0, 1.0, 0.2))
    assert "4.0 FLOPs a byte" in copy.meaning
    assert fp32.of_datasheet is None
    on_gpu = {reading.name: reading for reading in interpret(ON_GPU)}
    assert on_gpu["matrix product bf16"].of_datasheet == pytest.approx(0.8)
    assert on_gpu["copy, memory in use"].of_datasheet == pytest.approx(0.85)
    assert on_gpu["copy, fresh memory"].meaning == "as fast as memory in use"
