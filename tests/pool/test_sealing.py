from __future__ import annotations

import os
from pathlib import Path

from stoker.pool.sealing import seal, unseal


def test_a_sealed_file_is_read_with_its_own_key_alone(tmp_path: Path) -> None:
    """Of more than one part; equal files have keys, and bytes, of their own."""
    content = os.urandom((1 << 20) + 7)
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.write_bytes(content)
    keys = [seal(path) for path in paths]
    sealed = [path.read_bytes() for path in paths]
    assert len({*keys}) == len({content, *sealed}) - 1 == 2
    assert [len(one) for one in sealed] == [len(content)] * 2
    unseal(paths[0], keys[1])
    assert paths[0].read_bytes() != content
    unseal(paths[1], keys[1])
    assert paths[1].read_bytes() == content
