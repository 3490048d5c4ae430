"""What training code is made of runs deferred on the simulated device and gives what the CPU gives, bit for bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils import checkpoint
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, TensorDataset

from harness.tests.simulator_support import Repetition, preparing, registered, repetition, streams

MOST_LAUNCHES = 1024
"""More than any of these tests enqueues on its stream; each of them is held."""


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return registered()


Make = Callable[[], tuple[Any, ...]]
"""Makes the modules and tensors that a step uses, on the CPU, the same ones at every call."""

Step = Callable[..., Any]


def _on_device(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    return value.to(device)


def _run_held(native: ModuleType, make: Make, step: Step, device: str = "sim") -> tuple[Any, Repetition]:
    """The step on a side stream whose launches are all held until it has been enqueued."""
    (stream,) = streams(1)
    with repetition(native, [(stream, index) for index in range(MOST_LAUNCHES)]) as result:
        with preparing(native):
            on_device = [_on_device(value, device) for value in make()]
        with stream:
            simulated = step(*on_device)
    return simulated, result


def _agree(native: ModuleType, make: Make, step: Step, *, deferred: bool = True) -> None:
    """The step gives the same on both devices, and where it is deferred nothing in it waits for a launch."""
    expected = step(*make())
    simulated, result = _run_held(native, make, step)
    states = [outcome[0] for outcome in result.outcomes]
    assert states[0] in ({"pending"} if deferred else {"pending", "forced"})
    assert states[-1] == "missing"
    if deferred:
        assert "forced" not in states
    _assert_same(simulated, expected)


def _assert_same(simulated: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert simulated.device.type == "sim"
        host = simulated.detach().cpu()
        assert (host.dtype, host.shape, host.layout) == (expected.dtype, expected.shape, expected.layout)
        one, other = host.to_dense(), expected.detach().to_dense()
        assert torch.equal(one, other), (one - other).abs().max()
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(simulated, expected, strict=True):
            _assert_same(one, other)
    else:
        assert simulated == expected


def _numbers(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def _seeded(module: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return module()


def _backward(model: nn.Module, *inputs: torch.Tensor) -> list[Any]:
    """Output, gradients and buffers after a backward through a nonlinear loss."""
    output = model(*inputs)
    output = output[0] if isinstance(output, tuple) else output
    (output * output).sum().backward()
    leaves = [*model.parameters(), *(tensor for tensor in inputs if tensor.requires_grad)]
    return [output, [leaf.grad for leaf in leaves], list(model.buffers())]


def _leaf(*sizes: int) -> torch.Tensor:
    return _numbers(*sizes).requires_grad_()


WORDS = torch.tensor([[1, 4, 1], [0, 6, 4]])

MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "linear": (lambda: nn.Linear(6, 4), lambda: (_leaf(5, 6),)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), lambda: (_leaf(2, 3, 8),)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), lambda: (_leaf(2, 4, 7, 7),)),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(4, 3, 3), lambda: (_leaf(2, 4, 5, 5),)),
    "batch norm": (lambda: nn.BatchNorm2d(3), lambda: (_leaf(4, 3, 5, 5),)),
    "batch norm in evaluation": (lambda: nn.BatchNorm1d(3).eval(), lambda: (_leaf(4, 3),)),
    "layer norm": (lambda: nn.LayerNorm(6), lambda: (_leaf(4, 6),)),
    "group norm": (lambda: nn.GroupNorm(2, 6), lambda: (_leaf(4, 6, 5),)),
    "embedding": (lambda: nn.Embedding(7, 3, padding_idx=0), lambda: (WORDS,)),
    "sparse embedding": (lambda: nn.Embedding(7, 3, sparse=True), lambda: (WORDS,)),
    "embedding bag": (lambda: nn.EmbeddingBag(7, 3, mode="mean"), lambda: (WORDS,)),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: (_leaf(2, 5, 8), _leaf(2, 6, 8), _leaf(2, 6, 8)),
    ),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), lambda: (_leaf(2, 5, 8),),
    ),
    "transformer layer in evaluation": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, activation="gelu").eval(), lambda: (_leaf(5, 2, 8),),
    ),
    "pooling": (
        lambda: nn.Sequential(nn.MaxPool2d(2), nn.ReLU(), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)),
        lambda: (_leaf(2, 3, 8, 8),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules(native: ModuleType, name: str) -> None:
    module, inputs = MODULES[name]
    _agree(native, lambda: (_seeded(module), *inputs()), _backward)


@pytest.mark.parametrize("module", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules(native: ModuleType, module: Callable[..., nn.Module]) -> None:
    """The device's fused cells add in another order than the CPU's own, so the last bits differ."""

    def make() -> tuple[Any, ...]:
        model = _seeded(lambda: module(5, 4, num_layers=2, bidirectional=True))
        return model.double(), _numbers(6, 3, 5).double().requires_grad_()

    expected = _backward(*make())
    simulated, result = _run_held(native, make, _backward)
    assert "forced" not in {outcome[0] for outcome in result.outcomes}
    for one, other in zip(simulated, expected, strict=True):
        torch.testing.assert_close(one, other, check_device=False, rtol=1e-12, atol=1e-12)
    if module is not nn.RNN:
        assert any("_thnn_fused" in operation for operation in result.operations())


def test_an_lstm_of_float_is_the_cell_s_formula(native: ModuleType) -> None:
    torch.manual_seed(0)
    model, inputs = nn.LSTM(5, 4), _numbers(1, 3, 5)
    weights = dict(model.named_parameters())
    bias = weights["bias_ih_l0"] + weights["bias_hh_l0"]  # the first hidden state is zero
    input, _, cell, output = functional.linear(inputs[0], weights["weight_ih_l0"], bias).chunk(4, 1)
    expected = output.sigmoid() * (input.sigmoid() * cell.tanh()).tanh()
    simulated = copy.deepcopy(model).to("sim")(inputs.to("sim"))[0][0]
    torch.testing.assert_close(simulated.cpu(), expected)


CLASSES = torch.tensor([0, 2, 1, 2])
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross entropy": lambda a, b: functional.cross_entropy(a, CLASSES.to(a.device), label_smoothing=0.1),
    "negative log-likelihood": lambda a, b: functional.nll_loss(a.log_softmax(1), CLASSES.to(a.device)),
    "mean square": functional.mse_loss,
    "absolute": functional.l1_loss,
    "smooth absolute": functional.smooth_l1_loss,
    "Huber": functional.huber_loss,
    "binary cross entropy": lambda a, b: functional.binary_cross_entropy_with_logits(a, b.sigmoid()),
    "Kullback-Leibler": lambda a, b: functional.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"),
    "cosine embedding": lambda a, b: functional.cosine_embedding_loss(a, b, torch.ones(4, device=a.device)),
    "triplet": lambda a, b: functional.triplet_margin_loss(a, b, a.flip(0)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(native: ModuleType, name: str) -> None:
    def step(one: torch.Tensor, other: torch.Tensor) -> list[Any]:
        loss = LOSSES[name](one, other)
        loss.backward()
        return [loss, one.grad, other.grad] if other.grad is not None else [loss, one.grad]

    moves_classes = name in {"cross entropy", "negative log-likelihood"}  # a blocking copy, which waits for its stream
    _agree(native, lambda: (_leaf(4, 3), _numbers(3, 4).t()), step, deferred=not moves_classes)


def _small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


def _make_training() -> tuple[nn.Module, torch.Tensor]:
    return _seeded(_small_model), _numbers(8, 6)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])
def test_clipping(native: ModuleType, clip: Callable[..., Any], foreach: bool) -> None:
    def step(model: nn.Module, inputs: torch.Tensor) -> list[Any]:
        model(inputs).square().sum().backward()
        norm = clip(model.parameters(), 0.25, foreach=foreach)
        return [parameter.grad for parameter in model.parameters()] + ([] if norm is None else [norm])

    _agree(native, _make_training, step)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters, **kind: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, **kind),
    "Adam": lambda parameters, **kind: torch.optim.Adam(parameters, lr=0.1, amsgrad=True, **kind),
    "AdamW": lambda parameters, **kind: torch.optim.AdamW(parameters, lr=0.1, **kind),
}


KINDS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(native: ModuleType, name: str, kind: str) -> None:
    def step(model: nn.Module, inputs: torch.Tensor) -> list[Any]:
        optimizer = OPTIMIZERS[name](model.parameters(), **KINDS[kind])
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        return list(model.parameters())

    _agree(native, _make_training, step)


def test_sparse_gradients_reach_optimizers(native: ModuleType) -> None:
    def step(model: nn.Module, words: torch.Tensor) -> list[Any]:
        sgd, adam = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SparseAdam(model.parameters(), lr=0.1)
        for optimizer in (sgd, adam):
            model.zero_grad()
            for part in words:  # the second backward accumulates into the first one's gradient
                model(part).square().sum().backward()
            optimizer.step()
        return [model.weight, model.weight.grad]

    def make() -> tuple[Any, ...]:
        return _seeded(lambda: nn.Embedding(7, 3, sparse=True)), WORDS

    # Joining sparse gradients waits for the stream: how many entries they have is known to the host.
    _agree(native, make, step, deferred=False)


def test_a_sparse_gradient_is_applied_in_its_turn(native: ModuleType) -> None:
    def step(model: nn.Embedding, words: torch.Tensor) -> torch.Tensor:
        model(words).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return model.weight

    _agree(native, lambda: (_seeded(lambda: nn.Embedding(7, 3, sparse=True)), WORDS), step)


def test_a_gradient_scaler_skips_steps_that_overflow(native: ModuleType) -> None:
    def step(model: nn.Module, inputs: torch.Tensor) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(inputs.device.type, init_scale=2.0**10, growth_interval=2)
        scales = []
        for factor in (1.0, float("inf"), 1.0, 1.0):
            optimizer.zero_grad()
            scaler.scale(model(inputs).square().mean() * factor).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return [list(model.parameters()), scales]

    expected = step(*_make_training())
    assert expected[1] == [1024.0, 512.0, 512.0, 1024.0]
    _agree(native, _make_training, step, deferred=False)  # it asks the device whether a gradient overflowed


class _Perceptron(nn.Module):
    """Casts by hand as autocast does on CUDA: linear layers in low precision, softmax in float."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, inputs: torch.Tensor, dtype: torch.dtype, by_hand: bool) -> torch.Tensor:
        if not by_hand:
            return torch.softmax(self.second(self.first(inputs).relu()), 1)
        hidden = inputs
        for layer in (self.first, self.second):
            hidden = hidden if layer is self.first else hidden.relu()
            hidden = functional.linear(hidden.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))
        return hidden.float().softmax(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_what_casting_by_hand_does(native: ModuleType, dtype: torch.dtype) -> None:
    def step(model: nn.Module, inputs: torch.Tensor) -> list[Any]:
        by_hand = inputs.device.type == "cpu"
        with torch.autocast("sim", dtype, enabled=not by_hand):
            output = model(inputs, dtype, by_hand)
        output.square().sum().backward()
        return [output, [parameter.grad for parameter in model.parameters()]]

    _agree(native, lambda: (_seeded(_Perceptron), _numbers(8, 6)), step)


def test_autocast_has_cuda_s_policies(native: ModuleType) -> None:
    half, single = (torch.ones(3, 3, device="sim", dtype=dtype) for dtype in (torch.float16, torch.float32))
    weight = torch.ones(3, 3, device="sim", requires_grad=True)
    with torch.autocast("sim"):
        assert torch.get_autocast_dtype("sim") == (single @ single).dtype
    with torch.autocast("sim", torch.float16):
        assert (single @ half).dtype == torch.float16
        assert half.exp().dtype == half.softmax(0).dtype == half.sum().dtype == half.norm().dtype == torch.float32
        assert half.norm(2, 0).dtype == torch.float32
        assert half.sum(dtype=torch.float64).dtype == torch.float64
        assert torch.addcmul(half, half, single).dtype == torch.float32
        assert torch.addcmul(half, half, half).dtype == torch.float16
        assert (half + half).dtype == torch.float16
        assert single.double().matmul(single.double()).dtype == torch.float64
        with torch.autocast("sim", enabled=False):
            assert (single @ single).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            functional.binary_cross_entropy(half, half)
        with repetition(native) as result:
            for _ in range(2):
                single @ weight
        casts = result.operations().count("aten::copy_")
        assert casts == 3  # of the input each time, of the weight once
    assert (single @ single).dtype == torch.float32


def test_autocast_knows_the_operators_that_cuda_s_knows(native: ModuleType) -> None:
    def registered_for(key: str) -> set[str]:
        names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
        return {name for name in names if name.startswith("aten::") and "cudnn" not in name}

    assert len(registered_for("AutocastCUDA")) > 100
    assert registered_for("AutocastPrivateUse1") == registered_for("AutocastCUDA")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_repeat_the_dropout_of_the_forward(native: ModuleType, reentrant: bool) -> None:
    def make() -> tuple[Any, ...]:
        return _seeded(lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))), _leaf(8, 6)

    def plain(model: nn.Module, inputs: torch.Tensor) -> list[Any]:
        torch.manual_seed(3)
        return _backward(model, inputs)

    def checkpointed(model: nn.Module, inputs: torch.Tensor) -> list[Any]:
        torch.manual_seed(3)
        output = checkpoint.checkpoint(model, inputs, use_reentrant=reentrant)
        torch.rand(3, device="sim")  # other random numbers in between
        (output * output).sum().backward()
        return [output, [leaf.grad for leaf in (*model.parameters(), inputs)], []]

    expected, _ = _run_held(native, make, plain)
    simulated, result = _run_held(native, make, checkpointed)
    assert "forced" not in {outcome[0] for outcome in result.outcomes}
    _assert_same(simulated, tree_map(torch.Tensor.cpu, expected))


def test_a_data_loader_pins_its_batches(native: ModuleType) -> None:
    values = torch.arange(12.0).view(6, 2)
    batches = list(DataLoader(TensorDataset(values), batch_size=3, pin_memory=True))
    assert all(batch.is_pinned() for (batch,) in batches)
    (stream,) = streams(1)
    with repetition(native, [(stream, 0)]) as result, stream:
        copies = [batch.to("sim", non_blocking=True) for (batch,) in batches]
    assert result.outcomes[0][0] == "pending"
    assert torch.equal(torch.cat(copies).cpu(), values)


def test_replicas_on_two_devices(native: ModuleType) -> None:
    """Replicate, scatter, apply, gather and sum the gradients: DataParallel's parts, which it has for CUDA alone."""

    def apply(devices: list[str], model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
        replicas = [copy.deepcopy(model).to(device, non_blocking=True) for device in devices]
        parts = [part.to(device, non_blocking=True) for part, device in zip(inputs.chunk(2), devices, strict=True)]
        outputs = [replica(part) for replica, part in zip(replicas, parts, strict=True)]
        gathered = torch.cat([output.to(devices[0], non_blocking=True) for output in outputs])
        gathered.square().sum().backward()
        gradients = zip(*(replica.parameters() for replica in replicas), strict=True)
        return [gathered, *(sum(p.grad.to(devices[0], non_blocking=True) for p in each) for each in gradients)]

    model, inputs = _make_training()
    expected = apply(["cpu", "cpu"], model, inputs)
    first, second = streams(1)[0], streams(1, 1)[0]
    holds = [(stream, index) for stream in (first, second) for index in range(MOST_LAUNCHES)]
    with repetition(native, holds) as result:
        with preparing(native):
            model, inputs = model.to("sim:0"), inputs.to("sim:0")
        model.zero_grad()
        torch.accelerator.set_stream(second)
        with first:
            simulated = apply(["sim:0", "sim:1"], model, inputs)
    torch.accelerator.set_stream(torch.Stream(stream_id=0, device_index=1, device_type=second.device_type))
    torch.accelerator.set_device_index(0)
    assert "forced" not in {outcome[0] for outcome in result.outcomes}
    assert {entry[1] for entry in result.of_kind("launch")} == {0, 1}
    _assert_same(simulated, expected)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no meta kernel.*")
        warnings.filterwarnings("ignore", message=".*AccumulateGrad node's stream.*")
        warnings.filterwarnings("ignore", message=".*Sparse invariant checks.*")
        warnings.filterwarnings("ignore", message=".*nested tensor.*")
        yield
