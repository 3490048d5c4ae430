"""Hooks that pack what an operation saves for backward: the caller's code, run in the middle of an operation.

What a native observer sees between the begin and the end of an operation counts as that operation's own. So it must be
told when the caller's code runs meanwhile, and only Python can do that: ``torch.autograd.graph.saved_tensors_hooks``
(which ``save_on_cpu`` and checkpointing use) and the function that it calls are the only way in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_PUSH = "_push_saved_tensors_default_hooks"


def report_to(native: ModuleType) -> Callable[[], None]:
    """Make packing hooks that are pushed from now on report to a native observer; else they cost a call.

    Args:
        native: its ``call_packing(pack, tensor)`` calls ``pack(tensor)``.

    Returns:
        A function that restores how hooks are pushed.
    """
    push = getattr(torch._C._autograd, _PUSH)

    @functools.wraps(push)
    def reporting(pack_hook: Callable[[torch.Tensor], Any], unpack_hook: Callable[[Any], torch.Tensor]) -> None:
        push(functools.partial(native.call_packing, pack_hook), unpack_hook)

    setattr(torch._C._autograd, _PUSH, reporting)
    return functools.partial(setattr, torch._C._autograd, _PUSH, push)
