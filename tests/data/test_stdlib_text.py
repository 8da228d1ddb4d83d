from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.data import python_source
from stoker.data.stdlib_text import Corpus, PythonSource
from stoker.errors import BadJob


def library(root: Path, **files: str | bytes) -> Path:
    """A folder with files; `__` in a name is a slash."""
    for name, content in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def both(corpus: Corpus, context: int) -> tuple[PythonSource, PythonSource]:
    """Both parts of a corpus."""
    return PythonSource("train", corpus, context), PythonSource("test", corpus, context)


class Given(Corpus):
    """A corpus of given bytes, without files."""

    def __init__(self, text: bytes) -> None:
        super().__init__(Path("/nowhere"))
        self.__dict__.update(num_bytes=len(text), text=torch.frombuffer(bytearray(text), dtype=torch.uint8), files=())


def test_the_text_is_the_files_in_order_of_their_paths(tmp_path):
    """Library files one after the other; tests, installed packages, generated files and other files are left out."""
    library(
        tmp_path,
        b="bb",
        a__z="az",
        a__tests__test_a="no",
        test__support="no",
        **{"site-packages__torch": "no", "_sysconfigdata__linux_": "no", "idlelib__idle_test__x": "no"},
    )
    (tmp_path / "a" / "notes.txt").write_text("no")
    (tmp_path / "config-3.11").mkdir()
    (tmp_path / "config-3.11" / "python-config.py").write_text("no")
    corpus = Corpus(tmp_path)
    assert [(file.path, file.num_bytes) for file in corpus.files] == [("a/z.py", 2), ("b.py", 2)]
    assert bytes(corpus.text.tolist()) == b"azbb"


def test_links_are_left_out(tmp_path):
    """A link leads out of the library, to something each machine has its own of."""
    library(tmp_path, a="aa")
    (tmp_path / "link.py").symlink_to(tmp_path / "a.py")
    (tmp_path / "broken.py").symlink_to(tmp_path / "gone.py")
    assert [file.path for file in Corpus(tmp_path).files] == ["a.py"]


def test_unreadable_files_are_left_out(tmp_path):
    """What may not be read is no part of the text."""
    library(tmp_path, a="aa", b="bb")
    (tmp_path / "a.py").chmod(0)
    if os.access(tmp_path / "a.py", os.R_OK):
        pytest.skip("to the superuser every file is readable")
    assert [file.path for file in Corpus(tmp_path).files] == ["b.py"]


@given(st.binary(min_size=30, max_size=400), st.integers(1, 3))
def test_windows_tile_the_text_and_targets_are_a_byte_later(text, context):
    """Inputs in order are the part from its start; each target is its input's next byte; what is left is < T + 1."""
    sources = both(Given(text), context)
    cut = len(text) * 9 // 10
    for source, part in zip(sources, (text[:cut], text[cut:]), strict=True):
        inputs, targets = source.arrays()
        covered = len(source) * context
        assert inputs.shape == targets.shape == (len(source), context)
        assert bytes(inputs.flatten().tolist()) == part[:covered]
        assert bytes(targets.flatten().tolist()) == part[1 : covered + 1]
        assert 0 < len(part) - covered <= context


def test_inputs_and_targets_are_views_of_one_text():
    """Both arrays of both parts lie in the corpus's own memory."""
    corpus = Given(bytes(range(200)))
    storage = corpus.text.untyped_storage().data_ptr()
    for source in both(corpus, 4):
        assert {array.untyped_storage().data_ptr() for array in source.arrays()} == {storage}


def test_prepared_bytes_are_what_embeddings_take():
    """A sample is two int64 vectors, and a batch keeps its shape."""
    train, _ = both(Given(bytes(range(200))), 4)
    inputs, targets = train[1]
    assert inputs.dtype == targets.dtype == torch.int64
    assert (inputs.tolist(), targets.tolist()) == ([4, 5, 6, 7], [5, 6, 7, 8])
    assert train.prepare(train.gather(torch.tensor([2, 0])))[0].shape == (2, 4)


def test_the_limit_cuts_the_text(tmp_path):
    """With a limit the text is its first bytes, and files beyond it are not opened."""
    library(tmp_path, a="a" * 30, b="b" * 30, c="c" * 30)
    corpus = Corpus(tmp_path, 40)
    assert corpus.num_bytes == 40
    (tmp_path / "c.py").unlink()
    assert bytes(corpus.text.tolist()) == b"a" * 30 + b"b" * 10


def test_the_fingerprint_follows_what_matters(tmp_path):
    """It differs by part, context, limit and files, and agrees between equal libraries in other places."""
    one, same, other = (
        library(tmp_path / name, a="a" * 90, b="b" * last) for name, last in (("1", 90), ("2", 90), ("3", 91))
    )
    train, test = both(Corpus(one), 4)
    assert train.fingerprint == both(Corpus(same), 4)[0].fingerprint
    others = [test, both(Corpus(one), 5)[0], both(Corpus(one, 100), 4)[0], both(Corpus(other), 4)[0]]
    assert len({source.fingerprint for source in (train, *others)}) == 5


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path):
    """The text is what the length and fingerprint were computed from, or none: sizes before and now are named."""
    library(tmp_path, a="a" * 90)
    corpus = Corpus(tmp_path)
    assert corpus.num_bytes == 90
    library(tmp_path, a="a" * 80)
    with pytest.raises(BadJob, match=r"a\.py had 90 bytes a moment ago and has 80 now"):
        _ = corpus.text
    (tmp_path / "a.py").unlink()
    with pytest.raises(BadJob, match=r"a\.py cannot be read"):
        _ = corpus.text


def test_an_interpreter_without_source_is_told(tmp_path):
    """No .py files at all: the folder is named."""
    with pytest.raises(BadJob, match=f"no .py files in {tmp_path}"):
        len(both(Corpus(tmp_path), 4)[0])


def test_a_part_too_short_for_a_window_is_told(tmp_path):
    """Ten bytes for testing hold no window of ten and a target."""
    train, test = both(Corpus(library(tmp_path, a="a" * 100)), 10)
    assert len(train) == 8
    with pytest.raises(BadJob, match="python_source/test has 10 bytes; one window and the byte after it take 11"):
        len(test)


@pytest.mark.parametrize("settings", [{"context": 0}, {"context": 8, "limit_bytes": 0}])
def test_sizes_are_positive(settings):
    """A context or limit of nothing is refused."""
    with pytest.raises(BadJob, match=">= 1, got 0"):
        python_source(**settings)


def test_the_interpreters_own_library_is_text():
    """On this machine: enough of it, every window whole, and recognisably Python."""
    train, test = python_source(context=128, limit_bytes=400_000)
    assert len(train) == (360_000 - 1) // 128
    assert len(test) == (40_000 - 1) // 128
    text = bytes(train.arrays()[0].flatten().tolist())
    assert b"\ndef " in text
    assert b"import " in text
