"""Copies between host and device: ordered like any other work of their stream, and not at all with the host.

The contract (https://docs.pytorch.org/docs/stable/notes/cuda.html, "Asynchronous execution", "CUDA streams" and "Use
pinned memory buffers"; ``torch.Tensor.copy_``): a copy runs on the stream that is current. One between pinned memory
and the device, with ``non_blocking=True``, returns at once: streams that use the device's side wait for it as for any
other work, and the host synchronizes before it reads what was copied to it or overwrites what is copied from it. A
blocking copy, ``item()`` and a copy from pageable memory leave the host nothing to wait for. Pinned memory that is
given up is not handed out again before the copies that use it are done (``CachingHostAllocator.h`` in PyTorch).

Backward keeps this up: gradients that go to a leaf on the host have arrived when it returns, and gradients that come
from the host have the stream semantics of any others. That copies overlap with compute is shown by
``test_copy_overlap.py``.
"""

import pytest
import torch

STREAMS = "https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams"
ASYNCHRONOUS = "https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution"
PINNED = "https://docs.pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers"
BACKWARD_STREAMS = "https://docs.pytorch.org/docs/stable/notes/cuda.html#stream-semantics-of-backward-passes"
RECORD_STREAM = "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html"

NOT_READY = "What is copied on one stream is used on another only after a wait."
NOT_ARRIVED = "The host reads the result of a non-blocking copy only after it has synchronized with it."
STILL_READ = "The host overwrites the source of a non-blocking copy only after it has synchronized with it."


def pinned(*values):
    """Host buffers that are pinned, one full of each value."""
    return [torch.full((256,), float(value)).pin_memory() for value in values]


def buffers(lab, owner, count=1):
    """Device buffers of that stream, NaN until something is copied into them."""
    with lab.preparing(), owner:
        return [torch.full((256,), float("nan"), device=lab.device) for _ in range(count)]


def weight_on(lab, stream, value=2.0):
    with lab.preparing(), stream:
        return torch.full((256,), value, device=lab.device, requires_grad=True)


# Orders between streams.


def wait_stream(later, earlier):
    later.wait_stream(earlier)


def wait_event(later, earlier):
    later.wait_event(earlier.record_event())


def stream_synchronize(later, earlier):
    earlier.synchronize()


def event_synchronize(later, earlier):
    earlier.record_event().synchronize()


def no_order(later, earlier):
    pass


every_order = pytest.mark.parametrize("order", [wait_stream, wait_event, stream_synchronize, event_synchronize])
wait_or_synchronize = pytest.mark.parametrize("synchronize", ["stream", "event"])


def synchronized(stream, how):
    (stream.record_event() if how == "event" else stream).synchronize()


# From the host to the device.


def prefetch(lab, order):
    copy, compute = lab.stream("copy"), lab.stream("compute")
    with lab.preparing():
        hosts = pinned(3)
    weight = weight_on(lab, compute)
    with copy:
        batch = hosts[0].to(lab.device, non_blocking=True)
    order(compute, copy)
    with compute:
        (weight * batch).sum().backward()
        lab.observe(weight.grad, 3.0)
        lab.observe(batch, 3.0)


@pytest.mark.contract(PINNED)
@every_order
def test_batch_is_uploaded_on_a_copy_stream(lab, order):
    """A batch uploaded on a stream of its own is used once the compute stream, or the host, has waited for it."""
    prefetch(lab, order)


@pytest.mark.contract(PINNED)
@pytest.mark.control(NOT_READY, aim="copy")
def test_batch_is_uploaded_on_a_copy_stream_without_a_wait(lab):
    """The same without the wait: training may begin before the batch is there."""
    prefetch(lab, no_order)


def prefetches_into_new_memory(lab, recorded):
    copy, compute = lab.stream("copy"), lab.stream("compute")
    with lab.preparing():
        *hosts, next_one = pinned(1, 2, 3, 99)
    weight = weight_on(lab, compute)
    for host in hosts:
        with copy:
            batch = host.to(lab.device, non_blocking=True)
        compute.wait_stream(copy)
        with compute:
            if recorded:
                batch.record_stream(compute)
            (weight * batch).sum().backward()
            del batch
    with copy:
        lab.keep(next_one.to(lab.device, non_blocking=True))
    with compute:
        lab.observe(weight.grad, 6.0)


@pytest.mark.contract(RECORD_STREAM)
def test_batches_are_given_up_one_after_another(lab):
    """The memory of a batch belongs to the copy stream: recorded on the compute stream, it may be dropped after use."""
    prefetches_into_new_memory(lab, recorded=True)


@pytest.mark.contract(RECORD_STREAM)
@pytest.mark.control("Memory that another stream still uses is reused, unless that use is recorded.", aim="compute")
def test_batches_are_given_up_one_after_another_without_a_recording(lab):
    """The same without record_stream: the next batch may land in the one that is still computed with."""
    prefetches_into_new_memory(lab, recorded=False)


def double_buffered(lab, filled, used):
    copy, compute = lab.stream("copy"), lab.stream("compute")
    with lab.preparing():
        hosts = pinned(1, 2, 3, 4)
    weight = weight_on(lab, compute)
    both = buffers(lab, copy, 2)
    total = 0
    last_used = [None, None]
    for number, host in enumerate(hosts):
        buffer = both[number % 2]
        with copy:
            if last_used[number % 2] is not None:
                used(copy, last_used[number % 2])
            buffer.copy_(host, non_blocking=True)
            ready = copy.record_event()
        with compute:
            filled(compute, ready)
            (weight * buffer).sum().backward()
            last_used[number % 2] = compute.record_event()
            total += number + 1
            lab.observe(weight.grad, total)


def waits(stream, event):
    stream.wait_event(event)


def does_not_wait(stream, event):
    pass


@pytest.mark.contract(STREAMS)
def test_double_buffering(lab):
    """Compute waits until a buffer is filled, and the copy that fills it again until compute has used it."""
    double_buffered(lab, waits, waits)


@pytest.mark.contract(STREAMS)
@pytest.mark.control(NOT_READY, aim="copy")
def test_double_buffering_without_the_wait_for_the_copy(lab):
    """The same without compute's wait: it may compute with the batch before last."""
    double_buffered(lab, does_not_wait, waits)


@pytest.mark.contract(STREAMS)
@pytest.mark.control("A copy that overwrites what another stream reads waits for that read.", aim="compute")
def test_double_buffering_without_the_wait_for_compute(lab):
    """The same without the copy's wait: the batch after next may overwrite the one that is computed with."""
    double_buffered(lab, waits, does_not_wait)


def several_copy_streams(lab, order):
    first, second, compute = lab.stream("first"), lab.stream("second"), lab.stream("compute")
    with lab.preparing():
        features, targets = pinned(3, 5)
    weight = weight_on(lab, compute)
    (feature,), (target,) = buffers(lab, first), buffers(lab, second)
    with first:
        feature.copy_(features, non_blocking=True)
    with second:
        target.copy_(targets, non_blocking=True)
    order(compute, first, second)
    with compute:
        (weight * feature + target * weight).sum().backward()
        lab.observe(weight.grad, 8.0)


def wait_for_both(compute, first, second):
    compute.wait_stream(first)
    compute.wait_stream(second)


def wait_for_one_that_waits_for_the_other(compute, first, second):
    second.wait_stream(first)
    compute.wait_stream(second)


def wait_for_one(compute, first, second):
    compute.wait_stream(second)


@pytest.mark.contract(STREAMS)
@pytest.mark.parametrize("order", [wait_for_both, wait_for_one_that_waits_for_the_other])
def test_several_copy_streams(lab, order):
    """Inputs uploaded on several streams are used once each of them has been waited for, directly or not."""
    several_copy_streams(lab, order)


@pytest.mark.contract(STREAMS)
@pytest.mark.control(NOT_READY, aim="first")
def test_several_copy_streams_of_which_one_is_waited_for(lab):
    """The same with a wait for the last one only, which says nothing of the other."""
    several_copy_streams(lab, wait_for_one)


# The host's side of an upload.


def arrived(lab, copy, batches):
    compute = lab.stream("compute")
    compute.wait_stream(copy)
    with compute:
        for number, batch in enumerate(batches):
            lab.observe(batch, number + 1.0)


def staged(lab, before_overwriting):
    copy = lab.stream("copy")
    with lab.preparing():
        (staging,) = pinned(1)
    batches = buffers(lab, copy, 3)
    for number, batch in enumerate(batches):
        with copy:
            batch.copy_(staging, non_blocking=True)
        before_overwriting(copy)
        staging.fill_(number + 2.0)
    arrived(lab, copy, batches)


@pytest.mark.contract(PINNED)
@wait_or_synchronize
def test_staging_buffer_is_filled_again(lab, synchronize):
    """The host fills a pinned buffer again once it has waited for the upload that reads it."""
    staged(lab, lambda copy: synchronized(copy, synchronize))


@pytest.mark.contract(PINNED)
@pytest.mark.control(STILL_READ, aim="copy")
def test_staging_buffer_is_filled_again_without_a_wait(lab):
    """The same without the wait: a batch may be uploaded as the next one."""
    staged(lab, lambda copy: None)


def staged_in_turn(lab, awaited):
    copy = lab.stream("copy")
    with lab.preparing():
        staging = pinned(1, 2)
    batches = buffers(lab, copy, 4)
    uploaded = []
    for number in range(5):
        if number < 4:
            with copy:
                batches[number].copy_(staging[number % 2], non_blocking=True)
                uploaded.append(copy.record_event())
        for event in uploaded[awaited(number)]:
            event.synchronize()
        if number > 0:
            staging[(number - 1) % 2].fill_(number + 2.0)
    arrived(lab, copy, batches)


@pytest.mark.contract(PINNED)
def test_two_staging_buffers_in_turn(lab):
    """With two pinned buffers in turn, the host waits for the upload before last, and not for the last one."""
    staged_in_turn(lab, lambda number: slice(max(number - 1, 0), number))


@pytest.mark.contract(PINNED)
@pytest.mark.control(STILL_READ, aim="copy")
def test_two_staging_buffers_in_turn_and_a_wait_for_the_wrong_upload(lab):
    """The same with a wait for the upload before that one, which used the other buffer."""
    staged_in_turn(lab, lambda number: slice(max(number - 2, 0), max(number - 1, 0)))


def pageable():
    return torch.full((256,), 3.0)


def pinned_with_gaps():
    return torch.full((512,), 3.0).pin_memory()[::2]


@pytest.mark.contract(ASYNCHRONOUS)
@pytest.mark.parametrize("source", [pageable, pinned_with_gaps])
def test_source_that_was_read_when_the_copy_returned(lab, source):
    """What cannot be copied asynchronously has been read when the copy returns: the host may overwrite it at once."""
    copy, compute = lab.stream("copy"), lab.stream("compute")
    with lab.preparing():
        host = source()
    (batch,) = buffers(lab, copy)
    with copy:
        batch.copy_(host, non_blocking=True)
    host.fill_(99.0)
    compute.wait_stream(copy)
    with compute:
        lab.observe(batch, 3.0)


@pytest.mark.contract("aten/src/ATen/core/CachingHostAllocator.h")
@pytest.mark.parametrize("current", ["copy", "default"])
def test_pinned_memory_given_up_during_its_upload(lab, current):
    """Pinned memory that is dropped, on whatever stream, is not handed out again before its upload is done."""
    copy, compute = lab.stream("copy"), lab.stream("compute")
    with lab.preparing():
        hosts = pinned(3)
    (batch,) = buffers(lab, copy)
    with copy:
        batch.copy_(hosts[0], non_blocking=True)
    with lab.stream(current):
        hosts.clear()
        lab.keep(pinned(99))
    compute.wait_stream(copy)
    with compute:
        lab.observe(batch, 3.0)


# From the device to the host.


def blocking(gradient, host, stream):
    return gradient.cpu()


def not_blocking_then_stream(gradient, host, stream):
    host = gradient.to("cpu", non_blocking=True)  # new pinned memory
    stream.synchronize()
    return host


def into_a_buffer_then_event(gradient, host, stream):
    host.copy_(gradient, non_blocking=True)
    stream.record_event().synchronize()
    return host


def into_a_buffer(gradient, host, stream):
    return host.copy_(gradient, non_blocking=True)


def host_reads_a_gradient(lab, download):
    with lab.stream("forward"):
        leaf, product = lab.product(2.0, 3.0)
    with lab.preparing():
        (host,) = pinned(float("nan"))
    with lab.stream("ambient") as ambient:
        product.backward(lab.poisoned(product).fill_(5.0))
        lab.observe(download(leaf.grad, host, ambient), 15.0)


@pytest.mark.contract(BACKWARD_STREAMS)
@pytest.mark.parametrize("download", [blocking, not_blocking_then_stream, into_a_buffer_then_event])
def test_host_reads_a_gradient(lab, download):
    """A gradient is copied to the host on the ambient stream, without a wait for where it was made, and read there."""
    host_reads_a_gradient(lab, download)


@pytest.mark.contract(BACKWARD_STREAMS)
@pytest.mark.control(NOT_ARRIVED, aim="ambient")
def test_host_reads_a_gradient_without_a_wait(lab):
    """The same copied without blocking and read without a wait: it may not have arrived."""
    host_reads_a_gradient(lab, into_a_buffer)


def running_total(lab, current):
    with lab.stream("forward") as forward:
        with lab.preparing():
            loss = torch.full((1,), 3.0, device=lab.device)
            total = torch.zeros(1, device=lab.device)
        total += loss
    current = lab.stream(current)
    return forward, current, total


@pytest.mark.contract(ASYNCHRONOUS)
@pytest.mark.parametrize("current", ["forward", "logging"])
def test_host_reads_a_running_loss(lab, current):
    """``item()`` waits for the stream that is current: the one that made the loss, or one that waits for that."""
    forward, current, total = running_total(lab, current)
    if current != forward:
        current.wait_stream(forward)
    with current:
        lab.observe(torch.tensor(total.item()), 3.0)


@pytest.mark.contract(ASYNCHRONOUS)
@pytest.mark.control("A blocking copy waits for the stream that is current, and for no other.", aim="forward")
def test_host_reads_a_running_loss_on_another_stream_without_a_wait(lab):
    """The same on a stream that has not waited for the loss: that ``item()`` blocks does not help."""
    _, current, total = running_total(lab, "logging")
    with current:
        lab.observe(torch.tensor(total.item()), 3.0)


def offload_gradients(lab, wait_for_backward, recorded, synchronize):
    copy = lab.stream("copy")
    leaves, products = [], []
    for number, name in enumerate(("one", "two")):
        with lab.stream(name):
            leaf, product = lab.product(2.0, 3.0 + number)
            leaves.append(leaf)
            products.append(product)
    with lab.preparing():
        hosts = pinned(float("nan"), float("nan"))
        with lab.stream("ambient"):
            seeds = [torch.ones_like(product) for product in products]
    sums = {}

    def offload(host):
        def hook(leaf):
            sums[host] = leaf.grad.sum()
            made_on = torch.accelerator.current_stream()
            wait_for_backward(copy, made_on)
            with copy:
                host.copy_(leaf.grad, non_blocking=True)
            if recorded:
                leaf.grad.record_stream(copy)
            leaf.grad = None
            lab.keep(torch.full((256,), 99.0, device=lab.device))

        return hook

    hooks = [leaf.register_post_accumulate_grad_hook(offload(host)) for leaf, host in zip(leaves, hosts, strict=True)]
    with lab.stream("ambient"):
        for seed in seeds:
            seed.mul_(5)
        torch.autograd.backward(products, seeds)
        seeds.clear()
        del seed
        for number, host in enumerate(hosts):
            lab.observe(sums[host], 256 * 5 * (3.0 + number))
    synchronize(copy)
    for number, host in enumerate(hosts):
        lab.observe(host, 5 * (3.0 + number))
    del hooks


@pytest.mark.contract(PINNED)
@wait_or_synchronize
def test_gradients_are_offloaded_while_they_are_made(lab, synchronize):
    """A hook copies each gradient to the host on a copy stream and drops it; the host reads them after one wait."""
    offload_gradients(lab, wait_stream, True, lambda copy: synchronized(copy, synchronize))


@pytest.mark.contract(BACKWARD_STREAMS)
@pytest.mark.control("A copy stream that a hook uses waits for the stream that the hook runs on.", aim="one")
def test_gradients_are_offloaded_while_they_are_made_without_a_wait(lab):
    """The same without the copy stream's wait: a gradient may leave before it is made."""
    offload_gradients(lab, no_order, True, torch.Stream.synchronize)


@pytest.mark.contract(RECORD_STREAM)
@pytest.mark.control("Memory that another stream still uses is reused, unless that use is recorded.", aim="copy")
def test_gradients_are_offloaded_while_they_are_made_without_a_recording(lab):
    """The same without record_stream: the next tensor may land in the gradient that is still being copied."""
    offload_gradients(lab, wait_stream, False, torch.Stream.synchronize)


@pytest.mark.contract(PINNED)
@pytest.mark.control(NOT_ARRIVED, aim="copy")
def test_gradients_are_offloaded_while_they_are_made_and_read_without_a_wait(lab):
    """The same without the host's wait: that backward has returned says nothing about the copies."""
    offload_gradients(lab, wait_stream, True, lambda copy: None)


# To the host and back.


def round_trip(lab, up, order):
    down = lab.stream("down")
    up = lab.stream(up)
    with lab.preparing():
        (host,) = pinned(float("nan"))
    (sent,), (back,) = buffers(lab, down), buffers(lab, up)
    with down:
        sent.fill_(3.0)
        host.copy_(sent, non_blocking=True)
    order(up, down)
    with up:
        back.copy_(host, non_blocking=True)
        lab.observe(back, 3.0)


@pytest.mark.contract("deepspeedai/DeepSpeed#3426")
def test_to_the_host_and_back_on_one_stream(lab):
    """Copies of one stream are in order: what one puts into pinned memory the next one finds there, with no wait."""
    round_trip(lab, "down", no_order)


@pytest.mark.contract(STREAMS)
@pytest.mark.parametrize("order", [wait_stream, wait_event])
def test_to_the_host_and_back_on_another_stream(lab, order):
    """Pinned memory is memory: a stream that reads what another puts there waits for it, the host need not."""
    round_trip(lab, "up", order)


@pytest.mark.contract(STREAMS)
@pytest.mark.control(NOT_READY, aim="down")
def test_to_the_host_and_back_on_another_stream_without_a_wait(lab):
    """The same without the wait: what goes back may not have arrived."""
    round_trip(lab, "up", no_order)


def optimizer_on_the_host(lab, arrived, returned):
    compute, down, up = lab.stream("compute"), lab.stream("down"), lab.stream("up")
    weight = weight_on(lab, compute, 10.0)
    with lab.preparing():
        host_weight, host_gradient = pinned(10, float("nan"))
        with compute:
            weight.grad = torch.full((256,), float("nan"), device=lab.device)
            factors = [torch.full((256,), value, device=lab.device) for value in (2.0, 3.0)]
    for factor in factors:
        with compute:
            weight.grad.zero_()
            (weight * weight * factor).sum().backward()
        down.wait_stream(compute)
        with down:
            host_gradient.copy_(weight.grad, non_blocking=True)
        arrived(down)
        host_weight.sub_(host_gradient)
        with up:
            weight.data.copy_(host_weight, non_blocking=True)
        returned(compute, up)
    with compute:
        lab.observe(weight, 10.0 - 40.0 - 6 * (10.0 - 40.0))


@pytest.mark.contract(PINNED)
def test_optimizer_on_the_host(lab):
    """Gradients go down, the host steps, weights go up: the host waits for what it reads, compute for what it uses."""
    optimizer_on_the_host(lab, torch.Stream.synchronize, wait_stream)


@pytest.mark.contract(PINNED)
@pytest.mark.control(NOT_ARRIVED, aim="down")
def test_optimizer_on_the_host_that_steps_too_early(lab):
    """The same without the host's wait: it may step with the gradient of the step before."""
    optimizer_on_the_host(lab, lambda down: None, wait_stream)


@pytest.mark.contract(PINNED)
@pytest.mark.control(NOT_READY, aim="up")
def test_optimizer_on_the_host_whose_weights_come_back_too_late(lab):
    """The same without the wait for the weights: the next step may compute with the old ones."""
    optimizer_on_the_host(lab, torch.Stream.synchronize, no_order)


# Saved tensors that are offloaded.

every_ambient_stream = pytest.mark.parametrize("ambient", ["default", "ambient", "forward"])


@pytest.mark.contract("torch.autograd.graph.save_on_cpu")
@every_ambient_stream
@pytest.mark.parametrize("pin_memory", [False, True], ids=["pageable", "pinned"])
def test_save_on_cpu(lab, pin_memory, ambient):
    """``save_on_cpu`` in a side stream copies away and back in order with its nodes, wherever backward is called."""
    forward = lab.stream("forward")
    weight = weight_on(lab, forward)
    (activation,) = buffers(lab, forward)
    with lab.preparing(), lab.stream(ambient):
        seeds = [torch.ones_like(weight)]
    with forward:
        activation.fill_(3.0)
        with torch.autograd.graph.save_on_cpu(pin_memory, device_type=lab.device.type):
            product = weight * activation
        del activation
        lab.keep(torch.full((256,), 99.0, device=lab.device))
    with lab.stream(ambient):
        product.backward(seeds.pop().mul_(5))
        lab.observe(weight.grad, 15.0)


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """Offloads what is saved on a copy stream; the waits and recordings of that are given, in that order."""

    def __init__(self, copy, hosts, fetched, wait_to_pack, record_packed, wait_to_use, record_fetched):
        def pack(tensor):
            if tensor.requires_grad:
                return tensor
            host = hosts.pop()
            wait_to_pack(copy, torch.accelerator.current_stream())
            with copy:
                host.copy_(tensor, non_blocking=True)
            record_packed(tensor, copy)
            return host

        def unpack(packed):
            if packed.requires_grad:
                return packed
            tensor = fetched.pop()
            with copy:
                tensor.copy_(packed, non_blocking=True)
            wait_to_use(torch.accelerator.current_stream(), copy)
            record_fetched(tensor, torch.accelerator.current_stream())
            return tensor

        super().__init__(pack, unpack)


def do_not_record(tensor, stream):
    pass


def offloaded(lab, ambient, *orders):
    forward, copy = lab.stream("forward"), lab.stream("copy")
    weight = weight_on(lab, forward)
    (activation,), fetched = buffers(lab, forward), buffers(lab, copy)
    with lab.preparing():
        hosts = pinned(float("nan"))
        with lab.stream(ambient):
            seeds = [torch.ones_like(weight)]
    with forward:
        activation.fill_(3.0)
        with Offload(copy, hosts, fetched, *orders):
            product = weight * activation
        del activation
        lab.keep(torch.full((256,), 99.0, device=lab.device))
    with lab.stream(ambient):
        product.backward(seeds.pop().mul_(5))
        with copy:
            lab.keep(torch.full((256,), 99.0, device=lab.device))
        lab.observe(weight.grad, 15.0)


@pytest.mark.contract("torch.autograd.graph.saved_tensors_hooks")
@every_ambient_stream
def test_offloading_on_a_copy_stream(lab, ambient):
    """Hooks that offload on a copy stream wait and record in both directions, on the streams that they run on."""
    offloaded(lab, ambient, wait_stream, torch.Tensor.record_stream, wait_stream, torch.Tensor.record_stream)


@pytest.mark.contract("torch.autograd.graph.saved_tensors_hooks")
@pytest.mark.control(NOT_READY, aim="forward")
def test_offloading_without_a_wait_for_what_is_saved(lab):
    """The same without the copy stream's wait: what is saved may leave before it is computed."""
    offloaded(lab, "ambient", no_order, torch.Tensor.record_stream, wait_stream, torch.Tensor.record_stream)


@pytest.mark.contract("torch.autograd.graph.saved_tensors_hooks")
@pytest.mark.control("Memory that another stream still uses is reused, unless that use is recorded.", aim="copy")
def test_offloading_without_a_recording_of_what_is_saved(lab):
    """The same without recording what is saved: the forward's next tensor may land in it before it has left."""
    offloaded(lab, "ambient", wait_stream, do_not_record, wait_stream, torch.Tensor.record_stream)


@pytest.mark.contract("torch.autograd.graph.saved_tensors_hooks")
@pytest.mark.control(NOT_READY, aim="copy")
def test_offloading_without_a_wait_for_what_comes_back(lab):
    """The same without the node's wait: it may run before what it needs is back."""
    offloaded(lab, "ambient", wait_stream, torch.Tensor.record_stream, no_order, torch.Tensor.record_stream)


@pytest.mark.contract("torch.autograd.graph.saved_tensors_hooks")
@pytest.mark.control("Memory that another stream still uses is reused, unless that use is recorded.", aim="forward")
def test_offloading_without_a_recording_of_what_comes_back(lab):
    """The same without recording what comes back: the copy stream's next tensor may land in it before it is used."""
    offloaded(lab, "ambient", wait_stream, torch.Tensor.record_stream, wait_stream, do_not_record)


# Copies as nodes of a graph.


@pytest.mark.contract(BACKWARD_STREAMS)
@every_ambient_stream
@pytest.mark.parametrize("used", [1, 2], ids=["used_once", "used_twice"])
def test_leaf_on_the_host(lab, ambient, used):
    """Gradients of a leaf on the host have arrived when backward returns: the host reads them at once."""
    copy, forward = lab.stream("copy"), lab.stream("forward")
    with lab.preparing():
        (weight,) = pinned(2)
        weight.requires_grad_()
        with lab.stream(ambient):
            seeds = [torch.ones(256, device=lab.device)]
    with copy:
        uploads = [weight.to(lab.device, non_blocking=True) for _ in range(used)]
    forward.wait_stream(copy)
    with forward:
        product = sum(upload * (3 + number) for number, upload in enumerate(uploads))
        lab.observe(product, 2.0 * sum(range(3, 3 + used)))
    with lab.stream(ambient):
        product.backward(seeds.pop().mul_(5))
        lab.observe(weight.grad, 5.0 * sum(range(3, 3 + used)))


@pytest.mark.contract(BACKWARD_STREAMS)
@every_ambient_stream
def test_loss_on_the_host(lab, ambient):
    """A gradient that comes from the host in the middle of a graph is uploaded before the device's nodes use it."""
    with lab.stream("forward"):
        leaf, product = lab.product(2.0, 3.0)
        host = product.to("cpu")
        loss = (host * host).sum()
    with lab.stream(ambient):
        loss.backward()
        lab.observe(leaf.grad, 36.0)
