"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest

from stoker.errors import BadJob
from stoker.serving.refusals import Unauthorized
from stoker.serving.security import KeyFile

ALICE, BOB = "alice-has-a-long-key", "bob-has-another-long-key"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two callers, one by digest and with two keys."""
    digest = hashlib.sha256(BOB.encode()).hexdigest()
    (tmp_path / "keys").write_text(f"# callers\n\nalice: {ALICE}\nbob:{digest}\nbob:{BOB}-newer\n")
    return tmp_path / "keys"


@pytest.mark.parametrize(
    ("headers", "caller"),
    [
        ({"authorization": f"Bearer {ALICE}"}, "alice"),
        ({"authorization": f"bearer  {BOB}"}, "bob"),
        ({"x-api-key": f"{BOB}-newer"}, "bob"),
        ({"x-api-key": ALICE, "authorization": "Basic eA=="}, "alice"),
    ],
)
def test_a_key_has_a_name(path: Path, headers: dict[str, str], caller: str) -> None:
    """In either header, as a key or by its digest, one of several."""
    assert KeyFile(path).authorize(headers) == caller


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": ALICE},
        {"authorization": f"Basic {ALICE}"},
        {"x-api-key": ALICE[:-1]},
        {"x-api-key": ALICE + "x"},
        {"x-api-key": hashlib.sha256(BOB.encode()).hexdigest()},
        {"x-api-key": "schlüssel-\udcff"},
    ],
)
def test_anything_else_is_refused(path: Path, headers: dict[str, str]) -> None:
    """No key, half a key, a digest instead of its key, bytes that are no text."""
    with pytest.raises(Unauthorized) as caught:
        KeyFile(path).authorize(headers)
    assert ALICE not in str(caught.value)


def test_every_key_is_compared_in_constant_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever key is presented, all digests are compared with `hmac.compare_digest`."""
    keys, calls = KeyFile(path), []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: calls.append(1) or compare(a, b))
    for key in (ALICE, BOB):
        keys.authorize({"x-api-key": key})
    assert len(calls) == 2 * 3


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has none"),
        ("# nobody\n", "has none"),
        ("alice\n", "line 1: no NAME:KEY"),
        (f"a:{ALICE}\n:{BOB}\n", "line 2: no NAME:KEY"),
        ("alice:short\n", "has 5 letters, at least 16"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, content: str, says: str) -> None:
    """The line is named, and no key is repeated."""
    (tmp_path / "keys").write_text(content)
    with pytest.raises(BadJob, match=says) as caught:
        KeyFile(tmp_path / "keys")
    assert BOB not in str(caught.value)
    with pytest.raises(BadJob, match="cannot be read"):
        KeyFile(tmp_path / "nowhere")


def test_keys_are_read_again(path: Path) -> None:
    """What is added holds, what is removed does not; where the file is damaged, the old ones do."""
    keys = KeyFile(path)
    path.write_text(f"carol:{BOB}\n")
    keys.read()
    assert keys.authorize({"x-api-key": BOB}) == "carol"
    path.write_text("")
    with pytest.raises(BadJob):
        keys.read()
    assert keys.authorize({"x-api-key": BOB}) == "carol"


def test_64_hexadecimal_digits_are_what_the_file_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A key as `openssl rand -hex 32` prints it, or a digest; where it is not said a digest, with a warning."""
    key = hashlib.sha256(b"drawn").hexdigest()
    digest = hashlib.sha256(key.encode()).hexdigest()
    path = tmp_path / "keys"
    for line in (f"ci:key:{key}", f"ci:sha256:{digest}", f"ci:{digest}"):
        path.write_text(f"{line}\n")
        assert KeyFile(path).authorize({"x-api-key": key}) == "ci"
        with pytest.raises(Unauthorized):
            KeyFile(path).authorize({"x-api-key": digest})
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2  # the last line, which was read twice
    assert "line 1: 64 hexadecimal digits are taken for the SHA-256 of the key of 'ci'" in warned[0]
    assert digest not in warned[0]


def test_a_key_with_umlauts_is_known_however_it_is_sent(tmp_path: Path) -> None:
    """Headers come decoded as Latin-1; curl sends the terminal's UTF-8, other clients Latin-1."""
    key = "schlüssel-mit-umlaut"
    (tmp_path / "keys").write_text(f"zoe:{key}\n", encoding="utf-8")
    keys = KeyFile(tmp_path / "keys")
    for sent in (key.encode("utf-8"), key.encode("latin-1")):
        assert keys.authorize({"x-api-key": sent.decode("latin-1")}) == "zoe"
