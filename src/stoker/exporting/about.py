"""What whoever exports knows of a model beside its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stoker.exporting.checking import LIMIT
from stoker.exporting.signature import Dynamic
from stoker.records import ArtifactSource, DynamicDim


@dataclass(frozen=True, kw_only=True)
class About:
    """What an export says of a model, and what may vary in it.

    Args:
        name: the model's (default: its directory's).
        dynamic: names of dimensions that vary beside the batch, by input and place: {"input_ids": {1: "tokens"}}.
        dims: the sizes that those may have, where not any.
        pad: what inputs are filled up with along them; None: proposed where there is an attention mask.
        labels: names of the classes of an output.
        metrics: what was measured of the model, such as {"test/accuracy": 0.93}.
        source: where it came from.
        limit: the most that answers may differ from the original's, as a share of the largest.
    """

    name: str | None = None
    dynamic: Dynamic = field(default_factory=dict)
    dims: Sequence[DynamicDim] = ()
    pad: Mapping[str, float] | None = None
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    source: ArtifactSource | None = None
    limit: float = LIMIT
