"""Direct exchange of large blobs between clients, for those that have iroh installed."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.pool.client import PoolClient
from stoker.store import cache_root

if TYPE_CHECKING:
    from stoker.pool.peer import Peer

_READY_S = 5.0
"""How long is waited for the pool's rendezvous [s]."""


def joined_peer(
    client: PoolClient, folder: Path | None = None, *, keeps: bool = False, tell: Callable[[str], None] = lambda _: None
) -> Peer | None:
    """Let a client exchange large blobs directly (`peer.Peer`), until this process ends; None: it cannot.

    `folder`: of what is kept; None: `pool/kept/KEY` in the cache.

    Raises:
        PlaceUnreachable: the pool does not answer.
        BadJob: another version of iroh is installed than the one that was tried.
    """
    pool = client.state("pool")
    if not pool.get("rendezvous"):
        return None
    try:
        from stoker.pool.peer import Peer  # noqa: PLC0415 - iroh, which few have
    except (ImportError, OSError) as problem:  # without it, or with a binary that this system cannot load
        why = f"iroh cannot be loaded here ({problem})"
        if isinstance(problem, ModuleNotFoundError):
            why = f"{problem.name} is not installed here"
        tell(
            f"large files go through the pool ({pool.get('forwarding')}), since {why}: pip install 'stoker[p2p]' lets "
            "them go directly"
        )
        return None
    assert client.key is not None
    folder = cache_root() / "pool" / "kept" / client.key.public if folder is None else folder
    peer = Peer(client, folder, keeps=keeps, tell=tell)
    atexit.register(peer.leave)
    if peer.wait_ready(_READY_S):
        nat = ": its NAT has a port for each destination, so that few reach it" if peer.network == "symmetric" else ""
        tell(
            f"large files go directly where a path exists (this network: {peer.network}{nat}), else through the pool "
            f"({pool['forwarding']})"
        )
    else:
        tell(
            f"UDP port {pool['rendezvous']['port']} of the pool does not answer yet: large files go through the pool "
            f"({pool['forwarding']})"
        )
    return peer
