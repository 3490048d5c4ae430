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

SEMANTICS = "notes/cuda: stream semantics of backward passes"
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


def defect(report, aim, torch=">=2.7"):
    return pytest.mark.defect(f"docs/defects/{report}.md", aim=aim, torch=torch, devices=("cuda", "sim"))


def without_the_wait_of_the_caller(aim):
    """Before 2.8 the engine waits for a default stream where another device is involved, whatever the caller orders."""
    return defect("default_streams_between_devices", aim, torch=">=2.7,<2.8")


def late_seed(*streams):
    """Both orders of roots: PyTorch does not wait for the seed of the second, which the stream fills.

    Before 2.8 it waits for the default stream of that device.
    """
    return [
        pytest.param(
            stream,
            first,
            marks=defect("roots_on_two_devices", late, torch=">=2.8" if stream == "default" else ">=2.7"),
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
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=without_the_wait_of_the_caller(late), id=f"device_{first}_first")
        for first, late in enumerate(["ambient.1", "ambient"])
    ],
)
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


# Copies to the other device in the middle of a graph.

each_start = pytest.mark.parametrize("start", [0, 1], ids=["from_device_0", "from_device_1"])


def copied_once(value, device):
    return value.to(device) * 5.0, 5.0


def copied_and_used_twice(value, device):
    copied = value.to(device)
    return copied * 5.0 + copied * 7.0, 12.0


def copied_twice(value, device):
    return value.to(device) * 5.0 + value.to(device) * 7.0, 12.0


@pytest.mark.contract("pytorch/pytorch#31930")
@pytest.mark.parametrize("use", [copied_once, copied_and_used_twice, copied_twice])
@each_start
def test_copy_in_the_middle_of_a_graph(lab, use, start):
    """The gradient of a copy is copied back, and the nodes before wait for that, whatever streams the devices use."""
    leaf = full_leaf(lab, start, 2.0)
    forward, ambient = both(lab, "forward"), both(lab, "ambient")
    with forward[1 - start], forward[start]:
        root, slope = use(leaf * 3.0, forward[1 - start].device)
    with ambient[start], ambient[1 - start]:
        root.backward(torch.full_like(root, 5.0))
        lab.observe(leaf.grad, 15.0 * slope)


# Nodes that use both devices. The stream of each is that of its first output.


class OnBoth(torch.autograd.Function):
    """Three times a value, where it is and on another device."""

    @staticmethod
    def forward(ctx, value, device):
        tripled = value * 3.0
        return tripled, tripled.to(device)

    @staticmethod
    def backward(ctx, here, there):
        there.record_stream(torch.accelerator.current_stream(there.device))  # on which it is copied
        return 3.0 * (here + there.to(here.device)), None


def used_there(lab, value, device, streams):
    return (value * 5.0).to(device), 5.0


def used_there_on_two_streams(lab, value, device, streams):
    own, side = streams[value.device.index], stream_on(lab, value.device.index, "side")
    side.wait_stream(own)
    with side:
        other = lab.keep(value * 7.0)
    own.wait_stream(side)
    # Their gradients differ, so that none can be taken for the other.
    return other.to(device) * 2.0 + (value * 5.0).to(device), 19.0


def copied_back(lab, value, device, streams):
    return value.to(device) * 5.0, 5.0


def copied_back_twice(lab, value, device, streams):
    return value.to(device) * 5.0 + value.to(device) * 7.0, 12.0


@pytest.mark.contract(NODES)
@pytest.mark.parametrize("use", [used_there, used_there_on_two_streams, copied_back, copied_back_twice])
@each_start
def test_gradients_of_a_node_with_outputs_on_both_devices(lab, use, start):
    """A node waits on its one stream for gradients on both devices, made on either, summed up or not."""
    leaf = full_leaf(lab, start, 2.0)
    forward, ambient = both(lab, "forward"), both(lab, "ambient")
    with forward[1 - start], forward[start]:
        here, there = OnBoth.apply(leaf, forward[1 - start].device)
        used, slope = use(lab, there, here.device, forward)
        root = here + used
        lab.observe(root, 6.0 * (1.0 + slope))
    with ambient[1 - start], ambient[start]:
        root.backward(torch.full_like(root, 5.0))
        lab.observe(leaf.grad, 15.0 * (1.0 + slope))


class CopyWithWork(torch.autograd.Function):
    """A copy to another device, whose gradient is multiplied on a stream of the device that it comes back to."""

    @staticmethod
    def forward(ctx, value, device, work, in_order):
        ctx.work, ctx.in_order = work, in_order
        return value.to(device)

    @staticmethod
    def backward(ctx, gradient):
        own = torch.accelerator.current_stream(gradient.device)
        with ctx.work:
            returned = gradient.to(ctx.work.device) * 3.0
        if ctx.in_order:
            own.wait_stream(ctx.work)
        return returned, None, None, None


def copy_with_work(lab, start, in_order):
    leaf = full_leaf(lab, start, 2.0)
    forward, ambient = both(lab, "forward"), both(lab, "ambient")
    work = lab.stream("work", start)
    with forward[1 - start], forward[start]:
        root = CopyWithWork.apply(leaf * 7.0, forward[1 - start].device, work, in_order) * 1.0
    with ambient[start], ambient[1 - start]:
        root.backward(torch.full_like(root, 5.0))
        lab.observe(leaf.grad, 105.0)


@pytest.mark.contract(NODES)
@without_the_wait_of_the_caller("work")
@each_start
def test_gradient_made_on_a_stream_of_the_other_device(lab, start):
    """A node whose gradient is made on a stream of another device has it ready on its own stream."""
    copy_with_work(lab, start, in_order=True)


@pytest.mark.contract(NODES)
@pytest.mark.control("A node producing a gradient should have it ready on the canonical stream.", aim="work")
@each_start
def test_gradient_made_on_a_stream_of_the_other_device_without_a_wait(lab, start):
    """The same without the wait: what comes next may read the gradient before it is made."""
    copy_with_work(lab, start, in_order=False)


# The end of backward: a model whose halves are on two devices.


def halves(lab, first_value, second_value):
    """Leaves on device 0 and device 1, and their product on device 1."""
    leaves = [full_leaf(lab, 0, first_value), full_leaf(lab, 1, second_value)]
    forward = both(lab, "forward")
    with forward[1], forward[0]:
        hidden = leaves[0] * 3.0
        return leaves, hidden.to(forward[1].device) * leaves[1]


def tensor_backward(root, seed, leaves):
    root.backward(seed)
    return [leaf.grad for leaf in leaves]


def autograd_grad(root, seed, leaves):
    return torch.autograd.grad(root, leaves, seed)


@pytest.mark.contract("pytorch/pytorch#57833, #60127")
@pytest.mark.parametrize("call", [tensor_backward, autograd_grad])
@pytest.mark.parametrize(
    "names",
    [("ambient", "ambient"), ("ambient", "default"), ("default", "ambient")],
    ids=["both_side_streams", "side_stream_on_device_0", "side_stream_on_device_1"],
)
def test_gradients_are_ready_for_the_ambient_stream_of_each_device(lab, call, names):
    """When backward returns, the gradients of each device are ready for the ambient stream of that device."""
    leaves, root = halves(lab, 2.0, 7.0)
    ambient = [stream_on(lab, device, name) for device, name in enumerate(names)]
    with ambient[0], ambient[1]:
        gradients = call(root, torch.full_like(root, 5.0), leaves)
        lab.observe(gradients[0], 105.0)
        lab.observe(gradients[1], 30.0)


@pytest.mark.contract(SEMANTICS)
def test_gradients_are_gathered_on_one_device(lab):
    """When backward returns, a gradient may be copied to the other device and added there, with no further wait."""
    leaves, root = halves(lab, 2.0, 7.0)
    ambient = both(lab, "ambient")
    with ambient[1], ambient[0]:
        root.backward(torch.full_like(root, 5.0))
        lab.observe(leaves[0].grad + leaves[1].grad.to(leaves[0].device), 135.0)


@pytest.mark.contract(SEMANTICS)
def test_gradients_read_on_other_streams_that_wait(lab):
    """A stream that waits for the ambient stream of its device may read the gradients of that device."""
    leaves, root = halves(lab, 2.0, 7.0)
    ambient, readers = both(lab, "ambient"), both(lab, "reader")
    with ambient[0], ambient[1]:
        root.backward(torch.full_like(root, 5.0))
    for device, reader in enumerate(readers):
        reader.wait_stream(ambient[device])
        with reader:
            lab.observe(leaves[device].grad, [105.0, 30.0][device])


UNORDERED = "What backward makes is ready for the stream that is current where it is called, and for no other."


@pytest.mark.contract(SEMANTICS)
@pytest.mark.parametrize(
    "device",
    [
        pytest.param(0, marks=pytest.mark.control(UNORDERED, aim="forward")),
        pytest.param(1, marks=pytest.mark.control(UNORDERED, aim="forward.1")),
    ],
)
def test_gradient_read_on_another_stream_without_a_wait(lab, device):
    """The same without the wait: it may read the gradients before they are made."""
    leaves, root = halves(lab, 2.0, 7.0)
    ambient, reader = both(lab, "ambient"), stream_on(lab, device, "reader")
    with ambient[0], ambient[1]:
        root.backward(torch.full_like(root, 5.0))
    with reader:
        lab.observe(leaves[device].grad, [105.0, 30.0][device])


# Clipping across devices, in round numbers: the gradients are 9 and 12, their norms 144 and 192, the norm of both 240.

CLIPPING = "torch.nn.utils.clip_grad_norm_, torch/nn/utils/clip_grad.py"
loop_and_foreach = pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])


def clip(lab, leaves, foreach):
    """Clips to a norm of 120, so halves the gradients, and observes them where they are clipped."""
    norm = torch.nn.utils.clip_grad_norm_(leaves, 120.0, foreach=foreach)
    lab.observe(norm, 240.0)
    lab.observe(leaves[0].grad, 4.5)
    lab.observe(leaves[1].grad, 6.0)


@pytest.mark.contract(CLIPPING)
@loop_and_foreach
def test_clipping_and_a_step_on_the_ambient_streams(lab, foreach):
    """Gradients on both devices are clipped by their common norm and used by a step, right after backward."""
    leaves, root = halves(lab, 4.0, 3.0)
    ambient = both(lab, "ambient")
    with ambient[1], ambient[0]:
        root.backward(torch.ones_like(root))
        clip(lab, leaves, foreach)
        torch.optim.SGD(leaves, lr=2.0, foreach=foreach).step()
        lab.observe(leaves[0], -5.0)
        lab.observe(leaves[1], -9.0)


@pytest.mark.contract(CLIPPING)
@loop_and_foreach
def test_clipping_on_streams_that_wait_for_the_ambient_ones(lab, foreach):
    """The same on other streams, of which each waits for the ambient stream of its device."""
    leaves, root = halves(lab, 4.0, 3.0)
    ambient, other = both(lab, "ambient"), both(lab, "clip")
    with ambient[1], ambient[0]:
        root.backward(torch.ones_like(root))
    for device in range(2):
        other[device].wait_stream(ambient[device])
    with other[1], other[0]:
        clip(lab, leaves, foreach)


@pytest.mark.contract(SEMANTICS)
@pytest.mark.parametrize(
    "device",
    [
        pytest.param(0, marks=pytest.mark.control(UNORDERED, aim="forward")),
        pytest.param(1, marks=pytest.mark.control(UNORDERED, aim="forward.1")),
    ],
)
@loop_and_foreach
def test_clipping_without_a_wait_on_one_device(lab, device, foreach):
    """The same without the wait on one of the devices: clipping may read, and write, the gradients there too early."""
    leaves, root = halves(lab, 4.0, 3.0)
    ambient, other = both(lab, "ambient"), both(lab, "clip")
    with ambient[1], ambient[0]:
        root.backward(torch.ones_like(root))
    other[1 - device].wait_stream(ambient[1 - device])
    with other[1], other[0]:
        clip(lab, leaves, foreach)
