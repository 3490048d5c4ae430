"""A gradient that nodes share is changed in place while another stream still reads it. Plain PyTorch, no harness.

    python shared_gradient.py        # one GPU

``x + a`` hands one gradient to the node of x and to the node of a. The node of a, on a side stream, is enqueued and
gives it up; then something is added to it, or a hook changes it, on the stream of x. The side stream sleeps for 20 ms
before it reads, as a busy one would. A backward call needs no synchronization inside, so every gradient must be right.
Exits with 1 if one is not.
"""

import sys

import torch

TRIALS = 5
SLEEP_CYCLES = 40_000_000  # about 20 ms on an H200
DEVICE = torch.accelerator.current_accelerator()


def sleep(*ignored):
    """Occupy the current stream, as a backward hook may."""
    torch.get_device_module()._sleep(SLEEP_CYCLES)


class Slow(torch.autograd.Function):
    """Three times its input; its backward starts late."""

    @staticmethod
    def forward(ctx, inputs):
        """Triple the input."""
        return inputs * 3.0

    @staticmethod
    def backward(ctx, gradient):
        """Triple the gradient, later."""
        sleep()
        return gradient * 3.0


def scale(leaf):
    """Scale a gradient in place."""
    leaf.grad.mul_(100.0)


def leaf_of(value, shape=(256,)):
    """A leaf that is ready on every stream."""
    leaf = torch.full(shape, value, device=DEVICE, requires_grad=True)
    torch.accelerator.synchronize()
    return leaf


def linear():
    """A linear layer whose weights are 1."""
    layer = torch.nn.Linear(8, 8, bias=False, device=DEVICE)
    torch.nn.init.ones_(layer.weight)
    return layer


def a_sum_with_another_gradient(main, side, protect):
    """The other gradient of ``shared`` is added to the one that ``tripled`` reads."""
    leaf, other = leaf_of(2.0), leaf_of(3.0)
    shared = leaf * 2.0
    fifth = shared * 5.0
    side.wait_stream(main)
    with side:
        tripled = Slow.apply(other)
    main.wait_stream(side)
    total = shared + tripled
    protect(total)
    (total * 7.0 + fifth).sum().backward()
    return other.grad, 21.0


def a_residual_with_two_branches(main, side, protect):
    """x + a(x) + b(x): the gradient that b has for x is added to the one that the weight of a needs."""
    first, second, beside = linear(), linear(), linear()
    leaf = leaf_of(1.0, (4, 8))
    x = leaf * 2.0
    side.wait_stream(main)
    with side:
        hidden = first(x)
    b = beside(x)
    with side:
        a = second(hidden)
        a.register_hook(sleep)
    main.wait_stream(side)
    total = x + a
    protect(total)
    ((total + b) * 3.0).sum().backward()
    return second.weight.grad, 192.0


def a_leaf_that_takes_it_over(main, side, protect):
    """The gradient becomes the leaf's own, and a hook of the leaf scales it."""
    leaf, other = leaf_of(2.0), leaf_of(3.0)
    leaf.register_post_accumulate_grad_hook(scale)
    moved = leaf + 1.0
    side.wait_stream(main)
    with side:
        tripled = Slow.apply(other)
    main.wait_stream(side)
    total = moved + tripled
    protect(total)
    (total * 7.0).sum().backward()
    return other.grad, 21.0


PROGRAMS = (a_sum_with_another_gradient, a_residual_with_two_branches, a_leaf_that_takes_it_over)


def trial(program, repaired):
    """Whether a gradient is wrong, and what is in it; a repaired program keeps the shared gradient until the end."""
    kept = []
    main, side = torch.Stream(DEVICE), torch.Stream(DEVICE)
    with main:
        gradient, expected = program(main, side, lambda total: total.register_hook(kept.append) if repaired else None)
        found = gradient.clone()
    torch.accelerator.synchronize()
    found = found.cpu().unique().tolist()
    return found != [expected], found, expected


def main():
    """Print a table; return whether a gradient was wrong."""
    for program in PROGRAMS:
        trial(program, False)  # loads kernels
    print(f"torch {torch.__version__}, {DEVICE.type}")
    row = "{:<32}{:<10}{:<10}{:<10}{}"
    print(row.format("changed in place by", "expected", "found", "wrong", "with the gradient kept"))
    defect = 0
    for program in PROGRAMS:
        trials, repaired = ([trial(program, repair) for _ in range(TRIALS)] for repair in (False, True))
        wrong, wrong_repaired = (sum(wrong for wrong, _, _ in results) for results in (trials, repaired))
        defect += wrong
        _, found, expected = trials[-1]
        name = program.__name__.replace("_", " ")
        shown = ", ".join(f"{value:g}" for value in found[:3])
        print(row.format(name, f"{expected:g}", shown, f"{wrong} of {TRIALS}", f"{wrong_repaired} of {TRIALS}"))
    print("The defect is there." if defect else "Every gradient was right.")
    return bool(defect)


if __name__ == "__main__":
    sys.exit(main())
