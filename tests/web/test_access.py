from __future__ import annotations

import asyncio
import base64
import hashlib
from pathlib import Path

import pytest

from stoker.web.access import LOADER
from tests.web.browser import PORT, TOKEN, ask, asked, ui_of


def test_nothing_is_answered_without_the_token(tmp_path: Path) -> None:
    """Neither pages nor documents nor files."""
    for address in ("/", "/api/runs", "/static/app.js", "/api/events", f"/?token={TOKEN[:-1]}"):
        answer = ask(ui_of(tmp_path), address, token=None)
        assert answer.status == 401, address
        assert TOKEN.encode() not in answer.body


def test_the_token_in_the_address_becomes_a_cookie(tmp_path: Path) -> None:
    """It leaves the address, and no script can read it, nor another site send it."""
    answer = ask(ui_of(tmp_path), f"/run/a%22b?token={TOKEN}", token=None)
    assert answer.status == 200
    cookie = answer.headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", f"stoker-ui-{PORT}="))
    assert TOKEN.encode() not in answer.body
    assert b'url=/run/a%22b"' in answer.body
    assert ask(ui_of(tmp_path), "/api/runs", token=None, cookie=cookie.partition(";")[0]).status == 200
    assert ask(ui_of(tmp_path), "/api/runs", token=None, cookie=f"stoker-ui-{PORT}=wrong; x=\x01").status == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8420", "localhost.evil:8420", ""]
)
def test_other_hosts_are_refused(tmp_path: Path, host: str) -> None:
    """A name that was made to resolve to this machine (DNS rebinding) gets nothing, even with the token."""
    assert ask(ui_of(tmp_path), "/api/runs", host=host).status == 403


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:8420"])
def test_this_machine_is_accepted_through_any_port(tmp_path: Path, host: str) -> None:
    """As through `ssh -L`."""
    assert ask(ui_of(tmp_path), "/api/runs", host=host).status == 200


def test_requests_from_other_sites_are_refused(tmp_path: Path) -> None:
    """By what browsers say of them, which pages cannot leave out; a link from elsewhere may be followed."""
    ui = ui_of(tmp_path, allows_changes=True)
    assert ask(ui, "/api/runs", origin="https://evil.example").status == 403
    assert ask(ui, "/api/runs", sec_fetch_site="cross-site").status == 403
    assert ask(ui, "/api/runs", sec_fetch_site="same-site", sec_fetch_mode="cors").status == 403
    assert ask(ui, "/", sec_fetch_site="cross-site", sec_fetch_mode="navigate").status == 200
    json = {"method": "POST", "content_type": "application/json"}
    assert ask(ui, "/api/do/stop?run=x", **json, origin="null").status == 403
    assert ask(ui, "/api/do/stop?run=x", **json, sec_fetch_site="cross-site", sec_fetch_mode="navigate").status == 403
    assert ask(ui, "/api/do/stop?run=x", method="POST", content_type="text/plain").status == 415


def test_the_page_changes_nothing_unless_it_was_allowed(tmp_path: Path) -> None:
    """Every POST is refused without --control; other methods always."""
    post = {"method": "POST", "content_type": "application/json"}
    assert b"--control" in ask(ui_of(tmp_path), "/api/do/annotate?run=x", **post).body
    assert ask(ui_of(tmp_path, allows_changes=True), "/api/do/annotate?run=x", **post).status == 409
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert ask(ui_of(tmp_path, allows_changes=True), "/api/runs", method=method).status == 405


def test_the_policy_names_the_one_script(tmp_path: Path) -> None:
    """No script runs but the page's own; answers that are no page may do nothing at all."""
    answer = ask(ui_of(tmp_path), "/")
    policy = answer.headers["content-security-policy"]
    digest = base64.b64encode(hashlib.sha256(LOADER.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}' 'strict-dynamic'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.replace("style-src-attr 'unsafe-inline'", "")
    assert f"<script>{LOADER}</script>".encode() in answer.body
    assert answer.body.count(b"<script") == 1
    for address in ("/api/runs", "/static/app.js", "/api/run?run=none"):
        found = ask(ui_of(tmp_path), address)
        assert "default-src 'none'" in found.headers["content-security-policy"], address
        assert found.headers["x-content-type-options"] == "nosniff"


def test_only_the_page_s_own_files_are_files(tmp_path: Path) -> None:
    """Names that lead elsewhere find nothing."""

    async def statuses() -> list[int]:
        application = ui_of(tmp_path).application()
        names = (
            "app.js",
            "page.css",
            "colours.css",
            "../server.py",
            "..%2fserver.py",
            "vendor/../app.js",
            "/etc/passwd",
            "",
        )
        return [(await asked(application, f"/static/{name}")).status for name in names]

    assert asyncio.run(statuses()) == [200, 200, 200, 404, 404, 404, 404, 404]
