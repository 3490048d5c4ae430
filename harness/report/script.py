"""A stand-alone script of one repetition: the case's body and its helpers in plain PyTorch, sleeps in place of holds.

The script imports nothing of the harness: whoever gets it needs PyTorch and an accelerator with ``_sleep``, and reads
in it all that happens. A stand-in for the lab gives the streams and inputs and compares at the end.

A launch of the caller's code is held by a sleep before the statement that makes it; one of the engine by a hook before
its autograd node. That is as near as plain Python comes: what else a statement or a node enqueues on that stream is
late as well, and the waits that the engine issues for a node come before its hook.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from harness.campaign.case import Discovery
from harness.errors import UsageError
from harness.observe.trace import Launch
from harness.perturb.plan import LaunchId, Plan
from harness.report import script_parts as parts

_PYTEST = "pytest"
_LITERALS = (bool, int, float, complex, str, bytes, type(None), slice, torch.dtype, torch.Size, torch.device)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the script comes from, for its first lines."""

    nodeid: str
    plan: Plan
    seen: str
    """By which oracles on what: a sentence."""
    devices: int = 1
    contract: str | None = None


def write_script(
    function: Callable[..., object], arguments: Mapping[str, Any], discovery: Discovery, origin: Origin
) -> str:
    """The text of the script.

    Args:
        function: the test function.
        arguments: what it is called with, the lab excepted.
        discovery: the launches of its body, with their lines.
        origin: where it comes from.

    Raises:
        UsageError: the case uses what a script cannot contain.
    """
    module = inspect.getmodule(function)
    if module is None or getattr(module, str(function.__name__), None) is not function:
        raise _cannot(origin, f"its function {function.__name__} is not at the top of a module")
    source = _Source(module, origin)
    holds = _place_holds(source, function.__name__, discovery, origin.plan)
    named = {name: source.expression(value, f"its argument {name}") for name, value in arguments.items()}
    call = ", ".join(["_lab", *(f"{name}={text}" for name, (text, _) in named.items())])
    needed = {function.__name__}.union(*(names for _, names in named.values()))
    definitions, imports = source.definitions(needed, function.__name__)
    nodes = [hold for hold in holds if hold.node is not None]
    blocks = [
        _docstring(function, origin, holds),
        "\n".join(_imports(imports, with_nodes=bool(nodes))) + "\n" + parts.HEAD.rstrip("\n"),
        parts.LAB.strip("\n"),
        parts.HOLDS.strip("\n") if holds else "",
        _state(holds, nodes),
        parts.NODES.strip("\n") if nodes else "",
        *definitions,
        parts.MAIN.format(devices=origin.devices, call=f"{function.__name__}({call})").strip("\n"),
    ]
    text = "\n\n\n".join(block for block in blocks if block) + "\n"
    compile(text, "script", "exec")
    return text


@dataclass(frozen=True, slots=True)
class _Placed:
    """A hold and its place."""

    launch: LaunchId
    operation: str
    name: str
    visit: int
    node: str | None


def _place_holds(source: _Source, function: str, discovery: Discovery, plan: Plan) -> list[_Placed]:
    placed = []
    for number, held in enumerate(plan.holds):
        launch = discovery.launches[held]
        name = f"_late_{number}"
        before = [each for each in discovery.order() if each.stream == held.stream and each.index < held.index]
        if launch.node is not None:
            alike = [each for each in before if _same_place(discovery.launches[each], launch)]
            placed.append(_Placed(held, launch.operation, name, len(alike), launch.node))
            continue
        alike = [each for each in before if _same_place(discovery.launches[each], launch)]
        source.insert(launch, function, f"{name}()")
        placed.append(_Placed(held, launch.operation, name, len(alike), None))
    return placed


def _same_place(one: Launch, other: Launch) -> bool:
    same_line = one.line == other.line or other.node is not None
    return (one.operation, one.node) == (other.operation, other.node) and same_line


class _Source:
    """The module of a case, as text with statements inserted."""

    def __init__(self, module: ModuleType, origin: Origin) -> None:
        self._module = module
        self._origin = origin
        text = inspect.getsource(module)
        self._lines = text.splitlines()
        self._tree = ast.parse(text)
        self._inserted: dict[int, list[str]] = {}

    def insert(self, launch: Launch, function: str, statement: str) -> None:
        """Put a statement before the one that makes a launch; at the start of the test where that is elsewhere."""
        found = None
        if launch.line is not None and launch.line.file == self._module.__file__:
            found = self._statement_at(launch.line.line)
        if found is None:
            body = next(
                each.body for each in self._tree.body if isinstance(each, ast.FunctionDef) and each.name == function
            )
            found = body[1] if len(body) > 1 and ast.get_docstring(self._function(function)) else body[0]
        indent = " " * found.col_offset
        self._inserted.setdefault(_first_line(found), []).append(indent + statement)

    def _function(self, name: str) -> ast.FunctionDef:
        return next(each for each in self._tree.body if isinstance(each, ast.FunctionDef) and each.name == name)

    def _statement_at(self, line: int) -> ast.stmt | None:
        """The innermost statement over a line that starts a line of its own, inside a function."""
        best = None
        for outer in self._tree.body:
            for node in ast.walk(outer):
                if not isinstance(node, ast.stmt) or node is outer or not node.lineno <= line <= (node.end_lineno or 0):
                    continue
                starts_line = not self._lines[node.lineno - 1][: node.col_offset].strip()
                if starts_line and (best is None or node.lineno >= best.lineno):
                    best = node
        return best

    def expression(self, value: Any, what: str) -> tuple[str, set[str]]:
        """Python text for a value, and the names of the module that it uses.

        Raises:
            UsageError: there is none.
        """
        if not isinstance(value, _LITERALS):
            for name, known in vars(self._module).items():
                if known is value and not name.startswith("__"):
                    return name, {name}
        if type(value) in (tuple, list):
            inner = [self.expression(each, what) for each in value]
            text = ", ".join(text for text, _ in inner)
            names = set[str]().union(*(names for _, names in inner))
            if isinstance(value, list):
                return f"[{text}]", names
            return f"({text},)" if len(inner) == 1 else f"({text})", names
        if type(value) is dict:
            pairs = [(self.expression(key, what), self.expression(each, what)) for key, each in value.items()]
            names = set[str]().union(*(key[1] | each[1] for key, each in pairs))
            return "{" + ", ".join(f"{key[0]}: {each[0]}" for key, each in pairs) + "}", names
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")', set()
        if isinstance(value, _LITERALS):
            text = repr(value)
            return (f"torch.{text}" if isinstance(value, torch.device) else text), set()
        place = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        if place.startswith("torch.") and _resolved(place) is value:
            return place, set()
        text_of_lambda = self._lambda(value)
        if text_of_lambda is not None:
            tree = ast.parse(text_of_lambda, mode="eval")
            return text_of_lambda, {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
        raise _cannot(self._origin, f"{what} is {value!r}, which no name of its module stands for")

    def _lambda(self, value: Any) -> str | None:
        code = getattr(value, "__code__", None)
        if code is None or value.__name__ != "<lambda>" or value.__closure__:
            return None
        found = [
            each
            for each in ast.walk(self._tree)
            if isinstance(each, ast.Lambda)
            and each.lineno == code.co_firstlineno
            and _code_of(each).co_code == code.co_code
            and _code_of(each).co_consts == code.co_consts
        ]
        return ast.unparse(found[0]) if found else None

    def definitions(self, needed: set[str], test: str) -> tuple[list[str], list[str]]:
        """The statements of the module that define these names and all that they use, in order; and the imports.

        Raises:
            UsageError: one of them uses pytest.
        """
        wanted: set[int] = set()
        waiting = list(needed)
        seen: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            for position, statement in enumerate(self._tree.body):
                if position not in wanted and name in _defined(statement):
                    wanted.add(position)
                    if not isinstance(statement, (ast.Import, ast.ImportFrom)):
                        waiting += _used(statement, is_test=name == test)
        if _PYTEST in seen:
            raise _cannot(self._origin, "it, or a helper of it, uses pytest")
        definitions: list[str] = []
        imports: list[str] = []
        values: list[str] = []
        for position in sorted(wanted):
            statement = self._tree.body[position]
            text = self._text(statement, without_decorators=test in _defined(statement))
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                imports.append(text)
            elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                if values:
                    definitions.append("\n".join(values))
                    values = []
                definitions.append(text)
            else:
                values.append(text)
        return definitions + (["\n".join(values)] if values else []), imports

    def _text(self, statement: ast.stmt, *, without_decorators: bool) -> str:
        first = statement.lineno if without_decorators else _first_line(statement)
        lines: list[str] = []
        for number in range(first, (statement.end_lineno or first) + 1):
            lines += self._inserted.get(number, [])
            lines.append(self._lines[number - 1])
        return "\n".join(lines)


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorators)])


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    stores = (each for each in ast.walk(statement) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
    return {each.id for each in stores} if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) else set()


def _used(statement: ast.stmt, *, is_test: bool) -> Iterator[str]:
    roots: Sequence[ast.AST] = [statement]
    if is_test and isinstance(statement, ast.FunctionDef):
        roots = statement.body  # its decorators are pytest's, and its arguments are given
    for root in roots:
        yield from (each.id for each in ast.walk(root) if isinstance(each, ast.Name))


def _code_of(expression: ast.Lambda) -> Any:
    code = compile(ast.Expression(expression), "lambda", "eval")
    return next(each for each in code.co_consts if hasattr(each, "co_code"))


def _resolved(place: str) -> Any:
    first, *rest = place.split(".")
    found: Any = torch if first == "torch" else None
    for part in rest:
        found = getattr(found, part, None)
    return found


def _imports(imports: Sequence[str], *, with_nodes: bool) -> list[str]:
    plain = {"import contextlib", "import sys"} | ({"import functools"} if with_nodes else set())
    theirs = [each for each in imports if each not in plain and each != "import torch"]
    standard = sorted(plain | {each for each in theirs if "torch" not in each})
    return [*standard, "", "import torch", *(each for each in theirs if "torch" in each)]


def _state(holds: Sequence[_Placed], nodes: Sequence[_Placed]) -> str:
    lines = ["_lab = _Lab()"]
    lines += [f'{hold.name} = _Hold("{hold.launch.stream}", {hold.visit})  # {_what(hold)}' for hold in holds]
    lines.append(f"_HOLDS = [{', '.join(hold.name for hold in holds)}]")
    if nodes:
        lines.append(f"_NODES = [{', '.join(f'({hold.node!r}, {hold.name})' for hold in nodes)}]")
    return "\n".join(lines)


def _what(hold: _Placed) -> str:
    return f"{hold.launch}, {hold.operation}" + (f" in {hold.node}" if hold.node else "")


def _docstring(function: Any, origin: Origin, holds: Sequence[_Placed]) -> str:
    title = (inspect.getdoc(function) or "A race of PyTorch's streams.").partition("\n\n")[0].replace("\n", " ")
    needs = f"{origin.devices} devices" if origin.devices > 1 else "one device"
    late = ", ".join(_what(hold) for hold in holds) or "nothing"
    text = [
        *textwrap.wrap(title, 116),
        "",
        "Plain PyTorch, without the harness that found it. Run it as it is:",
        "",
        "    python THIS_FILE",
        "",
        f"It needs {needs} of an accelerator with torch.<device>._sleep (CUDA, ROCm), and torch 2.7 or newer.",
        "",
        f"case: {origin.nodeid}",
        *([f"contract: {origin.contract}"] if origin.contract else []),
        f"plan: {origin.plan}",
        f"late: {late}, by a sleep before it",
        *textwrap.wrap(f"seen: {origin.seen}", 116),
        "",
        "Exits with 1 if a value is wrong, which a correct program on a correct PyTorch never shows.",
    ]
    body = "\n".join(text).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{body}\n"""'


def _cannot(origin: Origin, why: str) -> UsageError:
    return UsageError(
        f"{origin.nodeid} cannot be written as a stand-alone script: {why}. Replay it with python -m pytest instead, "
        "or move that into a function of its file."
    )
