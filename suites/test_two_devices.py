"""Two devices: backward orders the streams of every device that it uses, each device with its own ambient stream.

The contract (https://docs.pytorch.org/docs/stable/notes/cuda.html, "Stream semantics of backward passes") knows no
number of devices: the nodes of a device are ordered after what the ambient stream of that device is ordered after when
backward is called, and what they make is ready for it when backward returns (pytorch/pytorch#57833). A node has one
stream all the same, that of its first output on an accelerator; "Stream sync contract when dealing with
multi-deviced-ness" (torch/csrc/autograd/input_buffer.cpp, pytorch/pytorch#151079) says what follows: a node has its
gradients ready on that stream, wherever it made them, and orders whatever else it uses after that stream.

Copies between two devices are ordered with the current streams of both (aten/src/ATen/native/cuda/Copy.cu), and so keep
that contract by themselves (pytorch/pytorch#31930).
"""

import pytest
import torch

pytestmark = pytest.mark.devices(2)

SEMANTICS = "https://docs.pytorch.org/docs/stable/notes/cuda.html#bwd-cuda-stream-semantics"
NODES = "torch/csrc/autograd/input_buffer.cpp, Stream sync contract when dealing with multi-deviced-ness"


def stream_on(lab, device, name):
    return lab.stream(name if device == 0 or name == "default" else f"{name}.1", device)


def both(lab, name):
    """The streams of that name on device 0 and on device 1."""
    return stream_on(lab, 0, name), stream_on(lab, 1, name)


def full_leaf(lab, device, value):
    with lab.preparing():
        return torch.full((256,), value, device=lab.stream("default", device).device, requires_grad=True)


def product(lab, stream, left, right):
    """A leaf filled with ``left`` and its product with ``right``, made on a stream and ready everywhere."""
    leaf = full_leaf(lab, stream.device.index, left)
    with lab.preparing(), stream:
        return lab.keep((leaf, leaf * right))


# Roots on two devices.


def late_seed(*streams):
    """Both orders of roots: PyTorch does not wait for the seed of the second, which the stream fills."""
    report = "docs/defects/roots_on_two_devices.md"
    return [
        pytest.param(
            stream,
            first,
            marks=pytest.mark.defect(report, aim=late, torch=">=2.7", devices=("cuda", "sim")),
            id=f"{stream}-device_{first}_first",
        )
        for stream in streams
        for first, late in enumerate([f"{stream}.1", stream])
    ]


@pytest.mark.contract("pytorch/pytorch#45787")
@pytest.mark.parametrize(("ambient", "first"), late_seed("default", "ambient"))
def test_roots_on_two_devices(lab, ambient, first):
    """Each of two roots on two devices has a seed of its own, filled on the ambient stream of its device."""
    pairs = [product(lab, forward, 2.0, 3.0) for forward in both(lab, "forward")]
    on_device_0, on_device_1 = both(lab, ambient)
    with on_device_1, on_device_0:
        seeds = [lab.poisoned(root) for _, root in pairs]
        for seed in seeds:
            seed.fill_(5.0)
        order = [first, 1 - first]
        torch.autograd.backward([pairs[device][1] for device in order], [seeds[device] for device in order])
        del seed, seeds
        for leaf, _ in pairs:
            lab.observe(leaf.grad, 15.0)


@pytest.mark.contract(SEMANTICS)
@pytest.mark.parametrize(("ambient", "first"), late_seed("ambient"))
def test_losses_on_two_devices(lab, ambient, first):
    """Backward makes the seed of each of two losses on two devices itself, on the ambient stream of its device."""
    pairs = [product(lab, forward, 2.0, 3.0) for forward in both(lab, "forward")]
    on_device_0, on_device_1 = both(lab, ambient)
    with lab.preparing(), stream_on(lab, 1, "forward"), stream_on(lab, 0, "forward"):
        losses = [root.sum() for _, root in pairs]
    with on_device_1, on_device_0:
        for loss in losses:
            lab.poisoned(loss)  # and given up: the memory of the seed to come
        torch.autograd.backward([losses[first], losses[1 - first]])
        for leaf, _ in pairs:
            lab.observe(leaf.grad, 3.0)


@pytest.mark.contract(SEMANTICS)
@pytest.mark.parametrize("first", [0, 1], ids=["device_0_first", "device_1_first"])
def test_roots_on_two_devices_of_ordered_streams(lab, first):
    """The ambient stream of the first root's device is ordered after that of the other, and so after both seeds."""
    pairs = [product(lab, forward, 2.0, 3.0) for forward in both(lab, "forward")]
    ambient = both(lab, "ambient")
    with ambient[1], ambient[0]:
        seeds = [lab.poisoned(root) for _, root in pairs]
        for seed in seeds:
            seed.fill_(5.0)
        order = [first, 1 - first]
        ambient[first].wait_stream(ambient[1 - first])
        torch.autograd.backward([pairs[device][1] for device in order], [seeds[device] for device in order])
        del seed, seeds
        for leaf, _ in pairs:
            lab.observe(leaf.grad, 15.0)
