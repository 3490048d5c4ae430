"""Small programs whose outcome tells whether an observer changes what autograd does with memory.

Autograd avoids copies where nobody else holds a gradient: a leaf steals its first gradient
(torch/csrc/autograd/functions/accumulate_grad.h), later ones are added in place, and sums of gradients inside the
graph are made in place as well (torch/csrc/autograd/input_buffer.cpp). An observer that keeps a reference too many,
or that makes PyTorch believe in tensor subclasses, changes that, and then the streams on which memory is written
change as well.

Each program takes a device and returns whether addresses are equal, as a tuple of booleans.
"""

from __future__ import annotations

import torch


class _Remember(torch.autograd.Function):
    """The identity, whose backward makes a fresh gradient and notes its address."""

    @staticmethod
    def forward(ctx, value, addresses):
        ctx.addresses = addresses
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        fresh = gradient * 1.0
        ctx.addresses.append(fresh.data_ptr())
        return fresh, None


def a_leaf_steals_its_first_gradient(device: str) -> tuple[bool, ...]:
    """Whether the gradient of a leaf is the very memory that backward computed."""
    addresses: list[int] = []
    leaf = torch.ones(64, device=device, requires_grad=True)
    _Remember.apply(leaf, addresses).backward(torch.ones(64, device=device))
    assert leaf.grad is not None
    return (leaf.grad.data_ptr() == addresses[0],)


def later_gradients_are_added_in_place(device: str) -> tuple[bool, ...]:
    """Whether a second backward leaves the gradient where it is, and whether its value is the sum."""
    leaf = torch.ones(64, device=device, requires_grad=True)
    (leaf * 2.0).sum().backward()
    assert leaf.grad is not None
    address = leaf.grad.data_ptr()
    (leaf * 3.0).sum().backward()
    return leaf.grad.data_ptr() == address, leaf.grad.cpu().eq(5.0).all().item() is True


def sums_of_gradients_are_made_in_place(device: str) -> tuple[bool, ...]:
    """Whether the sum of two gradients inside the graph is the memory of one of them, and its value right."""
    addresses: list[int] = []
    sums: list[int] = []
    leaf = torch.ones(64, device=device, requires_grad=True)
    middle = leaf * 1.0
    middle.register_hook(lambda gradient: sums.append(gradient.data_ptr()))
    (_Remember.apply(middle, addresses) + _Remember.apply(middle, addresses)).backward(torch.ones(64, device=device))
    assert leaf.grad is not None
    return sums[0] in addresses, leaf.grad.cpu().eq(2.0).all().item() is True


def a_gradient_that_somebody_holds_is_not_stolen(device: str) -> tuple[bool, ...]:
    """Whether a gradient that the caller still holds is copied instead: the other side of stealing."""
    leaf = torch.ones(64, device=device, requires_grad=True)
    seed = torch.ones(64, device=device)
    leaf.backward(seed)
    assert leaf.grad is not None
    return (leaf.grad.data_ptr() == seed.data_ptr(),)


WANTED = {
    a_leaf_steals_its_first_gradient: (True,),
    later_gradients_are_added_in_place: (True, True),
    sums_of_gradients_are_made_in_place: (True, True),
    a_gradient_that_somebody_holds_is_not_stolen: (False,),
}
ALL = list(WANTED)
