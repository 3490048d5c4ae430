"""The value oracle: bit for bit, localised, and wrong copies of it noticed."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness.errors import UsageError
from harness.judge import values
from harness.judge.values import Mismatch, Observation, compare
from harness.observe.trace import SourceLine
from harness.tests.mutation import planted

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def flipped(tensor: torch.Tensor, byte: int, bit: int) -> torch.Tensor:
    """A copy with one bit changed."""
    raw = bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    raw[byte] ^= 1 << bit
    return from_bytes(bytes(raw), tensor.dtype, tuple(tensor.shape))


def observed(expected: torch.Tensor, got: torch.Tensor, **stale: torch.Tensor) -> Observation:
    return Observation("gradient", SourceLine("case.py", 7), expected, got, stale)


def expectations() -> Iterator[tuple[Observation, dict[str, Any] | None]]:
    """Observations and what must be found: None, or some fields of the mismatch."""
    for dtype in DTYPES:
        ones = torch.ones(2, 3).to(dtype)
        yield observed(ones, ones.clone()), None
        width = ones.element_size()
        for element, part in itertools.product((0, 4), (0, width - 1)):
            got = flipped(ones, element * width + part, 3)
            yield observed(ones, got), {"index": divmod(element, 3), "wrong": 1, "total": 6, "alike": 1}
    full = torch.full((4,), 15.0)
    nan = torch.full((4,), float("nan"))
    yield (
        observed(full, nan),
        {"found": "poison", "index": (0,), "wrong": 4, "alike": 4, "expected": "15.0", "got": "nan"},
    )
    yield observed(nan, nan.clone()), None
    yield observed(nan, full), {"found": "other", "wrong": 4}
    other_nan = from_bytes(struct.pack("<I", 0x7FC00001), torch.float32, ())
    usual_nan = from_bytes(struct.pack("<I", 0x7FC00000), torch.float32, ())
    yield observed(usual_nan, other_nan), {"found": "other", "expected": "nan (0x7fc00000)", "got": "nan (0x7fc00001)"}
    yield observed(torch.tensor(0.0), torch.tensor(-0.0)), {"found": "other", "index": (), "got": "-0.0", "total": 1}
    yield (
        observed(full, torch.tensor([15.0, 15, 3, 4]), old=torch.full((4,), 3.0)),
        {
            "found": "stale",
            "stale_name": "old",
            "index": (2,),
            "wrong": 2,
            "alike": 1,
        },
    )
    yield (
        observed(full, torch.full((4,), 3.0), older=torch.zeros(4), old=torch.full((4,), 3.0)),
        {
            "found": "stale",
            "stale_name": "old",
            "alike": 4,
        },
    )
    partly = torch.tensor([15.0, 3, 3, 15])
    yield observed(full, partly, old=partly.clone()), {"found": "stale", "index": (1,), "wrong": 2, "alike": 2}
    yield observed(full, torch.full((4,), 3.0), old=torch.full((5,), 3.0)), {"found": "other", "stale_name": None}
    yield observed(full, torch.full((4,), 3.0), old=torch.full((4,), 3.0, dtype=torch.float64)), {"found": "other"}
    yield (
        observed(full, torch.tensor([15, 15, float("nan"), 3])),
        {"found": "poison", "index": (2,), "wrong": 2, "alike": 1},
    )
    yield observed(torch.tensor([1, 2]), torch.tensor([1, -1])), {"found": "poison", "index": (1,), "got": "-1"}
    yield (
        observed(torch.tensor([7, 2], dtype=torch.uint8), torch.tensor([255, 2], dtype=torch.uint8)),
        {"found": "poison"},
    )
    yield observed(torch.tensor([1, -1]), torch.tensor([2, -1])), {"found": "other", "index": (0,), "wrong": 1}
    yield observed(full, full.double()), {"found": "dtype", "expected": "float32", "got": "float64"}
    yield observed(full, full.reshape(2, 2)), {"found": "shape", "expected": "[4]", "got": "[2, 2]"}
    yield observed(full[:1], full[0]), {"found": "shape", "expected": "[1]", "got": "[]"}
    grid = torch.arange(6.0).reshape(2, 3)
    yield observed(grid, grid.t().contiguous().t()), None
    yield observed(grid, grid.clone().index_fill_(1, torch.tensor([1]), 9)), {"index": (0, 1), "wrong": 2, "total": 6}
    yield observed(torch.empty(0), torch.empty(0)), None
    yield observed(torch.tensor([1 + 2j]), torch.tensor([1 - 2j]).conj()), None
    yield observed(torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()), {"index": (0,)}
    yield observed(torch.ones(2), torch.ones(2, requires_grad=True)), None
    yield observed(torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)), {"wrong": 2}


def disagreement(module: Any) -> str | None:
    """The first observation that a copy of the oracle judges otherwise, or None."""
    for observation, expected in expectations():
        try:
            found = module.compare(observation)
        except Exception as error:
            return f"{observation} raised {error!r}"
        if expected is None or found is None:
            if (expected is None) != (found is None):
                return f"{observation} gave {found}"
        else:
            got = {name: getattr(found, name) for name in expected}
            if got != expected:
                return f"{observation} gave {got} instead of {expected}"
    return None


def test_every_expectation() -> None:
    assert disagreement(values) is None


PLANTED_BUGS = {
    "a tolerance": ("torch.equal(expected_bits, got_bits)", "torch.allclose(expected.float(), got.float())"),
    "values instead of bits": ("torch.equal(expected_bits, got_bits)", "torch.equal(expected, got)"),
    "nothing is ever wrong": ("if torch.equal(expected_bits, got_bits):", "if True:"),
    "the dtype does not matter": ("if expected.dtype != got.dtype:", "if False:"),
    "the shape is broadcast": ("if expected.shape != got.shape:", "if False:"),
    "the last wrong index": ("places[0]", "places[-1]"),
    "poison is not told": ('found, alike = "poison"', 'found, alike = "other"'),
    "any NaN is poison": (" & ~_is_nan(expected)", ""),
    "integers have no poison": ("if expected.is_floating_point() or expected.is_complex():", "if True:"),
    "stale is not told": ('found, alike, stale_name = "stale"', 'found, alike, stale_name = "other"'),
    "the first stale value": ("if same[index]:", "if True:"),
    "a stale value of another shape": ("value.dtype == expected.dtype and value.shape == shape", "True"),
    "everything is counted alike": ("(poison & differs).sum()", "differs.sum()"),
    "right elements are counted": ("(same & differs).sum()", "same.sum()"),
    "conjugation is not seen": ("tensor.resolve_conj().resolve_neg()", "tensor"),
    "NaN all look the same": ("if right == there:", "if False:"),
}


@pytest.mark.parametrize("bug", PLANTED_BUGS)
def test_planted_bug_is_noticed(bug: str) -> None:
    assert disagreement(planted(values, *PLANTED_BUGS[bug])) is not None


def sentence(expected: torch.Tensor, got: torch.Tensor, **stale: torch.Tensor) -> str:
    mismatch = compare(observed(expected, got, **stale))
    assert isinstance(mismatch, Mismatch)
    return str(mismatch)


def test_sentences() -> None:
    full = torch.full((2, 2), 15.0)
    wrong = torch.tensor([[15.0, 3.0], [float("nan"), 3.0]])
    assert sentence(full, wrong, seed=torch.full((2, 2), 3.0)) == (
        "gradient (case.py:7): 3 of 4 elements are wrong, first at [0, 1]: expected 15.0, got 3.0, the value of seed "
        "in 2 of the 3: it was read before it was overwritten"
    )
    assert sentence(torch.tensor(1.0), torch.tensor(float("nan"))) == (
        "gradient (case.py:7) is wrong: expected 1.0, got nan, poison: it was read before it was written"
    )
    assert sentence(full, full + torch.tensor([0.0, 1.0])).endswith(
        "2 of 4 elements are wrong, first at [0, 1]: expected 15.0, got 16.0"
    )
    assert sentence(full[0], full[0] + torch.tensor([0, 1])).startswith(
        "gradient (case.py:7): 1 of 2 elements is wrong"
    )
    assert sentence(full, full[0]) == "gradient (case.py:7) has the wrong shape: expected [2, 2], got [2]"
    assert sentence(full, full.int()) == "gradient (case.py:7) has the wrong dtype: expected float32, got int32"


def test_label_stands_alone_without_a_line() -> None:
    mismatch = compare(Observation("gradient", None, torch.tensor(1), torch.tensor(2)))
    assert str(mismatch) == "gradient is wrong: expected 1, got 2"


def test_sparse_is_refused() -> None:
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(UsageError, match="gradient is a sparse_coo tensor"):
        compare(observed(sparse, sparse))
