"""Muon: momentum whose direction is orthogonalised, matrix by matrix.

What: the momentum of each matrix is replaced by the nearest matrix whose singular values all are near 1, by a few
    Newton-Schulz steps, so that no direction of the update drowns in another.
Use when: hidden matrices and convolutions do the learning. Embeddings, the output layer, gains and biases are left to
    another optimiser.
Costs: one momentum per weight, and `steps` times three products of the matrix's size, once per update: a small
    share of the time with large batches, a large one with small batches.
Does not combine with: the state of another optimiser; a plan's `foreach` and `fused` concern the rest alone.
Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024),
    https://kellerjordan.github.io/posts/muon/; `match_rms_adamw`: Liu et al., "Muon is Scalable for LLM Training"
    (2025), https://arxiv.org/abs/2502.16982; `normalize`: K. Jordan, airbench94_muon.py (2024),
    https://github.com/KellerJordan/cifar10-airbench. Here matrices of one shape share their products.
"""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Muon as Settings
from stoker.records import Precision

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the odd polynomial a*x + b*x^3 + c*x^5 that each step applies to the singular values (Jordan 2024).

They do not converge to 1: singular values end in about 0.7 to 1.2, after five steps even from 0.01.
"""
_LEAST_NORM = 1e-7
_MOST_TOGETHER = 2**22
"""Largest number of scalars in matrices that are multiplied together: larger products occupy a device by themselves,
and all of a model's at once would take several times its memory.
"""


Named = dict[str, nn.Parameter]


def divided(model: nn.Module, settings: Settings) -> tuple[Named, Named]:
    """The trained parameters of `model`, by name: the hidden matrices, and all others; see `stoker.Muon`.

    Raises:
        BadJob: there is no hidden matrix, or a pattern of `exclude` matches nothing.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for pattern in settings.exclude:
        if not fnmatch.filter(trained, pattern):
            raise BadJob(f"Muon(exclude=…): {pattern!r} matches no parameter that is trained")
    left = {name for pattern in settings.exclude for name in fnmatch.filter(trained, pattern)}
    # Left out too: embeddings, and the last trained matrix of any other module, the output layer's.
    embeddings, others = list[nn.Parameter](), list[nn.Parameter]()
    for part in model.modules():
        own = embeddings if isinstance(part, nn.Embedding | nn.EmbeddingBag) else others
        own += (p for p in part.parameters(recurse=False) if p.requires_grad and p.dim() >= 2)
    outer = {id(parameter) for parameter in (*embeddings, *others[-1:])}
    hidden = [name for name, p in trained.items() if p.dim() >= 2 and id(p) not in outer and name not in left]
    if not hidden:
        raise BadJob(
            f"Muon has nothing to do: {type(model).__name__} has no hidden matrix, only "
            f"{len(trained)} parameters that are vectors, embeddings, an output layer or left out",
            remedy="Use stoker.AdamW or SGD for this model.",
        )
    matrices = {name: trained[name] for name in hidden}
    return matrices, {name: p for name, p in trained.items() if name not in matrices}


class MuonOptimizer(torch.optim.Optimizer):
    """Muon over matrices, with another optimiser for the other parameters.

    Args:
        groups: parameter groups of matrices: tensors of two or more dimensions, taken as [rows, everything else].
        rest: the optimiser of the other parameters; its groups and state are also this one's. None if there are none.
        lr: learning rate of matrices.
        momentum: decay of the sum of gradients.
        nesterov: look one step ahead, as Nesterov's momentum does.
        weight_decay: decoupled, as in AdamW: the weights shrink by lr * weight_decay.
        steps: Newton-Schulz steps.
        adjust: a factor of the learning rate by shape: "original" is sqrt(max(1, rows/columns)), "match_rms_adamw" is
            0.2*sqrt(max(rows, columns)), "none" is 1.
        normalize: scale each matrix to the norm sqrt(rows) before each update.
        products_in: dtype of the Newton-Schulz products; None is that of the parameters.
    """

    def __init__(  # noqa: PLR0913 - the settings of `stoker.Muon`
        self,
        groups: Sequence[dict[str, Any]],
        rest: torch.optim.Optimizer | None,
        *,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        steps: int = 5,
        adjust: str = "original",
        normalize: bool = False,
        products_in: torch.dtype | None = None,
    ) -> None:
        self.rest: torch.optim.Optimizer | None = None
        self._num_own = len(groups)
        self._steps, self._adjust, self.products_in = steps, adjust, products_in
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__([dict(group) for group in groups], defaults | {"normalize": normalize})
        self.rest = rest
        if rest is not None:
            self.param_groups.extend(rest.param_groups)
        self._share()

    @property
    def matrices(self) -> list[torch.Tensor]:
        """The parameters that are moved as matrices."""
        return [parameter for group in self.param_groups[: self._num_own] for parameter in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        """The state of PyTorch's optimisers, and the attributes added here."""
        own = ("rest", "_num_own", "_steps", "_adjust", "products_in")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move all parameters that have gradients."""
        assert closure is None
        for group in self.param_groups[: self._num_own]:
            if parameters := [p for p in group["params"] if p.grad is not None]:
                self._move(group, parameters)
        if self.rest is not None:
            self.rest.step()

    def _share(self) -> None:
        """Let the rest's optimiser work on the groups and the state of this one, which are saved."""
        if self.rest is not None:
            self.rest.__setstate__({"state": self.state, "param_groups": self.param_groups[self._num_own :]})

    def _move(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        for parameter in parameters:
            if "momentum" not in self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        momenta = [self.state[parameter]["momentum"] for parameter in parameters]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, gradients)
        if group["normalize"]:  # to the norm sqrt(rows)
            norms: Any = torch._foreach_norm(parameters)  # noqa: SLF001 - PyTorch's own for lists of tensors
            torch._foreach_div_(norms, [math.sqrt(len(parameter)) for parameter in parameters])
            torch._foreach_clamp_min_(norms, _LEAST_NORM)
            torch._foreach_div_(parameters, norms)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        for indices in _together(parameters):
            ahead = [momenta[index] for index in indices]
            if group["nesterov"]:
                ahead = [gradients[index].add(momenta[index], alpha=group["momentum"]) for index in indices]
            directions = orthogonalized(ahead, self._steps, self.products_in, self._adjust)
            torch._foreach_add_([parameters[index] for index in indices], directions, alpha=-group["lr"])


def products_dtype(precision: Precision, matrices: Iterable[torch.Tensor]) -> torch.dtype | None:
    """The dtype of products under a precision; None is the matrices' own. Momenta and weights keep theirs."""
    is_bf16 = precision in ("bf16", "fp8") and all(matrix.dtype == torch.float32 for matrix in matrices)
    return torch.bfloat16 if is_bf16 else None


def orthogonalized(
    matrices: Sequence[torch.Tensor], steps: int, products_in: torch.dtype | None = None, adjust: str = "none"
) -> list[torch.Tensor]:
    """The matrices with their singular values brought near 1, shapes and dtypes kept.

    A tensor [rows, ...] counts as a matrix [rows, the rest]. Those of one shape are multiplied together.

    Args:
        matrices: tensors of two or more dimensions.
        steps: Newton-Schulz steps.
        products_in: dtype of the products; None is that of the matrices.
        adjust: a factor by shape; see `Muon`.
    """
    orthogonal: list[torch.Tensor] = list(matrices)
    for indices in _together(matrices):
        rows, columns = _sides(matrices[indices[0]])
        factor = 1.0
        if adjust == "original":
            factor = math.sqrt(max(1.0, rows / columns))
        elif adjust == "match_rms_adamw":
            factor = 0.2 * math.sqrt(max(rows, columns))
        stacked_NRC = torch.stack([matrices[index].reshape(rows, columns) for index in indices]).to(products_in)
        is_tall = rows > columns
        x_NRC = _newton_schulz(stacked_NRC.mT if is_tall else stacked_NRC, steps)
        x_NRC = (x_NRC.mT if is_tall else x_NRC).to(matrices[indices[0]].dtype) * factor
        for index, x_RC in zip(indices, x_NRC, strict=True):
            orthogonal[index] = x_RC.reshape(matrices[index].shape)
    return orthogonal


def _together(matrices: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Indices of matrices of one shape, at most _MOST_TOGETHER scalars at a time."""
    by_sides: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        by_sides[_sides(matrix)].append(index)
    for (rows, columns), indices in by_sides.items():
        count = max(1, _MOST_TOGETHER // max(1, rows * columns))
        yield from (indices[start : start + count] for start in range(0, len(indices), count))


def _sides(matrix: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a tensor taken as a matrix."""
    return matrix.shape[0], math.prod(matrix.shape[1:])


def _newton_schulz(x_NRC: torch.Tensor, steps: int) -> torch.Tensor:
    """Wide matrices, orthogonalised: X becomes a*X + (b*XX' + c*(XX')^2) X, `steps` times."""
    x_NRC = x_NRC / (torch.linalg.vector_norm(x_NRC, dim=(1, 2), keepdim=True) + _LEAST_NORM)
    for _ in range(steps):
        gram_NRR = x_NRC @ x_NRC.mT
        polynomial_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=_B, alpha=_C)
        x_NRC = torch.baddbmm(x_NRC, polynomial_NRR, x_NRC, beta=_A)
    return x_NRC
