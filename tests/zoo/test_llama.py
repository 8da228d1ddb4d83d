from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stoker.errors import BadJob
from stoker.zoo import Llama
from stoker.zoo.llama import rotated, rotation_angles

L, D, H, K, F, V, T = 2, 32, 4, 2, 48, 17, 10
E = D // H


def small(**settings) -> Llama:
    """A model of two layers, the same at every call."""
    torch.manual_seed(0)
    sizes = {"layers": L, "width": D, "heads": H, "kv_heads": K, "hidden": F, "vocab": V, "context": T}
    return Llama(**(sizes | settings))


def some_tokens(batch: int = 3) -> torch.Tensor:
    """Tokens [B, T]."""
    return torch.randint(0, V, (batch, T), generator=torch.Generator().manual_seed(1))


def test_parameters_are_as_stated():
    """The closed form of the module's docstring."""
    expected = 2 * V * D + L * (2 * D**2 + 2 * D * K * E + 3 * D * F + 2 * D) + D
    assert sum(p.numel() for p in small().parameters()) == expected


def test_the_defaults_are_llama_3_8b():
    """8,030,261,248 parameters, as the published checkpoint has; counted without any memory."""
    with torch.device("meta"):
        model = Llama()
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248


def test_flops_are_as_stated():
    """The closed form equals what PyTorch counts in a training step when attention is written as matrix products."""
    model = small()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(some_tokens(2)).sum().backward()
    per_token = L * (2 * D**2 + 2 * D * K * E + 3 * D * F) + V * D
    assert counter.get_total_flops() == 2 * (6 * T * per_token + 12 * L * D * T**2)


def test_a_later_token_never_moves_an_earlier_logit():
    """Changing token t changes logits from t on, and none before."""
    model, tokens = small().double(), some_tokens()
    before = model(tokens)
    for at in range(T):
        changed = tokens.clone()
        changed[:, at] = (changed[:, at] + 1) % V
        moved = (model(changed) - before).abs().amax(dim=(0, 2))
        assert not moved[:at].any()
        assert moved[at:].gt(0).all()


def test_rotated_products_depend_on_the_distance_alone():
    """The product of a query at position i and a key at j is that at i + 3 and j + 3, and not that at i + 3 and j."""
    angles_TE = rotation_angles(T, E, theta=100.0).double()
    generator = torch.Generator().manual_seed(2)
    q_E, k_E = (torch.randn(E, generator=generator, dtype=torch.float64) for _ in range(2))
    q_TE, k_TE = (rotated(x.expand(T, E), angles_TE.cos(), angles_TE.sin()) for x in (q_E, k_E))
    products_TT = q_TE @ k_TE.T
    torch.testing.assert_close(products_TT[3:, 3:], products_TT[:-3, :-3], rtol=0, atol=1e-5)  # angles are fp32
    assert not torch.allclose(products_TT[3:, :], products_TT[:-3, :])


def test_rotation_keeps_lengths():
    """Each component pair is turned, not scaled."""
    angles_TE = rotation_angles(T, E, theta=100.0).double()
    x_TE = torch.randn(T, E, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    turned = rotated(x_TE, angles_TE.cos(), angles_TE.sin())
    pairs, turned_pairs = (y.view(T, 2, E // 2).norm(dim=1) for y in (x_TE, turned))
    torch.testing.assert_close(turned_pairs, pairs)


def test_query_heads_share_keys_and_values():
    """With as many key heads as query heads, of which groups are equal, the output is that of the grouped model."""
    grouped, full = small().double(), small(kv_heads=H).double()
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if name.endswith(("key.weight", "value.weight")):
            weights[name] = weight.view(K, E, D).repeat_interleave(H // K, dim=0).reshape(H * E, D)
    full.load_state_dict(weights)
    torch.testing.assert_close(full(some_tokens()), grouped(some_tokens()))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"heads": 3}, "3 heads"),
        ({"heads": 32}, "1 components"),
        ({"kv_heads": 3}, "3 key/value"),
        ({"vocab": 0}, ">= 1"),
    ],
)
def test_sizes_that_make_no_model_are_named(settings, told):
    """A size that does not divide another is reported with both numbers."""
    with pytest.raises(BadJob, match=told):
        small(**settings)


def test_too_many_tokens_name_the_context():
    """A sample longer than the context says how long the context is."""
    with pytest.raises(BadJob, match=f"{T + 1} tokens.*context is {T}"):
        small()(torch.zeros(1, T + 1, dtype=torch.int64))
