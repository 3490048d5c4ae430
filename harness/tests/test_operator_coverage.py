"""The table of operators is true: one sample of every operator, float32, forward and backward, on every run."""

from __future__ import annotations

import copy
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from harness.backends.simulator.coverage import comparison, database, survey, workers
from harness.backends.simulator.coverage.comparison import Direction, Result
from harness.backends.simulator.coverage.table import COMMAND, WITH_FLOAT64, Table
from harness.errors import InfrastructureError, UsageError
from harness.tests.simulator_support import registered

SHARDS = 16
STALE = f"OPERATORS.md is stale; regenerate it with '{COMMAND}'."


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return registered()


@pytest.fixture(scope="module")
def committed() -> Table:
    return Table.read(survey.TABLE.read_text())


def _disagreements(table: Table, name: str, native: ModuleType) -> list[str]:
    """Where the table says of an operator what one sample of it, or the sample that it names, does not."""
    listed = [outcomes.out[name] for outcomes in table.outcomes.values() if name in outcomes.out]
    most_samples = max([number for number, _ in listed], default=1)
    with_float64 = any(reason.startswith(WITH_FLOAT64) for _, reason in listed)
    result = comparison.compare(native, name, torch.float64 if with_float64 else torch.float32, most_samples)
    found = []
    for direction, outcomes in table.outcomes.items():
        outcome: Direction = getattr(result, direction)
        out = outcomes.out.get(name)
        if out and outcome.failure != out[1].removeprefix(WITH_FLOAT64):
            found.append(f"{name} {direction} is listed as out ({out[1]}), but: {outcome.failure or 'it passes'}.")
        elif name in outcomes.passed and outcome.failure:
            found.append(f"{name} {direction} is listed as passing, but: {outcome.failure}.")
        elif name not in outcomes.passed and not out and outcome.samples:
            found.append(f"{name} {direction} is not listed, but runs.")
    return found


@pytest.mark.parametrize("shard", range(SHARDS))
def test_the_table_of_operators(native: ModuleType, committed: Table, shard: int) -> None:
    version = torch.__version__.partition("+")[0]
    if committed.torch_version != version:
        pytest.skip(f"OPERATORS.md lists the operators of torch {committed.torch_version}; this is {version}.")
    names = list(database.operators())[shard::SHARDS]
    disagreements = [line for name in names for line in _disagreements(committed, name, native)]
    assert not disagreements, "\n".join([*disagreements, STALE])


def test_the_table_lists_the_operators_of_the_database(committed: Table) -> None:
    if committed.torch_version == torch.__version__.partition("+")[0]:
        outcomes = committed.outcomes["forward"]
        assert sorted([*outcomes.passed, *outcomes.out, *outcomes.not_run]) == list(database.operators()), STALE


def test_a_stale_table_is_seen(native: ModuleType, committed: Table) -> None:
    stale = copy.deepcopy(committed)
    forward = stale.outcomes["forward"]
    forward.passed.remove("mul")
    forward.passed.remove("add")
    forward.out["add"] = (2, "NotImplementedError: it never did")
    assert _disagreements(stale, "mul", native) == ["mul forward is not listed, but runs."]
    assert _disagreements(stale, "add", native) == [
        "add forward is listed as out (NotImplementedError: it never did), but: it passes."
    ]


class _Entry:
    """What the comparison asks of a database entry, around an operator of our own."""

    full_name = "our.own"
    supports_autograd = True

    def __init__(self, op: Any) -> None:
        self.op = op

    def supports_dtype(self, dtype: torch.dtype, device: str) -> bool:
        return dtype is torch.float32

    def supported_backward_dtypes(self, device: str) -> set[torch.dtype]:
        return {torch.float32}

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool) -> list[Any]:
        class Sample:
            input = torch.ones(3, requires_grad=requires_grad)
            args: tuple[Any, ...] = (torch.zeros(3),)
            kwargs: dict[str, Any] = {}  # noqa: RUF012
            output_process_fn_grad = None

        return [Sample(), Sample()]


def _compare(native: ModuleType, monkeypatch: pytest.MonkeyPatch, op: Any) -> Result:
    monkeypatch.setitem(database.operators(), "our.own", _Entry(op))
    return comparison.compare(native, "our.own", torch.float32, None)


def _simulated(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "sim"


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (3 if _simulated(gradient) else 2)


def _raise_on_sim(tensor: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    if _simulated(tensor):
        raise ValueError("not here\nor there")
    return tensor * 2


MISTAKES: dict[str, tuple[Any, str, str]] = {
    "one bit": (
        lambda a, b: a * 2 + (2**-22 if _simulated(a) else 0), "3 of 3 values differ from the CPU's", "",
    ),
    "the sign of zero": (lambda a, b: -b if _simulated(b) else b, "3 of 3 values differ from the CPU's", ""),
    "dtype": (lambda a, b: a if _simulated(a) else a.double(), "it returns float32[3], on the CPU float64[3]", ""),
    "structure": (lambda a, b: (a, b) if _simulated(a) else a, "it returns another structure than on the CPU", ""),
    "number": (lambda a, b: 1 if _simulated(a) else 2, "it returns 1, on the CPU 2", ""),
    "error": (_raise_on_sim, "ValueError: not here", "ValueError: not here"),
    "written input": (lambda a, b: (b.fill_(1 + _simulated(b)), a * 2)[1], "3 of 3 values differ from the CPU's", ""),
    "gradient": (lambda a, b: _WrongBackward.apply(a), "", "3 of 3 values differ from the CPU's"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(native: ModuleType, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    op, forward, backward = MISTAKES[mistake]
    result = _compare(native, monkeypatch, op)
    assert (result.forward.failure, result.backward.failure) == (forward, backward)
    assert result.forward.failing_sample == bool(forward)
    assert result.forward.wrong == (bool(forward) and mistake != "error")


def test_samples_are_deferred(native: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    result = _compare(native, monkeypatch, lambda a, b: a * 2 + b)
    assert result.forward.passed and result.backward.passed
    assert (result.forward.samples, result.forward.synchronized, result.forward.random) == (2, 0, 0)
    result = _compare(native, monkeypatch, lambda a, b: a * a.sum().item())
    assert result.forward.passed and result.forward.synchronized == 2


def test_random_operators_are_compared_bit_for_bit(native: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    result = _compare(native, monkeypatch, lambda a, b: torch.rand_like(b) * a + torch.rand_like(b))
    assert result.forward.passed and result.backward.passed and result.forward.random == 2

    def twice_on_sim(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if _simulated(a):
            torch.rand_like(b)
        return torch.rand_like(b) * a

    assert _compare(native, monkeypatch, twice_on_sim).forward.wrong


def test_what_the_cpu_does_not_run_is_not_counted(native: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel")

    result = _compare(native, monkeypatch, fail)
    assert result.forward.samples == 0 and not result.forward.failure
    assert result.forward.not_applicable == "the CPU does not run it: RuntimeError: no kernel"


WORKER = """
import json, os, sys, time
for line in sys.stdin:
    name, dtype, _ = json.loads(line)
    if name == "crashes":
        os.abort()
    if name == "hangs":
        time.sleep(60)
    direction = dict(samples=1, failure="", failing_sample=0, wrong=False, not_applicable="", synchronized=0, random=0)
    print(json.dumps(dict(name=name, dtype=dtype, forward=direction, backward=direction)), flush=True)
"""


def test_an_operator_that_crashes_or_hangs_has_that_as_its_result() -> None:
    names = ["fine", "crashes", "also fine", "hangs", "fine at last"]
    seen: list[str] = []
    results = workers.compare_all(
        [workers.Task(name, "float32", None) for name in names],
        1,
        lambda result: seen.append(result.name),
        patience_s=3.0,
        command=[sys.executable, "-c", WORKER],
    )
    assert [result.name for result in results] == names == seen
    reasons = {result.name: result.backward.failure for result in results if result.backward.failure}
    assert reasons == {"crashes": "it ends the process (SIGABRT)", "hangs": "it hangs: it took more than 3 s"}


def test_a_worker_that_cannot_start_is_an_infrastructure_error() -> None:
    with pytest.raises(InfrastructureError, match="ended with status 5"):
        workers.compare_all(
            [workers.Task("fine", "float32", None)], 2, lambda result: None, command=[sys.executable, "-c", "exit(5)"]
        )


def test_the_table_is_read_back() -> None:
    def results(dtype: str) -> list[Result]:
        passed, failed = Direction(samples=3), Direction(samples=3, failure="it `fails`: twice", failing_sample=2)
        nothing = Direction(not_applicable="it has no backward")
        absent = Direction(not_applicable="PyTorch has no CPU kernel for it")
        return [
            Result("b", dtype, passed, nothing),
            Result("a", dtype, passed, failed),
            Result("c.variant", dtype, passed, passed if dtype == "float32" else failed),
            Result("d", "None", absent, absent),
        ]

    table = Table.of(results("float32"), results("float64"), "2.13.0")
    assert "| forward: pass, of those that the CPU runs | 3 of 3 (100.0 %) | 3 of 3 (100.0 %) |" in table.remarks
    assert "| backward: pass, of those that the CPU runs | 1 of 2 (50.0 %) | 0 of 2 (0.0 %) |" in table.remarks
    read = Table.read(table.to_markdown())
    assert read.torch_version == "2.13.0" and read.outcomes == table.outcomes
    assert read.outcomes["forward"].passed == ["a", "b", "c.variant"]
    assert read.outcomes["forward"].not_run == {"d": "PyTorch has no CPU kernel for it"}
    assert read.outcomes["backward"].out == {
        "a": (2, "it `fails`: twice"),
        "c.variant": (2, "with float64, it `fails`: twice"),
    }


def test_an_unknown_operator_is_bad_usage() -> None:
    with pytest.raises(UsageError, match="has no 'addd'"):
        survey.compare_some(["add", "addd"], "float32", 1, lambda sentence: None)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "expecttest" else object())
    with pytest.raises(UsageError, match="imports the package expecttest, which is not installed; pip install"):
        database.operators.__wrapped__()
