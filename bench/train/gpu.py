"""Stoker against compiled loops tuned by hand on the GPU here: rates, ratios with intervals, MFU, memory.

    python -m bench.train.gpu [--case gpt2 resnet50 cnn] [--rounds 10] [--sets 2] [--out FOLDER]
    python -m bench.train.gpu --rehearse        # tiny, on whatever is here: is this script in order?

Contenders take turns as in bench.train.throughput, each in a process of its own, all on one GPU: while one runs, the
others rest, and have given their cached memory back. All slices count: what else the CPUs do is written, no more.
--at-once contenders start together, in the order of --contenders: most of a start is a compiler's work on the CPU. MFU
is against the largest rate of bf16 matrix products measured here, just before. It needs PyTorch and NumPy, and without
an installation `PYTHONPATH=src:.`. Exit code 3 without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.forecast.registration import RESULTS, dated
from bench.train import results
from bench.train.bars import GPU_BAR
from bench.train.cases import Case, quick
from bench.train.flops import flops_per_sample, peak_flops
from bench.train.gpu_cases import GPU_CASES, GPU_CONTENDERS, REFERENCE
from bench.train.throughput import SLICE_S, Contest, told

NO_DEVICE = 3

_NOBODY_MINDS = 2.0
"""Share of the CPUs others may use: any, since the GPU is lent to nobody else."""


def measure(case: Case, path: Path, given: argparse.Namespace, peak: float) -> bool:
    """Measure a case, print and write it; whether nobody failed, and everybody did the same work."""
    case = quick(case) if given.rehearse else case
    chosen = [GPU_CONTENDERS[name] for name in given.contenders]
    contest = Contest(
        case=case,
        contenders=chosen,
        rounds=given.rounds,
        sets=given.sets,
        is_quick=given.rehearse,
        slice_s=0.1 if given.rehearse else SLICE_S,
        most_others=_NOBODY_MINDS,
        reference=REFERENCE,
        at_once=given.at_once,
    )
    command = f"python -m bench.train.gpu --case {case.name} --rounds {given.rounds} --sets {given.sets}"
    command += f" --at-once {given.at_once} --contenders {' '.join(given.contenders)}"
    content = results.document("training speed on a GPU", command, {})
    # FLOPs of tiny models would say nothing: a rehearsal counts none.
    flops = 0.0 if given.rehearse else flops_per_sample(case)
    content |= {"case": dataclasses.asdict(case), "peak_flops": peak, "flops_per_sample": flops}
    contest.run(path, content)
    rates = content["samples_per_s"]
    content["mfu"] = {name: None if rate is None else rate * flops / peak for name, rate in rates.items()}
    results.save(path, content)
    print("\n".join(told(content)))
    if flops:
        print("MFU: " + ", ".join(f"{name} {mfu:.1%}" for name, mfu in content["mfu"].items() if mfu is not None))
    return not content.get("disagreements") and not any("failed" in one for one in content["contenders"].values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases asked for; 1 if somebody failed, or did other work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", default=list(GPU_CASES), choices=list(GPU_CASES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sets", type=int, default=2)
    parser.add_argument("--contenders", nargs="+", default=list(GPU_CONTENDERS), choices=list(GPU_CONTENDERS))
    parser.add_argument("--at-once", type=int, default=2, help="contenders that start together; memory is a limit")
    parser.add_argument("--rehearse", action="store_true", help="tiny cases on whatever is here")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder where results go")
    given = parser.parse_args(arguments)
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or given.rehearse):
        print("There is no GPU here that PyTorch can use; --rehearse tries this out without.")
        return NO_DEVICE
    device = torch.device("cuda" if has_gpu else "cpu")
    peak = peak_flops(device, (256,) if given.rehearse else (4096, 8192, 16384))
    if has_gpu:
        torch.cuda.empty_cache()  # the memory is for those who are measured
    print(f"bf16 products reach {peak / 1e12:.1f} TFLOP/s; the bar is {GPU_BAR:g}× the best loop tuned by hand")
    prefix = "train_rehearsal" if given.rehearse else "train_gpu"
    done = [measure(GPU_CASES[name], given.out / dated(f"{prefix}_{name}").name, given, peak) for name in given.case]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
