"""PyTorch's database of operators with sample inputs (``torch/testing/_internal/common_methods_invocations.py``)."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from harness.errors import UsageError

OTHER_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool)
"""An operator that has no CPU kernel for the wanted dtype runs with the first of these that it takes."""

SEED = 0


@functools.cache
def operators() -> dict[str, Any]:
    """The entries of the database by full name, variant included, in alphabetical order.

    Raises:
        UsageError: a package that PyTorch's test utilities import is not installed.
    """
    for package in ("expecttest", "numpy"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(
                f"PyTorch's database of operators imports the package {package}, which is not installed; "
                f"pip install {package}."
            )
    from torch.testing._internal.common_methods_invocations import op_db

    return dict(sorted((entry.full_name, entry) for entry in op_db))


def dtype_of(entry: Any, wanted: torch.dtype) -> torch.dtype | None:
    """The dtype to run an entry with: the wanted one, or the first other that its CPU kernel takes."""
    for dtype in (wanted, *OTHER_DTYPES):
        if entry.supports_dtype(dtype, "cpu"):
            return dtype
    return None


def has_backward(entry: Any, dtype: torch.dtype) -> bool:
    """Whether the database says that the operator has a backward for that dtype on the CPU."""
    return bool(entry.supports_autograd) and dtype in entry.supported_backward_dtypes("cpu")


def samples(entry: Any, dtype: torch.dtype, requires_grad: bool, most: int | None) -> Iterator[Any]:
    """The entry's sample inputs on the CPU, the same ones at every call; at most so many."""
    torch.manual_seed(SEED)
    return itertools.islice(entry.sample_inputs("cpu", dtype, requires_grad=requires_grad), most)
