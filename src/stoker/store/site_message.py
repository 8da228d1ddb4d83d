"""The file of one message between sites of `Job(sync=…)`: a line of JSON, and the message's bytes. No pickle, no torch.

It is complete once it has as many bytes, with the digest, as its line says. Who exchanges messages through files is
`stepping.message_folder`; who carries them between machines need not know what is in them.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from dataclasses import asdict, dataclass
from typing import BinaryIO

from stoker.records.codec import from_json

MOST_HEAD_BYTES = 4096
_PART_BYTES = 1 << 20
_NAME = re.compile(r"(\d{9,12})-(\d{4,6})-(\d{4})\.message")


@dataclass(frozen=True, kw_only=True)
class MessageHead:
    """The line that a message's file begins with.

    Attributes:
        job: digest of the job's identity: sites of different jobs do not meet.
        sites, site: number of sites, and which one sent it, from 0.
        update: the update after which it was made, from 0.
        fragment: what part of the weights it is about.
        num_bytes, sha256: of what follows the line.
    """

    job: str
    sites: int
    site: int
    update: int
    fragment: int
    num_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """Name of the file."""
        return message_name(self.update, self.fragment, self.site)


def message_name(update: int, fragment: int, site: int) -> str:
    """Name of the file with a site's message.

    >>> message_name(9, 0, 1)
    '000000009-0000-0001.message'
    """
    return f"{update:09d}-{fragment:04d}-{site:04d}.message"


def encode_message(head: MessageHead, message: bytes) -> bytes:
    """The content of a message's file."""
    return json.dumps(asdict(head), sort_keys=True).encode() + b"\n" + message


def decode_message(content: bytes) -> tuple[MessageHead, bytes]:
    """The head and the bytes of a message from its file.

    Raises:
        ValueError: it is not complete, or no message; the text says what is missing.
    """
    head = check_message(io.BytesIO(content))
    return head, content[len(content) - head.num_bytes :]


def check_message(file: BinaryIO) -> MessageHead:
    """The head of the message in a file, once its bytes are found to be those that it names; they are read in parts.

    Raises:
        ValueError: as `decode_message`.
    """
    line = file.readline(MOST_HEAD_BYTES + 1)
    if not line.endswith(b"\n"):
        raise ValueError(f"its first line is not complete in {len(line)} bytes")
    try:
        head = from_json(json.loads(line), MessageHead)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"its first line is no head of a message: {problem}") from problem
    digest, num_bytes = hashlib.sha256(), 0
    while part := file.read(_PART_BYTES):
        digest.update(part)
        num_bytes += len(part)
    if num_bytes != head.num_bytes:
        raise ValueError(f"it has {num_bytes:,} of {head.num_bytes:,} bytes")
    if digest.hexdigest() != head.sha256:
        raise ValueError(f"its {head.num_bytes:,} bytes do not have the digest {head.sha256[:12]}…")
    return head


def parse_name(name: str) -> tuple[int, int, int] | None:
    """Update, fragment and site of a message by the name of its file; None: it is no message."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))
