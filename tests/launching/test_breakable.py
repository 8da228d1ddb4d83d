from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, HashStore, PrefixStore

from stoker.launching.breakable import Breakable


def test_it_is_the_store_behind_it() -> None:
    """Whatever is set is found by others, under the same names, through PyTorch's own prefixes as well."""
    behind = HashStore()
    store = Breakable(behind, lambda: False)
    named = PrefixStore("a", store)
    named.set("k", "v")
    assert behind.get("a/k") == b"v"
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
    store = Breakable(HashStore(), is_broken.is_set)
    store.set("here", "1")
    threading.Timer(0.1, is_broken.set).start()
    with pytest.raises(DistStoreError, match="lost while this one waited for a/missing"):
        PrefixStore("a", store).get("missing")
    assert store.get("here") == b"1"


def test_a_wait_ends_when_its_time_is_over() -> None:
    """As PyTorch's own would."""
    store = Breakable(HashStore(), lambda: False)
    with pytest.raises(DistStoreError, match=r"timed out after 0.05 s waiting for missing"):
        store.wait(["missing"], timedelta(seconds=0.05))
