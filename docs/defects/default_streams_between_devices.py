"""Gradients between two GPUs before torch 2.8: default streams are ordered instead of those in use. Plain PyTorch.

    python default_streams_between_devices.py

Four programs, each correct by the contract that 2.8 wrote down: a node has its gradients ready on its own stream, and
orders whatever else it uses after that. In each one stream is 20 ms late. Exits with 1 if a gradient is wrong.
"""

import sys

import torch

TRIALS = 5
SLEEP_CYCLES = 40_000_000  # about 20 ms on an H200
KIND = torch.accelerator.current_accelerator().type
DEFAULTS = [torch.accelerator.current_stream(device) for device in range(2)]


class Both(torch.autograd.Function):
    """Its input, and twice as much on device 1. The node, of device 0, reads its second gradient on ``reader``."""

    @staticmethod
    def forward(ctx, value, reader, repaired):
        ctx.reader, ctx.repaired = reader, repaired
        return value * 1.0, (value * 2.0).to(reader.device)

    @staticmethod
    def backward(ctx, here, there):
        ctx.reader.wait_stream(torch.accelerator.current_stream(0))
        if ctx.repaired:
            ctx.reader.wait_stream(DEFAULTS[1])
        there.record_stream(ctx.reader)
        with ctx.reader:
            brought = (there * 2.0).to(here.device)
        return here + brought, None, None


class Copy(torch.autograd.Function):
    """A copy to another device, whose gradient is made on ``own``, a stream of the device that it comes back to."""

    @staticmethod
    def forward(ctx, value, device, own, repaired):
        ctx.own, ctx.repaired = own, repaired
        return value.to(device)

    @staticmethod
    def backward(ctx, gradient):
        with ctx.own:
            made = gradient.to(ctx.own.device) * 3.0
        torch.accelerator.current_stream(gradient.device).wait_stream(ctx.own)
        if ctx.repaired:
            DEFAULTS[ctx.own.device.index].wait_stream(ctx.own)
        return made, None, None, None


def stream(device):
    """A side stream."""
    return torch.Stream(f"{KIND}:{device}")


def sleep(on):
    """Occupy a stream."""
    with on:
        torch.get_device_module()._sleep(SLEEP_CYCLES)


def leaf_on(device):
    """A leaf full of 2."""
    return torch.full((256,), 2.0, device=f"{KIND}:{device}", requires_grad=True)


def synchronize():
    """Wait for both devices."""
    for device in range(2):
        torch.accelerator.synchronize(device)


def sum_of_two_producers(repaired):
    """The gradients of a tensor on device 1, made there on two streams, for a node of device 0."""
    leaf = leaf_on(0)
    with stream(0):
        _, there = Both.apply(leaf, stream(1), repaired)
    synchronize()
    used = []
    for factor in (5.0, 7.0):
        with stream(1):
            used.append(there * factor)
    synchronize()
    with stream(1):
        root = used[0] + used[1]
        synchronize()
        sleep(DEFAULTS[1])
        root.backward(torch.ones_like(root))
        return leaf, (5.0 + 7.0) * 2.0


def sum_on_neither_device(repaired):
    """The same, for producers of device 0 that bring their gradients to device 1."""
    leaf, ambient = leaf_on(0), stream(0)
    with stream(0):
        _, there = Both.apply(leaf, stream(1), repaired)
    synchronize()
    owns, used = [stream(1), stream(1)], []
    for own, factor in zip(owns, (5.0, 7.0), strict=True):
        with stream(0):
            used.append(Copy.apply(there, f"{KIND}:0", own, repaired) * factor)
    synchronize()
    with ambient:
        root = used[0] + used[1]
        synchronize()
        for own in owns:
            sleep(own)
        root.backward(torch.ones_like(root))
        return leaf, (5.0 + 7.0) * 3.0 * 2.0


def gradient_made_on_the_other_device(repaired):
    """A node of device 1 whose gradient is made on device 0."""
    leaf, own = leaf_on(0), stream(0)
    with stream(0), stream(1):
        root = Copy.apply(leaf * 7.0, f"{KIND}:1", own, repaired) * 1.0
    with stream(0), stream(1):
        seed = torch.ones_like(root)
        synchronize()
        sleep(own)
        root.backward(seed)
        return leaf, 7.0 * 3.0


def second_root(repaired):
    """Roots on two devices, where the stream of the first seed is ordered after that of the second."""
    leaves, roots, ambients = [], [], [stream(0), stream(1)]
    for device in range(2):
        with stream(device):
            leaves.append(leaf_on(device))
            roots.append(leaves[device] * 3.0)
    seeds = [torch.full_like(root, float("nan"), requires_grad=False) for root in roots]
    synchronize()
    sleep(ambients[1])
    with ambients[0], ambients[1]:
        for seed in seeds:
            seed.fill_(5.0)
        ambients[0].wait_stream(ambients[1])
        if repaired:
            DEFAULTS[1].wait_stream(ambients[1])
        torch.autograd.backward(roots, seeds)
        return leaves[1], 15.0


def is_wrong(program, repaired):
    """Whether the gradient is not what it must be, read in the stream that called backward."""
    leaf, expected = program(repaired)
    synchronize()
    return not torch.equal(leaf.grad.cpu(), torch.full((256,), expected))


def main():
    """Print a table; return whether a gradient was wrong."""
    if torch.accelerator.device_count() < 2:
        sys.exit("this needs two devices")
    print(f"torch {torch.__version__}, {KIND}")
    row = "{:<36}{:<10}{}"
    print(row.format("program", "wrong", "with the default stream ordered as well"))
    found = 0
    for program in (sum_of_two_producers, sum_on_neither_device, gradient_made_on_the_other_device, second_root):
        program(True)  # loads kernels
        synchronize()
        wrong, repaired = (sum(is_wrong(program, repair) for _ in range(TRIALS)) for repair in (False, True))
        found += wrong
        print(row.format(program.__name__, f"{wrong} of {TRIALS}", f"{repaired} of {TRIALS}"))
    print("The defect is there." if found else "Every gradient was right.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
