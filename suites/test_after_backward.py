"""After backward: its gradients are ready for the ambient stream, as the results of any other call, and for no other.

The contract (https://docs.pytorch.org/docs/stable/notes/cuda.html, "Stream semantics of backward passes"): when
backward returns, the stream that was current where it was called is ordered after every gradient that it has made, on
whatever streams: those that it accumulated into ``.grad`` (pytorch/pytorch#57833), those that ``autograd.grad`` returns
(pytorch/pytorch#60127), and what its final callbacks have done. Any other stream, the default stream included (since
1.10, pytorch/pytorch#60421), has to wait for the ambient stream first.

A gradient is accumulated on the stream on which its leaf was first used, if the graph of that use is still alive
(pytorch/pytorch#166136), and its memory belongs to the stream of the operation that made it. So who reads a gradient on
the ambient stream and gives it up (``zero_grad``) gives memory back to another stream than the one that may still read.
"""

import contextlib
import warnings

import pytest
import torch

pytestmark = [
    pytest.mark.contract("notes/cuda: stream semantics of backward passes"),
    # Some leaves here are first used on another stream, on purpose.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]

queue_callback = torch.autograd.Variable._execution_engine.queue_callback
FACTORS = (3.0, 4.0, 5.0)
STREAMS = ("first", "second", "third")


def full(lab, value, **options):
    return torch.full((256,), value, device=lab.device, **options)


def leaves_on(lab, *streams):
    """A leaf of 2 for each stream, used there, and a loss of all, made on 'loss', whose gradients are 3, 4 and 5."""
    leaves, products = [], []
    with lab.preparing():
        for stream, factor in zip(streams, FACTORS, strict=False):
            with lab.stream(stream):
                leaves.append(full(lab, 2.0, requires_grad=True))
                products.append(leaves[-1] * full(lab, 256 * factor))
        with lab.stream("loss"):
            loss = sum(product.mean() for product in products)
    lab.keep((leaves, products))
    return leaves, products, loss


def leaf_and_factor(lab):
    with lab.preparing():
        return lab.keep((full(lab, 2.0, requires_grad=True), full(lab, 3.0)))


def backward(loss, leaves):
    loss.backward()
    return [leaf.grad for leaf in leaves]


def backward_into_inputs(loss, leaves):
    loss.backward(inputs=leaves)
    return [leaf.grad for leaf in leaves]


def autograd_grad(loss, leaves):
    return torch.autograd.grad(loss, leaves)


def wait_stream(reader, ambient):
    reader.wait_stream(ambient)


def wait_event(reader, ambient):
    reader.wait_event(ambient.record_event())


def host_synchronize(reader, ambient):
    ambient.synchronize()


def no_order(reader, ambient):
    pass


every_entry = pytest.mark.parametrize("entry", [backward, backward_into_inputs, autograd_grad])
default_and_side = pytest.mark.parametrize("ambient", ["default", "ambient"])


# Which stream may read.


@every_entry
@pytest.mark.parametrize("ambient", ["default", "ambient", "second"])
@pytest.mark.contract("pytorch/pytorch#57833, #60127")
def test_gradients_made_on_three_streams_are_read_on_the_ambient_stream_at_once(lab, entry, ambient):
    """The ambient stream is ordered after the stream of each gradient, also if it is one of them."""
    leaves, _, loss = leaves_on(lab, *STREAMS)
    with lab.stream(ambient):
        for gradient, factor in zip(entry(loss, leaves), FACTORS, strict=True):
            lab.observe(gradient, factor)


@pytest.mark.parametrize("ambient, reader", [("ambient", "default"), ("default", "reader"), ("ambient", "forward")])
@pytest.mark.parametrize("order", [wait_stream, wait_event, host_synchronize])
@pytest.mark.contract("notes/cuda: stream semantics of backward passes, BC note on the default stream")
def test_gradient_read_on_another_stream_that_waits(lab, order, ambient, reader):
    """Any stream that is ordered after the ambient stream may read, the default stream as well as the forward's own."""
    leaf, factor = leaf_and_factor(lab)
    with lab.preparing():
        with lab.stream("first"):
            kept = leaf.clone()  # noqa: F841  the graph that keeps the leaf's node on this stream
        with lab.stream("forward"):
            loss = (leaf * factor).sum()
        leaf.grad = full(lab, 10.0)
    with lab.stream(ambient) as called_on:
        loss.backward()
    with lab.stream(reader) as reading:
        order(reading, called_on)
        lab.observe(leaf.grad, 13.0)


@pytest.mark.parametrize("ambient, reader", [("ambient", "default"), ("default", "reader"), ("ambient", "forward")])
@pytest.mark.control("Only the ambient stream is ordered after backward; no other is, since 1.10.", aim="first")
@pytest.mark.contract("notes/cuda: stream semantics of backward passes, BC note on the default stream")
def test_gradient_read_on_another_stream_that_does_not_wait(lab, ambient, reader):
    """The same without the wait: even the default stream may read what is not there yet."""
    leaf, factor = leaf_and_factor(lab)
    with lab.preparing():
        with lab.stream("first"):
            kept = leaf.clone()  # noqa: F841
        with lab.stream("forward"):
            loss = (leaf * factor).sum()
        leaf.grad = full(lab, 10.0)
    with lab.stream(ambient):
        loss.backward()
    with lab.stream(reader):
        lab.observe(leaf.grad, 13.0)


@pytest.mark.parametrize("order", [wait_stream, wait_event, host_synchronize])
@pytest.mark.contract("pytorch/pytorch#60127")
def test_returned_gradients_used_on_the_default_stream_after_a_wait(lab, order):
    """What ``autograd.grad`` returned inside a side stream may be used outside, once that is ordered after the call."""
    leaves, _, loss = leaves_on(lab, *STREAMS)
    with lab.stream("ambient") as ambient:
        gradients = torch.autograd.grad(loss, leaves)
    order(lab.stream("default"), ambient)
    lab.observe(sum(gradients[1:], gradients[0]), 12.0)


@pytest.mark.control("What autograd.grad returns is ready for the ambient stream only.", aim="third")
@pytest.mark.contract("pytorch/pytorch#60127")
def test_returned_gradients_used_on_the_default_stream_without_a_wait(lab):
    """The same without the wait."""
    leaves, _, loss = leaves_on(lab, *STREAMS)
    with lab.stream("ambient"):
        gradients = torch.autograd.grad(loss, leaves)
    lab.observe(sum(gradients[1:], gradients[0]), 12.0)


# What autograd.grad returns and backward retains.


@default_and_side
@pytest.mark.contract("pytorch/pytorch#60127")
def test_returned_gradients_of_intermediates_and_leaves(lab, ambient):
    """``autograd.grad`` may be asked for intermediate results and for leaves at once; each is ready, hooks included."""
    leaves, products, loss = leaves_on(lab, *STREAMS)
    products[0].register_hook(lambda gradient: gradient * 512)
    with lab.stream(ambient):
        of_product, of_leaf, of_other = torch.autograd.grad(loss, [products[0], leaves[1], leaves[2]])
        lab.observe(of_leaf, 4.0)
        lab.observe(of_product, 2.0)
        lab.observe(of_other, 5.0)


@default_and_side
@pytest.mark.contract("torch.autograd.grad: materialize_grads")
def test_returned_gradients_of_unused_leaves_are_materialized_on_the_ambient_stream(lab, ambient):
    """Zeros for a leaf that the graph does not contain belong to the ambient stream, and may be written there."""
    leaves, _, loss = leaves_on(lab, *STREAMS)
    with lab.preparing():
        unused = full(lab, 2.0, requires_grad=True)
    with lab.stream(ambient):
        made, zeros = torch.autograd.grad(loss, [leaves[0], unused], materialize_grads=True)
        with torch.no_grad():  # until torch 2.9 they require a gradient as the leaf does
            lab.observe(zeros.add_(made), 3.0)


@default_and_side
@pytest.mark.contract("torch.Tensor.retain_grad")
def test_retained_gradient_of_an_intermediate_result(lab, ambient):
    """The retained gradient of a result in the middle of the graph is as ready as those of the leaves behind it."""
    leaf, factor = leaf_and_factor(lab)
    with lab.preparing():
        with lab.stream("first"):
            middle = leaf * factor
            middle.retain_grad()
        with lab.stream("second"):
            loss = (middle * factor).sum()
    with lab.stream(ambient):
        loss.backward()
        lab.observe(middle.grad, 3.0)
        lab.observe(leaf.grad, 9.0)


@pytest.mark.parametrize("gradient", ["new", "accumulated"])
@default_and_side
def test_leaf_is_the_root(lab, ambient, gradient):
    """Backward of a leaf itself accumulates the seed on the leaf's stream, between two waits like any gradient."""
    leaf, _ = leaf_and_factor(lab)
    with lab.preparing():
        with lab.stream("first"):
            kept = leaf.clone()  # noqa: F841
        if gradient == "accumulated":
            leaf.grad = full(lab, 10.0)
    seeds = []
    with lab.stream(ambient):
        seeds.append(torch.ones_like(leaf))
        leaf.backward(seeds[0])
        seeds.clear()
        lab.observe(leaf.grad, 11.0 if gradient == "accumulated" else 1.0)


class FusedWeightGradient(torch.autograd.Function):
    """A product whose backward adds to the weight's main gradient itself, and returns none, as fused kernels do."""

    @staticmethod
    def forward(ctx, value, weight):
        ctx.save_for_backward(value)
        ctx.weight = weight
        return value * weight

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        ctx.weight.main_grad.add_(gradient * value)
        return None, None


@default_and_side
@pytest.mark.contract("torch.autograd.Function")
def test_gradient_that_a_function_accumulates_itself(lab, ambient):
    """What a custom Function writes in its backward is ready as gradients are, on the stream of its forward."""
    with lab.preparing():
        weight = lab.keep(full(lab, 2.0, requires_grad=True))
        weight.main_grad = full(lab, 10.0)
        with lab.stream("forward"):
            product = FusedWeightGradient.apply(full(lab, 3.0), weight)
    with lab.stream(ambient):
        product.backward(torch.ones_like(product))
        lab.observe(weight.main_grad, 13.0)


# Where no gradient goes on to a leaf. PyTorch waits for the streams of leaves, and of what autograd.grad returns.


def not_ready(aim):
    report = "docs/defects/unordered_intermediates.md"
    return pytest.mark.defect(report, aim=aim, torch=">=2.7", devices=("cuda", "sim"))


def middle_and_product(lab):
    leaf, factor = leaf_and_factor(lab)
    with lab.preparing():
        with lab.stream("first"):
            middle = leaf * factor
        with lab.stream("second"):
            product = middle * factor
    return lab.keep((middle, product))


@default_and_side
@not_ready("first")
@pytest.mark.contract("torch.Tensor.backward: inputs")
def test_gradient_of_an_intermediate_result_as_the_only_input(lab, ambient):
    """Backward with ``inputs`` may be asked for a result in the middle of the graph; its gradient is ready too."""
    middle, product = middle_and_product(lab)
    with lab.stream(ambient):
        product.backward(torch.ones_like(product), inputs=[middle])
        lab.observe(middle.grad, 3.0)


@not_ready("first")
@pytest.mark.contract("pytorch/pytorch#57833, #37944")
def test_callback_scales_the_gradient_of_an_intermediate_result(lab):
    """There too a callback finds the gradient ready, and what it writes is ready for the ambient stream."""
    middle, product = middle_and_product(lab)

    def callback():
        middle.grad.mul_(2.0)

    product.register_hook(lambda _: queue_callback(callback))
    with lab.stream("ambient"):
        product.backward(torch.ones_like(product), inputs=[middle])
        lab.observe(middle.grad, 6.0)


@default_and_side
@not_ready("forward")
@pytest.mark.contract("torch.autograd.Function")
def test_gradient_that_a_function_accumulates_itself_for_a_leaf_first_used_elsewhere(lab, ambient):
    """What a custom Function writes is ready although the leaf, which belongs to another stream, gets no gradient."""
    with lab.preparing():
        weight = lab.keep(full(lab, 2.0, requires_grad=True))
        weight.main_grad = full(lab, 10.0)
        with lab.stream("first"):
            kept = weight.clone()  # noqa: F841
        with lab.stream("forward"):
            product = FusedWeightGradient.apply(full(lab, 3.0), weight)
    with lab.stream(ambient):
        product.backward(torch.ones_like(product))
        lab.observe(weight.main_grad, 13.0)


# Over iterations.


@pytest.mark.parametrize("forward", [("forward",) * 3, STREAMS], ids=["same_forward", "other_forwards"])
@pytest.mark.parametrize("graph", ["given_up", "kept"])
@pytest.mark.parametrize("ambients", [("default", "one", "two"), ("one", "two", "one")], ids="-".join)
@pytest.mark.contract("pytorch/pytorch#166136")
def test_gradient_accumulated_over_iterations_with_other_ambient_streams(lab, ambients, graph, forward):
    """Each iteration may call backward on another stream, once that waits for the last; forwards need no wait for it.

    While the graph of an earlier iteration is kept, the leaf stays with the stream of that forward.
    """
    leaf, factor = leaf_and_factor(lab)
    kept = []
    for number, (ambient, made_on) in enumerate(zip(ambients, forward, strict=True)):
        with lab.stream(made_on):
            loss = (leaf * factor).sum()
        with lab.stream(ambient) as current:
            if number:
                current.wait_stream(lab.stream(ambients[number - 1]))
            loss.backward()
            lab.observe(leaf.grad, 3.0 * (number + 1))
        kept.append(lab.keep(loss) if graph == "kept" else None)
        del loss


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(
            ("forward", "forward"),
            marks=pytest.mark.control("The next iteration accumulates into what may still be read.", aim="one"),
            id="same_forward",
        ),
        pytest.param(
            ("forward", "other"),
            marks=pytest.mark.control("The next iteration accumulates into what may not be there.", aim="forward"),
            id="other_forward",
        ),
    ],
)
@pytest.mark.contract("notes/cuda: stream semantics of backward passes")
def test_gradient_accumulated_over_iterations_with_unordered_ambient_streams(lab, forward):
    """The same when the second iteration's ambient stream does not wait for the first's."""
    leaf, factor = leaf_and_factor(lab)
    for number, (ambient, made_on) in enumerate(zip(("one", "two"), forward, strict=True)):
        with lab.stream(made_on):
            loss = (leaf * factor).sum()
        with lab.stream(ambient):
            loss.backward()
            lab.observe(leaf.grad, 3.0 * (number + 1))
        del loss


# The stream of a leaf.


@contextlib.contextmanager
def mismatch_warning(enabled):
    """Whether PyTorch warns of a leaf whose stream is not that of its gradient; here it does so each time."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(enabled)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)
        torch.set_warn_always(always)
    assert any("AccumulateGrad" in str(warning.message) for warning in caught) == enabled


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"), reason="new in PyTorch 2.10"
)
@pytest.mark.parametrize("warned", [True, False], ids=["warned", "not_warned"])
@pytest.mark.parametrize("gradient", ["stolen", "copied", "accumulated"])
@pytest.mark.contract("torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch, pytorch/pytorch#166136")
def test_leaf_first_used_on_another_stream(lab, gradient, warned):
    """A leaf accumulates where it was first used, after the gradient that is made elsewhere, with a warning or without.

    A gradient that can be stolen is that gradient itself, whose memory belongs to the stream of the forward.
    """
    leaf, factor = leaf_and_factor(lab)
    streams, seen = [], []
    with lab.preparing():
        main_grad = full(lab, 10.0)
        with lab.stream("first"):
            kept = leaf.clone()  # noqa: F841
        with lab.stream("forward"):
            product = leaf * factor
        if gradient == "accumulated":
            leaf.grad = full(lab, 10.0)

    def add_to_the_main_gradient(leaf):
        streams.append(torch.accelerator.current_stream())
        main_grad.add_(leaf.grad)
        if gradient == "stolen":
            leaf.grad = None

    leaf.register_post_accumulate_grad_hook(add_to_the_main_gradient)
    if gradient == "copied":
        leaf.register_hook(seen.append)  # a gradient that someone else has cannot be stolen
    with lab.stream("ambient"), mismatch_warning(warned):
        product.backward(torch.ones_like(product))
        seen.clear()
        lab.observe(main_grad, 23.0 if gradient == "accumulated" else 13.0)
    assert streams == [lab.stream("first")]


# zero_grad.


def sgd(leaf):
    return torch.optim.SGD([leaf], lr=1.0, foreach=False)


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@default_and_side
@pytest.mark.contract("torch.optim.Optimizer.zero_grad")
def test_zero_grad_before_backward(lab, ambient, set_to_none):
    """Gradients cleared on the ambient stream are cleared before the next backward accumulates, on other streams."""
    leaves, _, loss = leaves_on(lab, *STREAMS)
    with lab.preparing():
        for leaf in leaves:
            leaf.grad = full(lab, 10.0)
        lab.keep([leaf.grad for leaf in leaves])
    optimizer = torch.optim.SGD(leaves, lr=1.0)
    with lab.stream(ambient):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward()
        for leaf, factor in zip(leaves, FACTORS, strict=True):
            lab.observe(leaf.grad, factor)


@pytest.mark.control("The gradients are cleared on a stream that the ambient stream does not wait for.", aim="clear")
def test_zero_grad_before_backward_on_another_stream(lab):
    """The same on a stream that nothing orders before the backward."""
    leaves, _, loss = leaves_on(lab, *STREAMS)
    with lab.preparing():
        for leaf in leaves:
            leaf.grad = full(lab, 10.0)
    with lab.stream("clear"):
        torch.optim.SGD(leaves, lr=1.0).zero_grad(set_to_none=False)
    with lab.stream("ambient"):
        loss.backward()
        for leaf, factor in zip(leaves, FACTORS, strict=True):
            lab.observe(leaf.grad, factor)


@pytest.mark.parametrize("clear", ["ambient", "clear"])
@pytest.mark.contract("torch.optim.Optimizer.zero_grad")
def test_zero_grad_after_backward(lab, clear):
    """Gradients are cleared after they were made and used, on whichever stream; the next backward adds to zeros."""
    with lab.preparing():
        leaf = lab.keep(full(lab, 2.0, requires_grad=True))
    ambient, clearing = lab.stream("ambient"), lab.stream(clear)
    optimizer = torch.optim.SGD([leaf], lr=0.25, foreach=False)
    for before, after in ((2.0, 1.0), (1.0, 0.5)):
        with lab.stream("forward") as forward:
            forward.wait_stream(ambient)
            loss = leaf.square().sum()
        with ambient:
            loss.backward()
            optimizer.step()
            lab.observe(loss, 256 * before**2)
            lab.observe(leaf, after)
        with clearing:
            if clearing != ambient:
                clearing.wait_stream(ambient)
            optimizer.zero_grad(set_to_none=False)
        if clearing != ambient:
            ambient.wait_stream(clearing)
        with ambient:
            lab.observe(leaf.grad, 0.0)


@pytest.mark.control("The default stream is not ordered after a backward inside a side stream.", aim="forward")
def test_zero_grad_after_backward_on_the_default_stream(lab):
    """Clearing outside the side stream that backward was called in may come before the gradient does."""
    leaf, factor = leaf_and_factor(lab)
    with lab.preparing(), lab.stream("forward"):
        loss = (leaf * factor).sum()
    with lab.stream("ambient") as ambient:
        loss.backward()
    sgd(leaf).zero_grad(set_to_none=False)
    lab.stream("default").wait_stream(ambient)  # too late
    lab.observe(leaf.grad, 0.0)


def record_on_the_ambient_stream(leaf, forward, ambient):
    leaf.grad.record_stream(ambient)


def let_the_forward_stream_wait(leaf, forward, ambient):
    forward.wait_stream(ambient)


def give_up(leaf, forward, ambient):
    pass


def step_and_set_to_none(lab, before):
    """A step on the ambient stream, then the gradient's memory goes back to the forward stream, which uses it again."""
    leaf, factor = leaf_and_factor(lab)
    with lab.preparing(), lab.stream("forward"):
        loss = (leaf * factor).sum()
    optimizer = sgd(leaf)
    with lab.stream("ambient") as ambient:
        loss.backward()
        optimizer.step()
        lab.observe(leaf, -1.0)
        before(leaf, lab.stream("forward"), ambient)
        optimizer.zero_grad(set_to_none=True)
    with lab.stream("forward"):
        lab.observe(full(lab, 7.0), 7.0)  # the next batch, say


@pytest.mark.parametrize("before", [record_on_the_ambient_stream, let_the_forward_stream_wait])
@pytest.mark.contract("torch.Tensor.record_stream")
def test_gradient_given_up_after_the_step(lab, before):
    """A gradient belongs to the stream that made it, which has to learn of the step before it is set to None."""
    step_and_set_to_none(lab, before)


@pytest.mark.control("Memory is given back to one stream while another may still read it.", aim="ambient")
@pytest.mark.contract("torch.Tensor.record_stream")
def test_gradient_given_up_during_the_step(lab):
    """Without either, the next allocation of the forward stream may overwrite what the step still reads."""
    step_and_set_to_none(lab, give_up)


# Final callbacks.


def queued_by_a_tensor_hook(leaves, callback):
    leaves[1].register_hook(lambda _: queue_callback(callback))


def queued_by_a_post_accumulate_hook(leaves, callback):
    leaves[2].register_post_accumulate_grad_hook(lambda _: queue_callback(callback))


def queued_by_a_callback(leaves, callback):
    leaves[0].register_hook(lambda _: queue_callback(lambda: queue_callback(callback)))


every_way_to_queue = pytest.mark.parametrize(
    "queue", [queued_by_a_tensor_hook, queued_by_a_post_accumulate_hook, queued_by_a_callback]
)


@every_way_to_queue
@default_and_side
@pytest.mark.contract("pytorch/pytorch#57833, #37944")
def test_callback_reads_every_gradient_on_the_ambient_stream(lab, queue, ambient):
    """A callback queued anywhere in backward runs on the ambient stream, when every gradient is ready for it."""
    leaves, _, loss = leaves_on(lab, *STREAMS)
    streams = []

    def callback():
        streams.append(torch.accelerator.current_stream())
        for leaf, factor in zip(leaves, FACTORS, strict=True):
            lab.observe(leaf.grad, factor)

    queue(leaves, callback)
    with lab.stream(ambient) as current:
        loss.backward()
    assert streams == [current]


@default_and_side
@pytest.mark.contract("pytorch/pytorch#57833, #37944")
def test_callback_averages_gradients_that_are_used_at_once(lab, ambient):
    """What a callback writes is part of the backward: the ambient stream goes on after it, as after a reducer's."""
    leaves, _, loss = leaves_on(lab, *STREAMS)

    def callback():
        for leaf in leaves:
            leaf.grad.mul_(0.5)

    queued_by_a_tensor_hook(leaves, callback)
    with lab.stream(ambient):
        loss.backward()
        for leaf, factor in zip(leaves, FACTORS, strict=True):
            lab.observe(leaf.grad, factor / 2)


def reduced_on_a_stream_of_its_own(lab, wait):
    leaves, _, loss = leaves_on(lab, *STREAMS)
    ambient, reduce = lab.stream("ambient"), lab.stream("reduce")

    def callback():
        if wait:
            reduce.wait_stream(torch.accelerator.current_stream())
        with reduce:
            for leaf in leaves:
                leaf.grad.mul_(0.5)
        ambient.wait_stream(reduce)

    queued_by_a_tensor_hook(leaves, callback)
    with ambient:
        loss.backward()
        for leaf, factor in zip(leaves, FACTORS, strict=True):
            lab.observe(leaf.grad, factor / 2)


@pytest.mark.contract("pytorch/pytorch#37944")
def test_callback_reduces_on_a_stream_of_its_own(lab):
    """A callback may go to another stream that waits for the one it runs on, if the ambient stream waits in turn."""
    reduced_on_a_stream_of_its_own(lab, wait=True)


@pytest.mark.control("The stream that the callback goes to is not ordered after the gradients.", aim="third")
@pytest.mark.contract("pytorch/pytorch#37944")
def test_callback_reduces_on_a_stream_that_does_not_wait(lab):
    """The same without the first wait."""
    reduced_on_a_stream_of_its_own(lab, wait=False)
