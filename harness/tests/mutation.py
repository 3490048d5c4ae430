"""Runs a copy of a module with a bug planted in it."""

from __future__ import annotations

import inspect
import itertools
import sys
from types import ModuleType

_numbers = itertools.count()


def planted(module: ModuleType, old: str, new: str) -> ModuleType:
    """A copy of ``module`` in which every ``old`` is ``new``; the module itself stays as it is.

    Raises:
        AssertionError: the source does not contain ``old`` (any more).
    """
    source = inspect.getsource(module)
    assert old in source, f"{module.__name__} has no {old!r} to replace"
    copy = ModuleType(f"planted_{next(_numbers)}")
    sys.modules[copy.__name__] = copy  # dataclasses look their module up
    try:
        exec(compile(source.replace(old, new), f"<{module.__name__} with {new!r}>", "exec"), copy.__dict__)
    finally:
        del sys.modules[copy.__name__]
    return copy
