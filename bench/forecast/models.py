"""The fixed list of architectures on which forecasts of peak memory are held against what is allocated.

They come from timm and transformers, which this benchmark alone needs:

    pip install --no-deps timm==1.0.31 transformers==5.23.0 torchvision

(without `--no-deps` they bring another PyTorch), and what they then miss. A few more are written here and in
`memory_jobs`. Sizes are such that a case takes seconds on two cores, and that activations are a third to two thirds of
the peak in fp32.

Shapes: B samples, C channels, H × W pixels, T tokens, V vocabulary, D width, E experts, N = B × T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

import stoker
from bench.forecast.memory_jobs import LSTMTagger, UNet

Family = Literal["CNN", "ViT", "encoder", "decoder", "encoder-decoder", "LSTM", "U-Net", "MoE", "mixer"]
Samples = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
VOCAB, CLASSES = 2000, 10


@dataclass(frozen=True)
class Case:
    """An architecture and what it is trained on: `samples(batch)` are the batch of every update."""

    name: str
    family: Family
    model: Callable[[], nn.Module]
    samples: Samples
    batch: int

    def job(self) -> stoker.Job:
        """Updates on the whole batch: with momentum for what convolves, with AdamW for the rest."""
        data = self.samples(self.batch)
        has_tokens = not data[0].is_floating_point()
        optimizer = stoker.SGD(lr=0.01, momentum=0.9) if self.family in {"CNN", "U-Net"} else stoker.AdamW(lr=1e-4)
        return stoker.Job(
            model=self.model,
            data=data,
            loss="token_cross_entropy" if has_tokens else "cross_entropy",
            optimizer=optimizer,
            batch=self.batch,
            until=stoker.updates(10),
        )


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def images(side: int, channels: int = 3) -> Samples:
    """Images [B, C, side, side] of noise, and labels [B]."""

    def samples(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(batch, channels, side, side, generator=_generator())
        return noise, torch.randint(0, CLASSES, (batch,), generator=_generator())

    return samples


def pixels(side: int) -> Samples:
    """Images [B, 3, side, side] of noise, and a label for each pixel."""

    def samples(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(0, 4, (batch, side, side), generator=_generator())
        return images(side)(batch)[0], labels

    return samples


def tokens(context: int, vocab: int = VOCAB) -> Samples:
    """Tokens [B, T] and those that follow them [B, T]."""

    def samples(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(5, vocab, (batch, context + 1), generator=_generator())
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return samples


def from_timm(name: str, **settings: Any) -> nn.Module:
    """A classifier of timm, with random weights."""
    _without_torchvision_operators()
    import timm  # noqa: PLC0415 - needed by its cases alone

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **settings)
    return model


def _without_torchvision_operators() -> None:
    """Let torchvision be imported where its compiled operators are not: no model here calls them, but timm asks."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class FromTransformers(nn.Module):
    """tokens_BT to logits_BTV through a model of transformers; an encoder-decoder writes what it reads."""

    def __init__(self, architecture: str, config: str, **settings: Any) -> None:
        super().__init__()
        import transformers  # noqa: PLC0415 - needed by its cases alone

        transformers.logging.set_verbosity_error()
        chosen = getattr(transformers, config)(vocab_size=VOCAB, **settings)
        self.inner = getattr(transformers, architecture)(chosen)
        self.is_encoder_decoder = bool(chosen.is_encoder_decoder)
        self.keeps_cache = hasattr(chosen, "use_cache")

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits of every token."""
        more: dict[str, Any] = {"use_cache": False} if self.keeps_cache else {}
        if self.is_encoder_decoder:
            more["decoder_input_ids"] = tokens_BT
        logits_BTV: torch.Tensor = self.inner(input_ids=tokens_BT, **more).logits
        return logits_BTV


class SwitchLayer(nn.Module):
    """Attention, then one expert for each token, of a fixed capacity; what overflows goes on unchanged.

    Source: W. Fedus, B. Zoph, N. Shazeer, "Switch Transformers" (2021), section 2.2, without its auxiliary loss.
    """

    def __init__(self, width: int, heads: int, experts: int, hidden: int) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(width, heads, width, 0.0, batch_first=True, norm_first=True)
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.into = nn.Parameter(torch.randn(experts, width, hidden) / math.sqrt(width))
        self.out = nn.Parameter(torch.randn(experts, hidden, width) / math.sqrt(hidden))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The layer's output, of the same shape."""
        x_BTD = self.attention(x_BTD)
        x_ND = self.norm(x_BTD).flatten(0, 1)
        num_experts = self.into.shape[0]
        capacity = 2 * len(x_ND) // num_experts
        gate_N, expert_N = torch.softmax(self.router(x_ND), -1).max(-1)
        order_N = torch.argsort(expert_N, stable=True)
        first_E = torch.searchsorted(expert_N[order_N], torch.arange(num_experts))
        slot_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(x_ND)) - first_E[expert_N[order_N]])
        keeps_N1 = (slot_N < capacity).unsqueeze(-1)
        place_N = expert_N * capacity + slot_N.clamp_max(capacity - 1)
        sent_SD = torch.zeros(num_experts * capacity, x_ND.shape[1], dtype=x_ND.dtype)
        sent_ECD = sent_SD.index_add(0, place_N, x_ND * keeps_N1).view(num_experts, capacity, -1)
        done_ECD = torch.relu(sent_ECD @ self.into) @ self.out
        back_ND = done_ECD.flatten(0, 1)[place_N] * keeps_N1 * gate_N.unsqueeze(-1)
        return x_BTD + back_ND.view_as(x_BTD)


class Switch(nn.Module):
    """tokens_BT to logits_BTV through layers of experts."""

    def __init__(self, layers: int, width: int, experts: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(SwitchLayer(width, 4, experts, 2 * width) for _ in range(layers))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits of every token."""
        x_BTD = self.tokens(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        logits_BTV: torch.Tensor = self.head(x_BTD)
        return logits_BTV


class ListLayer(nn.Module):
    """Attention, then the two best of several experts for each token, one expert after the other."""

    def __init__(self, width: int, heads: int, experts: int, hidden: int) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(width, heads, width, 0.0, batch_first=True, norm_first=True)
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(experts)
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The layer's output, of the same shape."""
        x_BTD = self.attention(x_BTD)
        x_ND = self.norm(x_BTD).flatten(0, 1)
        weights_NK, chosen_NK = torch.softmax(self.router(x_ND), -1).topk(2, -1)
        out_ND = torch.zeros_like(x_ND)
        for number, expert in enumerate(self.experts):
            row_M, place_M = torch.where(chosen_NK == number)
            if len(row_M):
                out_ND.index_add_(0, row_M, expert(x_ND[row_M]) * weights_NK[row_M, place_M, None])
        return x_BTD + out_ND.view_as(x_BTD)


class ExpertList(nn.Module):
    """tokens_BT to logits_BTV through layers of experts in a list."""

    def __init__(self, layers: int, width: int, experts: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(ListLayer(width, 4, experts, 2 * width) for _ in range(layers))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits of every token."""
        x_BTD = self.tokens(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        logits_BTV: torch.Tensor = self.head(x_BTD)
        return logits_BTV


def _timm(name: str, family: Family, side: int, batch: int, **settings: Any) -> Case:
    return Case(name, family, partial(from_timm, name, **settings), images(side), batch)


def _transformers(
    name: str, family: Family, architecture: str, config: str, context: int, batch: int, **settings: Any
) -> Case:
    return Case(name, family, partial(FromTransformers, architecture, config, **settings), tokens(context), batch)


_BERT = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "intermediate_size": 768}

CASES: tuple[Case, ...] = (
    _timm("resnet18", "CNN", 96, 24),
    _timm("resnet50", "CNN", 96, 12),
    _timm("resnext50_32x4d", "CNN", 96, 12),
    _timm("mobilenetv2_100", "CNN", 96, 4),
    _timm("mobilenetv3_large_100", "CNN", 96, 8),
    _timm("efficientnet_b0", "CNN", 96, 4),
    _timm("regnety_002", "CNN", 96, 12),
    _timm("convnext_atto", "CNN", 96, 8),
    _timm("densenet121", "CNN", 96, 5),
    _timm("vgg11_bn", "CNN", 64, 24, mlp_ratio=0.05),
    _timm("hrnet_w18_small", "CNN", 96, 10),
    _timm("vit_tiny_patch16_224", "ViT", 112, 16, img_size=112),
    _timm("deit_tiny_distilled_patch16_224", "ViT", 112, 16, img_size=112),
    _timm("swin_tiny_patch4_window7_224", "ViT", 112, 12, img_size=112, embed_dim=48, num_heads=(2, 4, 8, 16)),
    _timm("xcit_nano_12_p16_224", "ViT", 112, 6, img_size=112),
    _timm("mixer_s16_224", "mixer", 112, 12, img_size=112),
    _transformers("BERT", "encoder", "BertForMaskedLM", "BertConfig", 128, 7, **_BERT),
    _transformers("RoBERTa", "encoder", "RobertaForMaskedLM", "RobertaConfig", 128, 7, **_BERT),
    _transformers(
        "DistilBERT",
        "encoder",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        128,
        8,
        dim=256,
        n_layers=4,
        n_heads=4,
        hidden_dim=1024,
    ),
    _transformers("ELECTRA", "encoder", "ElectraForMaskedLM", "ElectraConfig", 128, 7, embedding_size=64, **_BERT),
    _transformers(
        "GPT-2", "decoder", "GPT2LMHeadModel", "GPT2Config", 128, 5, n_embd=256, n_layer=6, n_head=4, n_positions=256
    ),
    _transformers(
        "OPT",
        "decoder",
        "OPTForCausalLM",
        "OPTConfig",
        128,
        8,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        ffn_dim=1024,
        word_embed_proj_dim=256,
        max_position_embeddings=256,
    ),
    _transformers("Llama", "decoder", "LlamaForCausalLM", "LlamaConfig", 128, 8, **_LLAMA),
    _transformers("Qwen2", "decoder", "Qwen2ForCausalLM", "Qwen2Config", 128, 8, **_LLAMA),
    _transformers("Gemma", "decoder", "GemmaForCausalLM", "GemmaConfig", 128, 8, head_dim=64, **_LLAMA),
    _transformers(
        "T5",
        "encoder-decoder",
        "T5ForConditionalGeneration",
        "T5Config",
        96,
        6,
        d_model=256,
        d_kv=64,
        d_ff=1024,
        num_layers=4,
        num_heads=4,
    ),
    *(
        _transformers(
            name,
            "MoE",
            "MixtralForCausalLM",
            "MixtralConfig",
            128,
            8,
            num_local_experts=4,
            experts_implementation=implementation,
            **_LLAMA,
        )
        for name, implementation in (("Mixtral", "grouped_mm"), ("Mixtral in a loop", "eager"))
    ),
    Case("experts in a list", "MoE", partial(ExpertList, 4, 256, 4), tokens(128), 16),
    Case("Switch", "MoE", partial(Switch, 4, 192, 4), tokens(128), 16),
    Case("LSTM", "LSTM", partial(LSTMTagger, VOCAB, 256), tokens(64), 32),
    Case("U-Net", "U-Net", partial(UNet, 48), pixels(32), 4),
)
"""Thirty architectures of all families. Laws of what convolutions hide were found on those among them that convolve."""

HELD_OUT: tuple[Case, ...] = (
    _timm("dla34", "CNN", 96, 12),
    _timm("edgenext_xx_small", "CNN", 96, 12),
    _timm("ghostnet_100", "CNN", 96, 8),
    _timm("mnasnet_100", "CNN", 96, 8),
    _timm("mobileone_s0", "CNN", 96, 6),
    _timm("nf_resnet50", "CNN", 96, 8),
    _timm("poolformer_s12", "ViT", 96, 12),
    _timm("regnetx_004", "CNN", 96, 12),
    _timm("res2net50_26w_4s", "CNN", 96, 8),
    _timm("pit_ti_224", "ViT", 112, 16, img_size=112),
)
"""Ten that convolve, and that nobody looked at before the laws were written down.

One of them has added to the laws since: nf_resnet50 in bf16 was 2.3 % off until batch norm's backward pass was known.
"""
