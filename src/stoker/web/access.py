"""Who may use the page: this machine's user, by a token; what a browser may do with it, by headers.

A web page elsewhere can make a browser ask `127.0.0.1`, and read the answer through a name that resolves there (DNS
rebinding). So every request needs the token, the `Host` must be this machine's own name for itself, and what changes
something must come from the page itself. Scripts: only the one in the page whose SHA-256 the policy names, and modules
that it imports; nothing that a record holds can become one.

Source: W3C, Content Security Policy Level 3, 6.7.1.1 (`strict-dynamic`) and 6.7.3 (hashes); Trusted Types; RFC 6265bis,
5.2 (`SameSite`); Fetch Metadata Request Headers.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import html
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, quote

from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.serving.security import is_own_host

LOADER = """
const address = "/static/app.js";
const policy = window.trustedTypes?.createPolicy("stoker-loader", { createScriptURL: () => address });
const script = document.createElement("script");
script.type = "module";
script.src = policy ? policy.createScriptURL(address) : address;
document.head.append(script);
for (const name of ["api", "dom", "format", "runs"]) {
  const link = document.createElement("link");
  link.rel = "modulepreload";
  link.href = `/static/${name}.js`;
  document.head.append(link);
}
"""
"""The one inline script: what it loads may run (`strict-dynamic`), an element that a parser made may not."""


def content_policy() -> str:
    """The content security policy of the page."""
    digest = base64.b64encode(hashlib.sha256(LOADER.encode()).digest()).decode()
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{digest}' 'strict-dynamic'",
            "style-src 'self'",
            "style-src-attr 'unsafe-inline'",
            "img-src 'self' data:",
            "connect-src 'self'",
            "font-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types stoker stoker-loader",
        )
    )


_NOTHING = "default-src 'none'; frame-ancestors 'none'; sandbox"
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class Access:
    """ASGI middleware: refuses requests without the token, under another host's name, or from another site.

    Args:
        application: what is asked for everything else.
        token: the secret.
        port: of the server; part of the cookie's name, since cookies are shared by the ports of a host.
        allows_changes: whether POST is taken at all.
    """

    def __init__(self, application: ASGIApp, *, token: str, port: int, allows_changes: bool) -> None:
        self._application, self._token, self._allows_changes = application, token, allows_changes
        self._cookie = f"stoker-ui-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._application(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                policy = {} if b"content-security-policy" in present else {"content-security-policy": _NOTHING}
                fresh = {} if b"cache-control" in present else {"cache-control": "no-store"}
                added = (_HEADERS | policy | fresh).items()
                message["headers"] = [*message["headers"], *((n.encode(), v.encode()) for n, v in added)]
            await send(message)

        refusal = self._refusal(scope, headers)
        if refusal is None and (answer := self._entrance(scope, headers)) is not None:
            refusal = answer
        await (self._application if refusal is None else refusal)(scope, receive, guarded)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> Response | None:
        """Why a request is refused before its token is looked at; None for a good one."""
        host = headers.get("host", "")
        if not is_own_host(host):
            return _refused(403, "This page answers to 127.0.0.1 and localhost only.")
        method = scope["method"]
        if method not in ("GET", "HEAD", "POST"):
            return _refused(405, "Only GET and POST are known.")
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        if origin is not None and origin.partition("://")[2] != host:
            return _refused(403, "This page takes no requests from other sites.")
        navigates = headers.get("sec-fetch-mode") == "navigate" and method == "GET"
        if site not in ("none", "same-origin") and not navigates:
            return _refused(403, "This page takes no requests from other sites.")
        if method == "POST":
            if not self._allows_changes:
                return _refused(403, "This page is read-only; start it with --control to stop and resume runs.")
            if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
                return _refused(415, "Bodies are application/json.")
        return None

    def _entrance(self, scope: Scope, headers: dict[str, str]) -> Response | None:
        """The answer to a request that brings its token in the address, or has none; None for one that may pass."""
        if self._is_right(headers.get("authorization", "").removeprefix("Bearer ")):
            return None
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if given:
            if not self._is_right(given):
                return _refused(401, "The token is wrong: stoker ui has printed the address with the right one.")
            # Not a redirect: after a link from another site a browser would follow it without the new cookie.
            where = html.escape(quote(scope["path"] or "/"), quote=True)
            answer = HTMLResponse(
                f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={where}">'
                f'<title>Stoker</title><a href="{where}">Stoker</a>',
                headers={"content-security-policy": "default-src 'none'; frame-ancestors 'none'"},
            )
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            return answer
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            cookie = None
        if cookie is not None and self._is_right(cookie.value):
            return None
        return _refused(401, "This page needs its token: open the address that stoker ui has printed.")

    def _is_right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode())


def _refused(status: int, why: str, **more: Any) -> Response:
    return Response(f"{why}\n", status, media_type="text/plain; charset=utf-8", **more)
