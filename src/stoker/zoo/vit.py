"""ViT: an encoder-only transformer over the patches of an image, LayerNorm before attention and MLP.

Shapes: B images, C input channels, S pixels of each side, P of a patch's, N = (S / P)^2 patches, T = N + 1 tokens;
D width, H heads, E = D / H, M width of the MLP, L layers, K classes. Weights have timm's names.
Parameters: (C*P^2 + 1)*D + D + T*D + L*(4*D^2 + 2*D*M + 9*D + M) + 2*D + (D + 1)*K; 86,567,656 for ViT-B/16.
FLOPs to train on one image, the matrix products alone: 6*(T*L*(4*D^2 + 2*D*M) + N*C*P^2*D + D*K) + 12*L*D*T^2 less
2*N*C*P^2*D, since the gradient of the image is not computed. A multiply and an add count as two.

Source: A. Dosovitskiy et al., "An Image is Worth 16x16 Words" (2020), https://arxiv.org/abs/2010.11929; initialisation
by normals of deviation 0.02, cut at two deviations, biases and the class token's start as in timm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from stoker.errors import BadJob

_INIT_STD = 0.02
_EPS = 1e-6


class ViT(nn.Module):
    """x_BCSS to logits_BK, by a class token.

    Args:
        image: S.
        patch: P, a divisor of S.
        layers: L.
        width: D.
        heads: H, a divisor of D.
        classes: K.
        in_channels: C.
        mlp: M; four times the width by default.
        dropout: share of embeddings, attention weights and residual updates set to zero in training.

    Raises:
        BadJob: a size is not positive or does not divide, or `dropout` is not in [0, 1).
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the sizes of a transformer
        self,
        image: int = 224,
        patch: int = 16,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        classes: int = 1000,
        in_channels: int = 3,
        mlp: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        hidden = 4 * width if mlp is None else mlp
        sizes = {
            "image": image,
            "patch": patch,
            "layers": layers,
            "width": width,
            "heads": heads,
            "classes": classes,
            "in_channels": in_channels,
            "mlp": hidden,
        }
        if min(sizes.values()) < 1 or not 0 <= dropout < 1:
            raise BadJob(f"ViT takes sizes >= 1 and 0 <= dropout < 1, got {sizes} and dropout {dropout}")
        if image % patch or width % heads:
            raise BadJob(
                f"ViT cuts {image} pixels into patches of {patch}, and {width} components into {heads} heads: "
                "both have to come out even"
            )
        self.image = image
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(in_channels, width, kernel_size=patch, stride=patch)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width, heads, hidden, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.pos_embed, std=_INIT_STD, a=-2 * _INIT_STD, b=2 * _INIT_STD)
        nn.init.normal_(self.cls_token, std=_EPS)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=_INIT_STD, a=-2 * _INIT_STD, b=2 * _INIT_STD)
                nn.init.zeros_(module.bias)

    def forward(self, x_BCSS: torch.Tensor) -> torch.Tensor:
        """Logits [B, K] of images [B, C, S, S].

        Raises:
            BadJob: images are of another size.
        """
        if x_BCSS.shape[-2:] != (self.image, self.image):
            raise BadJob(f"ViT(image={self.image}) got images of {list(x_BCSS.shape[-2:])} pixels")
        patches_BND = self.patch_embed["proj"](x_BCSS).flatten(2).transpose(1, 2)
        x_BTD = torch.cat([self.cls_token.expand(len(x_BCSS), -1, -1), patches_BND], dim=1) + self.pos_embed
        x_BTD = self.dropout(x_BTD)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BK: torch.Tensor = self.head(self.norm(x_BTD)[:, 0])
        return logits_BK


class _Block(nn.Module):
    """Attention and MLP, each added to its input, each seeing it normalised."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=_EPS)
        self.attn = _Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width, eps=_EPS)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, hidden), "fc2": nn.Linear(hidden, width)})
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.dropout(self.attn(self.norm1(x_BTD)))
        hidden_BTM = F.gelu(self.mlp["fc1"](self.norm2(x_BTD)))
        change_BTD: torch.Tensor = self.dropout(self.mlp["fc2"](hidden_BTM))
        return x_BTD + change_BTD


class _Attention(nn.Module):
    """Multi-head attention of every token to all."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        q_BHTE, k_BHTE, v_BHTE = self.qkv(x_BTD).view(B, T, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, dropout_p=dropout)
        out_BTD: torch.Tensor = self.proj(mixed_BHTE.transpose(1, 2).reshape(B, T, -1))
        return out_BTD
