"""Side-stream forward: what ran forward on a side stream runs backward there, and the engine carries the order along.

The contract (https://docs.pytorch.org/docs/stable/notes/cuda.html, "Stream semantics of backward passes"): a backward
op runs on the stream that its forward op used. Whoever spreads a forward over streams orders it himself: a side stream
waits for what it reads, and whoever joins waits for the side streams. Of the backward he orders nothing: a gradient
that crosses from one node's stream to another's is waited for by the engine, and when backward returns the stream that
is current there is ordered after every leaf that got a gradient, wherever that happened (pytorch/pytorch#8354, #57833,
#60421). The engine knows one stream of a node, the one that was current when the node was made; what a custom Function
does on others it orders itself (Note "Stream sync contract when dealing with multi-deviced-ness" in
torch/csrc/autograd/input_buffer.cpp).

So the ambient stream does real work before and after each forward here, every gradient is observed on it directly after
backward, and which stream a Function or a hook runs on is asserted where it runs.
"""

import contextlib

import pytest
import torch

SEMANTICS = "CUDA semantics, Stream semantics of backward passes"
STREAMS = "CUDA semantics, CUDA streams"
NODE_STREAM = "torch/csrc/autograd/input_buffer.cpp, Stream sync contract when dealing with multi-deviced-ness"

pytestmark = pytest.mark.contract(SEMANTICS)

ROWS, WIDTH = 4, 8


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
        return torch.full((ROWS, WIDTH), value, device=lab.device, requires_grad=True)


def unsafe(value, reason, aim):
    return pytest.param(value, marks=pytest.mark.control(reason, aim=aim))


every_ambient_stream = pytest.mark.parametrize("ambient", ["default", "ambient"])


# Two modules. Their weights are constant, so that each expected value is a product of counts and constants.


def constant_linear(lab, weight):
    layer = torch.nn.Linear(WIDTH, WIDTH, bias=False, device=lab.device)
    torch.nn.init.constant_(layer.weight, weight)
    return layer


class Affine(torch.nn.Module):
    """One node."""

    def __init__(self, lab, weight):
        super().__init__()
        self.layer = constant_linear(lab, weight)
        self.gain = WIDTH * weight

    def forward(self, inputs):
        return self.layer(inputs)

    def gradients(self, inputs):
        return [(self.layer.weight.grad, ROWS * inputs)]


class Perceptron(torch.nn.Module):
    """Several nodes, and activations saved between them."""

    def __init__(self, lab, weight):
        super().__init__()
        self.first, self.second = constant_linear(lab, weight), constant_linear(lab, 1.0)
        self.gain = WIDTH * weight * WIDTH

    def forward(self, inputs):
        return self.second(self.first(inputs).relu())

    def gradients(self, inputs):
        hidden = inputs * self.gain / WIDTH
        return [(self.first.weight.grad, ROWS * inputs * WIDTH), (self.second.weight.grad, ROWS * hidden)]


class Gate(torch.nn.Module):
    """A leaf that is looked up, on a path that does not depend on the input, and then multiplied with it."""

    def __init__(self, lab, weight):
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, WIDTH, device=lab.device)
        torch.nn.init.constant_(self.table.weight, weight)
        self.rows = torch.arange(ROWS, device=lab.device)
        self.gain = weight

    def forward(self, inputs):
        return self.table(self.rows) * inputs

    def gradients(self, inputs):
        return [(self.table.weight.grad, inputs)]


every_module = pytest.mark.parametrize("kind", [Affine, Perceptron, Gate])


def two_modules(lab, kind, ambient, placement, before=(wait, wait), after=(wait, wait)):
    """Make an input on the ambient stream, give it to two modules on their streams, join the outputs and go back."""
    leaf = leaf_of(lab)
    with lab.preparing():
        modules = [kind(lab, 2.0), kind(lab, 1.0)]
    streams = [lab.stream(name) for name in placement]
    with lab.stream(ambient) as main:
        inputs = leaf * 2.0
        for stream, order in zip(streams, before, strict=True):
            order(stream, main)
        outputs = []
        for module, stream in zip(modules, streams, strict=True):
            with on(stream):
                outputs.append(module(inputs))
        for stream, order in zip(streams, after, strict=True):
            order(main, stream)
        loss = torch.cat(outputs).sum()
        loss.backward()
        gains = sum(module.gain for module in modules)
        lab.observe(loss, ROWS * WIDTH * 6.0 * gains)
        lab.observe(leaf.grad, 2.0 * gains)
        for module in modules:
            for gradient, expected in module.gradients(6.0):
                lab.observe(gradient, expected)


@every_module
@every_ambient_stream
def test_two_modules_on_two_side_streams(lab, kind, ambient):
    """Two modules run on side streams that wait for their input; whoever joins their outputs waits for both."""
    two_modules(lab, kind, ambient, ["left", "right"])


@every_module
@every_ambient_stream
def test_one_module_on_the_default_stream_and_one_on_a_side_stream(lab, kind, ambient):
    """The default stream is no exception: what ran there goes back there, whether or not it is the ambient stream."""
    order = no_order if ambient == "default" else wait
    two_modules(lab, kind, ambient, ["default", "right"], before=(order, wait), after=(order, wait))


@every_module
def test_one_module_on_the_ambient_stream_and_one_on_a_side_stream(lab, kind):
    """The side stream alone is waited for; the default stream has no part in it."""
    two_modules(lab, kind, "ambient", ["ambient", "right"], before=(no_order, wait), after=(no_order, wait))


@pytest.mark.contract(STREAMS)
@pytest.mark.parametrize(
    "ambient",
    [
        unsafe(name, "A side stream does not wait for the stream that makes its input.", aim=name)
        for name in ("default", "ambient")
    ],
)
@every_module
@pytest.mark.parametrize("before", [(no_order, wait), (wait, no_order)], ids=["left", "right"])
def test_two_modules_of_which_one_does_not_wait_for_its_input(lab, kind, ambient, before):
    """The same without the wait of one module: it may run before its input is there."""
    two_modules(lab, kind, ambient, ["left", "right"], before=before)


@pytest.mark.contract(STREAMS)
@every_ambient_stream
@every_module
@pytest.mark.parametrize(
    "after",
    [
        unsafe(after, "The stream that joins the outputs does not wait for the stream that makes one.", aim=aim)
        for after, aim in (((no_order, wait), "left"), ((wait, no_order), "right"))
    ],
    ids=["left", "right"],
)
def test_two_modules_of_which_one_is_not_waited_for(lab, kind, ambient, after):
    """The same without the wait for one module: its output may be joined before it is there."""
    two_modules(lab, kind, ambient, ["left", "right"], after=after)


@every_ambient_stream
def test_modules_whose_input_needs_no_gradient(lab, ambient):
    """Each side stream ends in leaves of its own, and backward waits for every one of these streams."""
    with lab.preparing():
        data = torch.full((ROWS, WIDTH), 3.0, device=lab.device)
        modules = [constant_linear(lab, weight) for weight in (1.0, 2.0, 3.0)]
    streams = [lab.stream(f"side{number}") for number in range(3)]
    with lab.stream(ambient) as main:
        inputs = data * 2.0
        outputs = []
        for module, stream in zip(modules, streams, strict=True):
            stream.wait_stream(main)
            with stream:
                outputs.append(module(inputs))
        for stream in streams:
            main.wait_stream(stream)
        joined = torch.cat(outputs)
        joined.sum().backward()
        lab.observe(joined, torch.cat([torch.full((ROWS, WIDTH), 6.0 * WIDTH * weight) for weight in (1.0, 2.0, 3.0)]))
        for module in modules:
            lab.observe(module.weight.grad, ROWS * 6.0)


@every_ambient_stream
def test_two_steps_of_training(lab, ambient):
    """The ambient stream updates the weights; the next forward on the side streams waits for it, as the first did."""
    with lab.preparing():
        data = torch.full((ROWS, WIDTH), 1.0, device=lab.device)
        modules = [constant_linear(lab, weight) for weight in (1.0, 2.0)]
    streams = [lab.stream("left"), lab.stream("right")]
    weights = [module.weight for module in modules]
    optimizer = torch.optim.SGD(weights, lr=0.5, foreach=False)
    with lab.stream(ambient) as main:
        for _ in range(2):
            inputs = data * 2.0
            for stream in streams:
                stream.wait_stream(main)
            optimizer.zero_grad()
            outputs = []
            for module, stream in zip(modules, streams, strict=True):
                with stream:
                    outputs.append(module(inputs))
            for stream in streams:
                main.wait_stream(stream)
            (outputs[0] * outputs[1]).sum().backward()
            optimizer.step()
        for weight, expected in zip(weights, trained(1.0, 2.0), strict=True):
            lab.observe(weight, expected)


def trained(left, right):
    """Two weights after two steps: an output is 16 times its weight, a gradient 8 times the other output."""
    for _ in range(2):
        left, right = left - 0.5 * ROWS * 2.0 * 16.0 * right, right - 0.5 * ROWS * 2.0 * 16.0 * left
    return left, right


def record_on_the_ambient_stream(tensor, side, ambient):
    tensor.record_stream(ambient)


def wait_for_the_ambient_stream(tensor, side, ambient):
    side.wait_stream(ambient)


@pytest.mark.contract("torch.Tensor.record_stream")
@pytest.mark.parametrize("keep", [record_on_the_ambient_stream, wait_for_the_ambient_stream])
@every_ambient_stream
def test_outputs_given_up_once_they_are_joined(lab, keep, ambient):
    """The memory of an output belongs to its side stream: before it is given up, its use elsewhere is made known."""
    leaf = leaf_of(lab)
    with lab.preparing():
        modules = [constant_linear(lab, 2.0), constant_linear(lab, 1.0)]
    streams = [lab.stream("left"), lab.stream("right")]
    with lab.stream(ambient) as main:
        inputs = leaf * 2.0
        outputs = []
        for module, stream in zip(modules, streams, strict=True):
            stream.wait_stream(main)
            with stream:
                outputs.append(module(inputs))
        for stream in streams:
            main.wait_stream(stream)
        joined = torch.cat(outputs)
        for stream in streams:
            keep(outputs.pop(0), stream, main)
        joined.sum().backward()
        lab.observe(joined[:ROWS], 6.0 * WIDTH * 2.0)
        lab.observe(joined[ROWS:], 6.0 * WIDTH * 1.0)
        lab.observe(leaf.grad, 2.0 * WIDTH * (2.0 + 1.0))


# Where each backward runs.


class Times(torch.autograd.Function):
    """A multiplication that is told on which stream its backward must run."""

    @staticmethod
    def forward(ctx, inputs, factor):
        ctx.factor, ctx.stream = factor, torch.accelerator.current_stream()
        return inputs * factor

    @staticmethod
    def backward(ctx, gradient):
        assert torch.accelerator.current_stream() == ctx.stream
        return gradient * ctx.factor, None


forward_and_ambient = pytest.mark.parametrize(
    ("forward", "ambient"), [("default", "ambient"), ("forward", "default"), ("forward", "ambient")]
)


def triple_in_hook_of_tensor(tensor, stream):
    def hook(gradient):
        assert torch.accelerator.current_stream() == stream
        return gradient * 3.0

    tensor.register_hook(hook)


def triple_in_hook_before_node(tensor, stream):
    def hook(gradients):
        assert torch.accelerator.current_stream() == stream
        return (gradients[0] * 3.0,)

    tensor.grad_fn.register_prehook(hook)


def triple_in_hook_after_node(tensor, stream):
    def hook(gradients_of_inputs, gradients_of_outputs):
        assert torch.accelerator.current_stream() == stream
        return gradients_of_inputs[0] * 3.0, *gradients_of_inputs[1:]

    tensor.grad_fn.register_hook(hook)


@forward_and_ambient
def test_backward_of_a_function_runs_on_the_stream_of_its_forward(lab, forward, ambient):
    """Whatever stream is current where backward is called, and where the forward's results were used since."""
    leaf = leaf_of(lab)
    with lab.stream(forward) as side:
        outputs = Times.apply(leaf, 2.0)
    with lab.stream(ambient) as main:
        main.wait_stream(side)
        joined = Times.apply(outputs, 5.0)
        joined.sum().backward()
        lab.observe(joined, 30.0)
        lab.observe(leaf.grad, 10.0)


@forward_and_ambient
@pytest.mark.parametrize("triple", [triple_in_hook_of_tensor, triple_in_hook_before_node, triple_in_hook_after_node])
def test_hook_runs_on_the_stream_of_its_node(lab, triple, forward, ambient):
    """A hook may change the gradient with no wait of its own: it runs where the node runs, in the node's order."""
    leaf = leaf_of(lab)
    with lab.stream(forward) as side:
        outputs = leaf * 2.0
        triple(outputs, side)
    with lab.stream(ambient) as main:
        main.wait_stream(side)
        joined = outputs * 5.0
        joined.sum().backward()
        lab.observe(joined, 30.0)
        lab.observe(leaf.grad, 30.0)


# Chains.


ROUTES = [
    ("default", "first", "default"),
    ("first", "default", "first"),
    ("first", "second", "first"),
    ("first", "second", "third"),
    ("first", "first", "second"),
]


def chain(lab, route, order):
    """Square on one stream after another, each ordered after the one before."""
    leaf = leaf_of(lab, 2.0)
    value, previous = leaf, None
    for name in route:
        with lab.stream(name) as stream:
            if previous not in (None, stream):
                order(stream, previous)
            value = lab.keep(value.square())
        previous = stream
    with lab.stream("ambient") as ambient:
        ambient.wait_stream(previous)
        joined = value * 3.0
        joined.sum().backward()
        lab.observe(joined, 3.0 * 256.0)
        lab.observe(leaf.grad, 3.0 * 8.0 * 128.0)


@pytest.mark.parametrize("route", ROUTES, ids="-".join)
def test_chain_that_hops_from_stream_to_stream(lab, route):
    """Each hop of the forward is waited for by the caller, and the same hop of the backward by the engine."""
    chain(lab, route, wait)


@pytest.mark.contract(STREAMS)
@pytest.mark.parametrize(
    "route",
    [
        unsafe(route, "A stream does not wait for the stream that makes its input.", aim=route[0])
        for route in ROUTES
        if route[0] != route[1]
    ],
    ids=["-".join(route) for route in ROUTES if route[0] != route[1]],
)
def test_chain_that_hops_without_a_wait(lab, route):
    """The same without the waits of the forward, for which backward does not make up."""
    chain(lab, route, no_order)


# Forward and backward in different places.


@forward_and_ambient
def test_backward_is_called_on_another_stream_than_the_forward_ran_on(lab, forward, ambient):
    """The loss is scaled, and backward called, where the forward was waited for; the gradients are ready there."""
    with lab.preparing():
        module = constant_linear(lab, 2.0)
    leaf = leaf_of(lab)
    with lab.stream(forward) as side:
        loss = module(leaf * 2.0).square().sum()
    with lab.stream(ambient) as main:
        main.wait_stream(side)
        scaled = loss * 4.0
        scaled.backward()
        lab.observe(scaled, 4.0 * ROWS * WIDTH * 96.0**2)
        lab.observe(leaf.grad, 4.0 * 2.0 * 96.0 * 2.0 * WIDTH * 2.0)
        lab.observe(module.weight.grad, 4.0 * 2.0 * 96.0 * ROWS * 6.0)


@pytest.mark.contract(STREAMS)
@pytest.mark.parametrize(
    ("forward", "ambient"),
    [
        pytest.param(
            *names, marks=pytest.mark.control("The loss is used on a stream that does not wait for it.", aim=names[0])
        )
        for names in (("default", "ambient"), ("forward", "default"), ("forward", "ambient"))
    ],
)
def test_backward_is_called_on_a_stream_that_does_not_wait_for_the_forward(lab, forward, ambient):
    """The same without the wait: backward may start from a loss that is not there yet."""
    leaf = leaf_of(lab)
    with lab.stream(forward):
        loss = (leaf * 2.0).square().sum()
    with lab.stream(ambient):
        loss.square().backward()
        lab.observe(leaf.grad, 2.0 * (ROWS * WIDTH * 36.0) * 2.0 * 6.0 * 2.0)


@pytest.mark.parametrize("inside", ["default", "inside"])
def test_forward_and_backward_inside_one_stream_and_the_gradient_outside(lab, inside):
    """Whoever uses the gradients elsewhere waits for the stream that backward was called on, and for no other."""
    leaf = leaf_of(lab)
    with lab.stream("before") as before:
        inputs = leaf * 2.0
    with lab.stream(inside) as side:
        side.wait_stream(before)
        outputs = inputs * 5.0
        outputs.sum().backward()
    with lab.stream("outside") as outside:
        outside.wait_stream(side)
        lab.observe(outputs, 30.0)
        lab.observe(leaf.grad, 10.0)


# Views and changes in place.


def halves_by_slicing(tensor):
    return tensor[: ROWS // 2], tensor[ROWS // 2 :]


def halves_by_splitting(tensor):
    return tensor.split(ROWS // 2)


def halves_by_unbinding(tensor):
    return tensor.view(2, -1).unbind()


def halves_of_the_transpose(tensor):
    return tensor.t().chunk(2)


def halves_strided(tensor):
    return tuple(tensor.as_strided((ROWS // 2, WIDTH), (WIDTH, 1), start) for start in (0, ROWS // 2 * WIDTH))


every_view = pytest.mark.parametrize(
    "halve", [halves_by_slicing, halves_by_splitting, halves_by_unbinding, halves_of_the_transpose, halves_strided]
)


@every_view
def test_views_made_on_a_side_stream(lab, halve):
    """The gradient of a view is put back into the base's on the stream that the view was made on."""
    leaf = leaf_of(lab)
    with lab.stream("ambient") as main:
        base = leaf * 2.0
        with lab.stream("side") as side:
            side.wait_stream(main)
            one, other = halve(base)
            joined = one * other
        main.wait_stream(side)
        loss = (joined * 5.0).sum()
        loss.backward()
        lab.observe(loss, ROWS / 2 * WIDTH * 5.0 * 36.0)
        lab.observe(leaf.grad, 5.0 * 6.0 * 2.0)


@every_view
def test_views_made_on_the_ambient_stream_and_used_on_two_side_streams(lab, halve):
    """Each half is multiplied on its own side stream; the base's gradient is put together on the ambient stream."""
    leaf = leaf_of(lab)
    with lab.stream("ambient") as main:
        halves = halve(leaf * 2.0)
        streams = [lab.stream("left"), lab.stream("right")]
        products = []
        for half, stream in zip(halves, streams, strict=True):
            stream.wait_stream(main)
            with stream:
                products.append(half * 5.0)
        for stream in streams:
            main.wait_stream(stream)
        (products[0] * products[1]).sum().backward()
        lab.observe(leaf.grad, 30.0 * 5.0 * 2.0)


def scale_whole(base, view):
    base.mul_(5.0)
    return base


def scale_through_a_view(base, view):
    view.mul_(5.0)
    return base


def scale_the_base_of_a_view(base, view):
    base.mul_(5.0)
    return view


every_change = pytest.mark.parametrize("change", [scale_whole, scale_through_a_view, scale_the_base_of_a_view])


def change_in_place(lab, change, order):
    """Change on a side stream what the ambient stream made, and use the outcome on a third."""
    leaf = leaf_of(lab)
    with lab.stream("ambient") as main:
        base = leaf * 2.0
        view = base[:]
        with lab.stream("side") as side:
            order(side, main)
            changed = change(base, view)
        with lab.stream("third") as third:
            third.wait_stream(side)
            used = changed * 7.0
        main.wait_stream(third)
        joined = used * 11.0
        joined.sum().backward()
        lab.observe(joined, 6.0 * 5.0 * 7.0 * 11.0)
        lab.observe(leaf.grad, 11.0 * 7.0 * 5.0 * 2.0)


@every_change
def test_change_in_place_on_a_side_stream(lab, change):
    """An operation in place is a node of the stream that it ran on, whether it reaches the base or one of its views."""
    change_in_place(lab, change, wait)


@pytest.mark.contract(STREAMS)
@pytest.mark.control("A side stream changes a tensor without waiting for the stream that makes it.", aim="ambient")
@every_change
def test_change_in_place_on_a_side_stream_without_a_wait(lab, change):
    """The same without the wait: the change may come before the values that it changes."""
    change_in_place(lab, change, no_order)


@every_ambient_stream
def test_halves_of_one_buffer_changed_in_place_on_two_side_streams(lab, ambient):
    """Disjoint halves need no order of each other forward; backward goes through both nodes, one after the other."""
    leaf = leaf_of(lab)
    with lab.stream(ambient) as main:
        base = leaf * 2.0
        for half, name in ((slice(None, ROWS // 2), "left"), (slice(ROWS // 2, None), "right")):
            with lab.stream(name) as side:
                side.wait_stream(main)
                base[half].mul_(5.0)
        for name in ("left", "right"):
            main.wait_stream(lab.stream(name))
        base.square().sum().backward()
        lab.observe(base, 30.0)
        lab.observe(leaf.grad, 2.0 * 30.0 * 5.0 * 2.0)


# Functions with several outputs.


class Multiples(torch.autograd.Function):
    """The first multiples of its input, as separate outputs."""

    @staticmethod
    def forward(ctx, inputs, count):
        ctx.stream = torch.accelerator.current_stream()
        return tuple(inputs * (number + 1.0) for number in range(count))

    @staticmethod
    def backward(ctx, *gradients):
        assert torch.accelerator.current_stream() == ctx.stream
        total = gradients[0] * 1.0
        for number, gradient in enumerate(gradients[1:], 2):
            total += gradient * number
        return total, None


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("forward", ["ambient", "forward"])
def test_outputs_of_one_function_used_on_different_streams(lab, count, forward):
    """A node with several outputs waits for the gradient of each, from whatever stream it comes."""
    leaf = leaf_of(lab)
    with lab.stream("ambient") as main:
        with on(lab.stream(forward)) as made:
            outputs = Multiples.apply(leaf, count)
        used = []
        for number, output in enumerate(outputs):
            with lab.stream(f"side{number}") as side:
                side.wait_stream(made)
                used.append(output.square())
        for number in range(count):
            main.wait_stream(lab.stream(f"side{number}"))
        loss = sum(output * weight for weight, output in enumerate(used, 1)).sum()
        loss.backward()
        lab.observe(loss, ROWS * WIDTH * sum(9.0 * number**3 for number in range(1, count + 1)))
        lab.observe(leaf.grad, sum(number * 2.0 * 3.0 * number**2 for number in range(1, count + 1)))


class Forked(torch.autograd.Function):
    """A multiplication by 2 and one by 3, of which the latter runs on a stream of the Function's own, both ways."""

    @staticmethod
    def forward(ctx, inputs, own, join, join_backward):
        ctx.own, ctx.join = own, join_backward
        current = torch.accelerator.current_stream()
        own.wait_stream(current)
        with own:
            tripled = inputs * 3.0
        doubled = inputs * 2.0
        join(current, own)
        return doubled, tripled

    @staticmethod
    def backward(ctx, of_doubled, of_tripled):
        current = torch.accelerator.current_stream()
        ctx.own.wait_stream(current)
        with ctx.own:
            one = of_tripled * 3.0
        other = of_doubled * 2.0
        ctx.join(current, ctx.own)
        one.record_stream(current)
        return one + other, None, None, None


def fork(lab, join, join_backward):
    leaf = leaf_of(lab)
    with lab.stream("forward") as forward:
        doubled, tripled = Forked.apply(leaf, lab.stream("own"), join, join_backward)
    with lab.stream("ambient") as ambient:
        ambient.wait_stream(forward)
        (doubled.square() + tripled.square()).sum().backward()
        lab.observe(leaf.grad, 2.0 * 6.0 * 2.0 + 2.0 * 9.0 * 3.0)


@pytest.mark.contract(NODE_STREAM)
def test_function_that_forks_and_joins(lab):
    """A Function may use streams of its own, if it joins them with the stream that it is called on, both ways."""
    fork(lab, wait, wait)


@pytest.mark.contract(NODE_STREAM)
@pytest.mark.control("A node must have its outputs ready on the stream that it is called on.", aim="own")
@pytest.mark.parametrize(("join", "join_backward"), [(no_order, wait), (wait, no_order)], ids=["forward", "backward"])
def test_function_that_forks_and_does_not_join(lab, join, join_backward):
    """The same without a join: the engine knows nothing of the Function's own stream."""
    fork(lab, join, join_backward)
