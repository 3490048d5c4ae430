"""Random numbers: seeds, generators, and what restores them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.tests.device.accelerator import Accelerator

Draw = Callable[[torch.device, torch.Generator | None], torch.Tensor]

DRAWS: dict[str, Draw] = {
    "rand": lambda device, generator: torch.rand(64, device=device, generator=generator),
    "randn": lambda device, generator: torch.randn(64, device=device, generator=generator),
    "randint": lambda device, generator: torch.randint(0, 1000, (64,), device=device, generator=generator),
    "randperm": lambda device, generator: torch.randperm(64, device=device, generator=generator),
    "normal_": lambda device, generator: torch.empty(64, device=device).normal_(generator=generator),
    "uniform_": lambda device, generator: torch.empty(64, device=device).uniform_(generator=generator),
    "bernoulli_": lambda device, generator: torch.empty(64, device=device).bernoulli_(0.5, generator=generator),
    "exponential_": lambda device, generator: torch.empty(64, device=device).exponential_(generator=generator),
    "multinomial": lambda device, generator: torch.multinomial(torch.ones(64, device=device), 32, generator=generator),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_seed_gives_the_same_numbers(accelerator: Accelerator, name: str) -> None:
    def draw(generator: torch.Generator | None = None) -> list[float]:
        return DRAWS[name](accelerator.device(), generator).tolist()

    torch.manual_seed(7)
    first, second = draw(), draw()
    assert first != second
    torch.manual_seed(7)
    assert [draw(), draw()] == [first, second]
    torch.manual_seed(8)
    assert draw() != first
    generator = torch.Generator(device=accelerator.device()).manual_seed(3)
    third = draw(generator)
    assert draw(generator) != third
    assert draw(generator.manual_seed(3)) == third


def rand(accelerator: Accelerator, generator: torch.Generator | None = None, index: int = 0) -> list[float]:
    return torch.rand(16, device=accelerator.device(index), generator=generator).tolist()


def test_a_generator_draws_numbers_of_its_own(accelerator: Accelerator) -> None:
    generator = torch.Generator(device=accelerator.device())
    assert generator.device == accelerator.device()
    torch.manual_seed(7)
    expected = rand(accelerator)
    torch.manual_seed(7)
    generator.manual_seed(7)
    rand(accelerator, generator)
    assert rand(accelerator) == expected
    assert rand(accelerator, generator.manual_seed(7)) == expected
    assert generator.initial_seed() == 7


def test_the_state_of_a_generator_can_be_taken_and_put_back(accelerator: Accelerator) -> None:
    generator = torch.Generator(device=accelerator.device()).manual_seed(3)
    rand(accelerator, generator)
    state = generator.get_state()
    assert state.device.type == "cpu"
    expected = rand(accelerator, generator)
    generator.set_state(state)
    assert rand(accelerator, generator) == expected
    other = torch.Generator(device=accelerator.device())
    other.set_state(state)
    assert rand(accelerator, other) == expected
    generator.set_state(state)
    clone = generator.clone_state()
    assert rand(accelerator, clone) == expected
    assert rand(accelerator, generator) == expected


def test_the_state_of_the_default_generator_can_be_taken_and_put_back(accelerator: Accelerator) -> None:
    state = accelerator.module.get_rng_state()
    states = accelerator.module.get_rng_state_all()
    assert len(states) == accelerator.device_count
    expected = rand(accelerator)
    accelerator.module.set_rng_state(state)
    assert rand(accelerator) == expected
    accelerator.module.set_rng_state_all(states)
    assert rand(accelerator) == expected


def test_a_generator_of_another_device_type_is_refused(accelerator: Accelerator) -> None:
    with pytest.raises(RuntimeError, match=rf"Expected a '{accelerator.type}' device type for generator"):
        torch.rand(4, device=accelerator.device(), generator=torch.Generator())


def test_the_host_s_numbers_are_left_alone(accelerator: Accelerator) -> None:
    torch.manual_seed(7)
    expected = torch.rand(4).tolist()
    torch.manual_seed(7)
    for draw in DRAWS.values():
        draw(accelerator.device(), None)
    nn.functional.dropout(torch.ones(64, device=accelerator.device()))
    assert torch.rand(4).tolist() == expected


def test_the_module_s_seeds_are_those_of_its_devices_alone(accelerator: Accelerator) -> None:
    host = torch.get_rng_state()
    accelerator.module.manual_seed(5)
    assert accelerator.module.initial_seed() == 5
    expected = rand(accelerator)
    accelerator.module.manual_seed_all(5)
    assert rand(accelerator) == expected
    assert torch.equal(torch.get_rng_state(), host)
    for reseed in (accelerator.module.seed, accelerator.module.seed_all):
        reseed()
        assert accelerator.module.initial_seed() != 5
        assert rand(accelerator) != expected


@pytest.mark.usefixtures("two_devices")
def test_each_device_has_a_generator_of_its_own(accelerator: Accelerator) -> None:
    torch.manual_seed(7)
    expected = rand(accelerator)
    assert rand(accelerator, index=1) == expected
    torch.manual_seed(7)
    rand(accelerator, index=1)
    assert rand(accelerator) == expected


def test_numbers_are_drawn_in_the_order_of_enqueueing(accelerator: Accelerator) -> None:
    first, second = accelerator.streams(2)
    torch.manual_seed(7)
    expected = [rand(accelerator), rand(accelerator)]
    torch.manual_seed(7)
    drawn = [accelerator.full(0.0, size=16) for _ in range(2)]
    with accelerator.busy(first):
        with first:
            drawn[0].uniform_()
        with second:
            drawn[1].uniform_()
        second.synchronize()
        assert not first.query()
    assert [values.tolist() for values in drawn] == expected


def test_fork_rng_puts_the_numbers_back(accelerator: Accelerator) -> None:
    torch.manual_seed(7)
    expected = rand(accelerator)
    torch.manual_seed(7)
    with torch.random.fork_rng(devices=[0], device_type=accelerator.type):
        torch.manual_seed(8)
        rand(accelerator)
    assert rand(accelerator) == expected


def test_dropout_zeroes_in_backward_what_it_zeroed_in_forward(accelerator: Accelerator) -> None:
    value = torch.ones(256, device=accelerator.device(), requires_grad=True)
    dropped = nn.functional.dropout(value, 0.5)
    dropped.sum().backward()
    assert value.grad is not None
    assert sorted(set(dropped.tolist())) == [0.0, 2.0]
    assert value.grad.tolist() == dropped.tolist()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_dropout_in_a_checkpoint_is_recomputed_with_the_same_numbers(
    accelerator: Accelerator, use_reentrant: bool
) -> None:
    value = torch.ones(256, device=accelerator.device(), requires_grad=True)

    def body(given: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(given, 0.5) * given

    result = checkpoint(body, value, use_reentrant=use_reentrant)
    rand(accelerator)
    result.sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [2 * number for number in result.tolist()]
