import base64
import hashlib

import numpy as np
import pytest

from stoker.pool.hardware_proof import LocalDevice, entries, prove_hardware, row_digest, shape_of


class Device:
    """A device's side in NumPy, which can be made to cheat."""

    def __init__(self, cheat=""):
        self.cheat = cheat

    def __call__(self, question):
        if question["ask"] == "multiply":
            self.n, k, seed = question["n"], question["k"], question["seed"]
            self.product = entries(seed, 0, self.n, k) @ entries(seed + 1, 0, k, self.n)
            if self.cheat == "half the rows":
                self.product[::2] = 0
            if self.cheat == "no memory":
                return {"problem": "out of memory"}
            self.first = self.digests(seed)
            return {"root": hashlib.sha256(self.first).hexdigest()}
        if question["ask"] == "salt":
            self.salted = self.digests(question["salt"])
            if self.cheat == "one entry changed later":
                self.product += 1
            return {"root": hashlib.sha256(self.salted).hexdigest()}
        if self.cheat == "another list":
            self.salted = self.digests(1)
        rows = self.product[question["rows"]].astype("<i4").tobytes()
        contents = {"rows": rows, "first": self.first, "salted": self.salted}
        return {name: base64.b64encode(content).decode() for name, content in contents.items()}

    def digests(self, salt):
        return np.array([row_digest(row, salt) for row in self.product], "<i8").tobytes()


def test_an_honest_device_passes():
    """The memory and the speed are those of the product."""
    proof = prove_hardware(Device(), memory_bytes=1 << 20)
    assert proof.is_passed, proof.why
    n, k = shape_of(1 << 20)
    assert proof.flop_per_s == pytest.approx(2 * n * n * k / proof.product_s)


@pytest.mark.parametrize(
    ("cheat", "why"),
    [
        ("half the rows", "not a row of the product"),
        ("no memory", "could not be made"),
        ("one entry changed later", "not the one whose digest was stated"),
        ("another list", "not the one that was stated"),
    ],
)
def test_a_device_that_cheats_fails(cheat, why):
    """Rows left out, too little memory, rows made after the salt: each is found, and said."""
    proof = prove_hardware(Device(cheat), memory_bytes=1 << 20)
    assert not proof.is_passed
    assert why in proof.why
    assert proof.flop_per_s == proof.proved_bytes == 0


def test_rows_made_again_after_the_salt_prove_no_memory():
    """The slower the salted answer is against the product, the less memory counts as proved."""
    times = iter([0.0, 10.0, 10.0, 19.0])
    proof = prove_hardware(Device(), memory_bytes=1 << 20, clock=lambda: next(times))
    n, _ = shape_of(1 << 20)
    assert proof.is_passed
    assert proof.proved_bytes == pytest.approx(4 * n * n * 0.1, abs=4)


def test_entries_are_small_whole_numbers_of_no_low_rank():
    """The matrix cannot be had as the product of two small ones, and its entries are all values from -8 to 8."""
    made = entries(4711, 0, 300, 300)
    assert set(np.unique(made)) == set(range(-8, 9))
    assert np.linalg.matrix_rank(made.astype(np.float64)) == 300
    assert abs(made.mean()) < 0.1


def test_the_process_of_this_machines_device_answers_the_same():
    """PyTorch's formulas and NumPy's are one: the check passes against the real device's side.

    More memory than the machine has is an answer with a sentence, not a crash.
    """
    with LocalDevice() as device:
        proof = prove_hardware(device, memory_bytes=3 << 20)
        too_large = device({"ask": "multiply", "device": "cpu", "seed": 1, "n": 1 << 25, "k": 8})
    assert proof.is_passed, proof.why
    assert proof.salted_s > 0
    assert "problem" in too_large
