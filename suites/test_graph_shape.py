"""The shape of the graph and the way it is run change nothing: every backward call has the same stream semantics.

The contract (https://docs.pytorch.org/docs/stable/notes/cuda.html, "Stream semantics of backward passes"): each node of
a backward runs on the stream of its forward operation, is ordered after what the ambient stream is ordered after, and
what backward returns is ready for the ambient stream. That holds for the graph that a backward itself makes
(``create_graph``), whose nodes belong to the streams of the nodes that made them; for what a node runs when its turn
comes, be it a recomputation (``torch.utils.checkpoint``) or a backward of its own (a reentrant one, which has the
node's stream as its ambient stream); for every Python thread, each of which has its own current streams and starts on
the default one (https://docs.pytorch.org/docs/stable/notes/autograd.html, "Multithreaded Autograd"); and whether the
engine uses threads of its own or the caller's.
"""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

BACKWARD_STREAMS = "https://docs.pytorch.org/docs/stable/notes/cuda.html#stream-semantics-of-backward-passes"
CUDA_STREAMS = "https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams"
THREADS = "https://docs.pytorch.org/docs/stable/notes/autograd.html#multithreaded-autograd"
REENTRANT = "torch/csrc/autograd/engine.cpp, Note [Reentrant backwards]"
CHECKPOINT = "https://docs.pytorch.org/docs/stable/checkpoint.html"
FUNC_GRAD = "https://docs.pytorch.org/docs/stable/generated/torch.func.grad.html"

every_ambient_stream = pytest.mark.parametrize("ambient", ["default", "ambient", "forward"])


def leaf_on(lab, name, value=2.0):
    """A leaf that is made and first used on the stream of that name."""
    with lab.preparing(), lab.stream(name):
        return torch.full((256,), value, device=lab.device, requires_grad=True)


def poisoned_on(lab, name, like, count=1):
    with lab.stream(name):
        return [lab.poisoned(like) for _ in range(count)]


def fill(seeds, value=1.0):
    """The seeds, filled on the current stream and given up by the caller's list."""
    filled = [seed.fill_(value) for seed in seeds]
    seeds.clear()
    return filled


def product_on(stream, maker, tensor, factor):
    """A product on one stream of what was made on another."""
    stream.wait_stream(maker)
    with stream:
        return tensor * factor


def reuse(lab, *names):
    """What a program does next on these streams: memory that they are given is filled with something else."""
    for name in names:
        with lab.stream(name):
            lab.keep(torch.full((256,), 99.0, device=lab.device))


def on(stream, compute, tensor):
    """The result of a computation on another stream, for the current one."""
    current = torch.accelerator.current_stream()
    if stream == current:
        return compute(tensor)
    stream.wait_stream(current)
    with stream:
        result = compute(tensor)
    current.wait_stream(stream)
    return result


def without_threads():
    return torch.autograd.set_multithreading_enabled(False)


# Double backward.


def gradient(cube, leaf, seeds):
    (first,) = torch.autograd.grad(cube, leaf, seeds.pop(), create_graph=True)
    return first


def accumulated(cube, leaf, seeds):
    cube.backward(seeds.pop(), create_graph=True)
    first, leaf.grad = leaf.grad, None
    return first


may_cycle = pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
every_first_backward = pytest.mark.parametrize("first_backward", [gradient, accumulated])


def double_backward(lab, first_backward, first_ambient, second_ambient, order):
    leaf = leaf_on(lab, "forward")
    first_seeds = poisoned_on(lab, first_ambient, leaf)
    second_seeds = poisoned_on(lab, second_ambient, leaf)
    with lab.stream("forward"):
        cube = leaf * leaf * leaf
    with lab.stream(first_ambient) as ambient:
        first = first_backward(cube, leaf, fill(first_seeds))
        lab.observe(first, 12.0)
    with lab.stream(second_ambient) as second:
        order(second, ambient)
        squared = first * first  # nine times the fourth power
        squared.backward(*fill(second_seeds))
        lab.observe(leaf.grad, 288.0)


def already_ordered(later, earlier):
    pass


@pytest.mark.contract(BACKWARD_STREAMS)
@may_cycle
@every_first_backward
@every_ambient_stream
def test_double_backward(lab, first_backward, ambient):
    """What a backward has made, and the graph of it, is used on the ambient stream at once, in another backward too."""
    double_backward(lab, first_backward, ambient, ambient, already_ordered)


@pytest.mark.contract(BACKWARD_STREAMS)
@may_cycle
@every_first_backward
@pytest.mark.parametrize("second", ["default", "second"])
def test_double_backward_on_another_stream(lab, first_backward, second):
    """The second backward is called on a stream that has waited for the first one's."""
    double_backward(lab, first_backward, "ambient", second, torch.Stream.wait_stream)


@pytest.mark.contract(BACKWARD_STREAMS)
@pytest.mark.control("Gradients are ready for the ambient stream of their backward, and for no other.", aim="forward")
@may_cycle
@every_first_backward
@pytest.mark.parametrize("second", ["default", "second"])
def test_double_backward_on_another_stream_without_a_wait(lab, first_backward, second):
    """The same without the wait: what the first backward made may not be there."""
    double_backward(lab, first_backward, "ambient", second, already_ordered)


@pytest.mark.contract(BACKWARD_STREAMS)
@every_ambient_stream
def test_gradient_penalty_over_two_streams(lab, ambient):
    """A penalty on the gradients of two leaves, each with its own stream, is differentiated on the ambient stream."""
    first, second = leaf_on(lab, "one"), leaf_on(lab, "two", 3.0)
    seeds, penalty_seeds = poisoned_on(lab, ambient, first), poisoned_on(lab, ambient, first)
    with lab.stream("one"):
        squared = first * first
    with lab.stream("two") as two:
        two.wait_stream(lab.stream("one"))
        product = squared * second * second
        lab.observe(product, 36.0)
    with lab.stream(ambient):
        by_first, by_second = torch.autograd.grad(product, [first, second], *fill(seeds), create_graph=True)
        # Twice the first times the square of the second; twice the second times the square of the first.
        penalty = by_first + by_second
        penalty.backward(*fill(penalty_seeds))
        lab.observe(penalty, 60.0)
        lab.observe(first.grad, 42.0)
        lab.observe(second.grad, 32.0)


# Gradients of inner tensors.


@pytest.mark.contract("pytorch/pytorch#60127")
@every_ambient_stream
def test_gradients_of_inner_tensors(lab, ambient):
    """Gradients that are captured inside a graph, each on the stream of its node, are ready for the ambient stream."""
    leaf = leaf_on(lab, "one")
    seeds = poisoned_on(lab, ambient, leaf)
    with lab.preparing():
        with lab.stream("one"):
            inner = leaf * 3
        outer = product_on(lab.stream("two"), lab.stream("one"), inner, 5)
        root = product_on(lab.stream("forward"), lab.stream("two"), outer, 7)
    with lab.stream(ambient) as current:
        with without_threads():  # which might keep a gradient for a moment longer than the caller
            by_outer, by_inner, by_leaf = torch.autograd.grad(root, [outer, inner, leaf], fill(seeds))
        total = by_outer + by_inner + by_leaf
        for gradient in (by_outer, by_inner, by_leaf):
            gradient.record_stream(current)
        del by_outer, by_inner, by_leaf, gradient
        reuse(lab, "one", "two", "forward")
        lab.observe(total, 147.0)


@pytest.mark.contract(BACKWARD_STREAMS)
@every_ambient_stream
def test_backward_of_some_leaves(lab, ambient):
    """``backward(inputs=...)`` runs a part of the graph, and what it accumulates is ready as ever."""
    wanted, unwanted = leaf_on(lab, "one"), leaf_on(lab, "two", 3.0)
    seeds = poisoned_on(lab, ambient, wanted)
    with lab.preparing(), lab.stream("two"):
        product = wanted * unwanted
    with lab.stream(ambient):
        product.backward(*fill(seeds), inputs=[wanted])
        lab.observe(wanted.grad, 3.0)
    assert unwanted.grad is None


# Checkpoints.


def segment_on_one_stream(lab, tensor):
    squared = tensor * tensor
    fourth = squared * squared
    return fourth * fourth


def segment_that_hops(lab, tensor):
    squared = tensor * tensor
    fourth = on(lab.stream("inner"), lambda given: given * given, squared)
    squared.record_stream(lab.stream("inner"))
    fourth.record_stream(torch.accelerator.current_stream())
    return fourth * fourth


def segment_that_hops_without_a_wait(lab, tensor):
    squared = tensor * tensor
    with lab.stream("inner") as inner:
        fourth = squared * squared
        squared.record_stream(inner)
    torch.accelerator.current_stream().wait_stream(inner)
    fourth.record_stream(torch.accelerator.current_stream())
    return fourth * fourth


def spoil_free_memory(*streams):
    """What these streams are given next holds NaN, and not what was right the last time."""
    for stream in streams:
        with stream:
            for given in [torch.empty(256, device=stream.device) for _ in range(4)]:
                given.fill_(float("nan"))


every_segment = pytest.mark.parametrize("segment", [segment_on_one_stream, segment_that_hops])
reentrant_or_not = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])


def checkpointed(lab, segment, reentrant, ambient):
    forward, inner = lab.stream("forward"), lab.stream("inner")
    leaf = leaf_on(lab, "forward")
    seeds = poisoned_on(lab, ambient, leaf)
    with forward:
        result = checkpoint(
            lambda tensor: segment(lab, tensor), leaf, use_reentrant=reentrant, preserve_rng_state=False
        )
        lab.observe(result, 256.0)
    spoil_free_memory(forward, inner)
    with lab.stream(ambient):
        result.backward(*fill(seeds))
        lab.observe(leaf.grad, 1024.0)


@pytest.mark.contract(CHECKPOINT)
@reentrant_or_not
@every_segment
@every_ambient_stream
def test_checkpoint(lab, segment, reentrant, ambient):
    """What a checkpoint recomputes in backward runs where its forward ran, be it on one stream or on several."""
    checkpointed(lab, segment, reentrant, ambient)


@pytest.mark.contract(CHECKPOINT)
@pytest.mark.control("Work of different streams runs in any order unless one waits for the other.", aim="forward")
@reentrant_or_not
def test_checkpoint_of_a_segment_that_lacks_a_wait(lab, reentrant):
    """The same for a segment that changes streams without a wait: it is as unsafe in backward as in forward."""
    checkpointed(lab, segment_that_hops_without_a_wait, reentrant, "ambient")


# Reentrant backward.


class Nested(torch.autograd.Function):
    """Three times the square, differentiated by a backward inside its own backward, and so on, so many levels deep."""

    @staticmethod
    def forward(ctx, tensor, inner, depth, threads):
        with torch.enable_grad():
            ctx.given = tensor.detach().requires_grad_()
            if depth > 1:
                ctx.result = Nested.apply(ctx.given, inner, depth - 1, threads)
            else:
                ctx.result = on(inner, lambda given: given * given * 3, ctx.given)
        ctx.depth, ctx.threads = depth, threads
        return ctx.result.detach() * 1

    @staticmethod
    def backward(ctx, gradient):
        torch.autograd.backward(ctx.result, gradient)
        ctx.threads.add(threading.get_ident())
        by_given = ctx.given.grad
        return by_given * 1 if ctx.depth == 1 else by_given, None, None, None


@pytest.mark.contract(REENTRANT)
@every_ambient_stream
@pytest.mark.parametrize("inner", ["forward", "inner"])
@pytest.mark.parametrize("depth", [1, 2])
def test_reentrant_backward_in_a_node(lab, ambient, inner, depth):
    """A backward inside a node has the node's stream as its ambient stream: seeded from it, and ready for it."""
    leaf = leaf_on(lab, "forward")
    seeds = poisoned_on(lab, ambient, leaf)
    with lab.stream("forward"):
        result = Nested.apply(leaf, lab.stream(inner), depth, set())
        lab.observe(result, 12.0)
    with lab.stream(ambient):
        result.backward(*fill(seeds))
        lab.observe(leaf.grad, 12.0)


@pytest.mark.contract(REENTRANT)
def test_reentrant_backward_deeper_than_one_thread_goes(lab):
    """From 60 levels on the engine goes on in another thread, which takes the streams of the nodes and no others."""
    leaf = leaf_on(lab, "forward")
    seeds = poisoned_on(lab, "ambient", leaf)
    threads = set()
    with lab.preparing(), lab.stream("forward"):
        result = Nested.apply(leaf, lab.stream("inner"), 62, threads)
    with lab.stream("ambient"):
        result.backward(*fill(seeds))
        lab.observe(leaf.grad, 12.0)
    assert len(threads) == 2


@pytest.mark.contract(REENTRANT)
@every_ambient_stream
def test_reentrant_backward_in_a_hook(lab, ambient):
    """A backward inside a tensor hook, of another graph on another stream, is ready for the stream of the hook."""
    leaf, other = leaf_on(lab, "forward"), leaf_on(lab, "other", 3.0)
    seeds = poisoned_on(lab, ambient, leaf)
    with lab.stream("other"):
        squared = other * other
    with lab.stream("forward"):
        product = leaf * 5

    def scale_by_another_gradient(gradient):
        (by_other,) = torch.autograd.grad(squared, other, gradient)
        by_other.record_stream(torch.accelerator.current_stream())
        return gradient * by_other

    product.register_hook(scale_by_another_gradient)
    with lab.stream(ambient):
        product.backward(*fill(seeds))
        lab.observe(leaf.grad, 30.0)


# Threads.


def in_threads(*bodies):
    """Run each in a Python thread of its own, all at once; raise what one of them raised."""
    errors = []

    def guarded(body):
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


@pytest.mark.contract(THREADS)
@pytest.mark.parametrize("forward", ["same", "other"])
def test_threads_with_streams_of_their_own(lab, forward):
    """Threads that run backward at the same time, each on its own stream, each find their gradients ready there."""
    names = ["one", "two", "three"]
    forwards = names if forward == "same" else [f"forward_{name}" for name in names]
    leaves = [leaf_on(lab, name) for name in forwards]
    seeds = [poisoned_on(lab, name, leaf) for name, leaf in zip(names, leaves, strict=True)]

    def train(number):
        with lab.stream(forwards[number]):
            product = leaves[number] * (3 + number)
        with lab.stream(names[number]):
            product.backward(*fill(seeds[number]))

    in_threads(*(lambda number=number: train(number) for number in range(3)))
    for number, name in enumerate(names):
        with lab.stream(name):
            lab.observe(leaves[number].grad, 3.0 + number)


@pytest.mark.contract(THREADS)
def test_threads_that_share_a_leaf(lab):
    """Threads accumulate into one leaf, one after the other; each finds the sum so far ready on its own stream."""
    leaf = leaf_on(lab, "forward")
    names = ["one", "two", "three"]
    seeds = [poisoned_on(lab, name, leaf) for name in names]
    with lab.preparing(), lab.stream("forward"):
        products = [leaf * (3 + number) for number in range(3)]
    for number, name in enumerate(names):

        def train(number=number, name=name):
            with lab.stream(name) as stream:
                if number > 0:
                    stream.wait_stream(lab.stream(names[number - 1]))  # which has read the sum so far
                products[number].backward(*fill(seeds[number]))
                lab.observe(leaf.grad, float(sum(range(3, 4 + number))))

        in_threads(train)


def backward_in_a_thread(lab, in_thread):
    with lab.stream("forward"):
        leaf, product = lab.product(2.0, 3.0)
    seeds = poisoned_on(lab, "ambient", leaf)
    with lab.stream("ambient"):
        filled = fill(seeds, 5.0)
        in_threads(lambda: in_thread(product, filled))
        lab.observe(leaf.grad, 15.0)


@pytest.mark.contract(THREADS)
def test_thread_that_enters_the_stream_of_the_seed(lab):
    """A thread that makes the caller's stream current calls backward as the caller would."""

    def in_thread(product, seeds):
        with lab.stream("ambient"):
            product.backward(seeds.pop())

    backward_in_a_thread(lab, in_thread)


@pytest.mark.contract(THREADS)
@pytest.mark.control("The current stream is a thread's own, and a new thread starts on the default one.", aim="ambient")
def test_thread_that_starts_on_the_default_stream(lab):
    """The same in a thread that does not: its backward is ordered with the default stream, and not with the seed's."""
    backward_in_a_thread(lab, lambda product, seeds: product.backward(seeds.pop()))


# How the engine runs.


def with_anomaly_mode():
    return torch.autograd.set_detect_anomaly(True, check_nan=False)  # the check would make the host wait


@pytest.mark.contract(BACKWARD_STREAMS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("mode", [without_threads, with_anomaly_mode])
@every_ambient_stream
def test_modes_of_the_engine(lab, mode, ambient):
    """With no threads of its own, or in anomaly mode, the engine sums what several streams made as it always does."""
    leaf = leaf_on(lab, "forward")
    seeds = poisoned_on(lab, ambient, leaf, 2)
    with mode():
        with lab.preparing():
            with lab.stream("forward"):
                doubled = leaf * 2
            roots = [
                product_on(lab.stream(name), lab.stream("forward"), doubled, 3 + number)
                for number, name in enumerate(("one", "two"))
            ]
        with lab.stream(ambient):
            torch.autograd.backward(roots, fill(seeds))
            lab.observe(leaf.grad, 14.0)


# torch.func.


def cubed(tensor):
    return (tensor * tensor * tensor).sum()


def first_derivative(tensor):
    return torch.func.grad(cubed)(tensor)


def second_derivative(tensor):
    return torch.func.grad(lambda given: first_derivative(given).sum())(tensor)


def func_grad(lab, derivative, ambient, order):
    fill = lab.stream("fill")
    (value,) = poisoned_on(lab, "fill", torch.empty(256, device=lab.device))
    with fill:
        value.fill_(2.0)
    with lab.stream(ambient) as current:
        order(current, fill)
        lab.observe(derivative(value), 12.0)


every_derivative = pytest.mark.parametrize("derivative", [first_derivative, second_derivative])


@pytest.mark.contract(FUNC_GRAD)
@every_derivative
@pytest.mark.parametrize("ambient", ["default", "ambient"])
def test_func_grad(lab, derivative, ambient):
    """``torch.func.grad``, nested or not, is an operation of the current stream, which waits for its inputs."""
    func_grad(lab, derivative, ambient, torch.Stream.wait_stream)


@pytest.mark.contract(FUNC_GRAD)
@pytest.mark.control("Work of different streams runs in any order unless one waits for the other.", aim="fill")
@every_derivative
def test_func_grad_without_a_wait(lab, derivative):
    """The same without the wait: the derivative may be taken of what is not there yet."""
    func_grad(lab, derivative, "ambient", already_ordered)


@pytest.mark.contract(FUNC_GRAD)
@pytest.mark.defect(
    "docs/defects/functional_gradients.md", raises=NotImplementedError, torch=">=2.7", devices=("cuda", "sim")
)
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_transforms_of_a_function_that_uses_a_side_stream(lab, transform):
    """A function that does a part of its work on another stream, and waits for it, can be differentiated like any."""
    side = lab.stream("side")
    with lab.preparing():
        value = torch.full((256,), 2.0, device=lab.device)

    def function(given):
        current = torch.accelerator.current_stream()
        square = given * given
        side.wait_stream(current)
        with side:
            tripled = square * 3
        current.wait_stream(side)
        return tripled.sum()

    with lab.stream("ambient"):
        lab.observe(transform(function)(value), 12.0)


@pytest.mark.contract("https://docs.pytorch.org/docs/stable/generated/torch.func.vjp.html")
@every_ambient_stream
def test_func_vjp(lab, ambient):
    """What ``torch.func.vjp`` gives is called like a backward: on any stream that the seed is ready for."""
    value = leaf_on(lab, "forward").detach()
    seeds = poisoned_on(lab, ambient, value)
    with lab.stream("forward"):
        result, backward = torch.func.vjp(lambda tensor: tensor * tensor * 3, value)
        lab.observe(result, 12.0)
    with lab.stream(ambient):
        (by_value,) = backward(*fill(seeds))
        lab.observe(by_value, 12.0)
