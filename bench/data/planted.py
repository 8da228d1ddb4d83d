"""Data sets with planted faults: what `stoker data check` has to find, of every kind, and where."""

from __future__ import annotations

import csv
import io
import json
import random
import shutil
import struct
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageEnhance

from stoker.records.data_check import Fault, Finding

CLASSES = ("circle", "cross", "square", "stripes")
_SIDE = 64


@dataclass(frozen=True)
class Planted:
    """A fault that was put in, and the names it may be told under: of a pair either, of a column its place."""

    fault: Fault
    places: tuple[str, ...]
    how: str


def is_found(planted: Planted, findings: Iterable[Finding]) -> bool:
    """Whether one of the findings is this fault at one of its places."""
    return any(one.fault == planted.fault and {one.id, one.where} & set(planted.places) for one in findings)


def false_alarms(planted: Iterable[Planted], findings: Iterable[Finding]) -> list[Finding]:
    """Findings, notes left out, that nothing planted explains."""
    explained = {(one.fault, place) for one in planted for place in one.places}
    return [
        one
        for one in findings
        if one.gravity != "note" and not {(one.fault, one.id), (one.fault, one.where)} & explained
    ]


# --------------------------------------------------------------------------------------------------------------- images


def plant_images(root: Path, *, per_class: int = 60, copies: int = 3, seed: int = 0) -> list[Planted]:
    """`root/train` and `root/test` with a folder per class; each kind of fault `copies` times where it can be."""
    draw = random.Random(seed)
    for split, count in (("train", per_class), ("test", per_class // 4)):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                picture_of(name, draw).save(root / split / name / f"{number:05d}.png")
    planted: list[Planted] = []
    for turn in range(copies):
        planted += _damaged(root, draw, turn)
        planted += _odd(root, draw, turn)
        planted += _repeated(root, turn)
        planted += _mislabelled(root, draw, turn)
    (root / "train" / "hexagon").mkdir()
    (root / "test" / "arrow").mkdir()
    picture_of("cross", draw).save(root / "test" / "arrow" / "one.png")
    (root / "train" / "Thumbs.db").write_bytes(b"\xd0\xcf\x11\xe0")
    return [
        *planted,
        Planted("empty-class", ("train/hexagon",), "a folder without a file"),
        Planted("unknown-class", ("test/arrow",), "a class of the test split alone"),
        Planted("foreign", ("train/Thumbs.db",), "a file of the system's"),
    ]


def picture_of(name: str, draw: random.Random) -> Image.Image:
    """A shape on a background of soft colours, with its own place, size and shades; RGB, 64 × 64."""
    coarse = np.array([[[draw.randint(40, 215) for _ in range(3)] for _ in range(5)] for _ in range(5)], np.uint8)
    image = Image.fromarray(coarse).resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)
    pen, ink = ImageDraw.Draw(image), tuple(draw.choice((0, 255)) for _ in range(3))
    centre, size = [draw.randint(24, 40) for _ in range(2)], draw.randint(12, 20)
    left, top, right, bottom = centre[0] - size, centre[1] - size, centre[0] + size, centre[1] + size
    match name:
        case "circle":
            pen.ellipse((left, top, right, bottom), fill=ink)
        case "square":
            pen.rectangle((left, top, right, bottom), fill=ink)
        case "cross":
            pen.line((left, top, right, bottom), fill=ink, width=7)
            pen.line((left, bottom, right, top), fill=ink, width=7)
        case _:
            for y in range(top, bottom, 8):
                pen.line((0, y, _SIDE, y), fill=ink, width=4)
    return image


def _damaged(root: Path, draw: random.Random, turn: int) -> list[Planted]:
    folder = root / "train" / "circle"
    jpeg, png = _stored(picture_of("circle", draw), "JPEG"), _stored(picture_of("circle", draw), "PNG")
    flipped = bytearray(png)
    flipped[len(png) // 2] ^= 0x55
    cases: list[tuple[str, Fault, bytes, str]] = [
        (f"cut-{turn}.jpg", "corrupt", jpeg[: len(jpeg) * (turn + 2) // (turn + 4)], "a JPEG cut off"),
        (f"end-{turn}.jpg", "corrupt", jpeg[:-2], "a JPEG without its end marker"),
        (f"cut-{turn}.png", "corrupt", png[: len(png) * 2 // 3], "a PNG cut off"),
        (f"flipped-{turn}.png", "corrupt", bytes(flipped), "a PNG with a byte that changed"),
        (f"noise-{turn}.png", "corrupt", draw.randbytes(700), "random bytes"),
        (f"page-{turn}.jpg", "corrupt", b"<html>404 Not Found</html>", "a web page in place of an image"),
        (f"empty-{turn}.jpg", "empty", b"", "a file without bytes"),
        (f"named-{turn}.jpg", "extension", _stored(picture_of("circle", draw), "PNG"), "a PNG named .jpg"),
    ]
    for name, _, content, _ in cases:
        (folder / name).write_bytes(content)
    return [Planted(fault, (f"train/circle/{name}",), how) for name, fault, _, how in cases]


def _odd(root: Path, draw: random.Random, turn: int) -> list[Planted]:
    folder = root / "train" / "square"
    mode = ("L", "RGBA", "CMYK", "P", "1")[turn % 5]
    suffix = "jpg" if mode == "CMYK" else "png"
    size = ((64, 21), (7, 7), (300, 280))[turn % 3]
    shade = draw.randint(0, 255)
    cases: list[tuple[str, Fault, Image.Image, str]] = [
        (f"mode-{turn}.{suffix}", "mode", picture_of("square", draw).convert(mode), f"an image in mode {mode}"),
        (f"size-{turn}.png", "shape", picture_of("square", draw).resize(size), f"{size[0]} × {size[1]} pixels"),
        (f"blank-{turn}.png", "blank", Image.new("RGB", (_SIDE, _SIDE), (shade, turn, 0)), "one colour"),
    ]
    for name, _, image, _ in cases:
        image.save(folder / name)
    return [Planted(fault, (f"train/square/{name}",), how) for name, fault, _, how in cases]


def _repeated(root: Path, turn: int) -> list[Planted]:
    train, test = root / "train" / "cross", root / "test" / "cross"
    planted = []
    shutil.copy(train / f"{turn:05d}.png", train / f"again-{turn}.png")
    planted.append(_pair("duplicate", f"train/cross/{turn:05d}.png", f"train/cross/again-{turn}.png", "a copy"))
    with Image.open(train / f"{turn + 10:05d}.png") as image:
        image.save(train / f"stored-{turn}.bmp")
    stored = (f"train/cross/{turn + 10:05d}.png", f"train/cross/stored-{turn}.bmp")
    planted.append(_pair("duplicate", *stored, "the same pixels in another format"))
    shutil.copy(test / f"{turn:05d}.png", train / f"leak-{turn}.png")
    planted.append(Planted("leak", (f"train/cross/leak-{turn}.png",), "a test image in training"))
    for number, (name, change) in enumerate(CHANGES.items()):
        source = f"{turn * len(CHANGES) + number + 20:05d}.png"
        with Image.open(train / source) as image:
            change(image.convert("RGB")).save(train / f"{name}-{turn}.png")
        pair = (f"train/cross/{source}", f"train/cross/{name}-{turn}.png")
        planted.append(_pair("near-duplicate", *pair, name))
    with Image.open(test / f"{turn + 5:05d}.png") as image:
        image.convert("RGB").save(train / f"nearleak-{turn}.jpg", quality=60)
    planted.append(Planted("near-leak", (f"train/cross/nearleak-{turn}.jpg",), "a test image stored again"))
    return planted


def _pair(fault: Fault, one: str, other: str, how: str) -> Planted:
    return Planted(fault, (one, other), how)


def _through_jpeg(image: Image.Image) -> Image.Image:
    return Image.open(io.BytesIO(_stored(image, "JPEG", quality=60))).convert("RGB")


def _noisy(image: Image.Image) -> Image.Image:
    noise = np.random.default_rng(1).normal(0, 6, (image.height, image.width, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "jpeg": _through_jpeg,
    "smaller": lambda image: image.resize((48, 48), Image.Resampling.LANCZOS).resize((_SIDE, _SIDE)),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.1),
    "contrast": lambda image: ImageEnhance.Contrast(image).enhance(0.8),
    "noise": _noisy,
}
"""What a near duplicate went through."""


def _mislabelled(root: Path, draw: random.Random, turn: int) -> list[Planted]:
    shutil.copy(root / "train" / "square" / f"{turn:05d}.png", root / "train" / "stripes" / f"same-{turn}.png")
    picture_of("circle", draw).save(root / "train" / f"loose-{turn}.png")
    places = (f"train/square/{turn:05d}.png", f"train/stripes/same-{turn}.png")
    return [
        *(Planted("contradiction", (place,), "one picture in two classes") for place in places),
        Planted("unlabelled", (f"train/loose-{turn}.png",), "an image outside the classes"),
    ]


def _stored(image: Image.Image, kind: str, **options: int) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def plant_labels(root: Path, *, per_class: int = 80, wrong: int = 3, seed: int = 0) -> list[Planted]:
    """Pictures that small pixels tell apart (a bright half), `wrong` of them in another class."""
    draw = np.random.default_rng(seed)
    halves = {"left": np.s_[:, :12], "right": np.s_[:, 12:], "top": np.s_[:12, :], "bottom": np.s_[12:, :]}
    names = list(halves)
    for name in names:
        (root / name).mkdir(parents=True)
    planted = []
    for place, name in enumerate(names):
        for number in range(per_class):
            pixels = draw.normal(70, 12, (24, 24))
            pixels[halves[name]] += draw.uniform(70, 110)
            is_wrong = number < wrong
            folder = names[(place + 1) % 4] if is_wrong else name
            file = f"{folder}/{name}-{number:04d}.png"
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(root / file)
            if is_wrong:
                planted.append(Planted("suspect-label", (file,), "in the folder of another class"))
    return planted


# --------------------------------------------------------------------------------------------------- shards and arrays


def plant_shards(root: Path, *, keys: int = 40, seed: int = 0) -> list[Planted]:
    """Two shards: one with a damaged image, a key without one and a copy; one that is cut off."""
    draw = random.Random(seed)
    root.mkdir(parents=True)
    for shard in range(2):
        with tarfile.open(root / f"train-{shard:04d}.tar", "w") as archive:
            for number in range(keys):
                name = CLASSES[number % len(CLASSES)]
                content = _stored(picture_of(name, draw), "PNG")
                if (shard, number) == (0, 4):
                    first = content
                if (shard, number) == (0, 8):
                    content = first
                if (shard, number) == (0, 5):
                    content = content[: len(content) // 2]
                if (shard, number) != (0, 6):
                    _add(archive, f"{number:06d}.png", content)
                _add(archive, f"{number:06d}.cls", name.encode())
    cut = root / "train-0001.tar"
    with tarfile.open(cut) as archive:
        torn = archive.getmember(f"{keys - 8:06d}.png")
    cut.write_bytes(cut.read_bytes()[: torn.offset_data + torn.size // 2])
    return [
        Planted("corrupt", ("train-0000.tar:000005",), "an image cut off in a shard"),
        Planted("corrupt", ("train-0000.tar:000006",), "a key without an image"),
        Planted("duplicate", ("train-0000.tar:000004", "train-0000.tar:000008"), "an image twice in a shard"),
        Planted("corrupt", ("train-0001.tar",), "a shard cut off"),
        Planted("corrupt", (f"train-0001.tar:{keys - 8:06d}",), "the image in which it is cut off"),
    ]


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def plant_arrays(root: Path, *, rows: int = 120, seed: int = 0) -> list[Planted]:
    """An .npz as Keras has them: a copy, a leak, an image with NaN and one of one shade."""
    draw = np.random.default_rng(seed)
    train = draw.random((rows, 20, 20)).astype(np.float32)
    test = draw.random((rows // 4, 20, 20)).astype(np.float32)
    train[7], train[9] = train[3], test[5]
    train[11, 4, 4] = np.nan
    train[13] = 0.5
    labels = np.arange(rows) % 4
    labels[7] = labels[3]
    labels[9] = 5 % 4
    root.mkdir(parents=True)
    np.savez(root / "set.npz", x_train=train, y_train=labels, x_test=test, y_test=np.arange(rows // 4) % 4)
    return [
        Planted("duplicate", ("set.npz/x_train:3", "set.npz/x_train:7"), "a row twice"),
        Planted("leak", ("set.npz/x_train:9",), "a test row in training"),
        Planted("not-finite", ("set.npz/x_train:11",), "a row with NaN"),
        Planted("blank", ("set.npz/x_train:13",), "a row of one shade"),
    ]


def plant_idx(root: Path, *, rows: int = 60, seed: int = 0) -> list[Planted]:
    """IDX files: a copy under another label in training, and test images that are cut off."""
    draw = np.random.default_rng(seed)
    root.mkdir(parents=True)
    pixels, labels = draw.integers(0, 256, (rows, 12, 12), np.uint8), (np.arange(rows) % 3).astype(np.uint8)
    pixels[10] = pixels[2]  # labelled 1 and 2
    for name, array in (
        ("train-images-idx3-ubyte", pixels),
        ("train-labels-idx1-ubyte", labels),
        ("t10k-images-idx3-ubyte", pixels),
        ("t10k-labels-idx1-ubyte", labels),
    ):
        head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        content = head + array.tobytes()
        (root / name).write_bytes(content[:-100] if name.startswith("t10k-images") else content)
    return [
        *(Planted("contradiction", (f"train-images-idx3-ubyte:{row}",), "pixels under two labels") for row in (2, 10)),
        Planted("corrupt", ("t10k-images-idx3-ubyte",), "an IDX file cut off"),
    ]


# --------------------------------------------------------------------------------------------------------------- tables

_CITIES = ("Basel", "Bern", "Chur", "Genf", "Luzern")
_WORDS = (
    "the",
    "door",
    "was",
    "open",
    "and",
    "nobody",
    "had",
    "closed",
    "it",
    "since",
    "morning",
    "when",
    "rain",
    "began",
    "to",
    "fall",
    "over",
    "hills",
    "behind",
    "a",
    "town",
    "where",
    "people",
    "speak",
    "of",
    "little",
    "else",
    "boats",
)


def plant_csv(root: Path, *, rows: int = 600, seed: int = 0) -> list[Planted]:
    """`train.csv` and `test.csv` with numbers, a category, prose and a target `label`."""
    draw = random.Random(seed)
    root.mkdir(parents=True)
    head = ["id", "age", "weight", "city", "comment", "unit", "answer", "code", "label"]
    train = [_row(draw, number) for number in range(rows)]
    test = [_row(draw, rows + number) for number in range(rows // 3)]
    for row in (*train, *test):
        row[6], row[7] = row[8], {"no": "A7", "yes": "Q3"}[row[8]]  # the target again, and by other names
    train[3][1] = "abc"
    train[4][2] = "98000"
    train[6][2] = "inf"
    train[8][1] = ""
    train[9][4] = "   "
    train[10][4] = "one caf\u00c3\u00a9 and one more word than that, please"
    train[12][8] = ""
    train[14] = [train[14][0], *train[13][1:]]
    train[16] = [train[16][0], *test[5][1:]]
    other = "no" if train[17][8] == "yes" else "yes"
    train[18] = [train[18][0], *train[17][1:6], *train[17][6:8], other]
    test[7][3] = "Zug"
    _write(root / "train.csv", head, train)
    _write(root / "test.csv", head, test)
    lines = (root / "train.csv").read_bytes().split(b"\n")
    lines[1 + 20] += b",and,more"
    lines[1 + 21] = b",".join(lines[1 + 21].split(b",")[:3])
    lines[1 + 22] = (
        lines[1 + 22].replace(b"the", b"th\xe9", 1) if b"the" in lines[23] else lines[23].replace(b"a", b"\xe9")
    )
    (root / "train.csv").write_bytes(b"\n".join(lines))
    at = "train.csv:{}".format
    return [
        Planted("mixed-types", (at(3),), "a word among numbers"),
        Planted("outlier", (at(4),), "a number out by far"),
        Planted("not-finite", (at(6),), "an infinity"),
        Planted("missing", ("train/age",), "a missing value"),
        Planted("empty-text", (at(9),), "prose of blanks"),
        Planted("encoding", (at(10),), "UTF-8 read as Latin-1"),
        Planted("unlabelled", (at(12),), "a row without target"),
        Planted("duplicate", (at(13), at(14)), "a row twice, under two ids"),
        Planted("leak", (at(16),), "a test row in training"),
        *(Planted("contradiction", (at(row),), "equal rows with two targets") for row in (17, 18)),
        Planted("ragged", (at(20),), "a row with too many fields"),
        Planted("ragged", (at(21),), "a row with too few"),
        Planted("encoding", (at(22),), "a byte that is no UTF-8"),
        Planted("out-of-vocabulary", ("test.csv:7",), "a city that training never has"),
        Planted("constant", ("train/unit",), "a column of one value"),
        Planted("constant", ("test/unit",), "the same column in the test split"),
        Planted("missing", ("train/comment",), "the blanks count as missing"),
        Planted("target-leak", ("answer",), "the target again"),
        Planted("target-leak", ("code",), "the target by other names"),
    ]


def _row(draw: random.Random, number: int) -> list[str]:
    age, weight = draw.gauss(40, 12), draw.gauss(70, 9)
    comment = " ".join(draw.choice(_WORDS) for _ in range(9))
    return [
        str(number),
        f"{age:.1f}",
        f"{weight:.2f}",
        draw.choice(_CITIES),
        comment,
        "kg",
        "",
        "",
        draw.choice(("no", "yes")),
    ]


def _write(path: Path, head: list[str], rows: list[list[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([head, *rows])


def plant_jsonl(root: Path, *, rows: int = 300, seed: int = 0) -> list[Planted]:
    """`data.jsonl`: lines that are no JSON, no object or no UTF-8; a value of another type, an infinity, a gap."""
    draw = random.Random(seed)
    root.mkdir(parents=True)
    lines = [
        json.dumps({"size": draw.gauss(5, 1), "kind": draw.choice(_CITIES), "n": number}).encode()
        for number in range(rows)
    ]
    lines[5] = lines[5][:-4]
    lines[6] = b"[1, 2]"
    lines[7] = lines[7].replace(b'"n"', b'"n\xff"')
    lines[8] = json.dumps({"size": "large", "kind": "Bern", "n": 8}).encode()
    lines[9] = b'{"size": Infinity, "kind": "Chur", "n": 9}'
    lines[11] = json.dumps({"kind": "Chur", "n": 11}).encode()
    (root / "data.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    at = "data.jsonl:{}".format
    return [
        Planted("corrupt", (at(5),), "a line cut off"),
        Planted("corrupt", (at(6),), "a list in place of an object"),
        Planted("encoding", (at(7),), "a line that is no UTF-8"),
        Planted("mixed-types", (at(8),), "a word, no number"),
        Planted("not-finite", (at(9),), "an infinity"),
        Planted("missing", ("size",), "a key that is not there"),
    ]


def plant_parquet(root: Path, *, rows: int = 400, seed: int = 0) -> list[Planted]:
    """Three files of a split: whole, without a column, cut off; and a copy of a row."""
    draw = np.random.default_rng(seed)
    root.mkdir(parents=True)
    columns = {"a": draw.normal(size=rows), "b": draw.integers(0, 1 << 40, rows), "c": ["x", "y"] * (rows // 2)}
    columns["a"][30], columns["b"][30] = columns["a"][10], columns["b"][10]
    pq.write_table(pa.table(columns), root / "part-0.parquet")
    pq.write_table(pa.table({"a": draw.normal(size=rows), "c": ["x", "y"] * (rows // 2)}), root / "part-1.parquet")
    pq.write_table(pa.table(columns), root / "part-2.parquet")
    whole = (root / "part-2.parquet").read_bytes()
    (root / "part-2.parquet").write_bytes(whole[: len(whole) // 2])
    return [
        Planted("duplicate", ("part-0.parquet:10", "part-0.parquet:30"), "a row twice"),
        Planted("missing-column", ("part-1.parquet",), "a file without a column"),
        Planted("missing", ("b",), "its values are missing"),
        Planted("corrupt", ("part-2.parquet",), "a file cut off"),
    ]


def plant_texts(root: Path, *, files: int = 60, seed: int = 0) -> list[Planted]:
    """A folder of text per class: an empty file, one that is no UTF-8, a copy, one text in two classes."""
    draw = random.Random(seed)
    for name in ("bad", "good"):
        (root / name).mkdir(parents=True)
        for number in range(files):
            (root / name / f"{number:03d}.txt").write_text(" ".join(draw.choice(_WORDS) for _ in range(30)))
    (root / "bad" / "000.txt").write_text("")
    (root / "bad" / "001.txt").write_bytes("ein Gr\u00fcner Weg, nicht weit vom Fluss".encode("latin-1"))
    shutil.copy(root / "bad" / "002.txt", root / "bad" / "copy.txt")
    shutil.copy(root / "good" / "003.txt", root / "bad" / "both.txt")
    return [
        Planted("empty-text", ("bad/000.txt",), "an empty file"),
        Planted("encoding", ("bad/001.txt",), "a file that is no UTF-8"),
        Planted("duplicate", ("bad/002.txt", "bad/copy.txt"), "a copy"),
        *(Planted("contradiction", (place,), "one text in two classes") for place in ("good/003.txt", "bad/both.txt")),
    ]


PLANTERS: dict[str, Callable[..., list[Planted]]] = {
    "images": plant_images,
    "labels": plant_labels,
    "shards": plant_shards,
    "arrays": plant_arrays,
    "idx": plant_idx,
    "csv": plant_csv,
    "jsonl": plant_jsonl,
    "parquet": plant_parquet,
    "texts": plant_texts,
}
"""Every kind of data set."""
