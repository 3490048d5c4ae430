"""Two roots on two GPUs: the seed gradient of the second one is read before it is filled. Plain PyTorch, no harness.

    python roots_on_two_devices.py

Each root has its forward on a side stream of its device, and its seed is filled on the stream that is current on its
device where backward is called, 20 ms late on one of the two devices. A backward call has the stream semantics of any
other operation, so every gradient must be 15. Exits with 1 if one is not.
"""

import itertools
import sys

import torch

TRIALS = 5
SLEEP_CYCLES = 40_000_000  # about 20 ms on an H200


def sleep():
    """Occupy the current stream of the current device."""
    torch.get_device_module()._sleep(SLEEP_CYCLES)


def synchronize():
    """Wait for both devices."""
    for device in range(2):
        torch.accelerator.synchronize(device)


def trial(first, late, ambient_is_default, repaired):
    """The gradients, by device, that are not 15; the streams of a repaired program imply the order that is missing."""
    kind = torch.accelerator.current_accelerator().type
    leaves, roots, seeds, ambients = [], [], [], []
    for device in range(2):
        with torch.Stream(f"{kind}:{device}"):
            leaves.append(torch.full((256,), 2.0, device=f"{kind}:{device}", requires_grad=True))
            roots.append(leaves[-1] * 3.0)
        seeds.append(torch.full((256,), float("nan"), device=f"{kind}:{device}"))
        stream = torch.accelerator.current_stream(device) if ambient_is_default else torch.Stream(f"{kind}:{device}")
        ambients.append(stream)
    synchronize()
    with ambients[1], ambients[0]:
        with torch.get_device_module().device(late):
            sleep()
        for seed in seeds:
            seed.fill_(5.0)
        second = 1 - first
        if repaired:
            ambients[first].wait_stream(ambients[second])
        torch.autograd.backward([roots[first], roots[second]], [seeds[first], seeds[second]])
        gradients = [leaf.grad.clone() for leaf in leaves]
    synchronize()
    return [device for device in range(2) if not torch.equal(gradients[device].cpu(), torch.full((256,), 15.0))]


def main():
    """Print a table; return whether a gradient was wrong."""
    if torch.accelerator.device_count() < 2:
        sys.exit("this needs two devices")
    trial(0, 0, False, False)  # loads kernels
    print(f"torch {torch.__version__}, {torch.accelerator.current_accelerator().type}")
    row = "{:<17}{:<16}{:<14}{:<8}{}"
    print(row.format("ambient streams", "order of roots", "late seed on", "wrong", "with the ambient streams ordered"))
    found = 0
    for ambient_is_default, first, late in itertools.product((False, True), (0, 1), (0, 1)):
        wrong, repaired = (
            sum(bool(trial(first, late, ambient_is_default, repair)) for _ in range(TRIALS)) for repair in (False, True)
        )
        found += wrong
        kind = "default" if ambient_is_default else "side"
        print(row.format(kind, f"{first}, {1 - first}", late, f"{wrong} of {TRIALS}", f"{repaired} of {TRIALS}"))
    print("The defect is there." if found else "Every gradient was right.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
