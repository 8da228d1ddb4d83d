"""Checkpoints that are sent before they are committed to: encrypted, with a key that the commitment states.

What: over a direct path a renter's disk has a checkpoint before the pool has the commitment to it. The agent encrypts
the file with a new key, and the blob, whose hash is committed to, is the encrypted file. The key stands in the
commitment. So a renter that closes the lease first, or does not say that it has the blob, has nothing that it can read,
as where the checkpoint goes through the pool, which shows it to no one before that. An agent that states another key
has committed to a file that is no checkpoint: replays find the block unequal.
Costs: the file is read and written once more on each side.
Does not: keep a checkpoint secret. Its key is in the log; who gets the blob decides the pool, as of any other.

Source: optimistic fair exchange (Asokan, Schunter, Waidner, 1997), with the pool as the third party that sees the key.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

_PART_BYTES = 1 << 20


def seal(path: Path) -> str:
    """Encrypt a file in place, with a key of its own; the key (hex)."""
    key = secrets.token_hex(32)
    _apply(path, key)
    return key


def unseal(path: Path, key: str) -> None:
    """Decrypt a file in place; with another key it becomes other bytes of the same length."""
    _apply(path, key)


def _apply(path: Path, key: str) -> None:
    # A counter from 0: each key encrypts one file. AES-CTR is its own inverse. The blob's hash guards the bytes.
    stream = Cipher(AES256(bytes.fromhex(key)), CTR(bytes(16))).encryptor()
    with path.open("r+b") as file:
        while part := file.read(_PART_BYTES):
            file.seek(-len(part), os.SEEK_CUR)
            file.write(stream.update(part))
