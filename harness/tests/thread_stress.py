"""Several Python threads that do everything at once on two simulated devices.

Each thread of ``python -m harness.tests.thread_stress`` repeats a seeded sequence of small programs: backward over two
devices with a custom Function, checkpoints of both kinds, host synchronizations, events, tensors and streams that
threads share, allocation and freeing. Each checks its values. The main thread runs repetitions meanwhile, with launches
held.

A process of its own, because a hang must end with the stacks of all threads even where a thread holds the GIL:
faulthandler's timer does not need it. Exit status: 0, or 1 after a wrong value, an error or a hang.
"""

from __future__ import annotations

import argparse
import faulthandler
import queue
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch.utils.checkpoint import checkpoint

from harness.backends.simulator import device_module as sim
from harness.tests import simulator_support

DEVICES = ("sim:0", "sim:1")
SIZES = (1, 7, 64, 300, 5000)


class Shared:
    """What threads hand to one another."""

    def __init__(self) -> None:
        self.events = [torch.Event(device=DEVICES[number % 2], enable_timing=True) for number in range(4)]
        self.tensors: queue.Queue[torch.Tensor] = queue.Queue(maxsize=16)
        self.streams = [torch.Stream(device=device) for device in DEVICES for _ in range(2)]
        for number, event in enumerate(self.events):
            event.record(self.streams[2 * (number % 2)])


class _Across(torch.autograd.Function):
    """Doubles on the other device, on a stream of its own, forward and backward."""

    @staticmethod
    def forward(ctx, value, stream):
        ctx.stream = stream
        return _doubled_elsewhere(value, stream)

    @staticmethod
    def backward(ctx, gradient):
        return _doubled_elsewhere(gradient, ctx.stream), None


def _doubled_elsewhere(value: torch.Tensor, stream: torch.Stream) -> torch.Tensor:
    here = torch.accelerator.current_stream(value.device.index)
    stream.wait_stream(here)
    with stream:
        doubled = value.to(f"sim:{stream.device_index}").mul(2.0)
    here.wait_stream(stream)
    return doubled.to(value.device)


_operators = torch.library.Library("sidestream_stress", "DEF")
_operators.define("increment_(Tensor(a!) self) -> Tensor(a!)")


def _increment(self: torch.Tensor) -> torch.Tensor:
    time.sleep(0.0005)  # other threads take the GIL meanwhile, and wait for this one's stream
    return self.add_(1.0)


_operators.impl("increment_", _increment, "CPU")
_operators.impl("increment_", lambda self: self, "Meta")


class Worker:
    """One thread's programs and its own streams."""

    def __init__(self, shared: Shared, seed: int) -> None:
        self.shared = shared
        self.random = random.Random(seed)
        self.streams = [torch.Stream(device=device) for device in DEVICES]
        self.counts: Counter[str] = Counter()
        self.programs: list[Callable[[], None]] = [
            self.backward_over_two_devices,
            self.backward_in_this_thread,
            self.backward_of_checkpoints,
            self.synchronize_with_the_host,
            self.share_events,
            self.allocate_and_free,
            self.hand_over_tensors,
            self.launch_for_values,
            self.share_streams,
            self.run_kernels_in_python,
        ]

    def run(self, count: int) -> None:
        for turn in range(count):
            # Every program in turn, from another start and in another order in each thread.
            if turn % len(self.programs) == 0:
                self.random.shuffle(self.programs)
            program = self.programs[turn % len(self.programs)]
            program()
            self.counts[program.__name__] += 1

    def backward_over_two_devices(self) -> None:
        near, far = self.streams
        leaves = [torch.full((8,), 3.0, device=device, requires_grad=True) for device in DEVICES]
        for device in range(2):
            torch.accelerator.synchronize(device)
        with near:
            product = _Across.apply(leaves[0] * 2.0, far)
            total = (product + leaves[1].to(DEVICES[0]) * 5.0).sum()
            total.backward()
            self._expect([leaf.grad for leaf in leaves], [4.0, 5.0])

    def backward_in_this_thread(self) -> None:
        with torch.autograd.set_multithreading_enabled(False):
            self.backward_over_two_devices()

    def backward_of_checkpoints(self) -> None:
        near, _ = self.streams
        with near:
            leaf = torch.full((8,), 3.0, device=DEVICES[0], requires_grad=True)
            inner = checkpoint(lambda value: torch.nn.functional.dropout(value * 2.0, p=0.0), leaf, use_reentrant=False)
            outer = checkpoint(lambda value: value * value, inner, use_reentrant=True)
            outer.sum().backward()
            self._expect([leaf.grad], [24.0])

    def synchronize_with_the_host(self) -> None:
        near, far = self.streams
        value = torch.zeros(8, device=DEVICES[0])
        torch.accelerator.synchronize(0)
        with near:
            value.add_(1.0)
            event = near.record_event()
        far.wait_event(event)
        with far:
            copy = value.to(DEVICES[1]).add_(1.0)
        self.random.choice(
            [far.synchronize, lambda: torch.accelerator.synchronize(1), lambda: _poll(far), lambda: copy.sum().item()]
        )()
        self._expect([copy], [2.0])

    def share_events(self) -> None:
        device = self.random.randrange(2)  # an event stays on its device
        first, second = self.random.choices(self.shared.events[device::2], k=2)
        stream = self.random.choice(self.streams)
        with stream:
            torch.ones(4, device=f"sim:{stream.device_index}")
        self.random.choice(
            [
                lambda: first.record(self.streams[device]),
                lambda: stream.wait_event(first),
                first.synchronize,
                first.query,
                lambda: first.elapsed_time(second) if first.query() and second.query() else None,
            ]
        )()

    def allocate_and_free(self) -> None:
        stream = self.random.choice(self.streams)
        device = f"sim:{stream.device_index}"
        with stream:
            kept = [torch.full((self.random.choice(SIZES),), 4.0, device=device) for _ in range(4)]
            self.random.shuffle(kept)
            del kept[:2]
            kept[0].record_stream(self.random.choice(self.shared.streams))
        self._expect(kept, [4.0, 4.0])
        self.random.choice([sim.empty_cache, lambda: sim.memory_allocated(0), lambda: sim.memory_reserved(1)])()

    def hand_over_tensors(self) -> None:
        stream = self.random.choice(self.streams)
        with stream:
            given = torch.full((self.random.choice(SIZES),), 6.0, device=f"sim:{stream.device_index}")
        stream.synchronize()
        try:
            self.shared.tensors.put_nowait(given)
            taken = self.shared.tensors.get_nowait()
        except (queue.Full, queue.Empty):
            return
        self._expect([taken], [6.0])

    def launch_for_values(self) -> None:
        with self.streams[0]:
            values = torch.arange(6, device=DEVICES[0])
            found = values[values > 2]
        assert found.tolist() == [3, 4, 5], found

    def share_streams(self) -> None:
        stream = simulator_support.same_stream(self.random.choice(self.shared.streams))
        with stream:
            value = torch.full((8,), 1.0, device=f"sim:{stream.device_index}").mul_(7.0)
        self.random.choice([stream.synchronize, stream.query, lambda: None])()
        with stream:
            self._expect([value], [7.0])

    def run_kernels_in_python(self) -> None:
        stream = simulator_support.same_stream(self.random.choice(self.shared.streams))
        with stream:
            value = torch.full((8,), 1.0, device=f"sim:{stream.device_index}")
            torch.ops.sidestream_stress.increment_(value)
            self._expect([value], [2.0])

    def _expect(self, tensors: Sequence[torch.Tensor | None], values: Sequence[float]) -> None:
        for tensor, value in zip(tensors, values, strict=True):
            assert tensor is not None
            assert torch.equal(tensor.cpu(), torch.full(tensor.shape, value)), (tensor.cpu(), value)


def _poll(stream: torch.Stream) -> None:
    while not stream.query():
        pass


def stress(thread_count: int, programs_each: int, seed: int) -> Counter[str]:
    """Runs the programs; how often each was run, and the repetitions beside them.

    Raises:
        BaseException: the first that a thread met.
    """
    native = simulator_support.registered()
    shared = Shared()
    errors: list[BaseException] = []
    workers = [Worker(shared, seed + number) for number in range(thread_count)]

    def run(worker: Worker) -> None:
        try:
            worker.run(programs_each)
        except BaseException as error:
            traceback.print_exc()
            errors.append(error)

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    own = Worker(shared, seed - 1)
    counts: Counter[str] = Counter()
    while any(thread.is_alive() for thread in threads):
        held = [(own.streams[0], counts["repetition"] % 5), (own.streams[1], counts["repetition"] % 3)]
        with simulator_support.repetition(native, held, serial=counts["repetition"] % 2 == 1, lines=True) as repetition:
            own.backward_over_two_devices()
            own.backward_of_checkpoints()
        assert repetition.of_kind("launch"), "a repetition without launches"
        counts["repetition"] += 1
    for worker in workers:
        counts += worker.counts
    if errors:
        raise errors[0]
    return counts


def main() -> None:
    """Prints how often each program was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--programs", type=int, default=90, help="programs that each thread runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hang-s", type=float, default=60.0, help="seconds after which it counts as a hang")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.hang_s, exit=True)
    for name, count in sorted(stress(options.threads, options.programs, options.seed).items()):
        print(name, count)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
