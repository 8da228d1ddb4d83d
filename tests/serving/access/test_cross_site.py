"""Requests that a web page has a browser send."""

from __future__ import annotations

import pytest

from stoker.serving.refusals import Forbidden, WrongFormat
from stoker.serving.security import refuse_cross_site


@pytest.mark.parametrize(
    "headers",
    [
        {b"host": b"127.0.0.1:8002"},
        {b"host": b"localhost:8002"},
        {b"host": b"LOCALHOST"},
        {b"host": b"[::1]:8002"},
        {b"host": b"10.0.0.7:8002"},
        {},
        {b"host": b"localhost:8002", b"origin": b"http://localhost:8002", b"sec-fetch-site": b"same-origin"},
        {b"host": b"localhost:8002", b"content-type": b"application/json; charset=utf-8"},
        {b"host": b"localhost:8002", b"content-type": b"application/x-www-form-urlencoded"},
    ],
)
def test_programs_and_own_pages_may_ask(headers: dict[bytes, bytes]) -> None:
    """curl, Prometheus, a port that Kubernetes forwards: by an address or as localhost."""
    refuse_cross_site(headers, has_keys=False)
    refuse_cross_site(headers, has_keys=True)


@pytest.mark.parametrize(
    "headers",
    [
        {b"origin": b"https://evil.example"},
        {b"origin": b"null"},
        {b"origin": b"http://localhost:8000"},
        {b"origin": b"http://localhost:8002.evil.example"},
        {b"sec-fetch-site": b"cross-site"},
        {b"sec-fetch-site": b"same-site"},
    ],
)
def test_pages_of_other_sites_may_not(headers: dict[bytes, bytes]) -> None:
    """Whether or not callers need keys: a browser may have stored one."""
    for has_keys in (False, True):
        with pytest.raises(Forbidden, match="web pages of other sites"):
            refuse_cross_site({b"host": b"localhost:8002", **headers}, has_keys=has_keys)


@pytest.mark.parametrize("host", [b"rebound.evil.example", b"evil.example:8002", b"localhost.evil.example", b"[::1"])
def test_a_name_that_points_here_may_not(host: bytes) -> None:
    """A page's own name, made to mean this machine; where keys are needed a server may have names."""
    if host != b"[::1":
        with pytest.raises(Forbidden, match="localhost"):
            refuse_cross_site({b"host": host}, has_keys=False)
    refuse_cross_site({b"host": host}, has_keys=True)


@pytest.mark.parametrize("kind", [b"text/plain", b"multipart/form-data; boundary=x", b"TEXT/PLAIN;charset=UTF-8"])
def test_bodies_that_pages_send_without_asking_are_refused(kind: bytes) -> None:
    """Browsers ask a server before they send JSON elsewhere, and not before these."""
    with pytest.raises(WrongFormat, match="application/json"):
        refuse_cross_site({b"host": b"localhost", b"content-type": kind}, has_keys=True)
