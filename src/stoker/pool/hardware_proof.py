"""Proof of hardware: a device shows that it has the memory and the speed it is offered with.

What: three questions, each with an answer that the next one holds on to.

1. *Multiply.* The product C = A B of two seeded matrices of whole numbers, whose C fills the memory. The device answers
   with the digest of a list: a digest of each row of C.
2. *Salt.* A number that was not known before; the device answers with the digest of a list of salted row digests,
   which depend on the square of every entry: they cannot be had from A and B without making the row again. The time
   of this answer, against that of the product, bounds the share of C that was not in memory.
3. *Rows.* A few rows, drawn now, are sent whole. Each has to fit both lists, and Freivalds' check: row · r = a · (B r)
   for random r. A device that left out a share f of the rows passes with probability (1 - f)^rows.

It proves: 2 N² K exact operations were made within the time from question to answer, on a machine that had
`proved_bytes` at hand then. It does not prove: which device that was, that it is the offer's alone (probes at the same
moment show one that is offered twice), that it will be there tomorrow, or that anything on it is private. A machine
that is faster than its claim by a factor can stand in for more memory than it has by the same factor.

Costs: the device 2 N² K FLOP; the checker N K operations and 16 bytes a row.
Source: R. Freivalds, Probabilistic machines can use less running time, IFIP 1977.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import secrets
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from stoker.errors import PlaceFailed
from stoker.pool.control_group import ControlGroup, joining

PRIME = 2**31 - 1
LARGEST = 8
_CHUNK = 1 << 22
MOST_INNER = 1 << 17
"""Largest K: partial sums over more products may not be exact in fp32."""
_ANY_BYTES, _MOST_THREADS = 1 << 50, 1024
_MOST_CPU_BYTES = 512 << 20

Ask = Callable[[dict[str, Any]], dict[str, Any]]
"""Sends a question to the device's side and returns its answer."""
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class HardwareProof:
    """What a device has shown.

    Attributes:
        is_passed: every answer was right.
        why: in a sentence.
        flop_per_s: exact operations a second, by the checker's clock [FLOP/s]; 0 if it failed.
        proved_bytes: memory that held C when the salt came [bytes].
        product_s, salted_s: time from question to answer [s].
    """

    is_passed: bool
    why: str
    flop_per_s: float = 0.0
    proved_bytes: int = 0
    product_s: float = 0.0
    salted_s: float = 0.0


def shape_of(memory_bytes: int, inner: int = 4096) -> tuple[int, int]:
    """N and K of a product that takes `memory_bytes`: 4 (N² + 2 N K).

    >>> n, k = shape_of(80 << 30)
    >>> (80 << 30) - 4 * (n * n + 2 * n * k) < 4_000_000
    True
    """
    cells = memory_bytes // 4
    n = int(math.sqrt(cells + inner * inner)) - inner
    if n < inner:  # a square one
        n = inner = max(1, int(math.sqrt(cells / 3)))
    return n, inner


def prove_hardware(
    ask: Ask, *, memory_bytes: int, device: str = "cpu", num_rows: int = 32, clock: Callable[[], float] = time.monotonic
) -> HardwareProof:
    """Ask a device the three questions.

    Args:
        ask: sends a question and waits for the answer.
        memory_bytes: the memory it is offered with, as far as a job may have it [bytes].
        device: name in PyTorch there.
        num_rows: rows that are looked at.
        clock: time [s].
    """
    n, k = shape_of(memory_bytes)
    if k > MOST_INNER:
        raise ValueError(f"partial sums over {k} products may not be exact in fp32")
    seed, salt = secrets.randbelow(PRIME), secrets.randbelow(PRIME)
    began = clock()
    first = ask({"ask": "multiply", "device": device, "seed": seed, "n": n, "k": k})
    product_s = clock() - began
    if "problem" in first:
        return HardwareProof(is_passed=False, why=f"the product could not be made: {first['problem']}")
    began = clock()
    salted = ask({"ask": "salt", "salt": salt})
    salted_s = clock() - began
    indices = sorted(secrets.SystemRandom().sample(range(n), min(num_rows, n)))
    shown = ask({"ask": "rows", "rows": indices})
    if problem := _problem(first, salted, shown, indices, seed=seed, salt=salt, n=n, k=k):
        return HardwareProof(is_passed=False, why=problem, product_s=product_s, salted_s=salted_s)
    share = max(0.0, 1.0 - salted_s / product_s) if product_s > 0 else 0.0
    proved = int(4 * n * n * share)
    flop_per_s = 2.0 * n * n * k / product_s
    why = (
        f"{n:,} x {n:,} entries were made in {product_s:.3g} s and read in {salted_s:.3g} s; {len(indices)} rows of "
        "them were checked"
    )
    return HardwareProof(
        is_passed=True, why=why, flop_per_s=flop_per_s, proved_bytes=proved, product_s=product_s, salted_s=salted_s
    )


def probed_bytes(memory_bytes: int, *, is_cpu: bool) -> int:
    """Memory that a device fills for a proof [bytes]: 90 % of a GPU's; of a CPU's so much that it takes seconds."""
    return min(memory_bytes // 2, _MOST_CPU_BYTES) if is_cpu else int(0.9 * memory_bytes)


def prove_together(asks: Sequence[Ask], devices: Sequence[str], *, memory_bytes: int) -> HardwareProof:
    """Ask several devices at once; what the weakest of them shows, or the first that fails.

    One device that is given twice shows half of its rate each time, or has no memory for the second product.

    Args:
        asks: of each device, as in `prove_hardware`.
        devices: their names in PyTorch.
        memory_bytes: of each [bytes].
    """
    with ThreadPoolExecutor(len(asks), thread_name_prefix="stoker-proof") as threads:
        proofs = [
            *threads.map(lambda ask, name: prove_hardware(ask, memory_bytes=memory_bytes, device=name), asks, devices)
        ]
    return min(proofs, key=lambda proof: (proof.is_passed, proof.flop_per_s))


def _problem(
    first: Mapping[str, Any],
    salted: Mapping[str, Any],
    shown: Mapping[str, Any],
    indices: list[int],
    *,
    seed: int,
    salt: int,
    n: int,
    k: int,
) -> str:
    """What is wrong with the answers, as a sentence; "" for nothing."""
    try:
        lists = [base64.b64decode(shown[name], validate=True) for name in ("first", "salted")]
        rows = np.frombuffer(base64.b64decode(shown["rows"], validate=True), "<i4").reshape(len(indices), n)
    except (KeyError, ValueError, TypeError):
        return "the rows were not sent as they were asked for"
    for one, root, number in zip(lists, (first.get("root"), salted.get("root")), (seed, salt), strict=True):
        if len(one) != 8 * n or hashlib.sha256(one).hexdigest() != root:
            return "a list of row digests is not the one that was stated"
        digests = np.frombuffer(one, "<i8")
        for index, row in zip(indices, rows, strict=True):
            if row_digest(row.astype(np.int64), number) != digests[index]:
                return f"row {index:,} is not the one whose digest was stated"
    random = np.frombuffer(secrets.token_bytes(2 * n), "<u2").astype(np.int64) % 1021
    product = _times(seed + 1, k, n, random)
    for index, row in zip(indices, rows, strict=True):
        if int(row.astype(np.int64) @ random) != int(entries(seed, index, 1, k)[0] @ product):
            return f"row {index:,} is not a row of the product"
    return ""


def entries(seed: int, first_row: int, rows: int, columns: int) -> Ints:
    """Rows of the seeded matrix, whole numbers from -8 to 8 [rows, columns]; as `profiling.integer_product`."""
    i = np.arange(first_row, first_row + rows, dtype=np.int64)[:, None]
    j = np.arange(columns, dtype=np.int64)[None, :]
    x = (i * 0x9E3779B1 + j * 0x85EBCA77 + seed) % PRIME
    x = x * x % PRIME
    x = (x ^ (x >> 13)) % PRIME
    x = x * x % PRIME
    made: Ints = (x >> 7) % (2 * LARGEST + 1) - LARGEST
    return made


def row_digest(row: Ints, salt: int) -> int:
    """The salted digest of a row of C."""
    x = (np.arange(len(row), dtype=np.int64) * 0xC2B2AE3D + salt) % PRIME
    x = x * x % PRIME
    weights = (x ^ (x >> 11)) % PRIME
    return int((row * row % PRIME * weights % PRIME).sum() % PRIME)


def _times(seed: int, rows: int, columns: int, vector: Ints) -> Ints:
    """The seeded matrix times a vector, made in parts."""
    step = max(1, _CHUNK // columns)
    parts = [entries(seed, first, min(step, rows - first), columns) @ vector for first in range(0, rows, step)]
    return np.concatenate(parts)


class LocalDevice:
    """The device's side on this machine, in a process of its own that loads PyTorch; a context manager.

    `cores`: share of the CPUs that it may take, as a job may; None: all.
    """

    def __init__(self, cores: float | None = None) -> None:
        environment, command = dict(os.environ), [sys.executable, "-m", "stoker.profiling.integer_product"]
        self._group: ControlGroup | None = None
        if cores is not None:
            environment["OMP_NUM_THREADS"] = str(max(1, int(cores)))
            self._group = ControlGroup.make(
                f"stoker-{uuid.uuid4().hex[:12]}", cores=cores, memory_bytes=_ANY_BYTES, processes=_MOST_THREADS
            )
        self._process = subprocess.Popen(
            [*joining(self._group), *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def kill(self) -> None:
        """Let go of the device now; may be called in any thread. `end` is for who asks."""
        self._process.kill()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self.end()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        if self._group is not None:
            self._group.remove()

    def __call__(self, question: dict[str, Any]) -> dict[str, Any]:
        """Ask it.

        Raises:
            PlaceFailed: the process ended.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
            answer: dict[str, Any] = json.loads(stdout.readline())
        except (OSError, ValueError) as error:
            raise PlaceFailed(
                "the measurement of the device ended: it may need more memory than there is",
                remedy="Offer less memory.",
            ) from error
        return answer
