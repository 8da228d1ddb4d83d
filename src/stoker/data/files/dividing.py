"""Which samples go where when a source is split. Decides from names and labels alone, and touches no data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stoker.errors import BadJob

_LISTED = 10
"""With more classes than this, only the smallest and the largest are told."""


@dataclass(frozen=True)
class Division:
    """The indices of every part, ascending; `train` is what the others left."""

    parts: dict[str, npt.NDArray[np.int64]]
    shares: dict[str, float]
    labels: npt.NDArray[np.int64] | None
    seed: int

    def rule(self, part: str) -> str:
        """What makes the part out of the whole, for its fingerprint."""
        shares = " ".join(f"{name}={share:g}" for name, share in self.shares.items())
        kind = "stratified" if self.labels is not None else "unstratified"
        return f"[{part} of {shares} {kind} seed={self.seed}]"

    def in_words(self, classes: Sequence[str]) -> str:
        """The size of every part, and of its classes: `train 8 (cat 4, dog 4), valid 2 (cat 1, dog 1)`."""
        return ", ".join(f"{name} {len(indices):,}{self._of_classes(indices, classes)}" for name, indices in
                         self.parts.items())  # fmt: skip

    def _of_classes(self, indices: npt.NDArray[np.int64], classes: Sequence[str]) -> str:
        if self.labels is None:
            return ""
        known = np.unique(self.labels)
        counts = {int(one): int(np.count_nonzero(self.labels[indices] == one)) for one in known}
        if len(known) > _LISTED:
            return f" ({min(counts.values()):,} to {max(counts.values()):,} of each of {len(known)} classes)"
        named = {one: classes[one] if 0 <= one < len(classes) else str(one) for one in counts}
        return f" ({', '.join(f'{named[one]} {count:,}' for one, count in counts.items())})"


def divide(
    names: Sequence[str], labels: npt.NDArray[np.int64] | None, shares: Mapping[str, float], seed: int
) -> Division:
    """Draw the parts; a sample's place depends on its name and the seed, and on how many others there are.

    With `labels` every part gets of each class its share, rounded so that the part's size is right; one sample of each
    class at least stays in `train`.

    Raises:
        BadJob: shares that are none, leave nothing for training, or make a part empty.
    """
    wanted = {name: share for name, share in shares.items() if share}
    _require_shares(wanted)
    groups = [np.arange(len(names))] if labels is None else [np.flatnonzero(labels == one) for one in np.unique(labels)]
    order = [_drawn(names, group, seed) for group in groups]
    taken = [0] * len(order)
    parts: dict[str, npt.NDArray[np.int64]] = {}
    for name, share in wanted.items():
        counts = _counts([len(group) for group in order], taken, share)
        chosen = [group[start : start + count] for group, start, count in zip(order, taken, counts, strict=True)]
        taken = [start + count for start, count in zip(taken, counts, strict=True)]
        parts[name] = np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)
    rest = np.sort(np.concatenate([group[start:] for group, start in zip(order, taken, strict=True)]))
    for name, indices in parts.items():
        if not len(indices):
            raise BadJob(
                f"a share of {wanted[name]:g} of {len(names):,} samples for {name!r} is none",
                remedy="Give a larger share, or data of its own.",
            )
    return Division({"train": rest, **parts}, wanted, labels, seed)


def _require_shares(shares: Mapping[str, float]) -> None:
    if not shares or not all(0 < share < 1 for share in shares.values()) or sum(shares.values()) >= 1:
        given = ", ".join(f"{name}={share:g}" for name, share in shares.items()) or "none"
        raise BadJob(
            f"split takes shares between 0 and 1 that leave something for training, got {given}",
            remedy="As in split(valid=0.1, test=0.1).",
        )


def _drawn(names: Sequence[str], group: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int64]:
    """The group in the order of its names' keyed digests."""
    keys = [
        hashlib.blake2b(f"{seed} {names[at]}".encode("utf-8", "surrogateescape"), digest_size=16).digest()
        for at in group.tolist()
    ]
    return group[sorted(range(len(group)), key=keys.__getitem__)]


def _counts(sizes: Sequence[int], taken: Sequence[int], share: float) -> list[int]:
    """How many of each group: the floor of its share, and one more for the largest remainders until the sum fits."""
    free = [max(0, size - start - 1) for size, start in zip(sizes, taken, strict=True)]
    exact = [size * share for size in sizes]
    counts = [min(int(amount), room) for amount, room in zip(exact, free, strict=True)]
    missing = round(sum(sizes) * share) - sum(counts)
    by_remainder = sorted(range(len(sizes)), key=lambda at: (int(exact[at]) - exact[at], at))
    for at in by_remainder:
        if missing > 0 and counts[at] < free[at]:
            counts[at] += 1
            missing -= 1
    return counts
