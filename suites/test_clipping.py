"""Clipping: whatever is done to all gradients together is safe on the ambient stream, directly after backward.

The contract (https://docs.pytorch.org/docs/stable/notes/cuda.html, "Stream semantics of backward passes"): the stream
that was current where backward was called is ordered after every gradient, whatever stream made it. So a norm over all
of them, their scaling by it and the optimizer's step need no wait there, also when the parts of the model ran on
streams of their own. On any other stream the same is unsafe until that stream waits for the ambient one; and who clips
there has to be waited for before the step.

A norm reads every gradient and a clipped gradient depends on every other, so that one stale gradient spoils them all.
The gradients here are 48 and 64 (256 times each), their norms of order 1, 2 and infinity 28672, 1280 and 64, and each
maximum is half of that: all is exact in float32, in whatever order it is summed, and the 1e-6 that PyTorch adds to a
norm is rounded away. What an optimizer makes of them is computed by the same optimizer before, with nothing concurrent.
"""

import contextlib

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

pytestmark = pytest.mark.contract("notes/cuda: stream semantics of backward passes; torch.nn.utils.clip_grad_norm_")

GRADIENTS = (48.0, 64.0)
NORMS = {1.0: 28672.0, 2.0: 1280.0, float("inf"): 64.0}
CLIPPED = (24.0, 32.0)


def full(lab, value, **options):
    return torch.full((256,), value, device=lab.device, **options)


def model(lab, first, second, ambient, weight=100.0):
    """Two parameters, each used on the stream of its part of the model, and their loss, made on the ambient stream."""
    with lab.preparing():
        parameters, parts = [], []
        for stream, gradient in zip((first, second), GRADIENTS, strict=True):
            with lab.stream(stream):
                parameters.append(full(lab, weight, requires_grad=True))
                parts.append(parameters[-1] * full(lab, 256 * gradient))
        with lab.stream(ambient):
            loss = sum(part.mean() for part in parts)
    lab.keep(parameters)
    return parameters, loss


def observe_parameters(lab, parameters, expected):
    for parameter, value in zip(parameters, expected, strict=True):
        lab.observe(parameter, value)


def observe_gradients(lab, parameters, expected):
    for parameter, value in zip(parameters, expected, strict=True):
        lab.observe(parameter.grad, value)


# Ways to clip.


def by_norm(parameters):
    clip_grad_norm_(parameters, NORMS[2.0] / 2, foreach=False)


def by_norm_foreach(parameters):
    clip_grad_norm_(parameters, NORMS[2.0] / 2, foreach=True)


def by_a_norm_of_its_own(parameters):
    norm = get_total_norm([parameter.grad for parameter in parameters], foreach=True)
    clip_grads_with_norm_(parameters, NORMS[2.0] / 2, norm, foreach=True)


def by_hand(parameters):
    squares = torch.stack([parameter.grad.square().sum() for parameter in parameters])
    coefficient = (NORMS[2.0] / 2 / squares.sum().sqrt()).clamp(max=1.0)
    for parameter in parameters:
        parameter.grad.mul_(coefficient)


def by_hand_on_the_host(parameters):
    norm = sum(parameter.grad.square().sum().item() for parameter in parameters) ** 0.5
    if norm > NORMS[2.0] / 2:
        for parameter in parameters:
            parameter.grad.mul_(NORMS[2.0] / 2 / norm)


every_way = pytest.mark.parametrize(
    "clip", [by_norm, by_norm_foreach, by_a_norm_of_its_own, by_hand, by_hand_on_the_host]
)
every_model = pytest.mark.parametrize(
    "parts, ambient",
    [
        pytest.param(("first", "second"), "default", id="two_side_streams-default"),
        pytest.param(("first", "second"), "ambient", id="two_side_streams-ambient"),
        pytest.param(("first", "default"), "default", id="side_and_default-default"),
        pytest.param(("first", "default"), "ambient", id="side_and_default-ambient"),
        pytest.param(("first", "first"), "ambient", id="one_side_stream-ambient"),
    ],
)


# Directly after backward.


@every_model
@every_way
def test_clipped_directly_after_backward(lab, clip, parts, ambient):
    """Clipping by the norm of all gradients, right after backward, in the stream that called it, sees every gradient.

    By PyTorch's functions or by hand, on the device or where the host decides, wherever the parts of the model ran.
    """
    parameters, loss = model(lab, *parts, ambient)
    with lab.stream(ambient):
        loss.backward()
        clip(parameters)
        observe_gradients(lab, parameters, CLIPPED)


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("order", NORMS)
def test_norm_of_any_order_is_that_of_all_gradients(lab, order, foreach):
    """``clip_grad_norm_`` returns the norm that it clips by, on the device, for the ambient stream."""
    parameters, loss = model(lab, "first", "second", "ambient")
    with lab.stream("ambient"):
        loss.backward()
        norm = clip_grad_norm_(parameters, NORMS[order] / 2, norm_type=order, foreach=foreach)
        lab.observe(norm, NORMS[order])
        observe_gradients(lab, parameters, CLIPPED)


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
def test_norm_below_the_maximum_leaves_gradients_as_they_are(lab, foreach):
    """A norm that is not too large is computed all the same, and multiplies by one."""
    parameters, loss = model(lab, "first", "second", "ambient")
    with lab.stream("ambient"):
        loss.backward()
        clip_grad_norm_(parameters, 2 * NORMS[2.0], foreach=foreach)
        observe_gradients(lab, parameters, GRADIENTS)


@pytest.mark.parametrize(
    "loss_scale, expected", [(1.0, CLIPPED), (float("inf"), (float("inf"),) * 2)], ids=["finite", "infinite"]
)
@pytest.mark.parametrize("ambient", ["default", "ambient"])
@pytest.mark.contract("torch.nn.utils.clip_grad_norm_: error_if_nonfinite")
def test_norm_that_must_be_finite(lab, ambient, loss_scale, expected):
    """``error_if_nonfinite`` reads the norm on the host, which waits for the ambient stream and so for gradients."""
    parameters, loss = model(lab, "first", "second", ambient)
    with lab.stream(ambient):
        (loss * loss_scale).backward()
        with contextlib.suppress(RuntimeError):  # not finite: a training loop would skip this step
            clip_grad_norm_(parameters, NORMS[2.0] / 2, error_if_nonfinite=True)
        observe_gradients(lab, parameters, expected)


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("ambient", ["default", "ambient"])
@pytest.mark.contract("torch.nn.utils.clip_grad_value_")
def test_values_are_clipped_directly_after_backward(lab, ambient, foreach):
    """``clip_grad_value_`` changes each gradient in place, after it has been made."""
    parameters, loss = model(lab, "first", "second", ambient)
    with lab.stream(ambient):
        loss.backward()
        clip_grad_value_(parameters, 50.0, foreach=foreach)
        observe_gradients(lab, parameters, (48.0, 50.0))


# On a third stream.


def wait_stream(stream, other):
    stream.wait_stream(other)


def wait_event(stream, other):
    stream.wait_event(other.record_event())


def no_order(stream, other):
    pass


def clip_on_a_third_stream(lab, ambient, clip, before, after):
    parameters, loss = model(lab, "first", "second", ambient)
    called_on, clipping = lab.stream(ambient), lab.stream("clip")
    with called_on:
        loss.backward()
    before(clipping, called_on)
    with clipping:
        clip(parameters)
    after(called_on, clipping)
    with called_on:
        torch.optim.SGD(parameters, lr=1.0).step()
        observe_parameters(lab, parameters, [100.0 - clipped for clipped in CLIPPED])


@pytest.mark.parametrize("order, ambient", [(wait_stream, "ambient"), (wait_event, "default")])
@every_way
def test_clipped_on_a_third_stream_that_waits(lab, clip, order, ambient):
    """Clipping elsewhere is safe between two waits: of that stream for the ambient one, and the other way round."""
    clip_on_a_third_stream(lab, ambient, clip, order, order)


@every_way
@pytest.mark.control("Only the ambient stream is ordered after the gradients when backward returns.", aim="first")
def test_clipped_on_a_third_stream_that_does_not_wait(lab, clip):
    """Without the first wait, a norm may be that of gradients that are not there yet."""
    clip_on_a_third_stream(lab, "ambient", clip, no_order, wait_stream)


@pytest.mark.parametrize("clip", [by_norm, by_norm_foreach, by_a_norm_of_its_own, by_hand])
@pytest.mark.control("Nothing orders the clipping before the step.", aim="clip")
def test_step_that_does_not_wait_for_the_clipping(lab, clip):
    """Without the second wait, the step may take gradients that are not clipped yet."""
    clip_on_a_third_stream(lab, "ambient", clip, wait_stream, no_order)


@pytest.mark.parametrize(
    "parts", [("first", "second"), ("first", "default")], ids=["two_side_streams", "side_and_default"]
)
@pytest.mark.control("The default stream is not ordered after a backward inside a side stream.", aim="first")
def test_clipped_outside_the_side_stream_of_backward(lab, parts):
    """Backward inside a side stream, clipping outside: the default stream has to wait, since 1.10."""
    parameters, loss = model(lab, *parts, "ambient")
    with lab.stream("ambient"):
        loss.backward()
    clip_grad_norm_(parameters, NORMS[2.0] / 2)
    observe_gradients(lab, parameters, CLIPPED)


def norm_elsewhere(lab, wait):
    parameters, loss = model(lab, "first", "second", "ambient")
    with lab.stream("ambient") as ambient:
        loss.backward()
        with lab.stream("norm") as norming:
            norming.wait_stream(ambient)
            norm = get_total_norm([parameter.grad for parameter in parameters])
        if wait:
            ambient.wait_stream(norming)
        clip_grads_with_norm_(parameters, NORMS[2.0] / 2, norm)
        observe_gradients(lab, parameters, CLIPPED)


@pytest.mark.contract("torch.nn.utils.get_total_norm, clip_grads_with_norm_")
def test_norm_of_one_stream_scales_on_another_that_waits(lab):
    """The norm and the scaling are two calls, which may be on two streams: the second waits for the first."""
    norm_elsewhere(lab, wait=True)


@pytest.mark.control("Nothing orders the norm before the scaling that reads it.", aim="norm")
@pytest.mark.contract("torch.nn.utils.get_total_norm, clip_grads_with_norm_")
def test_norm_of_one_stream_scales_on_another_that_does_not_wait(lab):
    """The same without the wait."""
    norm_elsewhere(lab, wait=False)


# Then the step.


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5, **options)


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=0.5, **options)


every_optimizer = pytest.mark.parametrize("optimizer", [sgd, adamw])
every_implementation = pytest.mark.parametrize(
    "options",
    [{"foreach": False}, {"foreach": True}, {"fused": True}],
    ids=["loop", "foreach", "fused"],
)


def stepped(lab, optimizer, options, gradients, steps=1):
    """What the parameters are after some steps with these gradients, by the same optimizer, with nothing concurrent."""
    with lab.preparing():
        parameters = [full(lab, 100.0, requires_grad=True) for _ in gradients]
        reference = optimizer(parameters, **options)
        after = []
        for _ in range(steps):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = full(lab, gradient)
            reference.step()
            after.append([parameter.detach().cpu() for parameter in parameters])
    return after


@every_optimizer
@every_implementation
@pytest.mark.parametrize("ambient", ["default", "ambient"])
def test_clipped_and_stepped_directly_after_backward(lab, ambient, options, optimizer):
    """Backward, clip, step: nothing to wait for in between, whichever way the optimizer goes over the parameters."""
    (expected,) = stepped(lab, optimizer, options, CLIPPED)
    parameters, loss = model(lab, "first", "second", ambient)
    with lab.preparing():
        optimizer = optimizer(parameters, **options)
    with lab.stream(ambient):
        loss.backward()
        clip_grad_norm_(parameters, NORMS[2.0] / 2)
        optimizer.step()
        observe_parameters(lab, parameters, expected)


@every_optimizer
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_training_loop_with_parts_on_two_side_streams(lab, set_to_none, optimizer):
    """Two iterations of a whole loop: the parts wait for the last step, the loss for the parts, and clipping for none.

    The parts wait before what belongs to them is given up: their outputs, and gradients that are set to None.
    """
    expected = stepped(lab, optimizer, {}, CLIPPED, steps=2)
    with lab.preparing():
        factors = [full(lab, 256 * gradient) for gradient in GRADIENTS]
        parameters = [full(lab, 100.0, requires_grad=True) for _ in GRADIENTS]
        optimizer = optimizer(parameters)
    before = [torch.full((256,), 100.0)] * 2
    ambient, streams = lab.stream("ambient"), [lab.stream("first"), lab.stream("second")]
    for after in expected:
        for stream in streams:
            stream.wait_stream(ambient)
        with ambient:
            optimizer.zero_grad(set_to_none=set_to_none)
        outputs = []
        for stream, parameter, factor in zip(streams, parameters, factors, strict=True):
            with stream:
                outputs.append(parameter * factor)
            ambient.wait_stream(stream)
        with ambient:
            for output, parameter, gradient in zip(outputs, before, GRADIENTS, strict=True):
                lab.observe(output, parameter * (256 * gradient))
            loss = sum(output.mean() for output in outputs)
            loss.backward()
            clip_grad_norm_(parameters, NORMS[2.0] / 2)
            optimizer.step()
            observe_parameters(lab, parameters, after)
        before = after


# With a gradient scaler.


def gradient_scaler(lab, scale):
    return lab.keep(torch.amp.GradScaler(lab.device.type, init_scale=scale, growth_interval=1))


@every_optimizer
@every_implementation
@pytest.mark.contract("torch.amp.GradScaler; notes/amp_examples: gradient clipping")
def test_unscaled_clipped_and_stepped(lab, options, optimizer):
    """Scale, backward, unscale, clip, step, update: all on the ambient stream, with no wait by the caller."""
    (expected,) = stepped(lab, optimizer, options, CLIPPED)
    parameters, loss = model(lab, "first", "second", "ambient")
    with lab.preparing():
        optimizer = optimizer(parameters, **options)
        scaler = gradient_scaler(lab, 1024.0)
    with lab.stream("ambient"):
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(parameters, NORMS[2.0] / 2)
        scaler.step(optimizer)
        scaler.update()
        observe_parameters(lab, parameters, expected)
        lab.observe(scaler.scale(full(lab, 1.0)), 2048.0)


@every_implementation
@pytest.mark.contract("torch.amp.GradScaler")
def test_step_is_skipped_when_the_scaled_gradients_overflow(lab, options):
    """Gradients that are not finite are found whatever stream made them: no step, and a smaller scale from then on.

    The host decides, or a fused optimizer on the device.
    """
    parameters, loss = model(lab, "first", "second", "ambient")
    with lab.preparing():
        optimizer = sgd(parameters, **options)
        scaler = gradient_scaler(lab, 2.0**126)
    with lab.stream("ambient"):
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        observe_gradients(lab, parameters, (float("inf"),) * 2)
        scaler.step(optimizer)
        scaler.update()
        observe_parameters(lab, parameters, (100.0, 100.0))
        lab.observe(scaler.scale(full(lab, 1.0)), 2.0**125)


def unscale_on_a_third_stream(lab, order):
    parameters, loss = model(lab, "first", "second", "ambient")
    with lab.preparing():
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        scaler = gradient_scaler(lab, 1024.0)
    with lab.stream("ambient") as ambient:
        scaler.scale(loss).backward()
        with lab.stream("unscale") as unscaling:
            order(unscaling, ambient)
            scaler.unscale_(optimizer)
        ambient.wait_stream(unscaling)
        clip_grad_value_(parameters, 50.0)  # clipping by norm would undo the scale as well
        scaler.step(optimizer)
        observe_parameters(lab, parameters, (100.0 - 48.0, 100.0 - 50.0))
        with unscaling:
            scaler.update()  # gives up what was found by unscaling, whose memory belongs to this stream
        ambient.wait_stream(unscaling)
        lab.observe(scaler.scale(full(lab, 1.0)), 2048.0)


@pytest.mark.contract("torch.amp.GradScaler")
def test_unscaled_on_a_third_stream_that_waits(lab):
    """Unscaling elsewhere is safe between two waits, as clipping is."""
    unscale_on_a_third_stream(lab, wait_stream)


@pytest.mark.control("Only the ambient stream is ordered after the gradients when backward returns.", aim="first")
@pytest.mark.contract("torch.amp.GradScaler")
def test_unscaled_on_a_third_stream_that_does_not_wait(lab):
    """Without the first, it may unscale what is not there yet, and find no overflow in what is to come."""
    unscale_on_a_third_stream(lab, no_order)
