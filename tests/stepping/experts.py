"""Small mixtures of experts whose router sends each token to several of them: stacked parameters, and a list."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.stepping.models import VOCAB


class StackedExperts(nn.Module):
    """Experts of stacked matrices [E, …], by the signature of transformers'.

    `way` of products: grouped, batched, or in a loop over the experts that were chosen.
    """

    def __init__(self, experts: int, width: int, hidden: int, way: str = "grouped") -> None:
        super().__init__()
        self.num_experts, self.way = experts, way
        self.up_EDF = nn.Parameter(0.3 * torch.randn(experts, width, hidden))
        self.down_EFD = nn.Parameter(0.3 * torch.randn(experts, hidden, width))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The sum of the chosen experts' outputs for each token, with their weights: [N, D]."""
        if self.way == "looped":
            out_ND = torch.zeros_like(hidden_states)
            for expert in top_k_index.unique().tolist():
                row_M, place_M = torch.where(top_k_index == expert)
                y_MD = F.gelu(hidden_states[row_M] @ self.up_EDF[expert]) @ self.down_EFD[expert]
                out_ND = out_ND.index_add(0, row_M, y_MD * top_k_weights[row_M, place_M, None])
            return out_ND
        (num, choices), width = top_k_index.shape, hidden_states.shape[1]
        expert_S, order_S = top_k_index.flatten().sort(stable=True)
        x_SD = hidden_states[order_S // choices]
        if self.way == "grouped":
            counts_E = expert_S.bincount(minlength=self.num_experts).tolist()
            parts = [
                F.gelu(x @ up) @ down
                for x, up, down in zip(x_SD.split(counts_E), self.up_EDF, self.down_EFD, strict=True)
            ]
            y_SD = torch.cat(parts)
        else:
            h_SF = F.gelu(torch.bmm(x_SD.unsqueeze(1), self.up_EDF[expert_S]))
            y_SD = torch.bmm(h_SF, self.down_EFD[expert_S]).squeeze(1)
        y_SD = y_SD * top_k_weights.flatten()[order_S].unsqueeze(1)
        return torch.empty_like(y_SD).index_copy(0, order_S, y_SD).view(num, choices, width).sum(1)


class ListedExperts(nn.ModuleList):
    """Experts in a list, one after the other."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(experts)
        )

    def forward(self, x_ND: torch.Tensor, chosen_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        """As `StackedExperts.forward`."""
        out_ND = torch.zeros_like(x_ND)
        for number, expert in enumerate(self):
            row_M, place_M = torch.where(chosen_NK == number)
            if len(row_M):
                out_ND.index_add_(0, row_M, expert(x_ND[row_M]) * weights_NK[row_M, place_M, None])
        return out_ND


class Layer(nn.Module):
    """A router and its experts around a residual stream. `is_even`: tokens go to experts in turn."""

    def __init__(self, experts: nn.Module, num: int, width: int, *, is_even: bool) -> None:
        super().__init__()
        self.norm, self.router, self.experts, self.is_even = (
            nn.LayerNorm(width),
            nn.Linear(width, num),
            experts,
            is_even,
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The stream after the layer, of the same shape."""
        x_ND = self.norm(x_BTD).flatten(0, 1)
        logits_NE = self.router(x_ND)
        if self.is_even:
            rows_N1 = torch.arange(len(x_ND), device=x_ND.device).unsqueeze(1)
            turn_NE = (torch.arange(logits_NE.shape[1], device=x_ND.device) - rows_N1) % logits_NE.shape[1]
            logits_NE = logits_NE + 100.0 * (turn_NE % (logits_NE.shape[1] // 2) == 0)
        weights_NK, chosen_NK = logits_NE.softmax(-1).topk(2, -1)
        return x_BTD + self.experts(x_ND, chosen_NK, weights_NK).view(x_BTD.shape)


def mixture(
    kind: str = "grouped", *, layers: int = 2, num: int = 4, width: int = 8, hidden: int = 16, is_even: bool = False
) -> nn.Module:
    """A language model of routed experts: `grouped`, `batched`, in a `list`, or `looped`.

    The last chooses the first two experts alone, and trains nothing before the experts of its first layer.
    """

    def experts() -> nn.Module:
        return ListedExperts(num, width, hidden) if kind == "list" else StackedExperts(num, width, hidden, kind)

    blocks = [Layer(experts(), num, width, is_even=is_even) for _ in range(layers)]
    embedding = nn.Embedding(VOCAB, width)
    if kind == "looped":
        for frozen in (embedding, blocks[0].norm, blocks[0].router):
            frozen.requires_grad_(False)
        for block in blocks:
            block.router.bias.data[2:] = -100.0
    return nn.Sequential(embedding, *blocks, nn.Linear(width, VOCAB))
