"""Seeds of a study's draws: one for each trial, so that a study that is continued draws what it would have drawn."""

from __future__ import annotations

import hashlib


def seed_of(seed: int, number: int) -> int:
    """The seed of one trial's draws, below 2^32."""
    return int.from_bytes(hashlib.sha256(f"stoker tune {seed} {number}".encode()).digest()[:4])
