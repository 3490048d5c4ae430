"""Hooks: each runs on the stream of the node it belongs to, ordered after the gradient it is given, and after no other.

The contract (https://docs.pytorch.org/docs/stable/notes/autograd.html, "Backward Hooks execution", with notes/cuda,
"Stream semantics of backward passes"): a hook is part of its node, so it runs on the node's stream. That is the stream
of the forward operation for a tensor's hook, a node's hook and the unpacking of a saved tensor; the stream on which a
module was called for its hooks; and, for the hooks of a leaf, the stream where the leaf was first used. There a hook
may read, write and replace what it is given, and what it launches is part of the backward: the ambient stream is
ordered after it as after the gradient itself.

Whatever a hook does on another stream is its own business: that stream has to wait for the hook's, and be waited for by
whoever goes on. And a gradient made elsewhere is not ready for a hook, even if it was handed to an earlier one.
"""

import pytest
import torch
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

pytestmark = [
    pytest.mark.contract("notes/autograd: backward hooks execution; notes/cuda: stream semantics of backward passes"),
    # Some leaves here are first used on another stream, on purpose.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]

STREAMS = ("first", "second", "third")
FACTORS = (3.0, 4.0, 5.0)


def full(lab, value, **options):
    return torch.full((256,), value, device=lab.device, **options)


def chain(lab, first_used="first"):
    """A leaf, three times it made on 'first', four times that on 'second'. The leaf may be used elsewhere before."""
    with lab.preparing():
        leaf = full(lab, 2.0, requires_grad=True)
        if first_used != "first":
            with lab.stream(first_used):
                lab.keep(leaf.clone())  # as long as this graph is alive, the leaf's node belongs to this stream
        with lab.stream("first"):
            middle = leaf * full(lab, 3.0)
        with lab.stream("second"):
            output = middle * full(lab, 4.0)
    return leaf, middle, output


def leaves_on(lab, *streams):
    """A leaf of 20 for each stream, used there, and a loss of all, made on 'loss', whose gradients are 3, 4 and 5."""
    leaves, products = [], []
    with lab.preparing():
        for stream, factor in zip(streams, FACTORS, strict=False):
            with lab.stream(stream):
                leaves.append(full(lab, 20.0, requires_grad=True))
                products.append(leaves[-1] * full(lab, 256 * factor))
        with lab.stream("loss"):
            loss = sum(product.mean() for product in products)
    lab.keep(leaves)
    return leaves, loss


def current():
    return torch.accelerator.current_stream()


def wait(stream, other):
    stream.wait_stream(other)


def do_not_wait(stream, other):
    pass


default_and_side = pytest.mark.parametrize("ambient", ["default", "ambient"])


# Hooks of a tensor and of a node.


@pytest.mark.parametrize("where, stream", [("output", "second"), ("middle", "first"), ("leaf", "leaf")])
@default_and_side
@pytest.mark.contract("torch.Tensor.register_hook")
def test_tensor_hook_replaces_the_gradient(lab, ambient, where, stream):
    """A tensor's hook runs on the stream of the tensor's own node, which then goes on with what the hook returns."""
    leaf, middle, output = chain(lab, first_used="leaf" if where == "leaf" else "first")
    streams = []

    def negate(gradient):
        streams.append(current())
        return -gradient

    {"leaf": leaf, "middle": middle, "output": output}[where].register_hook(negate)
    with lab.stream(ambient):
        output.backward(torch.ones_like(output))
        lab.observe(leaf.grad, -12.0)
    assert streams == [lab.stream(stream)]


@pytest.mark.parametrize("where, last, leaf_gradient", [("output", 4.0, 48.0), ("middle", 10.0, 30.0)])
@pytest.mark.contract("torch.Tensor.register_hook")
def test_tensor_hooks_of_one_tensor_read_what_the_last_one_made(lab, where, last, leaf_gradient):
    """Several hooks of a tensor run one after another on one stream, each with the gradient that the last returned."""
    leaf, middle, output = chain(lab)
    tensor = {"middle": middle, "output": output}[where]
    tensor.register_hook(lambda gradient: gradient + 1)
    tensor.register_hook(lambda gradient: gradient * 2)
    tensor.register_hook(lambda gradient: lab.observe(gradient, last))
    with lab.stream("ambient"):
        output.backward(torch.ones_like(output))
        lab.observe(leaf.grad, leaf_gradient)


def node_prehook(node, streams):
    def negate(grad_outputs):
        streams.append(current())
        return tuple(-gradient for gradient in grad_outputs)

    node.register_prehook(negate)


def node_posthook(node, streams):
    def negate(grad_inputs, grad_outputs):
        streams.append(current())
        return (-grad_inputs[0], *grad_inputs[1:])

    node.register_hook(negate)


@pytest.mark.parametrize("register", [node_prehook, node_posthook])
@pytest.mark.parametrize("where, stream", [("output", "second"), ("middle", "first")])
@pytest.mark.contract("torch.autograd.graph.Node.register_prehook, register_hook")
def test_node_hook_replaces_what_comes_in_or_goes_out(lab, register, where, stream):
    """A node's hooks run on its stream, before and after it."""
    leaf, middle, output = chain(lab)
    streams = []
    register({"middle": middle, "output": output}[where].grad_fn, streams)
    with lab.stream("ambient"):
        output.backward(torch.ones_like(output))
        lab.observe(leaf.grad, -12.0)
    assert streams == [lab.stream(stream)]


@pytest.mark.parametrize("where, expected", [("output", 1.0), ("middle", 4.0), ("leaf", 12.0)])
@pytest.mark.contract("torch.Tensor.register_hook")
def test_tensor_hook_reads_its_gradient_on_the_host(lab, where, expected):
    """A hook that copies its gradient to the host, to log it, waits for no more than its own stream."""
    leaf, middle, output = chain(lab, first_used="leaf" if where == "leaf" else "first")

    logged = []

    def log(gradient):
        logged.append(gradient.cpu())
        return gradient * 2

    {"leaf": leaf, "middle": middle, "output": output}[where].register_hook(log)
    with lab.stream("ambient"):
        output.backward(torch.ones_like(output))
        lab.observe(logged[0], expected)
        lab.observe(leaf.grad, 24.0)


@pytest.mark.parametrize("where, expected", [("output", 2.0), ("middle", 8.0)])
@pytest.mark.contract("notes/autograd: whether hooks modify what retain_grad keeps")
def test_retained_gradient_is_what_the_last_hook_made(lab, where, expected):
    """``retain_grad`` keeps what its tensor's hooks return, though called before; the ambient stream may read it."""
    leaf, middle, output = chain(lab)
    tensor = {"middle": middle, "output": output}[where]
    tensor.retain_grad()
    tensor.register_hook(lambda gradient: gradient * 2)
    with lab.stream("ambient"):
        output.backward(torch.ones_like(output))
        lab.observe(tensor.grad, expected)
        lab.observe(leaf.grad, 24.0)


@default_and_side
@pytest.mark.contract("torch.Tensor.register_hook")
def test_what_a_hook_computed_is_ready_for_the_ambient_stream(lab, ambient):
    """What a hook keeps, a statistic of a gradient say, may be read on the ambient stream when backward returns."""
    leaf, middle, output = chain(lab)
    kept = []
    middle.register_hook(lambda gradient: kept.append(gradient.square()))
    with lab.stream(ambient):
        output.backward(torch.ones_like(output))
        lab.observe(kept[0], 16.0)
        lab.observe(leaf.grad, 12.0)


@pytest.mark.control("What a hook launched is ordered before the ambient stream only.", aim="first")
@pytest.mark.contract("torch.Tensor.register_hook")
def test_what_a_hook_computed_is_read_on_the_default_stream(lab):
    """The same outside the side stream of the backward: nothing orders the hook before."""
    _, middle, output = chain(lab)
    kept = []
    middle.register_hook(lambda gradient: kept.append(gradient.square()))
    with lab.stream("ambient"):
        output.backward(torch.ones_like(output))
    lab.observe(kept[0], 16.0)


# Hooks of several tensors.


@pytest.mark.contract("torch.autograd.graph.register_multi_grad_hook")
def test_hook_of_any_of_several_tensors(lab):
    """A hook that takes the first of several gradients runs on the stream of that one, which is ready there."""
    leaves, loss = leaves_on(lab, *STREAMS)
    streams = []

    def first_to_come(gradient):
        streams.append(current())
        lab.observe(gradient, 5.0)

    register_multi_grad_hook(leaves, first_to_come, mode="any")
    with lab.stream("ambient"):
        loss.backward()
        for leaf, factor in zip(leaves, FACTORS, strict=True):
            lab.observe(leaf.grad, factor)
    assert streams == [lab.stream("third")]


def sum_of_all(lab, order):
    leaves, loss = leaves_on(lab, *STREAMS)
    streams = []

    def all_are_there(gradients):
        streams.append(current())
        for other in ("second", "third"):
            order(current(), lab.stream(other))
        lab.observe(sum(gradients[1:], gradients[0]), 12.0)

    register_multi_grad_hook(leaves, all_are_there)
    with lab.stream("ambient"):
        loss.backward()
        for leaf, factor in zip(leaves, FACTORS, strict=True):
            lab.observe(leaf.grad, factor)
    assert streams == [lab.stream("first")]


@pytest.mark.contract("torch.autograd.graph.register_multi_grad_hook")
def test_hook_of_all_of_several_tensors_waits_for_their_streams(lab):
    """A hook that takes all gradients runs on the stream of the last, which has to wait for those of the others."""
    sum_of_all(lab, wait)


@pytest.mark.control("A hook is ordered after the gradient of its own node; it was the last to come.", aim="third")
@pytest.mark.contract("torch.autograd.graph.register_multi_grad_hook")
def test_hook_of_all_of_several_tensors_does_not_wait(lab):
    """The same without these waits: the hook has every gradient, but only its own is sure to be there."""
    sum_of_all(lab, do_not_wait)


# Hooks of a module.


class Scale(torch.nn.Module):
    """Multiplies by a weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, value):
        return value * self.weight


def modules_on_two_streams(lab, register):
    """A leaf of 2, multiplied by 3 on 'first' and by 4 on 'second'; hooks are registered before."""
    with lab.preparing():
        leaf = full(lab, 2.0, requires_grad=True)
        with lab.stream("first"):
            three = Scale(full(lab, 3.0))
        with lab.stream("second"):
            four = Scale(full(lab, 4.0))
        register(three, four)
        with lab.stream("first"):
            middle = three(leaf)
        with lab.stream("second"):
            output = four(middle)
    lab.keep((leaf, three, four, middle))
    return leaf, three, four, output


def full_backward_pre_hook(module, streams):
    def negate(module, grad_output):
        streams.append(current())
        return (-grad_output[0],)

    module.register_full_backward_pre_hook(negate)


def full_backward_hook(module, streams):
    def negate(module, grad_input, grad_output):
        streams.append(current())
        return (-grad_input[0],)

    module.register_full_backward_hook(negate)


@pytest.mark.parametrize("register", [full_backward_pre_hook, full_backward_hook])
@default_and_side
@pytest.mark.contract("torch.nn.Module.register_full_backward_hook, register_full_backward_pre_hook")
def test_module_hooks_run_where_the_module_was_called(lab, ambient, register):
    """A module's backward hooks run on the stream on which it was called, and replace what passes through it."""
    streams = []
    leaf, three, four, output = modules_on_two_streams(
        lab, lambda three, four: [register(module, streams) for module in (three, four)]
    )
    with lab.stream(ambient):
        output.backward(torch.ones_like(output))
        before = register is full_backward_pre_hook
        lab.observe(four.weight.grad, -6.0 if before else 6.0)
        lab.observe(three.weight.grad, 8.0 if before else -8.0)
        lab.observe(leaf.grad, 12.0)
    assert streams == [lab.stream("second"), lab.stream("first")]


@pytest.mark.contract("torch.nn.Module.register_full_backward_hook")
def test_module_hook_sees_both_sides(lab):
    """A module's hook is ordered after what comes in and what goes out, and its statistic is part of the backward."""
    statistics = []

    def products(module, grad_input, grad_output):
        statistics.append(grad_input[0] * grad_output[0])

    leaf, _, _, output = modules_on_two_streams(
        lab, lambda three, four: [module.register_full_backward_hook(products) for module in (three, four)]
    )
    with lab.stream("ambient"):
        output.backward(torch.ones_like(output))
        for statistic, expected in zip(statistics, (4.0, 48.0), strict=True):
            lab.observe(statistic, expected)
        lab.observe(leaf.grad, 12.0)


# After accumulation: the optimizer in the backward.


@pytest.mark.parametrize("first_used, stream", [("first", "first"), ("leaf", "leaf")], ids=["same_stream", "elsewhere"])
@default_and_side
@pytest.mark.contract("torch.Tensor.register_post_accumulate_grad_hook")
def test_optimizer_in_the_backward(lab, ambient, first_used, stream):
    """A step in a leaf's hook runs on the leaf's stream, after its gradient, which may be given up there at once."""
    leaf, _, output = chain(lab, first_used)
    optimizer = torch.optim.SGD([leaf], lr=1.0)
    streams = []

    def step(leaf):
        streams.append(current())
        optimizer.step()
        optimizer.zero_grad()

    leaf.register_post_accumulate_grad_hook(step)
    with lab.stream(ambient):
        output.backward(torch.ones_like(output))
        lab.observe(leaf, -10.0)
    assert leaf.grad is None and streams == [lab.stream(stream)]


@pytest.mark.contract("torch.autograd.graph.Node.register_hook")
def test_hook_of_the_node_that_accumulates(lab):
    """A hook of a leaf's node, as a reducer registers it, runs on the leaf's stream after the gradient is there."""
    leaf, _, output = chain(lab, first_used="leaf")
    streams, reduced = [], []

    def reduce(*_):
        streams.append(current())
        reduced.append(leaf.grad * 0.5)
        leaf.grad = None

    torch.autograd.graph.get_gradient_edge(leaf).node.register_hook(reduce)
    with lab.stream("ambient"):
        output.backward(torch.ones_like(output))
        lab.observe(reduced[0], 6.0)
    assert streams == [lab.stream("leaf")]


@pytest.mark.contract("torch.Tensor.register_post_accumulate_grad_hook")
def test_optimizer_in_the_backward_over_iterations(lab):
    """With a leaf on each of three streams, the next forwards need no wait for steps that ran on their own streams."""
    with lab.preparing():
        leaves = []
        for stream in STREAMS:
            with lab.stream(stream):
                leaves.append(lab.keep(full(lab, 1.0, requires_grad=True)))
    optimizers = {leaf: torch.optim.SGD([leaf], lr=0.25) for leaf in leaves}

    def step(leaf):
        optimizers[leaf].step()
        optimizers[leaf].zero_grad()

    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(step)
    ambient = lab.stream("ambient")
    for before in (1.0, 0.5):
        outputs = []
        for stream, leaf in zip(STREAMS, leaves, strict=True):
            with lab.stream(stream):
                outputs.append(leaf.square())
            ambient.wait_stream(lab.stream(stream))
        with ambient:
            total = sum(outputs[1:], outputs[0])
            lab.observe(total, 3 * before**2)
            total.sum().backward()
            for leaf in leaves:
                lab.observe(leaf, before / 2)


def step_on_a_stream_of_its_own(lab, before=wait, record=True, after=wait):
    leaf, _, output = chain(lab)
    optimizer = torch.optim.SGD([leaf], lr=1.0)
    stepping = lab.stream("step")

    def step(leaf):
        before(stepping, current())
        with stepping:
            optimizer.step()
        if record:
            leaf.grad.record_stream(stepping)
        optimizer.zero_grad()

    leaf.register_post_accumulate_grad_hook(step)
    lab.keep(leaf)
    with lab.stream("ambient") as ambient:
        output.backward(torch.ones_like(output))
        with lab.stream("first"):
            lab.observe(full(lab, 7.0), 7.0)  # the next batch, say, where the gradient was
        after(ambient, stepping)
        lab.observe(leaf, -10.0)


@pytest.mark.contract("torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.record_stream")
def test_step_on_a_stream_of_its_own(lab):
    """A hook may step on another stream that waits for its own, records the gradient there, and is waited for."""
    step_on_a_stream_of_its_own(lab)


@pytest.mark.control("Only the stream of the hook is ordered after the gradient.", aim="first")
def test_step_on_a_stream_that_does_not_wait_for_the_hook(lab):
    """The same without the wait inside the hook."""
    step_on_a_stream_of_its_own(lab, before=do_not_wait)


@pytest.mark.control(
    "Backward orders the ambient stream after its nodes, not after what hooks do elsewhere.", aim="step"
)
def test_step_on_a_stream_that_is_not_waited_for(lab):
    """The same without the wait after backward."""
    step_on_a_stream_of_its_own(lab, after=do_not_wait)


@pytest.mark.control("A gradient is given back to the stream that made it while another still reads it.", aim="step")
@pytest.mark.contract("torch.Tensor.record_stream")
def test_step_on_a_stream_that_the_gradient_is_not_recorded_on(lab):
    """The same without record_stream: the gradient is given up while the step may still read it."""
    step_on_a_stream_of_its_own(lab, record=False)


# Communication.


def reduced_one_by_one(lab, before=wait, after=wait):
    leaves, loss = leaves_on(lab, *STREAMS)
    communication = lab.stream("communication")

    def reduce(leaf):
        before(communication, current())
        with communication:
            leaf.grad.mul_(0.5)

    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(reduce)
    with lab.stream("ambient") as ambient:
        loss.backward()
        after(ambient, communication)
        for leaf, factor in zip(leaves, FACTORS, strict=True):
            lab.observe(leaf.grad, factor / 2)


@pytest.mark.contract("torch.Tensor.register_post_accumulate_grad_hook")
def test_gradients_reduced_on_a_communication_stream(lab):
    """Each gradient is reduced as soon as it is there, on a stream that waits for each hook and is waited for once."""
    reduced_one_by_one(lab)


@pytest.mark.control("Only the stream of a hook is ordered after its gradient.", aim="second")
def test_gradients_reduced_on_a_communication_stream_that_does_not_wait(lab):
    """The same without the waits inside the hooks."""
    reduced_one_by_one(lab, before=do_not_wait)


@pytest.mark.control("Backward does not order the ambient stream after what hooks do elsewhere.", aim="communication")
def test_gradients_reduced_on_a_communication_stream_that_is_not_waited_for(lab):
    """The same without the wait after backward."""
    reduced_one_by_one(lab, after=do_not_wait)


def every_arrival(arrivals):
    return arrivals


def last_arrival(arrivals):
    return arrivals[-1:]


def reduced_in_a_bucket(lab, which):
    """Hooks copy gradients into one flat buffer; when the last is there, the buffer is reduced as a whole."""
    leaves, loss = leaves_on(lab, *STREAMS)
    with lab.preparing():
        bucket = torch.zeros(3 * 256, device=lab.device)
    views = dict(zip(leaves, bucket.split(256), strict=True))
    communication = lab.stream("communication")
    arrivals = []

    def fill(leaf):
        views[leaf].copy_(leaf.grad)
        leaf.grad = None
        arrivals.append(current().record_event())
        if len(arrivals) == len(leaves):
            for event in which(arrivals):
                communication.wait_event(event)
            with communication:
                bucket.mul_(0.5)

    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(fill)
    with lab.stream("ambient") as ambient:
        loss.backward()
        ambient.wait_stream(communication)
        for leaf, factor in zip(leaves, FACTORS, strict=True):
            lab.observe(views[leaf], factor / 2)


@pytest.mark.contract("torch/csrc/distributed/c10d/reducer.cpp")
def test_bucket_of_gradients_from_several_streams(lab):
    """A bucket is reduced on a stream that waits for every hook that filled a part of it."""
    reduced_in_a_bucket(lab, every_arrival)


@pytest.mark.control("The last hook's stream is not ordered after the others.", aim="third")
@pytest.mark.contract("torch/csrc/distributed/c10d/reducer.cpp, all_reduce_bucket")
def test_bucket_that_waits_for_the_last_gradient_only(lab):
    """That the last gradient is there says nothing of those that came before it on other streams."""
    reduced_in_a_bucket(lab, last_arrival)


# Hooks that switch streams.


def negated_elsewhere(lab, before=wait, after=wait):
    leaf, middle, output = chain(lab)
    other = lab.stream("other")

    def negate(gradient):
        doubled = gradient * 2
        before(other, current())
        with other:
            negated = doubled * -0.5
        after(current(), other)
        negated.record_stream(current())
        return negated

    middle.register_hook(negate)
    with lab.stream("ambient"):
        output.backward(torch.ones_like(output))
        lab.observe(leaf.grad, -12.0)


@pytest.mark.contract("torch.Tensor.register_hook")
def test_hook_goes_to_another_stream_and_back(lab):
    """A hook may compute on another stream that waits for its own, which waits in turn before the hook returns."""
    negated_elsewhere(lab)


@pytest.mark.control("Only the stream of the hook is ordered after what the hook launched.", aim="first")
def test_hook_goes_to_another_stream_that_does_not_wait(lab):
    """The same without the first wait: what it is to read may not be there yet."""
    negated_elsewhere(lab, before=do_not_wait)


@pytest.mark.control("The node goes on with what the hook returns, on its own stream.", aim="other")
def test_hook_comes_back_without_a_wait(lab):
    """The same without the second wait: what the hook returns may not be there yet."""
    negated_elsewhere(lab, after=do_not_wait)


@default_and_side
@pytest.mark.contract("torch.Tensor.register_post_accumulate_grad_hook")
def test_hook_that_leaves_another_stream_current(lab, ambient):
    """The nodes after a hook that does not restore the current stream run on their own, and so does the caller."""
    leaves, loss = leaves_on(lab, *STREAMS)
    streams = []

    def leave(leaf):
        streams.append(current())
        torch.accelerator.set_stream(lab.stream("other"))

    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(leave)
    with lab.stream(ambient) as called_on:
        loss.backward()
        streams.append(current())
        for leaf, factor in zip(leaves, FACTORS, strict=True):
            lab.observe(leaf.grad, factor)
    assert streams == [lab.stream("third"), lab.stream("second"), lab.stream("first"), called_on]


@pytest.mark.control(
    "A node runs on the current stream, which its hook has changed behind the engine's back.", aim="other"
)
@pytest.mark.contract("torch.Tensor.register_hook")
def test_hook_that_leaves_another_stream_to_its_own_node(lab):
    """A hook before the node must restore the stream: the engine orders what comes next after the node's own."""
    leaf, middle, output = chain(lab)
    middle.register_hook(lambda _: torch.accelerator.set_stream(lab.stream("other")))
    lab.keep((leaf, middle))
    with lab.stream("ambient"):
        output.backward(torch.ones_like(output))
        lab.observe(leaf.grad, 12.0)


# Hooks of saved tensors.


@default_and_side
@pytest.mark.contract("torch.autograd.graph.saved_tensors_hooks")
def test_saved_tensor_is_packed_and_unpacked_on_the_stream_of_its_operation(lab, ambient):
    """What an operation saves is packed on its stream and unpacked there as well, wherever backward is called."""
    with lab.preparing():
        leaf = lab.keep(full(lab, 2.0, requires_grad=True))
    streams = []

    def halve(tensor):
        streams.append(current())
        return tensor * 0.5

    def double(packed):
        streams.append(current())
        return packed * 2

    with lab.stream("forward") as forward, saved_tensors_hooks(halve, double):
        output = (leaf * 3).square()
    with lab.stream(ambient):
        output.backward(torch.ones_like(output))
        lab.observe(leaf.grad, 36.0)
    assert streams == [forward] * 2


def saved_elsewhere(lab, pack_waits=wait, unpack_waits=wait):
    with lab.preparing():
        leaf = lab.keep(full(lab, 2.0, requires_grad=True))
    pack = lab.stream("pack")

    def halve(tensor):
        pack_waits(pack, current())
        tensor.record_stream(pack)
        with pack:
            return tensor * 0.5

    def double(packed):
        unpack_waits(current(), pack)
        packed.record_stream(current())
        return packed * 2

    with lab.stream("forward"), saved_tensors_hooks(halve, double):
        output = (leaf * 3).square()
    with lab.stream("ambient"):
        output.backward(torch.ones_like(output))
        lab.observe(leaf.grad, 36.0)


@pytest.mark.contract("torch.autograd.graph.saved_tensors_hooks")
def test_saved_tensor_is_packed_on_another_stream(lab):
    """Packing may happen on another stream, which waits for the forward's and is waited for when it is unpacked."""
    saved_elsewhere(lab)


@pytest.mark.control("Only the stream of the forward is ordered after what is saved.", aim="forward")
@pytest.mark.contract("torch.autograd.graph.saved_tensors_hooks")
def test_saved_tensor_is_packed_on_another_stream_that_does_not_wait(lab):
    """The same without the wait in packing."""
    saved_elsewhere(lab, pack_waits=do_not_wait)


@pytest.mark.control("The node runs on its own stream, which nothing orders after the packing.", aim="pack")
@pytest.mark.contract("torch.autograd.graph.saved_tensors_hooks")
def test_saved_tensor_is_unpacked_without_a_wait(lab):
    """The same without the wait in unpacking."""
    saved_elsewhere(lab, unpack_waits=do_not_wait)
