"""The root of a Merkle tree over hashes: what of an hour of the log is published, or goes into a contract."""

from __future__ import annotations

import hashlib


def merkle_root(hashes: list[str]) -> str:
    """Root of a Merkle tree over hashes (hex).

    Source: RFC 6962, section 2.1: leaves and nodes are hashed with different first bytes.
    """
    level = [hashlib.sha256(b"\0" + bytes.fromhex(one)).digest() for one in hashes]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [hashlib.sha256(b"\1" + b"".join(pair)).digest() if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0].hex() if level else hashlib.sha256(b"").hexdigest()
