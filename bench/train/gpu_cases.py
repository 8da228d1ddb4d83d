"""What is trained on a GPU, and by whom: Stoker, and compiled loops tuned by hand."""

from __future__ import annotations

from bench.train.cases import Case
from bench.train.contenders import Contender

GPU_CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            name="gpt2",
            title="GPT-2 124M, context 1024, bf16",
            architecture="gpt",
            sizes={"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocab": 50304, "tied": True},
            batch=16,
            lr=3e-4,
            threads=16,
            context=1024,
            epochs=200,
            random_samples=2048,
        ),
        Case(
            name="resnet50",
            title="ResNet-50, 224 pixels, bf16",
            architecture="resnet50",
            sizes={"classes": 1000},
            batch=256,
            threads=16,
            epochs=2000,
            random_samples=2048,
            image=(3, 224, 224),
        ),
        Case(
            name="cnn",
            title="ResNet-9 64 wide, batch 512, data on the device",
            architecture="resnet9",
            sizes={"width": 64},
            batch=512,
            threads=16,
            epochs=1500,
            random_samples=61_440,
        ),
    )
}
"""Cases by name. Samples are random: what is compared is speed, and that losses agree. They are runs of about half an
hour, of which compiling is a small share, as the loops tuned by hand take for granted."""

REFERENCE = "gpu_eager"

_LOOPS = (
    ("gpu_eager", "by hand, bf16, not compiled", "none"),
    ("gpu_whole", "by hand, compiled whole (as nanoGPT)", "whole"),
    ("gpu_blocks", "by hand, compiled by blocks (as torchtitan)", "blocks"),
    ("gpu_graphs", "by hand, compiled whole, CUDA graphs", "graphs"),
)

GPU_CONTENDERS: dict[str, Contender] = {
    **{
        name: Contender(name, title, "by_hand", "gpu_by_hand", {"compiled": compiled}, is_fp32=False)
        for name, title, compiled in _LOOPS
    },
    "stoker": Contender("stoker", "Stoker", "stoker", "gpu_stoker", is_fp32=False),
    "stoker_compiled": Contender(
        "stoker_compiled", "Stoker, given its compiled plan", "stoker", "gpu_stoker", {"compiled": True}, is_fp32=False
    ),
}
"""Contenders by name."""
