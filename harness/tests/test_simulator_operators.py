"""Operators on the simulated device give what PyTorch's CPU kernels give, bit for bit."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from harness.backends.simulator import device_module as sim
from harness.tests.simulator_support import filled, preparing, registered, repetition, streams


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return registered()


def _numbers(*sizes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(*sizes, generator=generator)


def _assert_same(simulated: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert simulated.device.type == "sim"
        host = simulated.cpu()
        assert host.dtype == expected.dtype and host.shape == expected.shape
        assert torch.equal(host.nan_to_num(), expected.nan_to_num())
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(simulated, expected, strict=True):
            _assert_same(one, other)
    else:
        assert simulated == expected


BATCH_NORM = (torch.zeros(6), torch.ones(6))
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "binary": (lambda a, b: (a + b, 2 + a * 3, a / b, a > b), (_numbers(4, 6), _numbers(6, 4).t())),
    "integers": (lambda a: (a / 2, a // 2, a.sum(), a.bool()), (torch.arange(7),)),
    "matrix": (lambda a, b: (a @ b, (b.t() @ a.t()), torch.addmm(a[:, :5], a, b)), (_numbers(4, 6), _numbers(6, 5))),
    "in place": (lambda a, b: a.add_(b).mul_(2).clamp_(min=0), (_numbers(4, 6), _numbers(5, 6)[:4])),
    "in place on a view": (lambda a: (a[1].zero_(), a.t()[2:4].fill_(7), a)[2], (_numbers(4, 6),)),
    "joining": (lambda a: (torch.cat([a, a], 1), torch.stack([a, a])), (_numbers(4, 6),)),
    "reductions": (lambda a: (a.sum(1, keepdim=True), a.max(1), a.std(), a.norm(), a.cumsum(0)), (_numbers(4, 6),)),
    "sorting": (lambda a: (a.topk(2), a.sort(0), a.argmax(1)), (_numbers(4, 6),)),
    "indexing": (
        lambda a, i: (a[i], a[torch.tensor([1, 0])], a.gather(0, i.view(1, 3)), a.index_put_((i,), 2 * a[:3])),
        (_numbers(4, 6), torch.tensor([0, 3, 2])),
    ),
    "masks": (lambda a: (a[a > 0], (a > 0).nonzero(), a.masked_fill(a > 0, 2.5)), (_numbers(4, 6),)),
    "results on the host": (lambda a: (a.sum().item(), torch.equal(a, a), bool((a > 9).any())), (_numbers(4, 6),)),
    "out": (lambda a: torch.mul(a, 2, out=torch.empty(0, device=a.device)), (_numbers(4, 6),)),
    "strided out": (lambda a: torch.mul(a, 2, out=torch.empty(6, 4, device=a.device).t()), (_numbers(4, 6),)),
    "views": (
        lambda a: (
            a.view(3, 8), a.unfold(1, 2, 2), a.expand(2, 4, 6), a.split(3, 1), a.diagonal(), a[:, ::2],
            a.view(torch.int32),
        ),
        (_numbers(4, 6),),
    ),
    "complex": (lambda a: (torch.view_as_complex(a).conj() * 2j, torch.view_as_complex(a).abs()), (_numbers(5, 2),)),
    "types": (lambda a: (a.double(), a.half(), a.int(), a.to(torch.bfloat16).float()), (_numbers(4, 6),)),
    "lists": (
        lambda a, b: (
            torch._foreach_add([a, b], [b, a], alpha=2), torch._foreach_norm([a, b]), torch._foreach_mul_([a], 3.0), a,
        ),
        (_numbers(4, 6), _numbers(6, 4).t()),
    ),
    "factories": (
        lambda a: (
            torch.arange(5, device=a.device), torch.eye(3, device=a.device), torch.zeros_like(a), a.new_full((2,), 3),
        ),
        (_numbers(4, 6),),
    ),
    "empty": (lambda a: (a[:0] + 1, a[:0].sum(), torch.cat([a[:0], a])), (_numbers(4, 6),)),
    "layer norm": (
        lambda a: (nn.functional.layer_norm(a, (6,)), a.softmax(-1), nn.functional.gelu(a)),
        (_numbers(4, 6),),
    ),
    "batch norm": (
        lambda a, m, v: (nn.functional.batch_norm(a, m, v, training=True), m, v),
        (_numbers(4, 6), *BATCH_NORM),
    ),
    "batch norm in evaluation": (lambda a, m, v: nn.functional.batch_norm(a, m, v), (_numbers(4, 6), *BATCH_NORM)),
    "convolution": (
        lambda a, w: nn.functional.max_pool2d(nn.functional.conv2d(a, w, padding=1), 2),
        (_numbers(2, 3, 8, 8), _numbers(4, 3, 3, 3)),
    ),
    "linear algebra": (
        lambda a: (torch.linalg.inv(a @ a.t() + torch.eye(4, device=a.device)), torch.linalg.svdvals(a)),
        (_numbers(4, 6),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("held", [False, True], ids=["at once", "deferred"])
def test_values_are_those_of_the_cpu(native: ModuleType, name: str, held: bool) -> None:
    function, arguments = CASES[name]
    expected = function(*copy.deepcopy(arguments))
    if held:
        (stream,) = streams(1)
        with repetition(native, [(stream, 0)]):
            with preparing(native):
                on_device = [argument.to("sim") for argument in arguments]
            with stream:
                sim._sleep(1)  # held, and all else behind it
                simulated = function(*on_device)
    else:
        simulated = function(*[argument.to("sim") for argument in arguments])
    _assert_same(simulated, expected)


def _train(device: str, *, foreach: bool, convolution: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    if convolution:
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
        )
        inputs = torch.randn(8, 1, 6, 6)
    else:
        model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
        inputs = torch.randn(8, 6)
    targets = torch.randint(0, 3, (8,))
    model, inputs, targets = model.to(device), inputs.to(device), targets.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("convolution", [True, False])
def test_training_gives_the_parameters_of_the_cpu(native: ModuleType, foreach: bool, convolution: bool) -> None:
    expected = _train("cpu", foreach=foreach, convolution=convolution)
    simulated = _train("sim", foreach=foreach, convolution=convolution)
    for one, other in zip(simulated, expected, strict=True):
        assert torch.equal(one.cpu(), other)


def test_output_metadata_is_cached_by_call_signature(native: ModuleType) -> None:
    # Sizes that no other test of this process has had in the cache.
    value = filled(1009, 1.0)
    value.add(1.0)
    size = native.metadata_cache_size()
    for number in range(5):
        value.add(float(number))
    assert native.metadata_cache_size() == size
    assert filled(1013, 1.0).add(1.0).shape == (1013,)
    assert value.double().add(1.0).dtype == torch.float64
    assert native.metadata_cache_size() == size + 3  # with the conversion
    assert (value + torch.tensor(1, dtype=torch.float64)).dtype == torch.float32
    assert (torch.arange(4, device="sim") + 1.5).dtype == torch.float32


META_CALLS: list[tuple[int, ...]] = []


def _counted_meta(self: torch.Tensor) -> torch.Tensor:
    META_CALLS.append(tuple(self.shape))
    return torch.empty_like(self)


@pytest.fixture(scope="module")
def operators() -> Any:
    """Operators of an extension: one without a meta kernel, one that is Python on the CPU, one for CUDA alone."""
    library = torch.library.Library("sidestream_test", "DEF")
    library.define("no_meta(Tensor self) -> Tensor")
    library.impl("no_meta", lambda self: self + 1, "CPU")
    library.define("in_python(Tensor self) -> Tensor")
    library.impl("in_python", lambda self: self * 2, "CPU")
    library.impl("in_python", _counted_meta, "Meta")
    library.define("for_cuda(Tensor self) -> Tensor")
    library.impl("for_cuda", lambda self: self, "CUDA")
    yield torch.ops.sidestream_test
    library._destroy()


def test_an_operator_without_a_meta_kernel_synchronizes_and_says_so_once(
    native: ModuleType, operators: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    (held,) = streams(1)
    with repetition(native, [(held, 0)]) as result, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with preparing(native):
            value = filled(4, 1.0)
        with held:
            value.fill_(2.0)
            outputs = [operators.no_meta(value) for _ in range(2)]
    assert [output[0].item() for output in outputs] == [3.0, 3.0]
    assert result.outcomes[0][0] == "forced"
    said = capfd.readouterr().err + "".join(str(warning.message) for warning in caught)
    assert said.count("sidestream_test::no_meta has no meta kernel") == 1


def test_an_operator_without_a_cpu_kernel_says_so(native: ModuleType, operators: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"sidestream_test::for_cuda has no CPU kernel, so the simulated .*"):
        operators.for_cuda(filled(4, 1.0))


def test_a_kernel_in_python_runs_when_its_turn_comes(native: ModuleType, operators: Any) -> None:
    (held,) = streams(1)
    with repetition(native, [(held, 0)]):
        with preparing(native):
            value = filled(4, 1.0)
        with held:
            value.fill_(2.0)
            doubled = operators.in_python(value)
    assert doubled[0].item() == 4.0


def test_a_meta_kernel_runs_once_a_signature(native: ModuleType, operators: Any) -> None:
    META_CALLS.clear()
    for size in (70, 71, 70, 70):
        operators.in_python(filled(size, 1.0))
    assert META_CALLS == [(70,), (71,)]


def test_an_operator_is_not_taken_for_one_whose_library_is_gone(native: ModuleType) -> None:
    """Its schema may lie where that of an operator of another library lay."""
    for count in (1, 2, 3) * 5:
        names = "abc"[:count]
        library = torch.library.Library("sidestream_brief", "DEF")
        library.define(f"sum{count}({', '.join(f'Tensor {name}' for name in names)}) -> Tensor")
        for key in ("CPU", "Meta"):
            library.impl(f"sum{count}", lambda *terms: torch.cat(terms), key)
        operator = getattr(torch.ops.sidestream_brief, f"sum{count}")
        assert operator(*[filled(2, 1.0) for _ in names]).tolist() == [1.0] * 2 * count
        library._destroy()


def test_random_numbers_do_not_depend_on_other_threads(native: ModuleType) -> None:
    """Kernels that draw from the process-wide CPU generator must have it to themselves."""

    def draw(device: str, into: list[torch.Tensor]) -> None:
        values = torch.ones(2000, device=device)
        into += [torch.native_dropout(values, 0.5, True)[1] for _ in range(200)]

    def draw_on_both(wait: bool) -> list[list[torch.Tensor]]:
        sim.manual_seed_all(7)
        masks: list[list[torch.Tensor]] = [[], []]
        threads = [threading.Thread(target=draw, args=(f"sim:{index}", masks[index])) for index in range(2)]
        for thread in threads:
            thread.start()
            if wait:
                thread.join()
        for thread in threads:
            thread.join()
        return [[mask.cpu() for mask in drawn] for drawn in masks]

    alone, together = draw_on_both(wait=True), draw_on_both(wait=False)
    for expected, drawn in zip(alone, together, strict=True):
        assert all(map(torch.equal, expected, drawn))
