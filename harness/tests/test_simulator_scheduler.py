"""The simulator's scheduler: streams in submission order, held launches, and what forces them."""

from __future__ import annotations

import threading
import time
from types import ModuleType
from typing import Any

import pytest
import torch

from harness.tests.simulator_support import (
    Twice,
    filled,
    preparing,
    registered,
    repetition,
    run_script,
    same_stream,
    streams,
)

NAN = float("nan")


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return registered()


def test_a_held_launch_and_what_follows_it_on_its_stream_run_after_the_body(native: ModuleType) -> None:
    held, other = streams(2)
    with repetition(native, [(held, 0)]) as result:
        with preparing(native):
            value, seen = filled(4, 1.0), [filled(4, NAN) for _ in range(2)]
        with held:
            value.fill_(2.0)
            value.mul_(10)
        with other:
            seen[0].copy_(value)
        with held:
            seen[1].copy_(value)
    assert result.outcomes == [("pending", None, 0)]
    assert [tensor[0].item() for tensor in seen] == [1.0, 20.0]


def test_a_wait_for_a_held_stream_keeps_the_waiting_stream_from_running(native: ModuleType) -> None:
    held, waiting = streams(2)
    with repetition(native, [(held, 0)]):
        with preparing(native):
            value, seen = filled(4, 1.0), filled(4, NAN)
        with held:
            value.fill_(2.0)
        with waiting:
            waiting.wait_stream(held)
            seen.copy_(value)
        assert not waiting.query()
    assert seen[0].item() == 2.0


def test_a_wait_binds_to_the_recording_before_it(native: ModuleType) -> None:
    held, waiting = streams(2)
    event = torch.Event(device="sim")
    with repetition(native, [(held, 1)]) as result:
        with preparing(native):
            value, seen = filled(4, 1.0), [filled(4, NAN) for _ in range(2)]
        with held:
            value.fill_(2.0)
            event.record(held)
        waiting.wait_event(event)
        with waiting:
            seen[0].copy_(value)
        with held:
            value.fill_(3.0)  # held
            event.record(held)
        assert waiting.query()  # what it waited for is complete, though the event has been recorded again
        with waiting:
            seen[1].copy_(value)
        assert not event.query()
        waiting.wait_event(event)
        assert not waiting.query()
    assert [tensor[0].item() for tensor in seen] == [2.0, 2.0]
    assert [entry[3] for entry in result.of_kind("record")] == [1, 2]
    assert [entry[3] for entry in result.of_kind("wait")] == [1, 2]


@pytest.mark.parametrize("sync", ["stream", "event", "device", "item", "copy"])
def test_a_host_sync_forces_a_held_launch_and_is_named_for_it(native: ModuleType, sync: str) -> None:
    held, bystander = streams(2)
    with repetition(native, [(held, 0), (bystander, 0)], lines=True) as result:
        with preparing(native):
            value, other = filled(4, 1.0), filled(4, 1.0)
        with held:
            value.fill_(2.0)
            event = held.record_event()
        with bystander:
            other.fill_(2.0)
        with held:
            forced_by: Any = {
                "stream": held.synchronize,
                "event": event.synchronize,
                "device": lambda: torch.accelerator.synchronize(0),
                "item": lambda: value[0].item(),
                "copy": lambda: value.cpu(),
            }[sync]
            forced_by()
        assert held.query()
        assert bystander.query() == (sync == "device")  # only what is needed is run
    assert [outcome[0] for outcome in result.outcomes] == ["forced", "forced" if sync == "device" else "pending"]
    assert result.outcomes[0][1] == __file__ and result.outcomes[0][2] > 0
    if sync != "device":
        assert result.outcomes[1] == ("pending", None, 0)


def test_forcing_a_stream_runs_what_it_waits_for_and_no_more(native: ModuleType) -> None:
    first, second, third = streams(3)
    with repetition(native, [(first, 0)]) as result:
        with preparing(native):
            value, seen = filled(4, 1.0), filled(4, NAN)
        with first:
            value.fill_(2.0)
        second.wait_stream(first)
        with first:
            value.fill_(7.0)  # after what `second` waits for
        third.wait_stream(second)
        with third:
            seen.copy_(value)
        third.synchronize()
        assert not first.query()
        with preparing(native):
            pass
    assert result.outcomes[0][0] == "forced"
    assert seen[0].item() == 2.0


def test_holds_are_released_in_the_order_given(native: ModuleType) -> None:
    for order in ((0, 1), (1, 0)):
        pair = streams(2)
        with repetition(native, [(pair[i], 0) for i in order]):
            with preparing(native):
                value = filled(4, 1.0)
            for i in range(2):
                with pair[i]:
                    value.fill_(float(i))
        assert value[0].item() == order[-1]


def test_streams_that_wait_for_each_other_in_turn_lose_no_launch(native: ModuleType) -> None:
    """Settling one wait settles the other stream, which leads back to the first: each launch still runs, once."""
    here, there = streams(2)
    with repetition(native, [(here, 0)]) as result:
        with preparing(native):
            sources = [filled(4, NAN) for _ in range(3)]
            products = [filled(4, NAN) for _ in range(3)]
        for source, product in zip(sources, products, strict=True):
            with here:
                source.fill_(2.0)
            there.wait_stream(here)
            with there:
                product.copy_(source)
            here.wait_stream(there)
    assert result.outcomes == [("pending", None, 0)]
    assert [tensor[0].item() for tensor in (*sources, *products)] == [2.0] * 6


def test_a_hold_that_no_launch_met_is_missing(native: ModuleType) -> None:
    stream, unused = streams(2)
    with repetition(native, [(stream, 1), (unused, 0)]) as result, stream:
        filled(4, 1.0)
    assert [outcome[0] for outcome in result.outcomes] == ["missing", "missing"]


def test_a_hold_on_a_stream_that_does_not_exist_is_missing(native: ModuleType) -> None:
    native.begin_repetition([(-1, -1, 0)], False, False)
    filled(4, 1.0)
    assert native.finish_repetition()[1] == [("missing", None, 0)]


def test_polling_an_event_of_a_held_launch_ends(native: ModuleType) -> None:
    (held,) = streams(1)
    with repetition(native, [(held, 0)]) as result:
        with held:
            filled(4, 1.0)
        event = held.record_event()
        polls = 0
        while not event.query():
            polls += 1
    assert polls > 100
    assert result.outcomes[0][0] == "forced"


def test_launches_are_counted_by_stream_from_the_start_of_the_repetition(native: ModuleType) -> None:
    pair = streams(2)
    for _ in range(2):
        with repetition(native) as result:
            with preparing(native):
                value = filled(4, 1.0)
            for stream in (pair[0], pair[1], pair[0]):
                with stream:
                    value.fill_(2.0)
        assert [entry[1:4] for entry in result.of_kind("launch")] == [
            (0, pair[0].stream_id, 0),
            (0, pair[1].stream_id, 0),
            (0, pair[0].stream_id, 1),
        ]


def test_the_error_of_a_deferred_kernel_names_its_launch_and_the_rest_still_runs(native: ModuleType) -> None:
    held, other = streams(2)
    message = rf"Launch {held.stream_id}:0 on sim:0 \(aten::index\.Tensor\) failed: index 9"
    with pytest.raises(RuntimeError, match=message), repetition(native, [(held, 0)]):
        with preparing(native):
            source, index, value = filled(4, 1.0), torch.tensor([9], device="sim"), filled(4, 1.0)
        with held:
            source[index]
            value.fill_(2.0)
        with other:
            value.add_(0)
    assert value[0].item() == 2.0
    with repetition(native) as result:
        pass
    assert result.entries == []


def test_the_error_of_a_deferred_kernel_is_raised_at_the_sync_that_runs_it(native: ModuleType) -> None:
    (held,) = streams(1)
    with repetition(native, [(held, 0)]):
        with preparing(native):
            source, index = filled(4, 1.0), torch.tensor([9], device="sim")
        with held:
            source[index]
        with pytest.raises(RuntimeError, match=rf"Launch {held.stream_id}:0 .*aten::index\.Tensor"):
            held.synchronize()


def test_errors_of_shape_are_raised_at_enqueue_as_on_any_device(native: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"broadcast|must match the size"):
        filled(4, 1.0) + filled(3, 1.0)
    with pytest.raises(RuntimeError, match=r"same device.*sim:0 and cpu"):
        filled(4, 1.0) + torch.ones(4)
    with pytest.raises(RuntimeError, match=r"same device.*sim:0 and sim:1"):
        filled(4, 1.0) + filled(4, 1.0, device=1)


def test_a_number_on_the_host_is_read_at_enqueue(native: ModuleType) -> None:
    (held,) = streams(1)
    with repetition(native, [(held, 0)]):
        with preparing(native):
            value = filled(4, 1.0)
        number, pageable = torch.tensor(2.0), torch.full((4,), 3.0)
        copied = torch.empty(4, device="sim")
        with held:
            value.mul_(number)
            copied.copy_(pageable, non_blocking=True)
        number.fill_(100.0)
        pageable.fill_(100.0)
    assert value[0].item() == 2.0
    assert copied[0].item() == 3.0


def test_pinned_memory_is_read_when_the_copy_runs(native: ModuleType) -> None:
    (held,) = streams(1)
    with repetition(native, [(held, 0)]):
        pinned = torch.full((4,), 3.0).pin_memory()
        copied = torch.empty(4, device="sim")
        with held:
            copied.copy_(pinned, non_blocking=True)
        pinned.fill_(100.0)
    assert copied[0].item() == 100.0


def test_an_asynchronous_copy_to_the_host_does_not_wait(native: ModuleType) -> None:
    (held,) = streams(1)
    with repetition(native, [(held, 0)]) as result:
        with preparing(native):
            value = filled(4, 1.0)
        host = torch.zeros(4).pin_memory()
        with held:
            value.fill_(2.0)
            host.copy_(value, non_blocking=True)
        assert host[0].item() == 0.0
        held.synchronize()
        assert host[0].item() == 2.0
    assert result.outcomes[0][0] == "forced"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("serial", [False, True])
def test_backward_on_two_devices_with_a_python_function_never_deadlocks(native: ModuleType, serial: bool) -> None:
    for round_number in range(200):
        sides = [streams(2, device)[0] for device in (0, 1)]
        holds = [(sides[round_number % 2], round_number // 2 % 4)] if round_number % 4 else []
        with repetition(native, holds, serial=serial):
            with preparing(native):
                leaves = [filled(8, 2.0, device).requires_grad_() for device in (0, 1)]
            outputs = []
            for side, leaf in zip(sides, leaves, strict=True):
                with side:
                    outputs.append(Twice.apply(leaf) * 3)
            for side in sides:
                side.wait_stream(torch.accelerator.current_stream(0))
                torch.accelerator.current_stream(side.device_index).wait_stream(side)
            total = outputs[0] + outputs[1].to("sim:0")
            total.sum().backward()
        assert [leaf.grad[0].item() for leaf in leaves if leaf.grad is not None] == [6.0, 6.0]


@pytest.fixture(scope="module")
def operators() -> Any:
    """An operator whose kernel gives other threads time to run, and adds up how many of it run at once."""
    library = torch.library.Library("sidestream_turns", "DEF")
    library.define("slow_(Tensor(a!) self, Tensor overlaps) -> Tensor(a!)")
    running: list[None] = []

    def slow(self: torch.Tensor, overlaps: torch.Tensor) -> torch.Tensor:
        running.append(None)
        time.sleep(0.001)
        overlaps.add_(len(running) - 1)
        running.pop()
        return self.add_(1)

    library.impl("slow_", slow, "CPU")
    library.impl("slow_", lambda self, overlaps: self, "Meta")
    yield torch.ops.sidestream_turns
    library._destroy()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("serial", [False, True])
def test_launches_of_several_threads_take_turns_on_a_stream(native: ModuleType, operators: Any, serial: bool) -> None:
    shared, rounds = streams(3), 20

    def enqueue(stream: torch.Stream, value: torch.Tensor, overlaps: torch.Tensor) -> None:
        with same_stream(stream):
            for _ in range(rounds):
                operators.slow_(value, overlaps)

    with repetition(native, serial=serial) as result:
        with preparing(native):
            value, overlaps = filled(4, 0.0), filled(1, 0.0)
        targets = shared if serial else [shared[0]] * 3  # in the serial run, streams take turns as well
        threads = [threading.Thread(target=enqueue, args=(stream, value, overlaps)) for stream in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert overlaps.item() == 0
    assert value[0].item() == 3 * rounds
    if not serial:
        assert [entry[3] for entry in result.of_kind("launch")] == list(range(3 * rounds))


@pytest.mark.timeout(120)
def test_a_kernel_that_takes_the_gil_does_not_block_a_thread_that_holds_it(native: ModuleType) -> None:
    """Frees and recordings of a thread that holds the GIL take the simulator's lock, which no kernel may hold."""
    done = run_script(
        """
        import threading, time
        import torch
        from harness.backends import simulator
        simulator.register()
        library = torch.library.Library("sidestream_gil", "DEF")
        library.define("slow_(Tensor(a!) self) -> Tensor(a!)")
        library.impl("slow_", lambda self: (time.sleep(0.001), self.add_(1))[1], "CPU")
        library.impl("slow_", lambda self: self, "Meta")
        value = torch.zeros(4, device="sim")
        stream = torch.Stream(device="sim")
        def enqueue():
            for _ in range(50):
                torch.ops.sidestream_gil.slow_(value)
        thread = threading.Thread(target=enqueue)
        thread.start()
        while thread.is_alive():
            torch.empty(4, device="sim")
            stream.wait_stream(torch.accelerator.current_stream())
        print(value[0].item())
        """,
        timeout_s=60,
    )
    assert done.stdout == "50.0\n", done.stderr


def test_the_serial_run_completes_each_launch_before_the_next(native: ModuleType) -> None:
    pair = streams(2)
    with repetition(native, serial=True) as result:
        with preparing(native):
            value, seen = filled(4, 1.0), filled(4, NAN)
        with pair[0]:
            value.fill_(2.0)
        with pair[1]:
            seen.copy_(value)
    assert seen[0].item() == 2.0
    assert result.operations() == ["aten::fill_.Scalar", "aten::copy_"]


def test_a_repetition_must_be_finished_before_the_next(native: ModuleType) -> None:
    with repetition(native), pytest.raises(RuntimeError, match="finish_repetition"):
        native.begin_repetition([], False, False)
    with pytest.raises(RuntimeError, match="begin_repetition"):
        native.finish_repetition()


def _resident_pages() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


def test_repetitions_neither_slow_down_nor_grow(native: ModuleType) -> None:
    leaf = filled(8, 2.0).requires_grad_()

    def run(count: int) -> float:
        started = time.process_time()  # not wall time: the machine has other work
        for _ in range(count):
            fill, ambient = streams(2)
            with repetition(native, [(fill, 0)]):
                with fill:
                    seed = filled(8, 5.0)
                ambient.wait_stream(fill)
                with ambient:
                    (leaf * 3).backward(seed)
            leaf.grad = None
        return time.process_time() - started

    run(300)
    early = min(run(100) for _ in range(10))  # the least: what a busy machine adds to CPU time comes and goes
    growth = []
    for _ in range(4):
        pages = _resident_pages()
        run(800)
        growth.append(_resident_pages() - pages)
    late = min(run(100) for _ in range(10))
    assert late < 2 * early
    assert min(growth) < 8  # pages; the process may grow once for its own reasons, a leak of 40 bytes grows each time
