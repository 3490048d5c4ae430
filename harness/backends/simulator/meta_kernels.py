"""Keeps PyTorch's meta kernels in Python from importing ``torch._dynamo``."""

from __future__ import annotations

import inspect
from types import FunctionType

from torch import _compile, _decomp


def spare_dynamo() -> None:
    """Lets elementwise meta kernels run without ``torch._dynamo``, whose import takes 2.5 s and 800 modules a process.

    ``torch._compile._disable_dynamo`` wraps them so that the first call imports it, only to ask it to leave the
    function alone, and stores the answer on the function. Here the function itself is stored: not compiling it is what
    a call does. Where a version of torch does this otherwise, nothing changes but the time that the import takes.
    """
    for kind in ("meta", "post_autograd"):
        for kernel in set(_decomp.global_decomposition_table[kind].values()):
            _answer_for_dynamo(kernel)


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
