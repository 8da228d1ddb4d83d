"""Jobs whose plan an expert would know beforehand: what the planner chooses, and what of it an expert would not run.

    python -m bench.forecast.situations [--only NUMBER,NUMBER] [--out FILE]
    stoker plan bench/forecast/situations.py --set number=2 --on 8xh100

Each situation is a job of a published shape and a place, with the settings that a plan there needs: a layout, a
precision, compiled passes, activation checkpointing, the micro-batch. They were named before any forecast was mended,
by what published runs use; a plan outside of them needs a published source. Nothing runs: data are one sample, repeated
by strides.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stoker
from stoker.jobs import load_job
from stoker.records import Plan


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A job of `batch` samples of `length` tokens, or images of that size, at a place, and an expert's settings.

    `accepts` yields what an expert would change of a plan.
    """

    on: str
    model: Callable[[], nn.Module]
    batch: int
    length: int
    accepts: Callable[[Plan], Iterator[str]]
    vocab: int = 0
    numerics: tuple[str, ...] = ()
    published: str = ""


def expert(  # noqa: PLR0913 - each is a setting of its own
    *,
    precision: str = "bf16",
    micro_batch: tuple[int, int] = (1, 10**9),
    shards: tuple[int, int] | None = None,
    experts: tuple[int, int] = (1, 1),
    context: tuple[int, int] = (1, 1),
    checkpointed: bool | None = None,
    is_compiled: bool = False,
    has_images: bool = False,
    most_kept: int = 0,
    saves_states: bool = False,
) -> Callable[[Plan], Iterator[str]]:
    """What of a plan is not as asked: ranges are inclusive, None asks for nothing.

    Images want channels-last; what saves optimiser states wants the loss in chunks, too. Where blocks should be
    checkpointed, a plan may do without if its micro-batch has at most `most_kept` samples: so many others published to
    have kept on such a device.
    """

    def unlike(plan: Plan) -> Iterator[str]:
        if plan.precision != precision:
            yield f"precision {plan.precision}, not {precision}"
        if not micro_batch[0] <= plan.micro_batch <= micro_batch[1]:
            yield f"micro-batch {plan.micro_batch}, not {micro_batch[0]} to {micro_batch[1]}"
        is_other = shards is not None and (plan.layout.stages > 1 or not shards[0] <= plan.layout.shards <= shards[1])
        if shards is not None and is_other:
            yield f"{plan.layout.in_words()}, not {shards[0]} to {shards[1]} shards"
        for what, size, (least, most) in (
            ("experts", plan.layout.experts, experts),
            ("tokens", plan.layout.context, context),
        ):
            if not least <= size <= most:
                yield f"{what} over {size} processes, not {least} to {most}"
        is_known = checkpointed is True and plan.micro_batch <= most_kept
        if checkpointed is not None and bool(plan.checkpointed_blocks) != checkpointed and not is_known:
            yield f"{plan.checkpointed_blocks} blocks checkpointed"
        if is_compiled and not plan.compile:
            yield "not compiled"
        if has_images and plan.memory_format != "channels_last":
            yield "contiguous"
        if saves_states and plan.optimizer_states == "full":
            yield "full optimiser states"
        if saves_states and plan.loss_chunks == 1:
            yield "the loss in one piece"

    return unlike


def _llama(context: int, **changes: int) -> Callable[[], nn.Module]:
    return lambda: stoker.zoo.Llama(context=context, vocab=128_256, **changes)


def _gpt(**sizes: int) -> Callable[[], nn.Module]:
    return lambda: stoker.zoo.GPT(tied=True, **sizes)


class _Mixtral(nn.Module):
    """tokens_BT to logits_BTV through transformers' mixture of experts, in its default shape: 8x7B."""

    def __init__(self, **changes: int) -> None:
        super().__init__()
        import transformers  # noqa: PLC0415 - needed by this situation alone

        transformers.logging.set_verbosity_error()
        self.inner = transformers.MixtralForCausalLM(transformers.MixtralConfig(use_cache=False, **changes))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits of every token."""
        logits_BTV: torch.Tensor = self.inner(input_ids=tokens_BT).logits
        return logits_BTV


_70B = {"layers": 80, "width": 8192, "heads": 64, "hidden": 28_672}
SITUATIONS: dict[int, Situation] = {
    1: Situation(
        on="h200",
        model=_llama(8192),
        batch=8,
        length=8192,
        vocab=128_256,
        numerics=("bf16-states", "8bit-states"),
        accepts=expert(checkpointed=True, is_compiled=True, micro_batch=(1, 4), saves_states=True),
    ),
    2: Situation(
        on="8xh100",
        model=_llama(8192),
        batch=16,
        length=8192,
        vocab=128_256,
        published="torchtitan: 2.46 s, eager 2.84 s",
        # fms-fsdp keeps 8,192 tokens of Llama-2-7B in 8 shards on 80 GB, not compiled: 3,700 tokens/s on an A100.
        accepts=expert(shards=(8, 8), checkpointed=True, is_compiled=True, most_kept=1),
    ),
    3: Situation(
        on="8x8xh100",
        model=_llama(8192),
        batch=128,
        length=8192,
        vocab=128_256,
        accepts=expert(shards=(8, 64), is_compiled=True),
    ),
    4: Situation(
        on="8xh100",
        model=_gpt(layers=48, width=7168, heads=64, context=2048, vocab=50_368),
        batch=504,
        length=2048,
        vocab=50_368,
        published="llm-foundry: 64 s",
        accepts=expert(shards=(8, 8), checkpointed=True, micro_batch=(2, 6)),
    ),
    5: Situation(
        on="64xa100-80",
        model=_llama(8192, **_70B),
        batch=64,
        length=8192,
        vocab=128_256,
        published="torchtitan: 24.7 s",
        accepts=expert(shards=(8, 64), checkpointed=True),
    ),
    6: Situation(
        on="a100-40",
        model=_gpt(layers=12, width=768, heads=12, context=1024, vocab=50_304),
        batch=512,
        length=1024,
        vocab=50_304,
        accepts=expert(micro_batch=(16, 128), checkpointed=False, is_compiled=True),
    ),
    7: Situation(
        on="v100-16",
        model=lambda: stoker.zoo.ResNet(50),
        batch=256,
        length=224,
        numerics=("fp16",),
        published="NVIDIA: 213 ms",
        accepts=expert(precision="fp16", checkpointed=False, has_images=True),
    ),
    8: Situation(
        on="a100-80",
        model=lambda: stoker.zoo.ResNet(50),
        batch=256,
        length=224,
        published="NVIDIA: 104 ms",
        accepts=expert(checkpointed=False, has_images=True),
    ),
    9: Situation(
        on="rtx-3090",
        model=lambda: stoker.zoo.ViT(image=224, patch=16, layers=12, width=768, heads=12),
        batch=192,
        length=224,
        published="timm: 488 ms",
        accepts=expert(checkpointed=False),
    ),
    10: Situation(
        on="4x8xh100",
        model=_Mixtral,
        batch=64,
        length=4096,
        vocab=32_000,
        accepts=expert(shards=(4, 8), experts=(4, 8), checkpointed=True),
    ),
    11: Situation(
        on="8xh100",
        model=_llama(32_768),
        batch=8,
        length=32_768,
        vocab=128_256,
        accepts=expert(shards=(8, 8), checkpointed=True, is_compiled=True),
    ),
    12: Situation(
        on="128x8xh100",
        model=_llama(8192),
        batch=2048,
        length=8192,
        vocab=128_256,
        accepts=expert(shards=(8, 64), is_compiled=True),
    ),
    13: Situation(
        on="8xh100",
        model=_llama(131_072),
        batch=8,
        length=131_072,
        vocab=128_256,
        # torchtitan, arXiv:2410.06511: of Llama 3.1 8B on 8 H100, 131,072 tokens over 4 processes, 262,144 over 8.
        accepts=expert(shards=(1, 2), context=(4, 8), checkpointed=True, micro_batch=(1, 4)),
    ),
}


def _samples(situation: Situation) -> tuple[torch.Tensor, torch.Tensor]:
    """One sample as often as the batch has, of no memory."""
    batch, length = situation.batch, situation.length
    if not situation.vocab:
        return torch.zeros(1, 3, length, length).expand(batch, -1, -1, -1), torch.arange(batch) % 1000
    return tokens_of(batch, length, situation.vocab)


def tokens_of(batch: int, length: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of `batch` equal samples of `length` tokens, of no memory."""
    tokens = torch.arange(length + 1) % min(vocab, 50_000)
    return tokens[:-1].expand(batch, -1), tokens[1:].expand(batch, -1)


def job(number: int = 2) -> stoker.Job:
    """The job of a situation."""
    situation = SITUATIONS[number]
    is_text = bool(situation.vocab)
    return stoker.Job(
        model=situation.model,
        data=_samples(situation),
        loss="token_cross_entropy" if is_text else "cross_entropy",
        optimizer=stoker.AdamW(lr=3e-4, weight_decay=0.1) if is_text else stoker.SGD(lr=0.1, momentum=0.9),
        clip_norm=1.0 if is_text else None,
        batch=situation.batch,
        until=stoker.updates(10_000),
        seed=0,
        numerics=situation.numerics,
        name=f"situation-{number}",
    )


def planned(number: int) -> dict[str, Any]:
    """What is chosen for a situation, with what an expert would change, and the time that planning took."""
    situation, began = SITUATIONS[number], time.process_time()
    given, entry = load_job(Path(__file__), {"number": str(number)})
    chosen = stoker.plan(given, on=situation.on, entry=entry).chosen
    plan, step_s = chosen.plan, chosen.forecast.step_s
    return {
        "number": number,
        "on": situation.on,
        "plan": plan.in_words(),
        "layout": dataclasses.asdict(plan.layout),
        "step_s": [step_s.value, step_s.low, step_s.high],
        "fits": chosen.forecast.probability_it_fits,
        "published": situation.published,
        "unlike": list(situation.accepts(plan)),
        "cpu_s": round(time.process_time() - began, 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def main() -> int:
    """Plan all situations and print them; 0 if an expert would run each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="numbers, with commas between them")
    parser.add_argument("--out", type=Path, help="write a JSON document here, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    numbers = [int(word) for word in options.only.split(",") if word] or list(SITUATIONS)
    found = []
    for number in numbers:
        one = planned(number)
        found.append(one)
        verdict = "; ".join(one["unlike"]) or "as an expert"
        print(f"{number:>2} {one['on']:<12} {one['step_s'][0]:8.3f} s  {one['plan']}: {verdict}", flush=True)
    if options.out:
        document = {
            "command": "python -m bench.forecast.situations",
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "situations": found,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(not one["unlike"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
