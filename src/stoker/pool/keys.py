"""Ed25519 keys: who acts in a pool.

A key is a file of 64 hexadecimal digits that this user alone may read; its public half is the name of an account. A
public key cannot be exchanged later: who loses the file loses the account, and there is no other copy.

Source: RFC 8032 (Ed25519), by the `cryptography` package.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from stoker.errors import BadRun
from stoker.store.files import make_directories, write_file

_DIGEST = re.compile(r"[0-9a-f]{64}")
_HEX_SIGNATURE = re.compile(r"[0-9a-f]{128}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, repr=False)
class Key:
    """A private key. `public` names its account; the private half is never printed."""

    private: Ed25519PrivateKey

    @property
    def public(self) -> str:
        """The public key, 64 hexadecimal digits."""
        return self.private.public_key().public_bytes_raw().hex()

    def sign(self, message: bytes) -> str:
        """The signature of `message`, 128 hexadecimal digits."""
        return self.private.sign(message).hex()

    def __repr__(self) -> str:
        """Without the private half."""
        return f"Key({self.public[:12]}…)"

    @classmethod
    def made(cls) -> Key:
        """A new key, kept nowhere."""
        return cls(Ed25519PrivateKey.generate())


def is_digest(text: str) -> bool:
    """Whether a text is 64 hexadecimal digits in lower case, as a SHA-256 and a public key are."""
    return _DIGEST.fullmatch(text) is not None


def is_signed(public: str, message: bytes, signature: str) -> bool:
    """Whether `signature` (hex) of `message` was made with the private half of `public` (hex).

    Digits in upper case are refused: a signature has one spelling, so that a changed log cannot pass for the same.
    """
    if not (is_digest(public) and _HEX_SIGNATURE.fullmatch(signature)):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), message)
    except (ValueError, InvalidSignature):
        return False
    return True


def keys_folder() -> Path:
    """Where keys are: `stoker/pool` in `$XDG_CONFIG_HOME`, or in `~/.config`. It may not exist yet."""
    return _user_folder("XDG_CONFIG_HOME", ".config", "pool")


def data_folder(name: str) -> Path:
    """Where a control plane (`pool`) or an agent (`agent`) keeps what it has: as keys, in `$XDG_DATA_HOME`."""
    return _user_folder("XDG_DATA_HOME", ".local/share", name)


def _user_folder(variable: str, usual: str, name: str) -> Path:
    given = Path(os.environ.get(variable, ""))
    return (given if given.is_absolute() else Path.home() / usual) / "stoker" / name


def own_key(name: str = "default", folder: Path | None = None) -> Key:
    """The key of that name, made if it is not there yet.

    Raises:
        BadRun: the file is readable by others, or holds no key.
    """
    if not _NAME.fullmatch(name):
        raise BadRun(f"{name!r} is no name of a key", remedy="Letters, digits, '.', '_' and '-', at most 64.")
    path = (keys_folder() if folder is None else folder) / f"{name}.key"
    if not path.exists():
        make_directories(path.parent)
        path.parent.chmod(0o700)
        aside = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
        before = os.umask(0o077)
        try:
            write_file(aside, Ed25519PrivateKey.generate().private_bytes_raw().hex().encode() + b"\n")
        finally:
            os.umask(before)
        try:
            path.hardlink_to(aside)  # unlike a rename, never replaces a key that another process just made
        except FileExistsError:
            pass
        finally:
            aside.unlink()
    return read_key(path)


def secret_text(path: Path, what: str) -> str:
    """The text of a file that holds a secret, which `what` names in errors.

    Raises:
        BadRun: it cannot be read, or is readable by others.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise BadRun(f"{what} {path} cannot be read: {problem}") from problem
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadRun(
            f"{what} {path} has mode {stat.S_IMODE(mode):o}: others may read it",
            remedy=f"chmod 600 {path}, and if others had access, use another key.",
        )
    return text


def read_key(path: Path) -> Key:
    """The key in a file.

    Raises:
        BadRun: it cannot be read, is readable by others, or holds no key.
    """
    text = secret_text(path, "the key")
    if not is_digest(text):
        raise BadRun(f"{path} is no key: wanted 64 hexadecimal digits", remedy="Restore it from a copy.")
    return Key(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text)))
