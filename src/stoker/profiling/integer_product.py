"""The device's side of a proof of hardware: an exact integer matrix product that fills memory, and digests of its rows.

What: entries of A [N, K] and B [K, N] follow from a seed and are whole numbers from -8 to 8; every entry of C = A B is
then exact in fp32, whatever the order of summation, since no partial sum reaches 2^24. C stays in the device's memory.
`row_digests` reads all of it. The other side is `stoker.pool.hardware_proof`, which knows the same formulas in NumPy.
Costs: 2 N² K FLOP, and 4 (N² + 2 N K) bytes.

`python -m stoker.profiling.integer_product` answers requests, a line of JSON each, on standard input.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import time

import torch

PRIME = 2**31 - 1
LARGEST = 8
_CHUNK = 1 << 22


def entries(seed: int, first_row: int, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Rows of the seeded matrix: whole numbers from -8 to 8, as fp32 [rows, columns]."""
    i = torch.arange(first_row, first_row + rows, dtype=torch.int64, device=device)[:, None]
    j = torch.arange(columns, dtype=torch.int64, device=device)[None, :]
    x = (i * 0x9E3779B1 + j * 0x85EBCA77 + seed) % PRIME
    x = x * x % PRIME
    x = (x ^ (x >> 13)) % PRIME
    x = x * x % PRIME
    return ((x >> 7) % (2 * LARGEST + 1) - LARGEST).to(torch.float32)


def seeded_matrix(seed: int, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """The whole matrix, made in parts, whose temporaries take little memory."""
    whole = torch.empty(rows, columns, dtype=torch.float32, device=device)
    step = max(1, _CHUNK // columns)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        whole[first : first + count] = entries(seed, first, count, columns, device)
    return whole


class ProductHolder:
    """A and B, and their product C, on a device."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._product = torch.empty(0)

    def multiply(self, seed: int, n: int, k: int) -> float:
        """Make and keep C; the time of the product [s]."""
        self._product = torch.empty(n, n, dtype=torch.float32, device=self._device)
        a = seeded_matrix(seed, n, k, self._device)
        b = seeded_matrix(seed + 1, k, n, self._device)
        self._wait()
        began = time.perf_counter()
        torch.mm(a, b, out=self._product)
        self._wait()
        return time.perf_counter() - began

    def row_digests(self, salt: int) -> bytes:
        """A digest of each row that depends on every entry and on `salt`, as int64, little-endian."""
        n = self._product.shape[1]
        weights = salts(salt, n, self._device)
        digests = []
        step = max(1, _CHUNK // n)
        for first in range(0, self._product.shape[0], step):
            row = self._product[first : first + step].to(torch.int64)
            squares = row * row % PRIME
            digests.append(((squares * weights % PRIME).sum(1) % PRIME).cpu())
        return torch.cat(digests).numpy().astype("<i8").tobytes()

    def rows(self, indices: list[int]) -> bytes:
        """Rows of C as int32, little-endian, one after another."""
        return self._product[indices].to(torch.int32).cpu().numpy().astype("<i4").tobytes()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def salts(salt: int, n: int, device: torch.device) -> torch.Tensor:
    """A weight for each column from 0 to 2^31 - 2, as int64 [n]."""
    j = torch.arange(n, dtype=torch.int64, device=device)
    x = (j * 0xC2B2AE3D + salt) % PRIME
    x = x * x % PRIME
    return (x ^ (x >> 11)) % PRIME


def main() -> None:
    """Answer requests until standard input ends."""
    holder: ProductHolder | None = None
    digests = {"first": b"", "salted": b""}
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, object] = {}
        try:
            if request["ask"] == "multiply":
                torch.backends.cuda.matmul.allow_tf32 = False
                holder = ProductHolder(request["device"])
                answer["product_s"] = holder.multiply(request["seed"], request["n"], request["k"])
                digests["first"] = holder.row_digests(request["seed"])
                answer["root"] = hashlib.sha256(digests["first"]).hexdigest()
            elif holder is not None and request["ask"] == "salt":
                digests["salted"] = holder.row_digests(request["salt"])
                answer["root"] = hashlib.sha256(digests["salted"]).hexdigest()
            elif holder is not None and request["ask"] == "rows":
                answer["rows"] = base64.b64encode(holder.rows(request["rows"])).decode()
                answer |= {name: base64.b64encode(content).decode() for name, content in digests.items()}
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as problem:
            answer["problem"] = str(problem).splitlines()[0][:200]
        print(json.dumps(answer), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
