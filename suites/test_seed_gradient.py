"""Seed gradients: backward is ordered after whatever its ambient stream is ordered after, seeds included.

The contract (https://docs.pytorch.org/docs/stable/notes/cuda.html, "Stream semantics of backward passes"): a backward
call has the stream semantics of any other operation. A seed may be filled on any stream, as long as the stream that is
current where backward is called (the ambient stream) is ordered after the fill; the engine then orders each backward
node after the seed, on whatever stream that node runs (pytorch/pytorch#45787). And the gradients are ready for the
ambient stream when backward returns, with no synchronization by the caller (pytorch/pytorch#57833, #60421).

So every gradient here is observed on the ambient stream directly after the backward that makes it. And every seed is
given up directly after the backward that takes it, since whoever calls a function need not keep its arguments: the
engine records a seed on the stream of the node that reads it (pytorch/pytorch#60230).
"""

import itertools

import pytest
import torch

pytestmark = pytest.mark.contract("notes/cuda: stream semantics of backward passes; pytorch/pytorch#45787")
COPIES = "notes/cuda: use pinned memory buffers"


def tensor_backward(roots, seeds, leaves):
    for root, leaf in zip(roots, leaves, strict=True):
        root.backward(next(seeds))
        yield leaf.grad


def autograd_backward(roots, seeds, leaves):
    torch.autograd.backward(roots, list(seeds))
    yield from (leaf.grad for leaf in leaves)


def autograd_grad(roots, seeds, leaves):
    yield from torch.autograd.grad(roots, leaves, list(seeds))


def wait_stream(ambient, fill):
    ambient.wait_stream(fill)


def wait_event(ambient, fill):
    ambient.wait_event(fill.record_event())


def stream_synchronize(ambient, fill):
    fill.synchronize()


def event_synchronize(ambient, fill):
    fill.record_event().synchronize()


def no_order(ambient, fill):
    pass


every_entry = pytest.mark.parametrize("call", [tensor_backward, autograd_backward, autograd_grad])
every_forward_stream = pytest.mark.parametrize("forward", ["default", "ambient", "forward"])
one_root_and_several = pytest.mark.parametrize("root_count", [1, 3], ids=["one_root", "three_roots"])


def filled(seeds):
    """Each seed when it is asked for, filled with 5 on the current stream, and given up."""
    while seeds:
        yield seeds.pop(0).fill_(5.0)


def filled_on(fill, seeds, order, ambient):
    """The same, filled on the stream that their memory belongs to, so that their use on this one has to be recorded."""
    while seeds:
        with fill:
            seeds[0].fill_(5.0)
        order(ambient, fill)
        seeds[0].record_stream(ambient)
        yield seeds.pop(0)


def doubled(seed):
    return seed.mul_(2.0)


def products(lab, forward, root_count):
    """Leaves of 2 and their products with 3, 4, ..., made on the forward stream and ready everywhere."""
    with lab.stream(forward):
        pairs = [lab.product(2.0, 3.0 + number) for number in range(root_count)]
    return [leaf for leaf, _ in pairs], [product for _, product in pairs]


@every_entry
@every_forward_stream
@one_root_and_several
def test_implicit_seed_inside_a_side_stream(lab, call, forward, root_count):
    """Backward makes the seed of a scalar root itself, on the ambient stream, and orders the first node after it."""
    leaves, roots = products(lab, forward, root_count)
    with lab.preparing(), lab.stream(forward):
        losses = [root.sum() for root in roots]
    with lab.stream("ambient"):
        for number, gradient in enumerate(call(losses, itertools.repeat(None, root_count), leaves)):
            lab.observe(gradient, 3.0 + number)


@every_entry
@every_forward_stream
@one_root_and_several
def test_seed_filled_and_used_in_one_side_stream(lab, call, forward, root_count):
    """A seed made and filled on the ambient stream itself needs no wait by the caller, and no record_stream."""
    leaves, roots = products(lab, forward, root_count)
    with lab.stream("ambient"):
        seeds = [lab.poisoned(root) for root in roots]
        for number, gradient in enumerate(call(roots, filled(seeds), leaves)):
            lab.observe(gradient, 5.0 * (3.0 + number))


@pytest.mark.parametrize("order", [wait_stream, wait_event])
@every_entry
@every_forward_stream
@one_root_and_several
def test_seed_filled_on_another_stream_that_is_waited_for(lab, order, call, forward, root_count):
    """A seed filled on one stream seeds a backward called on another, once that is ordered after the fill."""
    leaves, roots = products(lab, forward, root_count)
    with lab.stream("fill") as fill:
        seeds = [lab.poisoned(root) for root in roots]
    with lab.stream("ambient") as ambient:
        for number, gradient in enumerate(call(roots, filled_on(fill, seeds, order, ambient), leaves)):
            lab.observe(gradient, 5.0 * (3.0 + number))


@pytest.mark.parametrize("order", [stream_synchronize, event_synchronize])
@every_entry
@every_forward_stream
@one_root_and_several
def test_seed_that_the_host_waited_for_is_scaled_on_the_ambient_stream(lab, order, call, forward, root_count):
    """The host waits for the fill, and the ambient stream scales the seed, as a gradient scaler does."""
    leaves, roots = products(lab, forward, root_count)
    with lab.stream("fill") as fill:
        seeds = [lab.poisoned(root) for root in roots]
    with lab.stream("ambient") as ambient:
        scaled = map(doubled, filled_on(fill, seeds, order, ambient))
        for number, gradient in enumerate(call(roots, scaled, leaves)):
            lab.observe(gradient, 10.0 * (3.0 + number))


@pytest.mark.control(
    "A gradient that is populated on one stream and used by a backward called on another, unordered, is unsafe.",
    aim="fill",
)
@every_entry
@every_forward_stream
@one_root_and_several
def test_seed_filled_on_another_stream_without_a_wait(lab, call, forward, root_count):
    """The same without the wait: backward may read the seed before it is filled."""
    leaves, roots = products(lab, forward, root_count)
    with lab.stream("fill") as fill:
        seeds = [lab.poisoned(root) for root in roots]
    with lab.stream("ambient") as ambient:
        for number, gradient in enumerate(call(roots, filled_on(fill, seeds, no_order, ambient), leaves)):
            lab.observe(gradient, 5.0 * (3.0 + number))


def copied_to(seed, host):
    return seed.copy_(host, non_blocking=True)


def pinned(like, value):
    return torch.full(like.shape, value, pin_memory=True)


@pytest.mark.contract(COPIES)
@pytest.mark.parametrize("order", [wait_stream, wait_event])
@every_forward_stream
def test_seed_copied_from_the_host_on_another_stream_that_is_waited_for(lab, order, forward):
    """A seed that a copy stream brings from pinned memory is used once the ambient stream is ordered after the copy."""
    (leaf,), (root,) = products(lab, forward, 1)
    host = lab.keep(pinned(root, 5.0))
    with lab.stream("copy") as copy:
        seed = copied_to(lab.poisoned(root), host)
    with lab.stream("ambient") as ambient:
        order(ambient, copy)
        seed.record_stream(ambient)
        root.backward(seed)
        del seed
        lab.observe(leaf.grad, 15.0)


@pytest.mark.contract(COPIES)
@every_forward_stream
def test_seed_copied_from_the_host_on_the_ambient_stream(lab, forward):
    """A non-blocking copy from pinned memory is an operation of its stream like any other: no wait is needed there."""
    (leaf,), (root,) = products(lab, forward, 1)
    host = lab.keep(pinned(root, 5.0))
    with lab.stream("ambient"):
        seed = copied_to(lab.poisoned(root), host)
        root.backward(seed)
        del seed
        lab.observe(leaf.grad, 15.0)


@pytest.mark.contract(COPIES)
@pytest.mark.control(
    "A non-blocking copy is ordered with the stream that it is made on, and with no other.", aim="copy"
)
@every_forward_stream
def test_seed_copied_from_the_host_on_another_stream_without_a_wait(lab, forward):
    """The same without the wait: backward may read the seed before it has come from the host."""
    (leaf,), (root,) = products(lab, forward, 1)
    host = lab.keep(pinned(root, 5.0))
    with lab.stream("copy"):
        seed = lab.keep(copied_to(lab.poisoned(root), host))
    with lab.stream("ambient"):
        root.backward(seed)
        lab.observe(leaf.grad, 15.0)


# One graph, several backwards or several roots.


@every_forward_stream
def test_second_backward_on_another_ambient_stream_that_waits(lab, forward):
    """A retained graph is used again from another ambient stream, which waits for who read the gradient so far."""
    (leaf,), (root,) = products(lab, forward, 1)
    with lab.stream("first") as first:
        root.backward(lab.poisoned(root).fill_(5.0), retain_graph=True)
        lab.observe(leaf.grad, 15.0)
    with lab.stream("second") as second:
        second.wait_stream(first)
        root.backward(torch.full_like(root, 7.0))
        lab.observe(leaf.grad, 36.0)


@every_forward_stream
def test_second_backward_on_another_ambient_stream_returns_other_gradients(lab, forward):
    """What autograd.grad returns belongs to its call: backwards of one graph from two streams need no wait."""
    (leaf,), (root,) = products(lab, forward, 1)
    seeds = []
    for name in ("first", "second"):
        with lab.stream(name):
            seeds.append(lab.poisoned(root))
    with lab.stream("first"):
        (gradient,) = torch.autograd.grad(root, leaf, seeds.pop(0).fill_(5.0), retain_graph=True)
    with lab.stream("second"):
        (other,) = torch.autograd.grad(root, leaf, seeds.pop(0).fill_(7.0))
        lab.observe(other, 21.0)
    with lab.stream("first"):
        lab.observe(gradient, 15.0)


@pytest.mark.control("A gradient is accumulated in place, unordered with who has read it so far.", aim="first")
@every_forward_stream
def test_second_backward_on_another_ambient_stream_without_a_wait(lab, forward):
    """The same without the wait: the sum of both gradients may be there before the first one is read."""
    (leaf,), (root,) = products(lab, forward, 1)
    seeds = [lab.poisoned(root), lab.poisoned(root)]
    with lab.stream("first"):
        root.backward(seeds[0].fill_(5.0), retain_graph=True)
        lab.observe(leaf.grad, 15.0)
    with lab.stream("second"):
        root.backward(seeds[1].fill_(7.0))
        lab.observe(leaf.grad, 36.0)


def siblings(hidden, forward, side):
    with forward:
        first = hidden * 3.0
    with side:
        return [first, hidden * 5.0], 8.0


def one_behind_the_other(hidden, forward, side):
    with side:
        return [hidden, hidden * 3.0], 4.0


def one_twice(hidden, forward, side):
    with side:
        root = hidden * 3.0
    return [root, root], 6.0


@pytest.mark.parametrize("call", [autograd_backward, autograd_grad])
@pytest.mark.parametrize("shape", [siblings, one_behind_the_other, one_twice])
@every_forward_stream
def test_roots_that_share_a_graph(lab, call, shape, forward):
    """Seeds meet in a node that several roots lead to, be it a root itself: each is waited for where it is added up."""
    with lab.stream(forward) as stream:
        leaf, hidden = lab.product(2.0, 2.0)
    with lab.preparing():
        roots, slope = shape(hidden, stream, lab.stream("side"))
    with lab.stream("fill") as fill:
        seeds = [lab.poisoned(root) for root in roots]
    with lab.stream("ambient") as ambient:
        for gradient in call(roots, filled_on(fill, seeds, wait_stream, ambient), [leaf]):
            lab.observe(gradient, 10.0 * slope)
