"""Forecasts of single layers and of a diffusion U-Net on GPUs that are not here, against times that others published.

    python -m bench.forecast.published_layers [--out FILE] [--only TEXT]

Layers of BERT, GPT-2 and T5 (width 1024, 16 heads, attention written out, dropout), forward and with the backward
pass, on five GPUs; the forward pass of Stable Diffusion's U-Net on 32 latents of 64 x 64, eager and compiled, on three.
All are in fp16 with weights in fp16, which stands as what a process of two shards computes: weights gathered in bf16.
On a V100 that is priced at the rate of fp16; the U-Net was measured there and on a T4, too, but its fused attention has
no kernel in bf16 on them. Neither messages nor an optimiser are in these times.

Source: github.com/mli/transformers-benchmarks, README.md of 2022-11 and micro_bench.ipynb (PyTorch 1.13; the best of
several batches, the largest here); huggingface/diffusers, docs/source/en/optimization/torch2.0.md (diffusers 0.17,
PyTorch 2.0 and its nightly builds of May 2023, the better of which counts; batch 16 is 32 latents, with and without the
text, and a step is one pass).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import stoker
from bench.forecast.published import forecasts_of, planner_of
from stoker.devices import Place, attached_devices, planned_devices
from stoker.jobs import load_job

_WIDTH, _HEADS, _DROPPED = 1024, 16, 0.1


class _Attention(nn.Module):
    """x_BTD, and c_BSD whose tokens are attended to, to y_BTD; products, mask and softmax written out."""

    def __init__(self, *, has_bias: bool, is_causal: bool = False, is_wide: bool = False, length: int = 512) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(_WIDTH, _WIDTH, bias=has_bias) for _ in range(4))
        self.is_wide = is_wide
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool)) if is_causal else None
        self.register_buffer("mask", mask)

    def forward(self, x_BTD: torch.Tensor, c_BSD: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x_BTD.shape
        q, k, v = (
            layer(one).view(batch, -1, _HEADS, width // _HEADS).transpose(1, 2)
            for layer, one in ((self.q, x_BTD), (self.k, c_BSD), (self.v, c_BSD))
        )
        scores = q @ k.transpose(-1, -2)
        if self.is_wide:  # T5: a bias for each pair of positions, softmax in fp32
            scores += torch.zeros(1, _HEADS, *scores.shape[-2:], dtype=scores.dtype, device=scores.device)
            weights = scores.float().softmax(-1).type_as(scores)
        else:
            scores = scores / math.sqrt(width // _HEADS)
            if self.mask is not None:
                least = torch.full([], -1e4, dtype=scores.dtype, device=scores.device)
                scores = torch.where(self.mask[:tokens, :tokens], scores, least)
            weights = scores.softmax(-1)
        mixed = F.dropout(weights, _DROPPED, training=True) @ v
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, tokens, width))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    """A layer of `bert`, `gpt2`, a `t5 encoder` or a `t5 decoder`: x_BTD to x_BTD."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        is_t5 = kind.startswith("t5")
        norm = nn.RMSNorm if is_t5 else nn.LayerNorm
        self.kind = kind
        self.attention = _Attention(has_bias=not is_t5, is_causal=kind == "gpt2", is_wide=is_t5)
        self.crossed = _Attention(has_bias=False, is_wide=True) if kind == "t5 decoder" else None
        self.norms = nn.ModuleList(norm(_WIDTH) for _ in range(3 if kind == "t5 decoder" else 2))
        self.up, self.down = (
            nn.Linear(_WIDTH, 4 * _WIDTH, bias=not is_t5),
            nn.Linear(4 * _WIDTH, _WIDTH, bias=not is_t5),
        )

    def _mlp(self, x_BTD: torch.Tensor) -> torch.Tensor:
        wide = self.up(x_BTD)
        if self.kind == "gpt2":  # as it was written before PyTorch had this GELU
            wide = 0.5 * wide * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * torch.pow(wide, 3.0))))
        elif self.kind == "bert":
            wide = F.gelu(wide)
        else:
            wide = F.dropout(F.relu(wide), _DROPPED, training=True)
        return F.dropout(self.down(wide), _DROPPED, training=True)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        if self.kind == "bert":  # norms after the sums
            attended = F.dropout(self.attention(x_BTD, x_BTD), _DROPPED, training=True)
            x_BTD = self.norms[0](attended + x_BTD)
            return self.norms[1](self._mlp(x_BTD) + x_BTD)  # type: ignore[no-any-return]
        given_BTD = x_BTD
        normed = self.norms[0](x_BTD)
        x_BTD = x_BTD + F.dropout(self.attention(normed, normed), _DROPPED, training=True)
        if self.crossed is not None:
            x_BTD = x_BTD + F.dropout(self.crossed(self.norms[1](x_BTD), given_BTD), _DROPPED, training=True)
        return x_BTD + self._mlp(self.norms[-1](x_BTD))


_CHANNELS, _CONTEXT, _TEXT_TOKENS = 320, 768, 77


class _Residual(nn.Module):
    """image_BCHW and time_BT to image_BKHW."""

    def __init__(self, channels: int, kernels: int) -> None:
        super().__init__()
        self.norm_1, self.conv_1 = nn.GroupNorm(32, channels), nn.Conv2d(channels, kernels, 3, padding=1)
        self.norm_2, self.conv_2 = nn.GroupNorm(32, kernels), nn.Conv2d(kernels, kernels, 3, padding=1)
        self.time = nn.Linear(4 * _CHANNELS, kernels)
        self.skip = nn.Conv2d(channels, kernels, 1) if channels != kernels else nn.Identity()

    def forward(self, image: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.conv_1(F.silu(self.norm_1(image))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(image) + self.conv_2(F.silu(self.norm_2(hidden)))  # type: ignore[no-any-return]


class _Mixing(nn.Module):
    """q_BTD, and c_BSC whose tokens are attended to, to y_BTD by fused attention."""

    def __init__(self, width: int, context: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.k, self.v = nn.Linear(context, width, bias=False), nn.Linear(context, width, bias=False)

    def forward(self, x_BTD: torch.Tensor, c_BSC: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x_BTD.shape
        q, k, v = (
            layer(one).view(batch, -1, self.heads, width // self.heads).transpose(1, 2)
            for layer, one in ((self.q, x_BTD), (self.k, c_BSC), (self.v, c_BSC))
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))  # type: ignore[no-any-return]


class _Transformer(nn.Module):
    """image_BCHW and text_BSC to image_BCHW: self-attention, attention to the text, and a gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.GroupNorm(32, width), nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.text = _Mixing(width, width), _Mixing(width, _CONTEXT)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = image.shape
        x_BTD = self.into(self.norm(image)).permute(0, 2, 3, 1).reshape(batch, height * width, channels)
        normed = self.norms[0](x_BTD)
        x_BTD = x_BTD + self.own(normed, normed)
        x_BTD = x_BTD + self.text(self.norms[1](x_BTD), text)
        wide, gate = self.up(self.norms[2](x_BTD)).chunk(2, -1)
        x_BTD = x_BTD + self.down(wide * F.gelu(gate))
        back = x_BTD.reshape(batch, height, width, channels).permute(0, 3, 1, 2)
        return image + self.out(back)  # type: ignore[no-any-return]


class UNet(nn.Module):
    """latents_B4HW to noise_B4HW: Stable Diffusion 1.5's U-Net, 860 million parameters, at one time and for one text.

    Source: R. Rombach et al., arXiv:2112.10752, table 15, and the released configuration (320 channels times 1, 2, 4,
    4; two residual blocks a level, with transformers in the first three; eight heads; a text of 77 tokens of 768
    features).
    """

    def __init__(self) -> None:
        super().__init__()
        widths = [_CHANNELS * times for times in (1, 2, 4, 4)]
        self.time = nn.Sequential(
            nn.Linear(_CHANNELS, 4 * _CHANNELS), nn.SiLU(), nn.Linear(4 * _CHANNELS, 4 * _CHANNELS)
        )
        self.words = nn.Embedding(_TEXT_TOKENS, _CONTEXT)
        self.first = nn.Conv2d(4, _CHANNELS, 3, padding=1)
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        width, kept = _CHANNELS, [_CHANNELS]
        for level, next_width in enumerate(widths):
            for _ in range(2):
                self.downs.append(self._level(width, next_width, is_last=level == len(widths) - 1))
                width = next_width
                kept.append(width)
            if level < len(widths) - 1:
                self.downs.append(nn.ModuleList([nn.Conv2d(width, width, 3, stride=2, padding=1)]))
                kept.append(width)
        self.middle = nn.ModuleList([_Residual(width, width), _Transformer(width), _Residual(width, width)])
        for level, next_width in reversed(list(enumerate(widths))):
            for number in range(3):
                blocks = self._level(width + kept.pop(), next_width, is_last=level == len(widths) - 1)
                width = next_width
                if level and number == 2:
                    blocks.append(nn.Conv2d(width, width, 3, padding=1))
                self.ups.append(blocks)
        self.norm, self.last = nn.GroupNorm(32, _CHANNELS), nn.Conv2d(_CHANNELS, 4, 3, padding=1)

    @staticmethod
    def _level(width: int, next_width: int, *, is_last: bool) -> nn.ModuleList:
        return nn.ModuleList([_Residual(width, next_width), *([] if is_last else [_Transformer(next_width)])])

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """The noise in the latents."""
        batch = latents.shape[0]
        time = self.time(torch.zeros(batch, _CHANNELS, device=latents.device, dtype=self.first.weight.dtype))
        text = self.words.weight.expand(batch, -1, -1)

        def through(blocks: Any, image: torch.Tensor, *, is_up: bool = False) -> torch.Tensor:
            for block in blocks:
                if isinstance(block, nn.Conv2d):
                    image = block(F.interpolate(image, scale_factor=2.0) if is_up else image)
                else:
                    image = block(image, time if isinstance(block, _Residual) else text)
            return image

        image = self.first(latents)
        kept = [image]
        for blocks in self.downs:
            image = through(blocks, image)
            kept.append(image)
        image = through(self.middle, image)
        for blocks in self.ups:
            image = through(blocks, torch.cat([image, kept.pop()], 1), is_up=True)
        return self.last(F.silu(self.norm(image)))  # type: ignore[no-any-return]


def _sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.flatten(1).sum(1) + 0 * target


def job(kind: str = "bert", batch: int = 128, length: int = 512) -> stoker.Job:
    """A layer with `length` tokens, or the U-Net (`unet`) with latents of that size, for two processes."""
    shape = (4, length, length) if kind == "unet" else (length, _WIDTH)
    sample = torch.zeros(1, *shape, dtype=torch.float32 if kind == "unet" else torch.bfloat16)
    return stoker.Job(
        model=UNet if kind == "unet" else lambda: _Layer(kind),
        data=(sample.expand(2 * batch, *(-1 for _ in shape)), torch.zeros(2 * batch)),
        loss=_sum,
        optimizer=stoker.SGD(lr=0.1),
        batch=2 * batch,
        until=stoker.updates(10),
        seed=0,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A measurement: the forward pass, or both, of `batch` samples [ms]."""

    kind: str
    device: str
    batch: int
    length: int
    measured_ms: float
    is_both: bool = False
    is_compiled: bool = False

    @property
    def in_words(self) -> str:
        """`bert, forward and backward, a100-80`."""
        passes = "forward and backward" if self.is_both else "compiled" if self.is_compiled else "forward"
        return f"{self.kind}, {passes}, {self.device}"


_LAYERS = {
    # kind: (batch, tokens, TFLOP/s forward and of both passes by device)
    "bert": (128, 128, ((110, 136), (60, 70), (53, 64), (56, 62), (99, 109))),
    "gpt2": (64, 512, ((45, 53), (35, 38), (32, 36), (37, 39), (48, 54))),
    "t5 encoder": (128, 512, ((44, 56), (34, 41), (31, 38), (36, 41), (47, 55))),
    "t5 decoder": (128, 512, ((38, 47), (28, 34), (26, 32), (30, 36), (38, 45))),
}
_LAYER_DEVICES = ("a100-80", "rtx-a6000", "v100-32", "rtx-3090-ti", "rtx-4090")
_UNET_ITERATIONS_PER_S = {
    "a100-80": (3.6, 4.68),
    "rtx-3090": (1.70, 1.93),
    "rtx-4090": (3.2, 3.85),
}
"""Eager and compiled."""


def cases() -> Iterator[Case]:
    """All measurements."""
    for kind, (batch, length, rates) in _LAYERS.items():
        # The source's count: products of weights and of scores.
        attention = (4 * batch * _WIDTH * length**2 + 8 * batch * length * _WIDTH**2) / 1e9
        flop = 16 * batch * length * _WIDTH**2 / 1e9 + (2 if kind == "t5 decoder" else 1) * attention
        for device, (forward, both) in zip(_LAYER_DEVICES, rates, strict=True):
            usual = Case(kind=kind, device=device, batch=batch, length=length, measured_ms=flop / forward)
            yield usual
            yield dataclasses.replace(usual, measured_ms=3 * flop / both, is_both=True)
    for device, (eager, compiled) in _UNET_ITERATIONS_PER_S.items():
        unet = Case(kind="unet", device=device, batch=32, length=64, measured_ms=1e3 / eager)
        yield unet
        yield dataclasses.replace(unet, measured_ms=1e3 / compiled, is_compiled=True)


def _place(device: str) -> Place:
    """Two devices; where they lack bf16, at the rate of fp16."""
    (place,) = planned_devices(f"2x{device}", attached_devices())
    rates = place.hardware.dense_flops
    if "bf16" in rates:
        return place
    hardware = dataclasses.replace(place.hardware, dense_flops=rates | {"bf16": rates["fp16"]})
    return dataclasses.replace(place, hardware=hardware)


def forecast(case: Case) -> dict[str, Any]:
    """A case's forecast against its measurement."""
    given, entry = load_job(Path(__file__), {"kind": case.kind, "batch": str(case.batch), "length": str(case.length)})
    fields: dict[str, Any] = {"precision": "bf16", "layout": {"shards": 2}}
    fields |= {"micro_batch": case.batch, "compile": case.is_compiled}
    if case.kind == "unet":
        fields["memory_format"] = "channels_last"
    forecasts, plan = forecasts_of(planner_of(given, entry), _place(case.device), fields)
    update = forecasts.update(plan)
    forecast_ms = 1e3 * (update.forward_s + (update.backward_s if case.is_both else 0.0))
    return {
        "case": case.in_words,
        "kind": case.kind,
        "device": case.device,
        "measured_ms": round(case.measured_ms, 2),
        "forecast_ms": round(forecast_ms, 2),
        "error": forecast_ms / case.measured_ms - 1,
    }


def main() -> int:
    """Forecast all cases, print them, and write the document if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write a JSON document here, too")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = []
    for case in cases():
        if options.only in case.in_words:
            found.append(forecast(case))
            one = found[-1]
            print(f"{one['case']:<44} {one['measured_ms']:8.1f} ms {one['forecast_ms']:8.1f} ms {one['error']:+.0%}")
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for one in found:
        for name in (one["kind"], one["device"], "all"):
            groups[name].append(one["error"])
    summary = {
        name: {
            "cases": len(errors),
            "mean_error": statistics.fmean(errors),
            "mean_absolute_error": statistics.fmean(map(abs, errors)),
        }
        for name, errors in groups.items()
    }
    for name, one in summary.items():
        mean, absolute = one["mean_error"], one["mean_absolute_error"]
        print(f"{name:<44} {one['cases']:>3} cases {mean:+.0%}, mean |error| {absolute:.0%}")
    if options.out:
        document = {
            "command": "python -m bench.forecast.published_layers",
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cases": found,
            "groups": summary,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
