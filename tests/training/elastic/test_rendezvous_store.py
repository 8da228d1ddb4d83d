from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistStoreError, HashStore, PrefixStore

from stoker.errors import BadJob, RunFailed
from stoker.training.elastic.rendezvous_store import AuthenticatedStore, agreed_key, launched_secret, proof

KEY = b"0" * 32


def test_it_is_the_store_behind_it() -> None:
    """Whatever is set is found by others, under the same names, through PyTorch's own prefixes as well."""
    behind = HashStore()
    store = AuthenticatedStore(behind, KEY, lambda: False)
    named = PrefixStore("a", store)
    named.set("k", "v")
    assert behind.get("a/k")[32:] == b"v"
    assert (named.get("k"), named.multi_get(["k"]), named.check(["k"]), named.check(["l"])) == (
        b"v",
        [b"v"],
        True,
        False,
    )
    assert (named.add("n", 2), named.add("n", 3)) == (2, 5)
    assert (named.compare_set("k", "v", "w"), named.get("k")) == (b"w", b"w")
    assert named.num_keys() == store.num_keys() == behind.num_keys()
    assert named.delete_key("k")
    assert not behind.check(["a/k"])


def test_a_wait_ends_when_the_generation_is_broken() -> None:
    """It would have lasted for minutes; what is there already is read all the same."""
    is_broken = threading.Event()
    store = AuthenticatedStore(HashStore(), KEY, is_broken.is_set)
    store.set("here", "1")
    threading.Timer(0.1, is_broken.set).start()
    with pytest.raises(DistStoreError, match="lost while this one waited for a/missing"):
        PrefixStore("a", store).get("missing")
    assert store.get("here") == b"1"


def test_a_wait_ends_when_its_time_is_over() -> None:
    """As PyTorch's own would."""
    store = AuthenticatedStore(HashStore(), KEY, lambda: False)
    with pytest.raises(DistStoreError, match=r"timed out after 0.05 s waiting for missing"):
        store.wait(["missing"], timedelta(seconds=0.05))


def test_what_was_tampered_with_is_refused() -> None:
    """A value of a stranger, one byte changed, one of another key, one of an older generation."""
    behind = HashStore()
    store = AuthenticatedStore(behind, KEY)
    store.set("1/facts", "old")
    store.set("2/facts", "new")
    old, new = behind.get("1/facts"), behind.get("2/facts")
    for forged in (b"", b"new", new[:-1] + b"W", old, proof(b"1" * 32, b"2/facts", b"new") + b"new"):
        behind.set("2/facts", forged)
        for read in (lambda: store.get("2/facts"), lambda: store.multi_get(["2/facts"])):
            with pytest.raises(DistStoreError, match="2/facts in the store was not written by a process that knows"):
                read()
    assert store.get("1/facts") == b"old"


def test_a_proof_of_an_earlier_run_proves_nothing() -> None:
    """Keys depend on fresh nonces of all: who replays what a process once said is found out."""
    keys: list[bytes] = []
    earlier = HashStore()
    threads = [
        threading.Thread(target=lambda rank=rank: keys.append(agreed_key(earlier, b"s", "1", rank, 2, 10.0)))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert keys[0] == keys[1]
    now = HashStore()
    for name in ("1/nonce/1", "1/proof/1"):
        now.set(name, earlier.get(name))
    with pytest.raises(RunFailed, match="what answers as rank 1 does not know this run's secret"):
        agreed_key(now, b"s", "1", 0, 2, 10.0)


def test_a_secret_is_the_users_own(tmp_path: Path) -> None:
    """Given, or made once in a file that others cannot read; one that is short, or open to others, is refused."""
    assert launched_secret({"STOKER_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"
    with pytest.raises(BadJob, match="has 5 characters; at least 16"):
        launched_secret({"STOKER_SECRET": "short"})
    environ = {"STOKER_CACHE": str(tmp_path)}
    secret = launched_secret(environ)
    assert (len(secret), launched_secret(environ)) == (64, secret)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(BadJob, match="can be read or was written by others"):
        launched_secret(environ)
