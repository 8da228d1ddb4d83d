"""Whether a request to the admin door comes from a web page of another site, by way of its user's browser.

A page may have a browser send a POST to `127.0.0.1`, and with a name that it lets point there (DNS rebinding) also read
the answers. What browsers add, and pages cannot leave out, tells such requests from those of programs.

Source: Fetch Standard, "`Origin` header"; Fetch Metadata Request Headers (W3C); RFC 9110, section 7.2 (`Host`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from stoker.serving.problems import Forbidden, WrongFormat

_FORMATS = frozenset({"application/json", "application/octet-stream", "application/x-www-form-urlencoded"})
"""Types of bodies; the last is what `curl -d` says of any."""


def refuse_cross_site(headers: Mapping[bytes, bytes], *, has_keys: bool) -> None:
    """Refuse what a page of another site may have sent.

    Args:
        headers: of the request, names in lower case.
        has_keys: whether callers have to bring a key, which no page has; without, the request must be for this machine
            by its own name: an address, or `localhost`.

    Raises:
        Forbidden: its origin is another site, or it is for a host of another name.
        WrongFormat: its body is of a type that pages may send and clients do not.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").partition("://")[2] != host:
        raise Forbidden("this port takes no requests from web pages of other sites (Origin)")
    if headers.get(b"sec-fetch-site", b"none") not in {b"none", b"same-origin"}:
        raise Forbidden("this port takes no requests from web pages of other sites (Sec-Fetch-Site)")
    if not has_keys and host and not _is_own(host):
        raise Forbidden("this port is for this machine: ask it as localhost or 127.0.0.1, or give it --admin-keys")
    kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if kind and kind not in _FORMATS:
        raise WrongFormat("this port takes bodies of the type application/json")


def _is_own(host: str) -> bool:
    """Whether a `Host` is an address, or localhost: names are what somebody else may point here."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
