"""Accumulation: gradients that reach one node from several streams are summed there as if from one.

The contract (https://docs.pytorch.org/docs/stable/notes/cuda.html, "Stream semantics of backward passes"): what is used
several times forward gets the sum of its gradients backward, on however many streams it was used, with no wait by the
caller. The engine sums on one stream of the gradients' device (torch/csrc/autograd/input_buffer.cpp, Note "Autograd
Producer-Consumer Stream Syncs"; pytorch/pytorch#151079): A) that of the node they are for, if it is of that device,
else B) that of the node that made the first, if it is, else C) the one that is current. Before each addition this
stream waits for whoever made the new gradient, and for whoever made the sum so far; the node then waits for the sum.
And since the memory of a gradient belongs to the stream that made it, the engine records it on the stream that reads it
(pytorch/pytorch#60230).

Nodes run backward in the reverse order of their forward: of several branches, the last one made produces the first
gradient. Which producer is slow is what the plans decide: each launch of each branch is held once. Whoever gets a sum
uses it and gives it up, so that its memory, like that of every gradient in it, could be handed out too early.
"""

import contextlib

import pytest
import torch

SEMANTICS = "CUDA semantics, Stream semantics of backward passes"
SUMS = "torch/csrc/autograd/input_buffer.cpp, Autograd Producer-Consumer Stream Syncs"
NODE_STREAM = "torch/csrc/autograd/input_buffer.cpp, Stream sync contract when dealing with multi-deviced-ness"
STEALING = "torch/csrc/autograd/functions/accumulate_grad.h, Gradient Accumulation"

pytestmark = [
    pytest.mark.contract(SEMANTICS),
    # Leaves that several streams use are what this family is about.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]

SHAPE = (8, 8)


def wait(later, sooner):
    later.wait_stream(sooner)


def no_order(later, sooner):
    pass


def on(stream):
    """The stream as a context, also where it is current already: torch 2.7 does not let it be entered twice."""
    return contextlib.nullcontext(stream) if torch.accelerator.current_stream() == stream else stream


def leaf_of(lab, value=3.0):
    """A leaf, ready and synchronized, which no node has used."""
    with lab.preparing():
        return torch.full(SHAPE, value, device=lab.device, requires_grad=True)


def branches_of(count):
    return [f"branch{number}" for number in range(count)]


def use_on_branches(lab, shared, branches, use, made_on=None):
    """Use a tensor on each branch, which waits for it, and wait for all of them on the stream that is current."""
    used = []
    for number, name in enumerate(branches):
        with lab.stream(name) as branch:
            if made_on is not None:
                branch.wait_stream(made_on)
            used.append(lab.keep(use(shared, number)))
    for name in branches:
        torch.accelerator.current_stream().wait_stream(lab.stream(name))
    return used


def times(shared, number):
    return shared * (number + 2.0)


def weighted(outputs):
    """Their sum, each with its own weight, so that each gets a gradient of its own."""
    return sum(output * weight for weight, output in enumerate(outputs, 2))


def weight_of(numbers):
    """What ``weighted`` makes of the outputs of ``times``, for each unit of what is shared."""
    return float(sum((number + 2) ** 2 for number in numbers))


def overwrite(lab, *owners):
    """Take memory that belongs to these streams, as their next work would: what was given up may be in it."""
    for owner in owners:
        with owner:
            lab.keep(torch.full(SHAPE, -1.0, device=owner.device))


every_count = pytest.mark.parametrize("count", [2, 3, 8])


# A. The gradients are of the device of the node that they are for.


@every_count
@pytest.mark.parametrize("node", ["default", "ambient", "node", "first_branch", "last_branch"])
@pytest.mark.contract(SUMS)
def test_several_streams_into_one_node(lab, count, node):
    """The sum runs on the stream of the node, whichever that is among those of its producers and the ambient one."""
    branches = branches_of(count)
    leaf = leaf_of(lab)
    with lab.stream({"first_branch": branches[0], "last_branch": branches[-1]}.get(node, node)) as made_on:
        shared = leaf * 5.0
    with lab.stream("ambient"):
        joined = weighted(use_on_branches(lab, shared, branches, times, made_on))
        joined.sum().backward()
        lab.observe(joined, 15.0 * weight_of(range(count)))
        lab.observe(leaf.grad, 5.0 * weight_of(range(count)))


few = pytest.mark.parametrize("count", [2, 3])


@pytest.mark.contract(SUMS)
def test_several_streams_into_each_input_of_one_node(lab):
    """Each input of a node has a sum of its own, and the node waits for all of them."""
    leaf = leaf_of(lab)
    with lab.stream("node") as made_on:
        parts = (leaf * 5.0).repeat(2, 1).chunk(2)
    with lab.stream("ambient"):
        joined = 1.0
        for number, part in enumerate(parts):
            branches = [f"part{number}.{name}" for name in ("one", "other")]
            joined = joined * weighted(use_on_branches(lab, part, branches, times, made_on))
        joined.sum().backward()
        each = 15.0 * weight_of(range(2))
        lab.observe(joined, each**2)
        lab.observe(leaf.grad, 2.0 * each * 5.0 * weight_of(range(2)))


def grad_of_shared(joined, leaf, shared):
    return torch.autograd.grad(joined.sum(), shared)[0], 1.0


def grad_of_leaf(joined, leaf, shared):
    return torch.autograd.grad(joined.sum(), leaf)[0], 5.0


def retained_grad(joined, leaf, shared):
    shared.retain_grad()
    joined.sum().backward()
    gradient, shared.grad = shared.grad, None
    return gradient, 1.0


@few
@pytest.mark.parametrize("ask", [grad_of_shared, grad_of_leaf, retained_grad])
def test_sum_that_is_asked_for(lab, ask, count):
    """A sum is ready on the ambient stream where it is the result, or a tensor on the way that retains its gradient."""
    branches = branches_of(count)
    leaf = leaf_of(lab)
    with lab.stream("node") as made_on:
        shared = leaf * 5.0
    with lab.stream("ambient") as ambient:
        joined = weighted(use_on_branches(lab, shared, branches, times, made_on))
        # A thread of the engine's own may hold the result for a moment longer than its caller.
        with torch.autograd.set_multithreading_enabled(False):
            gradient, factor = ask(joined, leaf, shared)
        lab.observe(joined, 15.0 * weight_of(range(count)))
        lab.observe(gradient * 3.0, 3.0 * factor * weight_of(range(count)))
        gradient.record_stream(ambient)
        del gradient
    overwrite(lab, made_on, lab.stream(branches[-1]))


# In place and out of place, stolen and not.


@few
@pytest.mark.contract(SUMS)
def test_sum_in_place(lab, count):
    """The sum takes the place of the first gradient, which nobody else holds, once that has been made."""
    leaf = leaf_of(lab)
    places = {}
    with lab.stream("node") as made_on:
        shared = leaf * 5.0
        shared.register_hook(lambda gradient: places.update(sum=gradient.data_ptr()))
    with lab.stream("ambient"):
        used = use_on_branches(lab, shared, branches_of(count), times, made_on)
        used[-1].grad_fn.register_hook(lambda made, _: places.update(first=made[0].data_ptr()))
        weighted(used).square().sum().backward()
        assert places["sum"] == places["first"]
        lab.observe(leaf.grad, 2.0 * 15.0 * weight_of(range(count)) * 5.0 * weight_of(range(count)))


@few
@pytest.mark.contract(SUMS)
def test_sum_out_of_place_of_gradients_that_somebody_keeps(lab, count):
    """A gradient that a hook keeps does not become the sum."""
    branches = branches_of(count)
    leaf = leaf_of(lab)
    kept = []

    def use(shared, number):
        moved = shared + 1.0
        moved.register_hook(kept.append)
        return moved * (number + 2.0)

    with lab.stream("node") as made_on:
        shared = leaf * 5.0
    with lab.stream("ambient") as ambient:
        joined = weighted(use_on_branches(lab, shared, branches, use, made_on))
        joined.sum().backward()
        lab.observe(joined, 16.0 * weight_of(range(count)))
        lab.observe(leaf.grad, 5.0 * weight_of(range(count)))
        for number in range(count):
            gradient = kept.pop()
            lab.observe(gradient * 3.0, 3.0 * weight_of([number]))
            gradient.record_stream(ambient)
            del gradient
    overwrite(lab, *map(lab.stream, branches))


@few
@pytest.mark.contract(SUMS)
def test_sum_out_of_place_of_expanded_gradients(lab, count):
    """The gradient of a sum's input is one number everywhere, which has no place for another sum."""
    leaf = leaf_of(lab)
    with lab.stream("node") as made_on:
        shared = leaf * 5.0
    with lab.stream("ambient"):
        totals = use_on_branches(
            lab, shared, branches_of(count), lambda shared, number: shared.sum() * (number + 2.0), made_on
        )
        joined = weighted(totals)
        joined.backward()
        lab.observe(joined, 64.0 * 15.0 * weight_of(range(count)))
        lab.observe(leaf.grad, 5.0 * weight_of(range(count)))


@few
@pytest.mark.contract(SUMS)
def test_sum_out_of_place_for_a_further_backward(lab, count):
    """With create_graph the sum is an operation that is recorded itself, and so takes no gradient's place."""
    leaf = leaf_of(lab)
    with lab.stream("node") as made_on:
        shared = leaf * 5.0
    with lab.stream("ambient"):
        used = use_on_branches(lab, shared, branches_of(count), lambda shared, number: shared.square(), made_on)
        joined = weighted(used)
        # In this thread, which then is the only one to hold what is given up below.
        with torch.autograd.set_multithreading_enabled(False):
            (gradient,) = torch.autograd.grad(joined.sum(), leaf, create_graph=True)
        weight = sum(range(2, count + 2))
        lab.observe(joined, 225.0 * weight)
        lab.observe(gradient, 2.0 * 75.0 * weight)
        del gradient


@few
@pytest.mark.parametrize("first_used_on", ["ambient", "first_branch", "last_branch"])
@pytest.mark.contract(STEALING)
def test_leaf_that_takes_the_sum_over(lab, count, first_used_on):
    """A sum that nobody else holds becomes the gradient itself, in memory that belongs to one of the branches."""
    branches = branches_of(count)
    leaf = leaf_of(lab)
    places = {}
    leaf.register_hook(lambda gradient: places.update(sum=gradient.data_ptr()))
    with lab.stream({"first_branch": branches[0], "last_branch": branches[-1]}.get(first_used_on, first_used_on)):
        lab.keep(leaf[:])
    with lab.stream("ambient") as ambient:
        joined = weighted(use_on_branches(lab, leaf, branches, times))
        joined.sum().backward()
        assert leaf.grad.data_ptr() == places["sum"]
        lab.observe(joined, 3.0 * weight_of(range(count)))
        lab.observe(leaf.grad * 3.0, 3.0 * weight_of(range(count)))
        leaf.grad.record_stream(ambient)
        leaf.grad = None
    overwrite(lab, lab.stream(branches[-1]))


@few
@pytest.mark.contract(STEALING)
def test_leaf_that_copies_a_sum_that_a_hook_keeps(lab, count):
    """What a hook keeps stays what it is, whatever becomes of the gradient."""
    branches = branches_of(count)
    leaf = leaf_of(lab)
    kept = []
    leaf.register_hook(kept.append)
    with lab.stream("ambient") as ambient:
        joined = weighted(use_on_branches(lab, leaf, branches, times))
        joined.sum().backward()
        leaf.grad.mul_(3.0)
        lab.observe(joined, 3.0 * weight_of(range(count)))
        lab.observe(leaf.grad, 3.0 * weight_of(range(count)))
        lab.observe(kept[0] * 5.0, 5.0 * weight_of(range(count)))
        kept[0].record_stream(ambient)
        kept.clear()
    overwrite(lab, lab.stream(branches[-1]))


def overwrite_seed(lab, forward, writer, order):
    """Give a leaf a seed as it is, then use the seed and write over it."""
    leaf = leaf_of(lab)
    with lab.preparing(), lab.stream(forward):
        root = leaf + 1.0
    with lab.stream("ambient") as ambient:
        seed = torch.full(SHAPE, 5.0, device=lab.device)
        root.backward(seed)
        with on(lab.stream(writer)) as stream:
            order(stream, ambient)
            seed.add_(2.0)
            lab.observe(seed * 3.0, 21.0)
        if stream != ambient:
            seed.record_stream(stream)
        del seed
        lab.observe(leaf.grad, 5.0)
        lab.observe(torch.full(SHAPE, 9.0, device=lab.device), 9.0)


every_forward_stream = pytest.mark.parametrize("forward", ["default", "ambient", "forward"])


@every_forward_stream
@pytest.mark.contract(STEALING)
def test_leaf_that_copies_a_seed_that_the_caller_keeps(lab, forward):
    """The caller may write over his seed on the ambient stream when backward has returned: the leaf has its copy."""
    overwrite_seed(lab, forward, "ambient", no_order)


@every_forward_stream
@pytest.mark.contract(STEALING)
def test_leaf_that_copies_a_seed_that_is_overwritten_on_a_third_stream(lab, forward):
    """Elsewhere he may write over it too, once he has waited for the ambient stream."""
    overwrite_seed(lab, forward, "third", wait)


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(
            name, marks=pytest.mark.control("A stream writes over a seed that backward may still read.", aim=name)
        )
        for name in ("default", "ambient", "forward")
    ],
)
@pytest.mark.contract(SEMANTICS)
def test_leaf_that_copies_a_seed_that_is_overwritten_on_a_third_stream_without_a_wait(lab, forward):
    """The same without the wait: the leaf may copy what comes after its gradient."""
    overwrite_seed(lab, forward, "third", no_order)


def add_to_existing(lab, count, create_graph, order):
    """Fill the gradient on one stream and add to it on others."""
    leaf = leaf_of(lab)
    with lab.stream("fill") as fill:
        existing = torch.full(SHAPE, 100.0, device=lab.device)
        leaf.grad = existing
    with lab.stream("ambient") as ambient:
        order(ambient, fill)
        joined = weighted(use_on_branches(lab, leaf, branches_of(count), times))
        joined.sum().backward(create_graph=create_graph)
        assert (leaf.grad is existing) is not create_graph
        lab.observe(joined, 3.0 * weight_of(range(count)))
        lab.observe(leaf.grad, 100.0 + weight_of(range(count)))
    # With create_graph the gradient has a graph that leads to its leaf: a cycle.
    lab.keep(leaf.grad)
    leaf.grad = None


in_place_or_not = pytest.mark.parametrize("create_graph", [False, True], ids=["in_place", "out_of_place"])
no_advice_on_cycles = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")


@few
@in_place_or_not
@no_advice_on_cycles
@pytest.mark.contract(STEALING)
def test_sum_added_to_an_existing_gradient(lab, count, create_graph):
    """What the ambient stream has waited for is there before the sum is added to it, on the leaf's own stream."""
    add_to_existing(lab, count, create_graph, wait)


@pytest.mark.control(
    "The existing gradient is filled on a stream that backward's ambient stream is not ordered after.", aim="fill"
)
@in_place_or_not
@no_advice_on_cycles
def test_sum_added_to_an_existing_gradient_without_a_wait(lab, create_graph):
    """The same without the wait: the sum may be added to what is not there yet."""
    add_to_existing(lab, 2, create_graph, no_order)


# One gradient for several nodes, of which one changes it in place. PyTorch does not wait for the others' reads.

SHARED = pytest.mark.defect("docs/defects/shared_gradient.md", aim="side", torch=">=2.7", devices=("cuda", "sim"))


def sum_of_two_streams(lab, shared, other):
    """shared + 3 other, whose gradient is that of both; other is used on a side stream."""
    with lab.stream("side") as side:
        tripled = other * 3.0
    torch.accelerator.current_stream().wait_stream(side)
    return shared + lab.keep(tripled)


@SHARED
def test_sum_takes_the_place_of_a_gradient_that_another_stream_reads(lab):
    """The sum of the gradients of ``shared`` leaves alone what the other summand still reads."""
    leaf, other = leaf_of(lab, 2.0), leaf_of(lab)
    with lab.stream("ambient"):
        shared = leaf * 2.0
        fifth = shared * 5.0
        (sum_of_two_streams(lab, shared, other) * 7.0 + fifth).sum().backward()
        lab.observe(other.grad, 21.0)
        lab.observe(leaf.grad, 24.0)


@SHARED
def test_residual_connection_around_two_streams(lab):
    """x + a(x) + b(x): what b passes back to x leaves alone what the branch a still reads, on a stream of its own."""
    with lab.preparing():
        layers = [torch.nn.Linear(8, 8, bias=False, device=lab.device) for _ in range(3)]
        for layer in layers:
            torch.nn.init.ones_(layer.weight)
    first, second, beside = lab.keep(layers)
    leaf = leaf_of(lab, 1.0)
    with lab.stream("ambient") as ambient:
        x = leaf * 2.0
        side = lab.stream("side")
        side.wait_stream(ambient)
        with side:
            hidden = first(x)
        b = beside(x)
        with side:
            a = lab.keep(second(hidden))
        ambient.wait_stream(side)
        ((x + a + b) * 3.0).sum().backward()
        lab.observe(second.weight.grad, 8 * 16.0 * 3.0)
        lab.observe(leaf.grad, 2.0 * (3.0 + 24.0 + 8 * 24.0))


@SHARED
@pytest.mark.contract(STEALING)
def test_leaf_that_takes_over_a_gradient_that_another_stream_reads(lab):
    """What a hook of the leaf makes of the leaf's gradient leaves alone what the other summand still reads."""
    leaf, other = leaf_of(lab, 2.0), leaf_of(lab)

    def scale(leaf):
        leaf.grad.mul_(100.0)

    leaf.register_post_accumulate_grad_hook(scale)
    with lab.stream("ambient"):
        (sum_of_two_streams(lab, leaf + 1.0, other) * 7.0).sum().backward()
        lab.observe(other.grad, 21.0)
        lab.observe(leaf.grad, 700.0)


# Sparse gradients.


def looked_up(table, rows):
    return torch.nn.functional.embedding(rows, table, sparse=True) * 2.0


def multiplied(table, rows):
    return table * 3.0


@pytest.mark.filterwarnings("ignore:.*sparse tensors has no meta kernel")
@pytest.mark.contract("torch.nn.functional.embedding, sparse")
@pytest.mark.parametrize(
    "uses",
    [(looked_up, looked_up), (looked_up, multiplied), (multiplied, looked_up)],
    ids=["sparse-sparse", "sparse-dense", "dense-sparse"],
)
def test_sparse_gradients_from_several_streams(lab, uses):
    """A table that is looked up on one stream, and looked up or multiplied on another, as tied weights are."""
    with lab.preparing(), lab.stream("ambient"):
        table = torch.full(SHAPE, 3.0, device=lab.device, requires_grad=True)
        rows = [torch.arange(4, device=lab.device).repeat(2)]
    counts = torch.zeros(SHAPE)
    counts[:4] = 2.0
    outputs, gradients = {looked_up: 6.0, multiplied: 9.0}, {looked_up: counts * 2.0, multiplied: 3.0}
    with lab.stream("ambient"):
        used = use_on_branches(lab, table, ["left", "right"], lambda table, number: uses[number](table, rows[0]))
        joined = weighted(used)
        joined.sum().backward()
        lab.observe(joined, sum(weight * outputs[use] for weight, use in enumerate(uses, 2)))
        gradient = table.grad.to_dense() if table.grad.is_sparse else table.grad
        lab.observe(gradient, sum(weight * gradients[use] for weight, use in enumerate(uses, 2)))
        rows.clear()


# Undefined gradients, and zeros in their place.


class Scale(torch.autograd.Function):
    """A product of two inputs, of which the first gets no gradient unless it is told to let one pass."""

    @staticmethod
    def forward(ctx, inputs, factor, passes):
        ctx.save_for_backward(inputs, factor)
        ctx.passes = passes
        return inputs * factor

    @staticmethod
    def backward(ctx, gradient):
        inputs, factor = ctx.saved_tensors
        return gradient * factor if ctx.passes else None, gradient * inputs, None


def scale_on_branches(lab, passing, count):
    """Scale a tensor by a factor of its own on each branch, and ask for the gradients."""
    leaf = leaf_of(lab)
    factors = [leaf_of(lab, number + 2.0) for number in range(count)]
    with lab.stream("node") as made_on:
        shared = leaf * 5.0
    with lab.stream("ambient"):
        joined = weighted(
            use_on_branches(
                lab,
                shared,
                branches_of(count),
                lambda shared, number: Scale.apply(shared, factors[number], number in passing),
                made_on,
            )
        )
        joined.sum().backward()
        lab.observe(joined, 15.0 * weight_of(range(count)))
        for weight, factor in enumerate(factors, 2):
            lab.observe(factor.grad, 15.0 * weight)
        if passing:
            lab.observe(leaf.grad, 5.0 * weight_of(passing))
        else:
            assert leaf.grad is None


@pytest.mark.contract(SUMS)
@pytest.mark.parametrize(
    ("passing", "count"),
    [((1,), 2), ((0,), 2), ((1, 2), 3), ((0, 2), 3), ((0, 1), 3)],
    ids=["first_of_2", "last_of_2", "first_of_3", "middle_of_3", "last_of_3"],
)
def test_undefined_gradient_among_the_producers(lab, passing, count):
    """A branch that passes no gradient on counts for nothing: the sum starts with the first that has one."""
    scale_on_branches(lab, passing, count)


@pytest.mark.contract(SUMS)
def test_no_gradient_from_any_producer(lab):
    """A node that is given nothing passes nothing on; the other inputs of the branches get their gradients."""
    scale_on_branches(lab, (), 2)


class Multiples(torch.autograd.Function):
    """Twice and three times its input."""

    @staticmethod
    def forward(ctx, inputs, materialize):
        ctx.set_materialize_grads(materialize)
        return inputs * 2.0, inputs * 3.0

    @staticmethod
    def backward(ctx, of_double, of_triple):
        if of_double is None:
            return of_triple * 3.0, None
        if of_triple is None:
            return of_double * 2.0, None
        return of_double * 2.0 + of_triple * 3.0, None


def outputs_of_a_function(inputs):
    return Multiples.apply(inputs, True)


def outputs_of_a_function_that_takes_none(inputs):
    return Multiples.apply(inputs, False)


def outputs_of_an_operation(inputs):
    return torch.stack([inputs * 2.0, inputs * 3.0]).unbind()


@pytest.mark.contract("torch.autograd.function.FunctionCtx.set_materialize_grads")
@pytest.mark.parametrize("used", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize(
    "outputs", [outputs_of_a_function, outputs_of_a_function_that_takes_none, outputs_of_an_operation]
)
def test_zeros_for_an_output_that_nobody_used(lab, outputs, used):
    """Zeros are made on the node's own stream, unless it takes nothing as well, and added to what comes from others."""
    leaf = leaf_of(lab)
    with lab.stream("node") as made_on:
        shared = outputs(leaf * 5.0)[used]
    with lab.stream("ambient"):
        joined = weighted(use_on_branches(lab, shared, branches_of(2), times, made_on))
        joined.sum().backward()
        factor = (2.0, 3.0)[used]
        lab.observe(joined, 15.0 * factor * weight_of(range(2)))
        lab.observe(leaf.grad, 5.0 * factor * weight_of(range(2)))


# Producers and nodes of different devices.


class OnBothDevices(torch.autograd.Function):
    """Its input, and twice as much on another device. The node is of the input's device, and waits on the other's."""

    @staticmethod
    def forward(ctx, inputs, own, order):
        ctx.own, ctx.order = own, order
        return inputs * 1.0, (inputs * 2.0).to(own.device)

    @staticmethod
    def backward(ctx, here, there):
        ctx.order(ctx.own, torch.accelerator.current_stream())
        there.record_stream(ctx.own)
        with ctx.own:
            brought = (there * 2.0).to(here.device)
        return here + brought, None, None


class Fetch(torch.autograd.Function):
    """A copy from another device. The node is of the copy's device; the gradient is made on a stream of the other."""

    @staticmethod
    def forward(ctx, inputs, device, own, order):
        ctx.own, ctx.order = own, order
        return inputs.to(device)

    @staticmethod
    def backward(ctx, gradient):
        with ctx.own:
            made = gradient.to(ctx.own.device) * 3.0
        ctx.order(torch.accelerator.current_stream(), ctx.own)
        return made, None, None, None


def summed_on_a_default_stream(aim):
    """Before 2.8 the engine orders what goes between devices with their default streams, and sums there."""
    report = "docs/defects/default_streams_between_devices.md"
    return pytest.mark.defect(report, aim=aim, torch=">=2.7,<2.8", devices=("cuda", "sim"))


def other_device(lab):
    return torch.device(lab.device.type, 1)


@few
@pytest.mark.devices(2)
@pytest.mark.contract(SUMS)
def test_node_whose_gradients_come_from_another_device(lab, count):
    """A: copies to another device bring their gradients back, and the sum runs on the stream of the node."""
    leaf = leaf_of(lab)
    with lab.stream("ambient"):
        used = []
        with lab.stream("node"):
            shared = leaf * 5.0
            for number in range(count):
                with lab.stream(f"elsewhere{number}", 1):
                    used.append(lab.keep(times(shared.to(other_device(lab)), number)))
        with lab.stream("join", 1) as join:
            for number in range(count):
                join.wait_stream(lab.stream(f"elsewhere{number}", 1))
            joined = weighted(used)
            joined.sum().backward()
            lab.observe(joined, 15.0 * weight_of(range(count)))
        lab.observe(leaf.grad, 5.0 * weight_of(range(count)))


def gradients_made_on_the_other_device(lab, count, order):
    """Use the second output of a node on several streams of the second device."""
    leaf = leaf_of(lab)
    with lab.stream("ambient"):
        with lab.stream("node") as node:
            outputs = OnBothDevices.apply(leaf * 5.0, lab.stream("reader", 1), order)
        used = []
        for number in range(count):
            with lab.stream(f"elsewhere{number}", 1) as branch:
                branch.wait_stream(node)
                used.append(lab.keep(times(outputs[1], number)))
        with lab.stream("join", 1) as join:
            for number in range(count):
                join.wait_stream(lab.stream(f"elsewhere{number}", 1))
            joined = weighted(used)
            joined.sum().backward()
            lab.observe(joined, 30.0 * weight_of(range(count)))
        lab.observe(leaf.grad, 10.0 * weight_of(range(count)))


@few
@pytest.mark.devices(2)
@pytest.mark.contract(SUMS)
@summed_on_a_default_stream("default.1")
def test_node_with_gradients_made_on_another_device(lab, count):
    """B: the sum runs on the other device, where the first gradient was made; the node waits for it there."""
    gradients_made_on_the_other_device(lab, count, wait)


@pytest.mark.devices(2)
@pytest.mark.contract(NODE_STREAM)
@pytest.mark.control(
    "A node that uses a gradient on another stream than its own must wait for its own.",
    aim="elsewhere1" if torch.__version__ >= (2, 8) else "default.1",  # where the sum runs
)
def test_node_that_does_not_wait_for_gradients_made_on_another_device(lab):
    """The same, but the node reads the sum on the other device without waiting for its own stream there."""
    gradients_made_on_the_other_device(lab, 2, no_order)


def gradients_brought_to_the_other_device(lab, orders):
    """Copy the second output of a node back on several streams of the first device."""
    leaf = leaf_of(lab)
    with lab.stream("ambient") as ambient:
        with lab.stream("node"):
            outputs = OnBothDevices.apply(leaf * 5.0, lab.stream("reader", 1), wait)
        used = []
        for number, order in enumerate(orders):
            with lab.stream(f"branch{number}"):
                fetched = Fetch.apply(outputs[1], lab.device, lab.stream(f"own{number}", 1), order)
                used.append(lab.keep(times(fetched, number)))
        for number in range(len(orders)):
            ambient.wait_stream(lab.stream(f"branch{number}"))
        joined = weighted(used)
        joined.sum().backward()
        lab.observe(joined, 30.0 * weight_of(range(len(orders))))
        lab.observe(leaf.grad, 10.0 * 3.0 * weight_of(range(len(orders))))
    overwrite(lab, *(lab.stream(f"own{number}", 1) for number in range(len(orders))))


@few
@pytest.mark.devices(2)
@pytest.mark.contract(SUMS)
@summed_on_a_default_stream("own1")
def test_node_and_producers_of_one_device_with_gradients_on_another(lab, count):
    """C: the sum runs on the stream that is current on the gradients' device, which waits for every producer."""
    gradients_brought_to_the_other_device(lab, [wait] * count)


@pytest.mark.devices(2)
@pytest.mark.contract(NODE_STREAM)
@pytest.mark.parametrize(
    "orders",
    [
        pytest.param(
            orders,
            marks=pytest.mark.control("A node must have its gradients ready on its own stream.", aim=aim),
        )
        for orders, aim in (([wait, no_order], "own1"), ([no_order, wait], "own0"))
    ],
    ids=["first", "last"],
)
def test_producer_that_does_not_wait_for_the_gradient_that_it_brings(lab, orders):
    """The same, but a producer does not join the stream that its gradient is made on."""
    gradients_brought_to_the_other_device(lab, orders)
