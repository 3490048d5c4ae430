"""Memory reuse: freed memory may be handed out again as soon as its own stream could use it.

The contract (https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html and "CUDA streams" in
https://docs.pytorch.org/docs/stable/notes/cuda.html): memory belongs to the stream that was current when it was
allocated, whoever frees it and wherever. Freed, it goes to that stream's next allocation at once, since work of one
stream is in order. So whoever uses a tensor on another stream does one of two things before the last reference goes:
call ``record_stream``, which keeps the memory back until what that stream has been given by then is done, or make the
owner wait for that use. Autograd does the first by itself, for the gradients that its nodes hand to nodes of other
streams (pytorch/pytorch#33909, #60230). It does not do it for what it hands to the caller, nor for what a node saves.

So every tensor here is given up while its last use may be pending, and its owner at once fills memory of that size
with 99, as any program does sooner or later.
"""

import pytest
import torch

RECORD_STREAM = "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html"
CUDA_STREAMS = "https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams"
BACKWARD_STREAMS = "https://docs.pytorch.org/docs/stable/notes/cuda.html#stream-semantics-of-backward-passes"

NEITHER = "Memory that another stream still uses is reused, unless that use is recorded or the owner has waited for it."


def full(owner, value, size=256):
    """A tensor made and filled on its owner."""
    with owner:
        return torch.full((size,), value, device=owner.device)


def reuse(lab, owner, size=256):
    """What a program does next on the owner: memory of the size that was freed is filled with something else."""
    lab.keep(full(owner, 99.0, size))


# Before the last reference goes.


def record(owner, user, tensor):
    tensor.record_stream(user)


def wait_stream(owner, user, tensor):
    owner.wait_stream(user)


def wait_event(owner, user, tensor):
    owner.wait_event(user.record_event())


def stream_synchronize(owner, user, tensor):
    user.synchronize()


def event_synchronize(owner, user, tensor):
    user.record_event().synchronize()


def neither(owner, user, tensor):
    pass


# How memory is given up: the tensor is the only one in its list.


def drop_the_reference(tensors):
    tensors.clear()


def shrink_the_storage(tensors):
    tensors[0].untyped_storage().resize_(0)


def replace_the_data(tensors):
    tensors[0].data = tensors[0].new_empty(0)


def set_to_nothing(tensors):
    tensors[0].set_()


record_or_wait = pytest.mark.parametrize("order", [record, wait_stream])
every_way_to_free = pytest.mark.parametrize(
    "free", [drop_the_reference, shrink_the_storage, replace_the_data, set_to_nothing]
)
every_current_stream = pytest.mark.parametrize("current", ["owner", "user", "default"])


def read_on_another_stream(lab, order, free, current="default"):
    owner, user = lab.stream("owner"), lab.stream("user")
    tensors = [full(owner, 2.0)]
    user.wait_stream(owner)
    with user:
        result = tensors[0] * 3
    order(owner, user, tensors[0])
    with lab.stream(current):
        free(tensors)
    reuse(lab, owner)
    with user:
        lab.observe(result, 6.0)


@pytest.mark.contract(RECORD_STREAM)
@record_or_wait
@every_way_to_free
def test_memory_given_up_in_any_way(lab, order, free):
    """Memory that another stream reads is safe to give up in any way, once that is recorded or the owner has waited."""
    read_on_another_stream(lab, order, free)


@pytest.mark.contract(RECORD_STREAM)
@pytest.mark.control(NEITHER, aim="user")
@every_way_to_free
def test_memory_given_up_in_any_way_with_neither(lab, free):
    """The same with neither: the owner's next tensor may be in the memory before it is read."""
    read_on_another_stream(lab, neither, free)


@pytest.mark.contract(RECORD_STREAM)
@pytest.mark.parametrize("order", [wait_event, stream_synchronize, event_synchronize])
def test_every_order_before_the_free(lab, order):
    """The owner's wait for an event, and the host's for a stream or an event, are as good as a recording."""
    read_on_another_stream(lab, order, drop_the_reference)


@pytest.mark.contract(RECORD_STREAM)
@every_current_stream
def test_memory_goes_back_to_its_owner_wherever_it_is_freed(lab, current):
    """Which stream is current when the last reference goes makes no difference to a recorded tensor."""
    read_on_another_stream(lab, record, drop_the_reference, current)


@pytest.mark.contract(RECORD_STREAM)
@pytest.mark.control(NEITHER, aim="user")
@pytest.mark.parametrize("current", ["owner", "user"])
def test_freed_in_any_stream_with_neither(lab, current):
    """The same with neither: that the using stream is current when the last reference goes does not help."""
    read_on_another_stream(lab, neither, drop_the_reference, current)


def scratch(lab, order):
    owner, user = lab.stream("owner"), lab.stream("user")
    buffer = full(owner, 2.0)
    user.wait_stream(owner)
    with user:
        result = buffer.mul_(3) + 1
    order(owner, user, buffer)
    del buffer
    later = full(owner, 99.0)
    owner.wait_stream(user)
    with owner:
        lab.observe(result, 7.0)
        lab.observe(later, 99.0)


@pytest.mark.contract(RECORD_STREAM)
@record_or_wait
def test_scratch_written_on_another_stream(lab, order):
    """A buffer that another stream writes does not write into the owner's next tensor."""
    scratch(lab, order)


@pytest.mark.contract(RECORD_STREAM)
@pytest.mark.control(NEITHER, aim="user")
def test_scratch_written_on_another_stream_with_neither(lab):
    """The same with neither: the late write lands in a tensor that has nothing to do with it."""
    scratch(lab, neither)


@pytest.mark.contract(RECORD_STREAM)
def test_recorded_before_it_is_used(lab):
    """A tensor may be recorded before its use: what counts is what the stream has been given when it is freed."""
    owner, user = lab.stream("owner"), lab.stream("user")
    tensor = full(owner, 2.0)
    tensor.record_stream(user)
    user.wait_stream(owner)
    with user:
        result = tensor * 3
    del tensor
    reuse(lab, owner)
    with user:
        lab.observe(result, 6.0)


@pytest.mark.contract(RECORD_STREAM)
@pytest.mark.control("A wait orders what had been enqueued when its event was recorded, and nothing later.", aim="user")
def test_owner_waits_for_an_event_of_before_the_use(lab):
    """The owner waits, but for an event that was recorded before the use: unsafe, unlike an early record_stream."""
    owner, user = lab.stream("owner"), lab.stream("user")
    tensor = full(owner, 2.0)
    user.wait_stream(owner)
    early = user.record_event()
    with user:
        result = tensor * 3
    owner.wait_event(early)
    del tensor
    reuse(lab, owner)
    with user:
        lab.observe(result, 6.0)


def whole(tensor):
    return tensor


def second_half(tensor):
    return tensor[128:]


def detached_column(tensor):
    return tensor.detach().view(16, 16)[:, 3]


@pytest.mark.contract("pytorch/pytorch#27366")
@pytest.mark.parametrize("recorded", [second_half, detached_column])
def test_recorded_through_a_view(lab, recorded):
    """To record any view of a tensor is to record all of its memory."""
    owner, user = lab.stream("owner"), lab.stream("user")
    tensor = full(owner, 2.0)
    user.wait_stream(owner)
    with user:
        result = tensor * 3
    recorded(tensor).record_stream(user)
    del tensor
    reuse(lab, owner)
    with user:
        lab.observe(result, 6.0)


@pytest.mark.contract(RECORD_STREAM)
@record_or_wait
def test_the_last_view_frees_the_memory(lab, order):
    """Memory lives as long as any view of it: only with the last one must its use be recorded or waited for."""
    owner, user = lab.stream("owner"), lab.stream("user")
    tensor = full(owner, 2.0)
    view = second_half(tensor)
    user.wait_stream(owner)
    with user:
        doubled = tensor * 2
    del tensor  # frees nothing
    with user:
        tripled = view * 3
    order(owner, user, view)
    del view
    reuse(lab, owner)
    with user:
        lab.observe(doubled, 4.0)
        lab.observe(tripled, 6.0)


def go_on(stream):
    pass


def read_on_two_streams(lab, before_free, before_reuse=go_on):
    owner, first, second = lab.stream("owner"), lab.stream("first"), lab.stream("second")
    tensor = full(owner, 2.0)
    first.wait_stream(owner)
    second.wait_stream(owner)
    with first:
        tripled = tensor * 3
    with second:
        doubled = tensor * 2
    before_free(owner, first, second, tensor)
    del tensor
    before_reuse(second)
    reuse(lab, owner)
    with first:
        lab.observe(tripled, 6.0)
    with second:
        lab.observe(doubled, 4.0)


def record_both(owner, first, second, tensor):
    tensor.record_stream(first)
    tensor.record_stream(second)


def wait_for_one_that_waits_for_the_other(owner, first, second, tensor):
    second.wait_stream(first)
    owner.wait_stream(second)


def record_one_that_waits_for_the_other(owner, first, second, tensor):
    second.wait_stream(first)
    tensor.record_stream(second)


def record_one_and_wait_for_the_other(owner, first, second, tensor):
    owner.wait_stream(first)
    tensor.record_stream(second)


def record_one(owner, first, second, tensor):
    tensor.record_stream(second)


def record_one_that_waits_too_late(owner, first, second, tensor):
    tensor.record_stream(second)
    first.wait_stream(second)


@pytest.mark.contract(RECORD_STREAM)
@pytest.mark.parametrize(
    "before_free",
    [
        record_both,
        record_one_and_wait_for_the_other,
        record_one_that_waits_for_the_other,
        wait_for_one_that_waits_for_the_other,
    ],
)
def test_read_on_two_streams(lab, before_free):
    """Each stream that uses a tensor is recorded or waited for, directly or through another one."""
    read_on_two_streams(lab, before_free)


@pytest.mark.contract(RECORD_STREAM)
@pytest.mark.control(NEITHER, aim="first")
@pytest.mark.parametrize("before_free", [record_one, record_one_that_waits_too_late])
def test_read_on_two_streams_of_which_one_is_recorded(lab, before_free):
    """The same with one of the two recorded, which the other one waits for at most: the other's read is unprotected."""
    read_on_two_streams(lab, before_free, torch.Stream.synchronize)  # until then the recording keeps the memory back


def uninitialized_on_another_stream(lab, order):
    owner, user = lab.stream("owner"), lab.stream("user")
    old = full(owner, 2.0)
    with owner:
        result = old * 3
        del old
        new = torch.empty(256, device=lab.device)  # in the memory of the old one, which is still to be read
    order(user, owner)
    with user:
        new.fill_(5.0)
        lab.observe(new, 5.0)
    with owner:
        lab.observe(result, 6.0)


@pytest.mark.contract(CUDA_STREAMS)
def test_uninitialized_memory_is_used_on_another_stream(lab):
    """A stream waits for the owner of memory that it is the first to write: earlier tensors may have been there."""
    uninitialized_on_another_stream(lab, torch.Stream.wait_stream)


@pytest.mark.contract(CUDA_STREAMS)
@pytest.mark.control("The wait is still required where nothing is read, since the memory may be in use.", aim="owner")
def test_uninitialized_memory_is_used_on_another_stream_without_a_wait(lab):
    """The same without the wait: the write may overtake what was there before."""
    uninitialized_on_another_stream(lab, lambda user, owner: None)


@pytest.mark.contract(RECORD_STREAM)
def test_memory_is_handed_out_again_when_the_recorded_use_is_done(lab):
    """Once the recorded use is done the owner has the memory again, and may hand it to the same user again."""
    owner, user = lab.stream("owner"), lab.stream("user")
    for number in range(3):
        tensor = full(owner, 2.0 + number)
        user.wait_stream(owner)
        with user:
            result = tensor * 3
            tensor.record_stream(user)
            del tensor
            lab.observe(result, 6.0 + 3 * number)


# One flat buffer.


def flat_buffer(lab, waited_for):
    owner = lab.stream("owner")
    parts = full(owner, float("nan")).chunk(4)
    streams = [lab.stream(name) for name in ("one", "two", "three", "four")]
    for number, (stream, part) in enumerate(zip(streams, parts, strict=True), 1):
        stream.wait_stream(owner)
        with stream:
            part.fill_(number)
    for number in waited_for:
        owner.wait_stream(streams[number])
    with owner:
        total = parts[0] + parts[1] + parts[2] + parts[3]
        lab.observe(total, 10.0)


@pytest.mark.contract(CUDA_STREAMS)
def test_flat_buffer_filled_from_several_streams(lab):
    """Several streams fill their own parts of one buffer with no order among them; who reads it all waits for each."""
    flat_buffer(lab, range(4))


@pytest.mark.contract(CUDA_STREAMS)
@pytest.mark.control("Whoever reads what other streams write waits for each of them.", aim="three")
def test_flat_buffer_of_which_one_stream_is_not_waited_for(lab):
    """The same with the wait for one of the four left out: its part may not be filled yet."""
    flat_buffer(lab, [0, 1, 3])


def overlapping_parts(lab, order):
    owner, one, two = lab.stream("owner"), lab.stream("one"), lab.stream("two")
    flat = full(owner, 0.0)
    one.wait_stream(owner)
    two.wait_stream(owner)
    with one:
        flat[:129].add_(1)
    order(two, one)
    with two:
        flat[128:].add_(2)
        lab.observe(flat[128:129], 3.0)
        lab.observe(flat[129:], 2.0)
    with one:
        lab.observe(flat[:128], 1.0)


@pytest.mark.contract(CUDA_STREAMS)
def test_overlapping_parts_of_a_flat_buffer(lab):
    """Views that share a single element are in conflict: the second writer waits for the first."""
    overlapping_parts(lab, torch.Stream.wait_stream)


@pytest.mark.contract(CUDA_STREAMS)
@pytest.mark.control("Work of different streams runs in any order unless one waits for the other.", aim="one")
def test_overlapping_parts_of_a_flat_buffer_without_a_wait(lab):
    """The same without the wait: one of the two sums may get lost in the element that both write."""
    overlapping_parts(lab, lambda two, one: None)


def parts_given_up(lab, recorded, before_reuse=go_on):
    owner, one, two = lab.stream("owner"), lab.stream("one"), lab.stream("two")
    flat = full(owner, 2.0)
    first, second = flat.chunk(2)
    one.wait_stream(owner)
    two.wait_stream(owner)
    with one:
        tripled = first * 3
    with two:
        doubled = second * 2
    for part, stream in recorded(first, second, one, two):
        part.record_stream(stream)
    del flat, first, second, part
    before_reuse(two)
    reuse(lab, owner)
    with one:
        lab.observe(tripled, 6.0)
    with two:
        lab.observe(doubled, 4.0)


@pytest.mark.contract(RECORD_STREAM)
def test_parts_of_a_flat_buffer_are_recorded_on_their_own_streams(lab):
    """A buffer whose parts are used on several streams is freed as a whole, once each stream has been recorded."""
    parts_given_up(lab, lambda first, second, one, two: [(first, one), (second, two)])


@pytest.mark.contract(RECORD_STREAM)
@pytest.mark.control(NEITHER, aim="one")
def test_parts_of_a_flat_buffer_are_recorded_on_one_stream_only(lab):
    """The same with both parts recorded on one of the two streams: the other one's part goes with the rest."""
    parts_given_up(lab, lambda first, second, one, two: [(first, two), (second, two)], torch.Stream.synchronize)


@pytest.mark.contract(BACKWARD_STREAMS)
@pytest.mark.parametrize("ambient", ["default", "ambient", "one"])
def test_gradients_are_views_of_a_flat_buffer(lab, ambient):
    """Leaves of several streams accumulate into one buffer that is zeroed before backward and read whole after it."""
    with lab.stream("one"):
        first, tripled = lab.product(2.0, 3.0)
    with lab.stream("two"):
        second, quadrupled = lab.product(2.0, 4.0)
    with lab.preparing(), lab.stream(ambient):
        flat = torch.full((512,), float("nan"), device=lab.device)
        seeds = [torch.ones_like(tripled) for _ in range(2)]
        first.grad, second.grad = flat.chunk(2)
    with lab.stream(ambient):
        flat.zero_()
        torch.autograd.backward([tripled, quadrupled], seeds)
        seeds.clear()
        lab.observe(flat[:256] + flat[256:], 7.0)


# A storage that is emptied and filled again, as sharded parameters are.


def resized_storage(lab, order):
    gather, compute = lab.stream("gather"), lab.stream("compute")
    with lab.preparing(), compute:
        leaf = torch.full((256,), 2.0, device=lab.device, requires_grad=True)
        seed = torch.ones_like(leaf)
    weight = full(gather, 3.0)
    compute.wait_stream(gather)
    with compute:
        product = leaf * weight
    order(gather, compute, weight)
    weight.untyped_storage().resize_(0)
    reuse(lab, gather)
    with gather:
        weight.untyped_storage().resize_(4 * 256)
        weight.data.fill_(3.0)
    compute.wait_stream(gather)
    with compute:
        product.backward(seed)
    order(gather, compute, weight)
    weight.untyped_storage().resize_(0)
    reuse(lab, gather)
    with compute:
        lab.observe(product, 6.0)
        lab.observe(leaf.grad, 3.0)


@pytest.mark.contract("NVIDIA/Megatron-LM#5788")
@record_or_wait
def test_storage_emptied_after_forward_and_filled_for_backward(lab, order):
    """A weight is gathered, used and emptied, for forward and again for backward, which reads what was saved of it."""
    resized_storage(lab, order)


@pytest.mark.contract("NVIDIA/Megatron-LM#5788")
@pytest.mark.control(NEITHER, aim="compute")
def test_storage_emptied_after_forward_and_filled_for_backward_with_neither(lab):
    """The same with neither: the memory of the weight goes while the products with it are pending."""
    resized_storage(lab, neither)


# What a node saves belongs to whoever made it.


def once(product, seeds):
    product.backward(seeds.pop())
    return 1


def twice(product, seeds):
    product.backward(seeds[0], retain_graph=True)  # frees nothing
    product.backward(seeds.pop())
    return 2


once_and_twice = pytest.mark.parametrize("backward", [once, twice])


def saved_for_backward(lab, backward, while_saved, afterwards):
    owner, user = lab.stream("owner"), lab.stream("user")
    with lab.preparing(), user:
        leaf = torch.full((256,), 2.0, device=lab.device, requires_grad=True)
    with lab.stream("ambient") as ambient:
        seeds = [lab.poisoned(leaf).fill_(1.0)]
        saved = [full(owner, 3.0)]
        user.wait_stream(owner)
        with user:
            product = leaf * saved[0]
        while_saved(owner, user, saved)
        times = backward(product, seeds)
        afterwards(owner, ambient, saved)
        reuse(lab, owner)
        lab.observe(leaf.grad, 3.0 * times)


def record_and_forget(owner, user, saved):
    saved.pop().record_stream(user)


def forget(owner, user, saved):
    saved.pop()


def wait_and_forget(owner, ambient, saved):
    owner.wait_stream(ambient)
    saved.pop()


def nothing(owner, stream, saved):
    pass


@pytest.mark.contract(RECORD_STREAM)
@once_and_twice
def test_saved_tensor_is_recorded_where_its_node_runs(lab, backward):
    """The last reference may be a node's: recorded on the node's stream, a tensor is safe when backward drops it."""
    saved_for_backward(lab, backward, record_and_forget, nothing)


@pytest.mark.contract(RECORD_STREAM)
@once_and_twice
def test_saved_tensor_is_kept_until_its_owner_waits_for_backward(lab, backward):
    """Or the caller keeps a reference until the owner has waited for the stream that backward was called on."""
    saved_for_backward(lab, backward, nothing, wait_and_forget)


@pytest.mark.contract(RECORD_STREAM)
@pytest.mark.control(NEITHER, aim="user")
@once_and_twice
def test_saved_tensor_with_neither(lab, backward):
    """The same with neither: autograd does not record what a node saves, and drops it when the node has run."""
    saved_for_backward(lab, backward, forget, nothing)


def saved_by_a_graph_that_is_dropped(lab, order):
    owner, user = lab.stream("owner"), lab.stream("user")
    with lab.preparing(), user:
        leaf = torch.full((256,), 2.0, device=lab.device, requires_grad=True)
    saved = full(owner, 3.0)
    user.wait_stream(owner)
    with user:
        product = leaf * saved
        result = product.detach()
    order(owner, user, saved)
    del saved
    del product  # and with it the graph
    reuse(lab, owner)
    with user:
        lab.observe(result, 6.0)


@pytest.mark.contract(RECORD_STREAM)
@record_or_wait
def test_saved_tensor_of_a_graph_that_is_dropped(lab, order):
    """A graph that is dropped without a backward drops what it has saved, the forward that reads it pending or not."""
    saved_by_a_graph_that_is_dropped(lab, order)


@pytest.mark.contract(RECORD_STREAM)
@pytest.mark.control(NEITHER, aim="user")
def test_saved_tensor_of_a_graph_that_is_dropped_with_neither(lab):
    """The same with neither: the forward may read the owner's next tensor."""
    saved_by_a_graph_that_is_dropped(lab, neither)


# What autograd hands to the caller belongs to the stream that made it.


def grad_is_set_to_none(leaf, product, seeds):
    product.backward(seeds.pop())
    yield leaf.grad
    leaf.grad = None


def zero_grad(leaf, product, seeds):
    optimizer = torch.optim.SGD([leaf], lr=1.0)
    product.backward(seeds.pop())
    yield leaf.grad
    optimizer.zero_grad(set_to_none=True)


def result_of_grad(leaf, product, seeds):
    with torch.autograd.set_multithreading_enabled(False):  # a thread of the engine might keep it a moment longer
        gradients = list(torch.autograd.grad(product, leaf, seeds.pop()))
    yield gradients[0]
    gradients.clear()


every_gradient = pytest.mark.parametrize("gradients", [grad_is_set_to_none, zero_grad, result_of_grad])


def gradient_given_up(lab, gradients, order):
    with lab.stream("forward") as forward:
        leaf, product = lab.product(2.0, 3.0)
    with lab.stream("ambient") as ambient:
        steps = gradients(leaf, product, [lab.poisoned(leaf).fill_(5.0)])
        gradient = next(steps)
        result = gradient * 2
        order(forward, ambient, gradient)
        del gradient
        next(steps, None)
        reuse(lab, forward)
        lab.observe(result, 30.0)


@pytest.mark.contract(BACKWARD_STREAMS)
@record_or_wait
@every_gradient
def test_gradient_used_on_the_ambient_stream(lab, gradients, order):
    """A gradient is ready for the ambient stream, but its memory is its node's: its use is recorded or waited for."""
    gradient_given_up(lab, gradients, order)


@pytest.mark.contract(BACKWARD_STREAMS)
@pytest.mark.control(NEITHER, aim="ambient")
@every_gradient
def test_gradient_used_on_the_ambient_stream_with_neither(lab, gradients):
    """The same with neither: that the engine synchronizes the ambient stream protects no later use of the memory."""
    gradient_given_up(lab, gradients, neither)


# What autograd hands from node to node it records itself.


def product_on(stream, maker, tensor, factor):
    """A product on one stream of what was made on another."""
    stream.wait_stream(maker)
    with stream:
        return tensor * factor


every_ambient_stream = pytest.mark.parametrize("ambient", ["default", "ambient", "consumer", "producer"])


@pytest.mark.contract("pytorch/pytorch#60230")
@every_ambient_stream
def test_gradient_between_two_streams(lab, ambient):
    """A gradient made on one stream and read by a node of another, then dropped, outlives that read."""
    consumer, producer = lab.stream("consumer"), lab.stream("producer")
    with lab.preparing():
        with consumer:
            leaf = torch.full((256,), 2.0, device=lab.device, requires_grad=True)
            middle = leaf * 3
        root = product_on(producer, consumer, middle, 5)
    with lab.stream(ambient):
        root.backward(lab.poisoned(leaf).fill_(1.0))
        reuse(lab, producer)
        lab.observe(leaf.grad, 15.0)


@pytest.mark.contract("pytorch/pytorch#60230")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")  # that is the point
@every_ambient_stream
def test_gradient_accumulated_on_another_stream(lab, ambient):
    """A gradient that is added to an existing one on the leaf's stream, then dropped, outlives that sum."""
    consumer, producer = lab.stream("consumer"), lab.stream("producer")
    with lab.preparing():
        with consumer:
            leaf = torch.full((256,), 2.0, device=lab.device, requires_grad=True)
            accumulates_there = leaf.view_as(leaf).grad_fn  # the leaf is first used here
            leaf.grad = torch.full_like(leaf, 7.0, requires_grad=False)
        root = product_on(producer, consumer, leaf, 5)
    with lab.stream(ambient):
        root.backward(lab.poisoned(leaf).fill_(1.0))
        reuse(lab, producer)
        lab.observe(leaf.grad, 12.0)
    del accumulates_there


@pytest.mark.contract("pytorch/pytorch#60230")
@every_ambient_stream
@pytest.mark.parametrize("count", [2, 3])
def test_gradients_summed_on_another_stream(lab, ambient, count):
    """Gradients made on several streams and summed on the consumer's outlive the sum that each of them is part of."""
    consumer = lab.stream("consumer")
    producers = [lab.stream(name) for name in ("producer", "second", "third")[:count]]
    with lab.preparing():
        with consumer:
            leaf = torch.full((256,), 2.0, device=lab.device, requires_grad=True)
            middle = leaf * 3
        roots = [product_on(stream, consumer, middle, 5 + number) for number, stream in enumerate(producers)]
    with lab.stream(ambient):
        seeds = [lab.poisoned(leaf) for _ in roots]
        for seed in seeds:
            seed.fill_(1.0)
        torch.autograd.backward(roots, seeds)
        seeds.clear()
        del seed
        for stream in producers:
            reuse(lab, stream)
        lab.observe(leaf.grad, 3.0 * sum(range(5, 5 + count)))


@pytest.mark.contract("pytorch/pytorch#60230")
@every_ambient_stream
def test_gradients_that_go_to_and_fro(lab, ambient):
    """Between nodes that alternate between two streams, no gradient's memory is used for the next before it is read."""
    consumer, producer = lab.stream("consumer"), lab.stream("producer")
    with lab.preparing():
        with consumer:
            leaf = torch.full((256,), 2.0, device=lab.device, requires_grad=True)
            root = leaf * 2
        for number in range(5):
            maker, user = (producer, consumer) if number % 2 else (consumer, producer)
            root = product_on(user, maker, root, 2)
    with lab.stream(ambient):
        root.backward(lab.poisoned(leaf).fill_(1.0))
        reuse(lab, producer)
        reuse(lab, consumer)
        lab.observe(leaf.grad, 64.0)


@pytest.mark.contract("pytorch/pytorch#60230")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")  # that is the point
def test_sparse_gradient_accumulated_on_another_stream(lab):
    """The indices and the values of a sparse gradient outlive their use by a node of another stream, as a dense one."""
    consumer, producer = lab.stream("consumer"), lab.stream("producer")
    with lab.preparing():
        with consumer:
            weight = torch.full((16, 16), 2.0, device=lab.device, requires_grad=True)
            accumulates_there = weight.view_as(weight).grad_fn  # the leaf is first used here
            weight.grad = torch.full_like(weight, 7.0, requires_grad=False)
        producer.wait_stream(consumer)
        with producer:
            indices = torch.arange(16).to(lab.device)
            root = torch.nn.functional.embedding(indices, weight, sparse=True) * 3
            del indices
    with lab.stream("ambient"):
        root.backward(lab.poisoned(root).fill_(1.0))
        lab.keep(full(producer, 0.0))  # not 99: it may be read as indices, and the device fails if one is out of range
        lab.observe(weight.grad, 10.0)
    del accumulates_there


@pytest.mark.contract("pytorch/pytorch#60230")
def test_batched_gradients_between_two_streams(lab):
    """The gradients of a batch of seeds outlive their use by a node of another stream, as a single one."""
    consumer, producer = lab.stream("consumer"), lab.stream("producer")
    with lab.preparing():
        with consumer:
            leaf = torch.full((256,), 2.0, device=lab.device, requires_grad=True)
            middle = leaf * 3
        root = product_on(producer, consumer, middle, 5)
    with lab.stream("ambient"):
        seeds = [torch.full((4, 256), 1.0, device=lab.device)]
        (gradient,) = torch.autograd.grad(root, leaf, seeds.pop(), is_grads_batched=True)
        reuse(lab, producer, 4 * 256)
        lab.observe(gradient, 15.0)
