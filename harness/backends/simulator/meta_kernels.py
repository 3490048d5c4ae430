"""Fits PyTorch's meta kernels in Python to the simulator: they describe CPU kernels, and spare ``torch._dynamo``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor, _compile, _decomp, _meta_registrations
from torch._decomp import decompositions


def spare_dynamo() -> None:
    """Lets elementwise meta kernels run without ``torch._dynamo``, whose import takes 2.5 s and 800 modules a process.

    ``torch._compile._disable_dynamo`` wraps them so that the first call imports it, only to ask it to leave the
    function alone, and stores the answer on the function. Here the function itself is stored: not compiling it is what
    a call does. Where a version of torch does this otherwise, nothing changes but the time that the import takes.
    """
    for kind in ("meta", "post_autograd"):
        for kernel in set(_decomp.global_decomposition_table[kind].values()):
            _answer_for_dynamo(kernel)


def describe_cpu_kernels(runs_meta_kernel: Callable[[], bool]) -> None:
    """Lets meta kernels describe what CPU kernels return, where that differs from what CUDA's return.

    They ask ``torch._meta_registrations.device_hint``, which answers ``cuda`` for a meta tensor of which nothing is
    known. The simulator's kernels are the CPU's. Nothing changes for meta kernels that others run.

    Args:
        runs_meta_kernel: whether the calling thread is in a meta kernel that the simulator runs.
    """
    original = _meta_registrations.device_hint

    @functools.wraps(original)
    def device_hint(tensor: Any) -> str:
        if type(tensor) is Tensor and runs_meta_kernel():
            return "cpu"
        return str(original(tensor))

    _meta_registrations.device_hint = device_hint
    _describe_batch_norm(runs_meta_kernel)


def _describe_batch_norm(runs_meta_kernel: Callable[[], bool]) -> None:
    """In evaluation, batch normalization on the CPU returns no statistics; its meta kernel describes CUDA's."""
    original = decompositions.native_batch_norm_helper

    @functools.wraps(original)
    def helper(*arguments: Any) -> Any:
        results = original(*arguments)
        training = arguments[5]
        if training or not runs_meta_kernel():
            return results
        return (results[0], results[1].new_empty(0), results[2].new_empty(0), *results[3:])

    setattr(decompositions, original.__name__, helper)


def _answer_for_dynamo(kernel: object) -> None:
    pending, seen = [kernel], set()
    while pending:
        function = pending.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        enclosed = inspect.getclosurevars(function).nonlocals
        if function.__code__.co_filename == _compile.__file__ and isinstance(enclosed.get("fn"), FunctionType):
            vars(enclosed["fn"]).setdefault("__dynamo_disable", enclosed["fn"])
        pending += enclosed.values()
