"""Bodies compressed as gzip or deflate, both ways; what comes out of one is bounded while it comes out."""

from __future__ import annotations

import zlib

from stoker.serving.problems import BadRequest, TooLarge, WrongFormat, shortened

LEAST_BYTES = 1024
"""Below this an answer is not compressed: it fits into one packet as it is."""

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_FASTEST = 1


def decompress(body: bytes, encoding: str, *, most_bytes: int) -> bytes:
    """The body without its `Content-Encoding`; deflate is zlib's format, as HTTP defines it.

    Raises:
        BadRequest: it is damaged, cut off, or something follows it.
        TooLarge: it would have more than `most_bytes`; no more than these were ever held.
        WrongFormat: another encoding.
    """
    encoding = encoding.strip().lower()
    if encoding in {"", "identity"}:
        return body
    if encoding not in _WINDOW_BITS:
        raise WrongFormat(f"Content-Encoding {shortened(encoding)} is not known; gzip and deflate are")
    stream = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        whole = stream.decompress(body, most_bytes + 1)
    except zlib.error as error:
        raise BadRequest(f"the body is no {encoding}: {error}") from error
    if len(whole) > most_bytes:
        raise TooLarge(f"the body has more than {most_bytes} bytes once decompressed")
    if not stream.eof:
        raise BadRequest(f"the {encoding} body is cut off: {len(body)} bytes came")
    if stream.unused_data:
        raise BadRequest(f"{len(stream.unused_data)} bytes follow the {encoding} body")
    return whole


def asked_for(accept_encoding: str) -> str:
    """The encoding of the answer: the only one that `Accept-Encoding` names, or empty.

    A list such as `gzip, deflate` is what HTTP libraries send unasked, and compressing tensors costs more than it
    saves near the server; who names one alone wants it.
    """
    if not accept_encoding:
        return ""
    name, _, weight = accept_encoding.strip().lower().partition(";")
    if weight.replace(" ", "") in {"q=0", "q=0.0"}:
        return ""
    return name.strip() if name.strip() in {"gzip", "deflate"} else ""


def compress(body: bytes, encoding: str) -> bytes:
    """The body as `gzip` or `deflate`, quickly rather than small."""
    stream = zlib.compressobj(_FASTEST, zlib.DEFLATED, _WINDOW_BITS[encoding])
    return stream.compress(body) + stream.flush()
