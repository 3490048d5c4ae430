"""What backward makes where no gradient goes on to a leaf is not ready when it returns. Plain PyTorch, no harness.

    python unordered_intermediates.py        # one GPU

Each program makes a gradient on the stream of the forward, which sleeps for 20 ms first, as a busy one would, and reads
it on the stream that called backward, directly after that. A backward call has the stream semantics of any other
operation, so every gradient must be right. Exits with 1 if one is not.
"""

import sys

import torch

TRIALS = 5
SLEEP_CYCLES = 40_000_000  # about 20 ms on an H200
DEVICE = torch.accelerator.current_accelerator()


def full(value, **options):
    """A tensor that is ready on every stream."""
    tensor = torch.full((256,), value, device=DEVICE, **options)
    torch.accelerator.synchronize()
    return tensor


def start_late(gradient):
    """Occupy the current stream, as a backward hook may."""
    torch.get_device_module()._sleep(SLEEP_CYCLES)


class NoGradient(torch.autograd.Function):
    """A copy that passes no gradient on."""

    @staticmethod
    def forward(ctx, value):
        """Copy the value."""
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        """Give nothing."""
        return None


class FusedWeightGradient(torch.autograd.Function):
    """A product whose backward adds to the weight's main gradient itself, and returns none, as fused kernels do."""

    @staticmethod
    def forward(ctx, value, weight):
        """Multiply."""
        ctx.save_for_backward(value)
        ctx.weight = weight
        return value * weight

    @staticmethod
    def backward(ctx, gradient):
        """Add to the main gradient."""
        (value,) = ctx.saved_tensors
        ctx.weight.main_grad.add_(gradient * value)
        return None, None


def backward_into_an_intermediate_result(forward, ambient, order, factor):
    """backward(inputs=[middle]), where middle is no leaf."""
    leaf = full(2.0, requires_grad=True)
    with forward:
        middle = leaf * 3.0
        output = middle * 3.0
    output.register_hook(start_late)
    with ambient:
        output.backward(torch.full_like(output, factor), inputs=[middle])
        order(forward)
        return middle.grad.clone(), 3.0 * factor


def its_final_callback(forward, ambient, order, factor):
    """The same, with a callback that scales the gradient."""
    leaf = full(2.0, requires_grad=True)
    default = torch.accelerator.current_stream()
    with forward:
        middle = leaf * 3.0
        output = middle * 3.0

    def callback():
        order(forward)
        middle.grad.mul_(100.0)

    def start_late_and_queue(gradient):
        start_late(gradient)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    output.register_hook(start_late_and_queue)
    with ambient:
        output.backward(torch.full_like(output, factor), inputs=[middle])
        order(default)
        return middle.grad.clone(), 300.0 * factor


def retain_grad_behind_no_gradient(forward, ambient, order, factor):
    """The leaf, first used on another stream, gets no gradient; a result before it retains one."""
    leaf = full(2.0, requires_grad=True)
    kept = leaf.clone()  # noqa: F841  keeps the leaf's node on the default stream
    with forward:
        middle = NoGradient.apply(leaf) * 3.0
        middle.retain_grad()
        output = middle * 3.0
    output.register_hook(start_late)
    with ambient:
        output.backward(torch.full_like(output, factor))
        order(forward)
        return middle.grad.clone(), 3.0 * factor


def a_main_gradient(forward, ambient, order, factor):
    """A Function accumulates by itself into a leaf that was first used on another stream."""
    value, weight = full(3.0), full(2.0, requires_grad=True)
    weight.main_grad = full(10.0)
    kept = weight.clone()  # noqa: F841
    with forward:
        output = FusedWeightGradient.apply(value, weight)
    output.register_hook(start_late)
    with ambient:
        output.backward(torch.full_like(output, factor))
        order(forward)
        return weight.main_grad.clone(), 10.0 + 3.0 * factor


def a_hook_before_a_gradient_that_is_none(forward, ambient, order, factor):
    """autograd.grad returns None for what was asked; a hook on the way has computed something."""
    leaf, seen = full(2.0, requires_grad=True), []
    start = leaf * 2.0
    with forward:
        output = NoGradient.apply(start)

    def hook(gradient):
        start_late(gradient)
        seen.append(gradient * 2.0)

    output.register_hook(hook)
    with ambient:
        torch.autograd.grad(output, start, torch.full_like(output, factor), allow_unused=True)
        order(forward)
        return seen[0].clone(), 2.0 * factor


PROGRAMS = (
    backward_into_an_intermediate_result,
    its_final_callback,
    retain_grad_behind_no_gradient,
    a_main_gradient,
    a_hook_before_a_gradient_that_is_none,
)


def trial(program, repaired, factor):
    """Whether a gradient is wrong; in a repaired program the stream that reads it waits for the one that makes it.

    Each trial has another factor, since memory is used again and may hold the gradient of an earlier one.
    """

    def order(sooner):
        if repaired:
            torch.accelerator.current_stream().wait_stream(sooner)

    gradient, expected = program(torch.Stream(DEVICE), torch.Stream(DEVICE), order, factor)
    torch.accelerator.synchronize()
    return not torch.equal(gradient.cpu(), torch.full((256,), expected))


def main():
    """Print a table; return whether a gradient was wrong."""
    for program in PROGRAMS:
        trial(program, False, 1.0)  # loads kernels
    print(f"torch {torch.__version__}, {DEVICE.type}")
    row = "{:<40}{:<10}{}"
    print(row.format("what is read", "wrong", "with a wait for the stream that makes it"))
    found = 0
    for program in PROGRAMS:
        wrong, repaired = (
            sum(trial(program, repair, 11.0 + number) for number in range(TRIALS)) for repair in (False, True)
        )
        found += wrong
        print(row.format(program.__name__.replace("_", " "), f"{wrong} of {TRIALS}", f"{repaired} of {TRIALS}"))
    print("The defect is there." if found else "Every gradient was right.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
