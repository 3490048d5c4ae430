"""One operator on the simulated accelerator against the CPU: the same samples, bit for bit.

On the simulated accelerator a sample runs on a side stream whose launches are all held. So its kernels run when the
repetition ends, in the order of the queue, on memory that is by then recycled where PyTorch let go of it; or, as on a
real accelerator, when the operator itself waits for a value.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from harness.backends.simulator.coverage import database

HELD_LAUNCHES = 512
"""So many launches of a sample are held: enough for every sample of the database."""

UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""What these return has no values to compare."""

_GELSY = (
    "LAPACK's gelsy reads an array of pivots that PyTorch does not initialize (jpvt, aten/src/ATen/native/"
    "BatchLinearAlgebra.cpp), so the CPU differs from itself by rounding"
)
NOT_REPRODUCIBLE = {"linalg.lstsq": _GELSY, "linalg.lstsq.grad_oriented": _GELSY}
"""Operators whose results are compared by ``torch.testing.assert_close``, and why."""

HOST_ARGUMENTS = {"tensor_split": (1,)}
"""Positions of tensor arguments that stay on the host, on any accelerator."""

RESEED = 1234

_RequireValues = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass
class Direction:
    """What became of an operator forward, or backward."""

    samples: int = 0
    """How many the CPU ran, and so were compared."""
    failure: str = ""
    """Why it is out, in a sentence; empty where every sample passed."""
    failing_sample: int = 0
    """Number of the first sample that failed, from 1 in the database's order."""
    wrong: bool = False
    """Whether values, shapes or dtypes differ from the CPU's; otherwise it is an error."""
    not_applicable: str = ""
    """Why there is nothing to run, in a sentence."""
    synchronized: int = 0
    """Samples of which a launch was forced: the operator waited for it."""
    random: int = 0
    """Samples that drew random numbers."""

    @property
    def passed(self) -> bool:
        return self.samples > 0 and not self.failure


@dataclass
class Result:
    """What became of one operator with one dtype."""

    name: str
    dtype: str
    forward: Direction
    backward: Direction

    def to_json(self) -> dict[str, Any]:
        """As plain data; :meth:`from_json` reads it."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Result:
        """Reads what :meth:`to_json` wrote."""
        forward, backward = (Direction(**data[key]) for key in ("forward", "backward"))
        return Result(data["name"], data["dtype"], forward, backward)


def failed(name: str, dtype: str, reason: str) -> Result:
    """The result of an operator that could not be compared at all."""
    forward, backward = (Direction(samples=1, failure=reason, failing_sample=1) for _ in range(2))
    return Result(name, dtype, forward, backward)


class Mismatch(Exception):
    """The simulated accelerator's result is not the CPU's."""


def compare(native: ModuleType, name: str, wanted: torch.dtype, most_samples: int | None) -> Result:
    """Runs an operator's samples on both devices, forward and, where it has one, backward.

    Args:
        native: the registered simulator.
        name: full name in the database.
        wanted: the dtype of the samples, if the CPU kernel takes it.
        most_samples: how many samples at most; None for all.
    """
    entry = database.operators()[name]
    dtype = database.dtype_of(entry, wanted)
    result = Result(name, str(dtype).removeprefix("torch."), Direction(), Direction())
    if dtype is None:
        reason = "PyTorch has no CPU kernel for it"
        result.forward.not_applicable = result.backward.not_applicable = reason
        return result
    differentiable = database.has_backward(entry, dtype)
    if not differentiable:
        result.backward.not_applicable = "it has no backward"
    cpu_error = ""
    for number, sample in enumerate(database.samples(entry, dtype, differentiable, most_samples), 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cpu_error = _compare_sample(native, entry, sample, result, differentiable) or cpu_error
        for direction in (result.forward, result.backward):
            if direction.failure and not direction.failing_sample:
                direction.failing_sample = number
    native.empty_cache()  # each stream of the pool keeps the blocks that it had
    for direction in (result.forward, result.backward):
        if direction.samples == 0 and not direction.failure and not direction.not_applicable:
            direction.not_applicable = f"the CPU does not run it: {cpu_error}" if cpu_error else "no sample has one"
    return result


def _compare_sample(native: ModuleType, entry: Any, sample: Any, result: Result, differentiable: bool) -> str:
    """Adds what became of one sample to the result; returns the CPU's error where the CPU itself fails."""
    inputs = (sample.input, sample.args, sample.kwargs)
    seeds = _SeedsOfTheDevice()
    try:
        for mode in (seeds, contextlib.nullcontext()):
            torch.manual_seed(RESEED)
            on_cpu = _copy(inputs, "cpu")
            expected = _Run(entry, sample, on_cpu)
            with mode:
                expected.forward()
            if seeds.drawn:
                break
    except Exception as error:
        return sentence(error)
    backward = differentiable and not result.backward.failure and bool(expected.roots)
    if backward:
        expected.make_seeds()
        try:
            expected.backward()
        except Exception as error:
            if not result.backward.samples:
                result.backward.not_applicable = f"the CPU does not run it: {sentence(error)}"
            backward = False
    if result.forward.failure and not backward:
        return ""
    host = HOST_ARGUMENTS.get(entry.full_name, ())
    with _held(native) as held:
        with _preparing(native):
            on_device = _copy(inputs, "sim", host)
            simulated = _Run(entry, sample, on_device)
            simulated.take_seeds(expected)
        torch.manual_seed(RESEED)
        with held.stream:
            simulated.attempt(backward)
    outputs = [
        (simulated.outputs, expected.outputs),
        (on_device, on_cpu),
    ]  # inputs as well, for what is written in place
    outcomes = [(result.forward, simulated.forward_error, outputs)]
    if backward:
        outcomes.append((result.backward, simulated.backward_error, [(simulated.gradients, expected.gradients)]))
    for direction, failure, pairs in outcomes:
        direction.samples += 1
        direction.synchronized += held.forced
        direction.random += seeds.drawn > 0
        if not direction.failure:
            _judge(direction, failure or held.error, pairs, _requirement(entry.full_name))
    return ""


def _judge(
    direction: Direction,
    error: Exception | None,
    pairs: Sequence[tuple[Any, Any]],
    require_values: _RequireValues,
) -> None:
    if error is not None:
        direction.failure = sentence(error)
        return
    try:
        for one, other in pairs:
            _require_same(one, other, require_values)
    except Mismatch as mismatch:
        direction.failure, direction.wrong = str(mismatch), True


def _requirement(name: str) -> _RequireValues:
    if name in UNINITIALIZED:
        return _require_nothing
    return _require_close_values if name in NOT_REPRODUCIBLE else _require_same_values


class _Run:
    """One sample on one device: outputs, and gradients of all differentiable inputs for fixed seed gradients."""

    def __init__(self, entry: Any, sample: Any, inputs: Any) -> None:
        self._entry = entry
        self._sample = sample
        self._inputs = inputs
        self.outputs: Any = None
        self.roots: list[torch.Tensor] = []
        self.seeds: list[torch.Tensor] = []
        self.gradients: Any = None
        self.forward_error: Exception | None = None
        self.backward_error: Exception | None = None

    def forward(self) -> None:
        input_, arguments, keywords = self._inputs
        self.outputs = self._entry.op(input_, *arguments, **keywords)
        processed = self.outputs
        if self._sample.output_process_fn_grad is not None:
            processed = self._sample.output_process_fn_grad(self.outputs)
        self.roots = [
            leaf for leaf in tree_flatten(processed)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]

    def make_seeds(self) -> None:
        generator = torch.Generator().manual_seed(RESEED)
        self.seeds = [torch.randn(root.shape, dtype=root.dtype, generator=generator) for root in self.roots]

    def take_seeds(self, other: _Run) -> None:
        self.seeds = [seed.to("sim") for seed in other.seeds]

    def backward(self) -> None:
        leaves = [
            leaf for leaf in tree_flatten(self._inputs)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        self.gradients = torch.autograd.grad(self.roots, leaves, self.seeds, allow_unused=True)

    def attempt(self, backward: bool) -> None:
        try:
            self.forward()
        except Exception as error:
            self.forward_error = self.backward_error = error
            return
        if backward:
            try:
                self.backward()
            except Exception as error:
                self.backward_error = error


def _differentiable(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


class _Held:
    def __init__(self) -> None:
        self.stream = torch.Stream(device="sim:0")
        self.forced = False
        self.error: Exception | None = None


@contextlib.contextmanager
def _held(native: ModuleType) -> Iterator[_Held]:
    """Runs the block as a repetition in which every launch of a stream is held."""
    held = _Held()
    holds = [(0, held.stream.stream_id, index) for index in range(HELD_LAUNCHES)]
    native.begin_repetition(holds, False, False)
    try:
        yield held
    finally:
        try:
            _, outcomes = native.finish_repetition()
            held.forced = any(outcome[0] == "forced" for outcome in outcomes)
        except Exception as error:  # of a launch that was deferred
            held.error = error


@contextlib.contextmanager
def _preparing(native: ModuleType) -> Iterator[None]:
    native.set_preparing(True)
    try:
        yield
        torch.accelerator.synchronize(0)
    finally:
        native.set_preparing(False)


class _SeedsOfTheDevice(TorchDispatchMode):
    """Seeds the CPU's generator before each random operator as the simulator does: with a number of the device's own.

    The device's generator is seeded by ``torch.manual_seed``, in the operator as well. What is random on the CPU
    thereby has the values that it must have on the simulator. The mode is left off for all else, because modes change
    how PyTorch composes some operators.
    """

    _SEEN = 0x5EED

    def __init__(self) -> None:
        super().__init__()
        self.drawn = 0
        self._device = torch.Generator()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*arguments, **(keywords or {}))
        generator = torch.default_generator
        if generator.initial_seed() != self._SEEN:
            self._device.manual_seed(generator.initial_seed())
        number = torch.empty((), dtype=torch.int64).random_(-(2**63), None, generator=self._device)
        generator.manual_seed(int(number) % 2**64)
        self.drawn += 1
        try:
            return function(*arguments, **(keywords or {}))
        finally:
            generator.manual_seed(self._SEEN)


def _copy(inputs: Any, device: str, host_arguments: tuple[int, ...] = ()) -> Any:
    """Copies of all tensors on a device, in the same places of copied storages, so that kernels see the same memory."""
    storages: dict[int, torch.Tensor] = {}
    hosts = {id(inputs[1][index - 1]) for index in host_arguments if len(inputs[1]) >= index}

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _copied_tensor(value, "cpu" if id(value) in hosts else device, storages)
        if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
            return torch.device(device)
        return value

    return tree_map(copied, inputs)


def _copied_tensor(tensor: torch.Tensor, device: str, storages: dict[int, torch.Tensor]) -> torch.Tensor:
    values = tensor.detach()
    if values.layout is not torch.strided or values.is_quantized:
        copy = values.clone() if device == "cpu" else values.to(device)
    else:
        conjugate, negative = values.is_conj(), values.is_neg()
        if conjugate:
            values = values.conj()
        if negative:
            values = torch._neg_view(values)
        key = values.untyped_storage()._cdata
        storage = storages.get(key)
        if storage is None:
            items = values.untyped_storage().nbytes()
            whole = torch.empty(0, dtype=torch.uint8).set_(values.untyped_storage(), 0, (items,), (1,))
            storage = storages[key] = whole.clone() if device == "cpu" else whole.to(device)
        copy = torch.empty(0, dtype=values.dtype, device=storage.device)
        copy.set_(storage.untyped_storage(), values.storage_offset(), values.shape, values.stride())
        if conjugate:
            copy = copy.conj()
        if negative:
            copy = torch._neg_view(copy)
    return copy.requires_grad_(tensor.requires_grad)


def _require_same(simulated: Any, expected: Any, require_values: _RequireValues) -> None:
    """Raises Mismatch with a sentence where two results differ: structure, dtype, shape, or values."""
    ones, structure = tree_flatten(simulated)
    others, expected_structure = tree_flatten(expected)
    if structure != expected_structure:
        raise Mismatch("it returns another structure than on the CPU")
    for one, other in zip(ones, others, strict=True):
        if isinstance(other, torch.Tensor):
            _require_same_tensor(one, other, require_values)
        elif not isinstance(other, torch.device) and one != other and not (one != one and other != other):
            raise Mismatch(f"it returns {one!r}, on the CPU {other!r}")


def _require_same_tensor(one: Any, other: torch.Tensor, require_values: _RequireValues) -> None:
    if not isinstance(one, torch.Tensor):
        raise Mismatch(f"it returns {type(one).__name__}, on the CPU a tensor")
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        raise Mismatch(f"it returns {_describe(one)}, on the CPU {_describe(other)}")
    if one.requires_grad != other.requires_grad:
        raise Mismatch("it differs from the CPU in which results require gradients")
    require_values(one.detach().cpu(), other.detach())


def _require_same_values(one: torch.Tensor, other: torch.Tensor) -> None:
    bits, expected = _bits(one), _bits(other)
    if not torch.equal(bits, expected):
        raise Mismatch(f"{int((bits != expected).sum())} of {expected.numel()} values differ from the CPU's")


def _require_close_values(one: torch.Tensor, other: torch.Tensor) -> None:
    try:
        torch.testing.assert_close(one, other, equal_nan=True)
    except AssertionError as error:
        raise Mismatch("values are not close to the CPU's") from error


def _require_nothing(one: torch.Tensor, other: torch.Tensor) -> None:
    pass


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The values as integers, all NaNs alike."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
        tensor = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    return tensor


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def sentence(error: BaseException) -> str:
    """An error as one sentence that is the same on every machine."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = re.sub(r"0x[0-9a-f]+", "an address", line)
    line = re.sub(r"Launch \d+:\d+ on", "A launch on", line)
    return f"{type(error).__name__}: {line[:200]}"
