import hashlib
import os
import threading

import pytest

from stoker.errors import BadRun
from stoker.launching.bundle import Bundle, TreeFile
from stoker.pool.blob_tree import (
    TreeEntry,
    TreeIndex,
    TreeLimits,
    pack_bundles,
    pack_folder,
    plain_names,
    read_index,
    read_member,
    unpack,
)
from stoker.records.codec import dumps

LIMITS = TreeLimits(num_bytes=1 << 20, files=100)


@pytest.fixture
def folder(tmp_path):
    """A folder as a job may leave it: files, links to files of the owner, a pipe, a socket's place, folders."""
    (tmp_path / "owner").write_text("secret")
    root = tmp_path / "run"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "a.json").write_text("{}")
    (root / "deep" / "er" / "b.bin").write_bytes(bytes(range(256)) * 300)
    (root / "link").symlink_to(tmp_path / "owner")
    (root / "deep" / "outside").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    return root


def test_a_folder_comes_back_as_it_was(folder, tmp_path):
    """Files and their contents; no link, no pipe, nothing of the owner's."""
    names = plain_names(folder)
    assert sorted(names) == ["a.json", "deep/er/b.bin"]
    index = pack_folder(
        folder, [*names, "link", "pipe", "deep/outside/owner", "../owner", "gone"], tmp_path / "t", LIMITS
    )
    assert [entry.path for entry in index.entries] == ["a.json", "deep/er/b.bin"]
    unpack(tmp_path / "t", tmp_path / "there", LIMITS)
    assert sorted(plain_names(tmp_path / "there")) == sorted(names)
    assert (tmp_path / "there/deep/er/b.bin").read_bytes() == (folder / "deep/er/b.bin").read_bytes()
    assert read_member(tmp_path / "t", "a.json", LIMITS) == b"{}"
    assert read_member(tmp_path / "t", "none", LIMITS) is None


def test_bundles_bring_links_and_programs(tmp_path):
    """The code of a job links to its data; the receiver of an order takes links, and no other reader does."""
    code = Bundle(kind="code", name="job.py", files=(TreeFile(path="rows.csv", link="../../data/x/rows.csv"),))
    program = TreeFile(
        path="tool", num_bytes=2, digest=hashlib.sha256(b"#!").hexdigest(), content=b"#!", is_executable=True
    )
    data = Bundle(kind="data", name="rows", files=(program,))
    pack_bundles((code, data), tmp_path / "t")
    unpack(tmp_path / "t", tmp_path / "there", TreeLimits(num_bytes=10, has_links=True))
    assert str((tmp_path / "there" / code.folder / "rows.csv").readlink()) == "../../data/x/rows.csv"
    assert os.access(tmp_path / "there" / data.folder / "tool", os.X_OK)
    with pytest.raises(BadRun, match="is a link, and only files are taken"):
        unpack(tmp_path / "t", tmp_path / "again", LIMITS)


def tree(tmp_path, entries, content=b"", *, index=None):
    """A blob with such an index, from any sender."""
    text = (dumps(TreeIndex(entries=tuple(entries)), indent=None) if index is None else index).encode()
    path = tmp_path / "made"
    path.write_bytes(content + text + len(text).to_bytes(8, "little"))
    return path


def file(path, content=b"x", offset=0, **changes):
    """An entry of a file."""
    settings = {
        "path": path,
        "offset": offset,
        "num_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    return TreeEntry(**(settings | changes))


BOMBS = {
    "leads out": ([file("../x")], b"x", "no path below"),
    "is absolute": ([file("/etc/x")], b"x", "no path below"),
    "has an empty part": ([file("a//b")], b"x", "no path below"),
    "is too deep": ([file("/".join("d" * 60))], b"x", "no path below"),
    "is there twice": ([file("a"), file("a", offset=1)], b"xx", "twice"),
    "is reached through a link": ([TreeEntry(path="a", link="/etc"), file("a/passwd")], b"x", "through a link"),
    "lies below a file": ([file("a"), file("a/b", offset=1)], b"xx", "below a file"),
    "says more than was sent": ([file("a", b"x" * 9)], b"x", "9 bytes, and 1 were sent"),
    "says one content many times": ([file(f"{n}") for n in range(50)], b"x", "does not follow"),
    "says more than is taken": ([file("a", num_bytes=1 << 40)], b"x", "at most 1.0 MiB are taken"),
    "has too many files": ([file(f"{n}", b"", n, num_bytes=0) for n in range(101)], b"", "101 files"),
    "is another content": ([file("a", b"y")], b"x", "not what its index says"),
    "has no digest": ([file("a", sha256="0")], b"x", "has no digest"),
    "has a size below zero": ([file("a", num_bytes=-1)], b"x", "does not follow"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_tree_is_refused(tmp_path, name):
    """Paths out of the folder, bombs and false sizes are refused with the reason; nothing is written elsewhere."""
    entries, content, why = BOMBS[name]
    path = tree(tmp_path, entries, content)
    with pytest.raises(BadRun, match=why):
        unpack(path, tmp_path / "there", TreeLimits(num_bytes=1 << 20, files=100, has_links=True))
    assert sorted(one.name for one in tmp_path.iterdir()) in (["made"], ["made", "there"])


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 40, b"{}" + (2).to_bytes(8, "little")])
def test_what_is_no_tree_is_refused(tmp_path, content):
    """Whatever bytes come, the answer is a sentence."""
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(BadRun, match="index"):
        read_index(tmp_path / "t", LIMITS)


def test_an_index_nested_without_end_is_refused(tmp_path):
    """Deeply nested JSON is no index."""
    path = tree(tmp_path, [], index='{"entries":' + "[" * 5000 + "]" * 5000 + "}")
    with pytest.raises(BadRun, match="cannot be read"):
        read_index(path, LIMITS)


def test_more_than_the_limits_is_not_packed(folder, tmp_path):
    """A job that leaves more files or bytes than it may does not fill the owner's disk with copies."""
    with pytest.raises(BadRun, match="more than 64"):
        pack_folder(folder, plain_names(folder), tmp_path / "t", TreeLimits(num_bytes=64))
    with pytest.raises(BadRun, match="more than 1 files"):
        pack_folder(folder, plain_names(folder), tmp_path / "t", TreeLimits(num_bytes=1 << 20, files=1))
    for number in range(200):
        (folder / f"f{number}").touch()
    with pytest.raises(BadRun, match="more than 100 files"):
        plain_names(folder, most=100)


def test_a_file_that_grows_while_it_is_read_is_sent_as_it_was_hashed(folder, tmp_path):
    """What is stored has the digest that the index says, whatever the job does in that time."""
    growing, done = folder / "growing", threading.Event()
    growing.write_bytes(b"0" * 100_000)

    def grow():
        with growing.open("ab") as out:
            while not done.is_set():
                out.write(b"1" * 1000)
                out.flush()

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        index = pack_folder(folder, ["growing"], tmp_path / "t", TreeLimits(num_bytes=1 << 30))
    finally:
        done.set()
        thread.join()
    unpack(tmp_path / "t", tmp_path / "there", TreeLimits(num_bytes=1 << 30))
    content = (tmp_path / "there" / "growing").read_bytes()
    assert hashlib.sha256(content).hexdigest() == index.entries[0].sha256
