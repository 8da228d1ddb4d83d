"""What a GPU sustains: rates, power and clock over seconds of products of random numbers, and of training steps.

    python -m bench.forecast.sustained [--seconds 8] [--out FILE]

A driver limits the mean power over tenths of a second, so products alone in a benchmark of milliseconds say nothing
about a step that lasts. Exit code 3 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.forecast.registration import dated, surroundings
from stoker.zoo import GPT, Llama

NO_DEVICE = 3


def watched(update: Callable[[], None], seconds: float, flops: float) -> dict[str, Any]:
    """Half-seconds of updates: rate [TFLOP/s]; power [W], clock [MHz] and temperature [°C] while they went on."""
    samples: list[list[float]] = []
    stop = threading.Event()

    def sample() -> None:
        query = "power.draw.instant,clocks.sm,temperature.gpu"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-lms", "250"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if stop.is_set():
                    break
                samples.append([float(value) for value in line.split(",")])
            process.kill()

    for _ in range(3):
        update()
    torch.cuda.synchronize()
    reader = threading.Thread(target=sample)
    reader.start()
    rates, begun = [], time.perf_counter()
    while time.perf_counter() - begun < seconds:
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < 0.5:
            update()
            torch.cuda.synchronize()
            count += 1
        rates.append(count * flops / (time.perf_counter() - started) / 1e12)
    stop.set()
    reader.join()
    return {"tflops": rates, "power_w, clock_mhz, temperature_c": samples}


def product(size: int, dtype: torch.dtype) -> tuple[Callable[[], None], float]:
    """Sixteen products of square matrices of normal numbers, and their FLOPs."""
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def update() -> None:
        for _ in range(16):
            torch.mm(a, b, out=out)

    return update, 16 * 2.0 * size**3


def training(model: torch.nn.Module, batch: int, context: int, vocab: int) -> tuple[Callable[[], None], float]:
    """Steps of a language model in bf16 on random tokens, eager; FLOPs of its products alone."""
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(vocab, (batch, context + 1), device="cuda")

    def update() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    embedded = sum(
        p.numel() for module in model.modules() if type(module) is torch.nn.Embedding for p in module.parameters()
    )
    weights = sum(p.numel() for p in model.parameters()) - embedded
    return update, 6.0 * weights * batch * context


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 3 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each")
    parser.add_argument("--out", type=Path, help="file (default: bench/results, dated)")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"PyTorch {torch.__version__} finds no CUDA device here. Run this where one is.", file=sys.stderr)
        return NO_DEVICE
    subjects: dict[str, Callable[[], tuple[Callable[[], None], float]]] = {
        "products of 8192, bf16": lambda: product(8192, torch.bfloat16),
        "Llama of 4 layers 4096 wide, context 4096": lambda: training(
            Llama(layers=4, width=4096, heads=32, kv_heads=8, hidden=14336, vocab=32000, context=4096), 2, 4096, 32000
        ),
        "GPT of 24 layers 1024 wide, context 1024": lambda: training(
            GPT(layers=24, width=1024, heads=16, context=1024, vocab=50304), 16, 1024, 50304
        ),
    }
    path, document = given.out or dated("sustained"), {"what": "what a GPU sustains", "machine": surroundings()}
    for name, made in subjects.items():
        update, flops = made()
        document[name] = watched(update, given.seconds, flops)
        del update
        torch.cuda.empty_cache()
        rates, draws = document[name].values()
        print(f"{name}: {rates[0]:.0f} to {rates[-1]:.0f} TFLOP/s, {draws[-1]}", flush=True)
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
