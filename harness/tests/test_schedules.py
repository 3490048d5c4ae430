"""Schedules: their strings, what each may and must not do, what PCT promises, and the replay of host threads."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from harness.backends.simulator import set_schedule
from harness.campaign.lab import Lab
from harness.campaign.options import Options
from harness.campaign.repetition import run_repetition
from harness.campaign.session import Session
from harness.errors import UsageError
from harness.judge.verdict import Verdict
from harness.observe.instrument import Instrument
from harness.observe.streams import StreamNames
from harness.perturb.plan import LaunchId, Plan
from harness.perturb.schedule import (
    RECORD,
    SUBMISSION_ORDER,
    HostOrder,
    ProbabilisticConcurrencyTesting,
    RandomWalk,
    Schedule,
    SubmissionOrder,
    VirtualTime,
    parse_schedule,
)
from harness.tests.simulator_support import (
    Repetition,
    Twice,
    filled,
    preparing,
    registered,
    repetition,
    run_script,
    streams,
)

NAN = float("nan")
SHARED = [HealthCheck.function_scoped_fixture]
"""The fixtures hold for all examples of a test: each sets its own schedule."""
DECIDING = [
    "virtual-time",
    "virtual-time:launch_us=1,operation_us=50",
    "pct:seed={seed},steps=60",
    "random:seed={seed}",
]
"""The schedules that queue every launch."""


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return registered()


@pytest.fixture(autouse=True)
def submission_order_afterwards(native: ModuleType) -> Any:
    yield
    set_schedule(SubmissionOrder())


# Strings.

orders = st.builds(
    HostOrder,
    st.lists(st.tuples(st.sampled_from(["m", "d0", "d1", "t1", "t12"]), st.integers(1, 10**6)), max_size=6).map(tuple),
    st.integers(0, 2**32 - 1),
)
hosts = st.none() | st.just(RECORD) | orders
times_us = st.floats(0, 1e9)
schedules = st.one_of(
    st.builds(SubmissionOrder, hosts=hosts),
    st.builds(
        VirtualTime, times_us, times_us, times_us, times_us, times_us.filter(lambda time_us: time_us > 0), hosts=hosts
    ),
    st.builds(
        ProbabilisticConcurrencyTesting,
        st.integers(0, 2**63 - 1),
        st.integers(1, 10),
        st.integers(1, 10**9),
        hosts=hosts,
    ),
    st.builds(RandomWalk, st.integers(0, 2**63 - 1), hosts=hosts),
)


@settings(max_examples=100, database=None, derandomize=True)
@given(schedules)
def test_the_string_of_a_schedule_means_that_schedule(schedule: Schedule) -> None:
    assert parse_schedule(str(schedule)) == schedule
    assert "," not in str(schedule.hosts)


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("submission", SubmissionOrder()),
        ("virtual-time:launch_us=5,operation_us=10", VirtualTime(launch_us=5, operation_us=10)),
        ("pct:seed=7,depth=3,steps=40", ProbabilisticConcurrencyTesting(seed=7, depth=3, steps=40)),
        ("random:seed=5", RandomWalk(seed=5)),
        ("submission:hosts=m:14-d0:9/9f31c2aa", SubmissionOrder(hosts=HostOrder((("m", 14), ("d0", 9)), 0x9F31C2AA))),
    ],
)
def test_parameters_that_are_left_out_have_their_defaults(text: str, schedule: Schedule) -> None:
    assert parse_schedule(text) == schedule


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the kinds are submission, virtual-time, pct, random"),
        ("fifo", "the kinds are submission, virtual-time, pct, random"),
        ("pct:", "'' is not one of the parameters of pct"),
        ("pct:speed=1", r"'speed=1' is not one of the parameters of pct, each once \(hosts, seed, depth, steps\)"),
        ("random:seed=1,seed=2", "each once"),
        ("submission:seed=1", r"parameters of submission, each once \(hosts\)"),
        ("random:seed", "'seed' is not one"),
        ("pct:seed=1.5", "seed takes a whole number, not '1.5'"),
        ("pct:seed= 1", "seed takes a whole number"),
        ("virtual-time:launch_us=soon", "launch_us takes a number, not 'soon'"),
        ("virtual-time:launch_us=nan", "launch_us takes a number, not 'nan'"),
        ("virtual-time:launch_us=-1", "give microseconds from 0 on"),
        ("virtual-time:query_us=0", "query_us=0 would let a host that polls wait for ever"),
        ("pct:depth=0", "depth=0 makes no schedule"),
        ("pct:steps=0", "steps=0 makes no schedule"),
        ("pct:depth=1001", "depth=1001 promises nothing"),
        ("random:seed=-1", "seed=-1 is out of range"),
        ("submission:hosts=m:14", "no order of host threads"),
        ("submission:hosts=m:0/00000000", "no order of host threads"),
        ("submission:hosts=x:1/00000000", "no order of host threads"),
        ("submission:hosts=m:99999999999999999999/00000000", "no order of host threads"),
    ],
)
def test_a_string_that_is_no_schedule_is_refused_with_what_would_be_one(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_schedule(text)


def test_a_host_order_given_as_text_is_refused() -> None:
    with pytest.raises(UsageError, match="give a HostOrder"):
        RandomWalk(hosts="m:1/00000000")


# What every schedule keeps.


class Body:
    """A program of launches, recordings, waits and host synchronizations on three streams."""

    def __init__(self, steps: Sequence[tuple[str, int, int]]) -> None:
        self.steps = steps

    def run(self, native: ModuleType) -> tuple[Repetition, list[tuple[int, int]]]:
        """Returns what was observed, and the launches (stream, index) in the order in which they ran."""
        pool = streams(3)
        with repetition(native) as result:
            with preparing(native):
                values = [filled(1, 0.0) for _ in pool]
            events: list[torch.Event] = []
            for kind, number, other in self.steps:
                stream = pool[number]
                if kind == "launch":
                    with stream:
                        values[number].add_(1)
                elif kind == "record":
                    events.append(stream.record_event())
                elif kind == "wait" and events:
                    stream.wait_event(events[other % len(events)])
                elif kind == "synchronize":
                    stream.synchronize()
                elif kind == "query":
                    stream.query()
        position = {stream.stream_id: number for number, stream in enumerate(pool)}
        executed = native.schedule_report()["executed"]
        return result, [(position[stream], index) for _, stream, index, _ in executed]


bodies = st.lists(
    st.tuples(
        st.sampled_from([*["launch"] * 6, *["record"] * 3, *["wait"] * 3, "synchronize", "query"]),
        st.integers(0, 2),
        st.integers(0, 20),
    ),
    min_size=15,
    max_size=40,
).map(Body)


def _must_precede(trace: Sequence[tuple[Any, ...]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of launches (stream, index) of which the first must run before the second, by stream order and waits."""
    last: dict[int, tuple[int, int]] = {}  # of each stream
    recorded: dict[int, tuple[int, int] | None] = {}
    waited: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    pairs = []
    for entry in trace:
        if entry[0] == "launch":
            launch = entry[2], entry[3]
            before = waited.pop(entry[2], [])
            pairs += [(each, launch) for each in [*before, *([last[entry[2]]] if entry[2] in last else [])]]
            last[entry[2]] = launch
        elif entry[0] == "record":
            recorded[entry[3]] = last.get(entry[2])
        elif entry[0] == "wait":
            before_recording = recorded[entry[3]]
            if before_recording is not None:
                waited[entry[2]].append(before_recording)
    return pairs


@pytest.mark.parametrize("schedule", DECIDING)
@settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=SHARED)
@given(body=bodies, seed=st.integers(0, 10**6))
def test_every_launch_runs_once_after_those_before_it_and_those_waited_for(
    native: ModuleType, schedule: str, body: Body, seed: int
) -> None:
    set_schedule(parse_schedule(schedule.format(seed=seed)))
    result, executed = body.run(native)
    ids = [entry[2] for entry in result.of_kind("launch")]
    names = dict(zip(ids, (number for kind, number, _ in body.steps if kind == "launch"), strict=True))
    place = {launch: position for position, launch in enumerate(executed)}
    assert len(place) == len(executed) == len(ids)
    for first, second in _must_precede(result.entries):
        assert place[names[first[0]], first[1]] < place[names[second[0]], second[1]]
    if not schedule.startswith("pct"):
        return
    # PCT's steps: a launch enqueued and a launch run are one each.
    assert native.schedule_report()["steps"] == 2 * len(ids)
    assert native.schedule_report()["threads"] == 1 + len(set(ids))


@pytest.mark.parametrize("schedule", ["submission", *DECIDING])
@settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=SHARED)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=15),
    seed=st.integers(0, 10**6),
)
def test_a_synchronized_program_gives_the_same_values_under_every_schedule(
    native: ModuleType, schedule: str, steps: list[tuple[int, int, int, bool]], seed: int
) -> None:
    expected = [1.0, 2.0, 3.0, 4.0]
    set_schedule(parse_schedule(schedule.format(seed=seed)))
    pool = streams(3)
    last_access: list[list[torch.Event]] = [[] for _ in expected]
    with repetition(native):
        with preparing(native):
            values = [filled(1, value) for value in expected]
        for number, source, target, adds in steps:
            stream = pool[number]
            for event in {*last_access[source], *last_access[target]}:
                stream.wait_event(event)
            with stream:
                if adds:
                    values[target].add_(values[source])
                    expected[target] += expected[source]
                else:
                    values[target].mul_(values[source]).remainder_(97)
                    expected[target] = expected[target] * expected[source] % 97
            event = stream.record_event()
            last_access[source].append(event)
            last_access[target].append(event)
    assert [value.item() for value in values] == expected


def _racing(native: ModuleType) -> float:
    """A fill on one stream and a copy on another that does not wait for it: 2.0, or the stale 1.0."""
    fill, ambient = streams(2)
    with repetition(native):
        with preparing(native):
            value, seen = filled(4, 1.0), filled(4, NAN)
        with fill:
            value.fill_(2.0)
        with ambient:
            seen.copy_(value)
    set_schedule(SubmissionOrder())
    return seen[0].item()


@pytest.mark.parametrize("schedule", ["pct:seed={seed},depth=1", "pct:seed={seed},steps=4", "random:seed={seed}"])
def test_a_race_shows_both_values_within_a_handful_of_seeds(native: ModuleType, schedule: str) -> None:
    seen = set()
    for seed in range(10):
        set_schedule(parse_schedule(schedule.format(seed=seed)))
        seen.add(_racing(native))
    assert seen == {1.0, 2.0}
    assert _racing(native) == 2.0  # in submission order


@pytest.mark.parametrize(
    "schedule", [RandomWalk(11), ProbabilisticConcurrencyTesting(seed=11, steps=60), VirtualTime()]
)
def test_each_repetition_starts_the_schedule_anew(native: ModuleType, schedule: Schedule) -> None:
    body = Body([("launch", i % 3, 0) for i in range(30)])
    set_schedule(schedule)
    executed = body.run(native)[1]
    assert body.run(native)[1] == executed
    if not isinstance(schedule, VirtualTime):
        assert executed != sorted(executed, key=lambda launch: (launch[1], launch[0]))


def test_the_schedule_applies_outside_repetitions_as_well(native: ModuleType) -> None:
    seen = set()
    for seed in range(10):
        set_schedule(RandomWalk(seed))
        fill, ambient = streams(2)
        value, copy = filled(4, 1.0), filled(4, NAN)
        torch.accelerator.synchronize()
        with fill:
            value.fill_(2.0)
        with ambient:
            copy.copy_(value)
        torch.accelerator.synchronize()
        seen.add(copy[0].item())
    assert seen == {1.0, 2.0}
    fill.synchronize()
    with repetition(native), pytest.raises(RuntimeError, match="finish_repetition before setting another schedule"):
        set_schedule(SubmissionOrder())


@pytest.mark.parametrize("schedule", ["virtual-time", "pct:depth=1,seed=3", "pct:depth=1,seed=5", "random"])
def test_a_host_that_polls_gets_on(native: ModuleType, schedule: str) -> None:
    set_schedule(parse_schedule(schedule))
    (stream,) = streams(1)
    with stream:
        for _ in range(5):
            value = filled(4, 1.0)
    event = stream.record_event()
    while not event.query():
        pass
    while not stream.query():
        pass
    assert value[0].item() == 1.0
    with repetition(native), stream:
        for _ in range(5):
            value = filled(4, 1.0)
        with preparing(native):  # where the schedule stands still
            while not stream.query():
                pass


def test_the_error_of_a_scheduled_kernel_names_its_launch_and_the_rest_still_runs(native: ModuleType) -> None:
    set_schedule(VirtualTime())
    (stream,) = streams(1)
    with pytest.raises(RuntimeError, match=rf"Launch {stream.stream_id}:0 .*aten::index\.Tensor"), repetition(native):
        with preparing(native):
            source, index, value = filled(4, 1.0), torch.tensor([9], device="sim"), filled(4, 1.0)
        with stream:
            source[index]
            value.fill_(2.0)
    assert value[0].item() == 2.0


@pytest.mark.timeout(60)
def test_kernels_of_several_threads_run_one_at_a_time(native: ModuleType) -> None:
    library = torch.library.Library("sidestream_schedules", "DEF")
    library.define("slow_(Tensor(a!) self) -> Tensor(a!)")
    running: list[None] = []
    most = 0

    def slow(self: torch.Tensor) -> torch.Tensor:
        nonlocal most
        running.append(None)
        time.sleep(0.0005)
        most = max(most, len(running))
        running.pop()
        return self.add_(1)

    library.impl("slow_", slow, "CPU")
    library.impl("slow_", lambda self: self, "Meta")
    set_schedule(RandomWalk(1))
    pool = streams(3)
    with preparing_values(native) as values:

        def enqueue(stream: torch.Stream, value: torch.Tensor) -> None:
            with stream:
                for _ in range(20):
                    torch.ops.sidestream_schedules.slow_(value)
                stream.synchronize()

        threads = [threading.Thread(target=enqueue, args=pair) for pair in zip(pool, values, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    library._destroy()
    assert most == 1
    assert [value[0].item() for value in values] == [20.0] * 3


class preparing_values:
    """A repetition with three prepared tensors of zeros."""

    def __init__(self, native: ModuleType) -> None:
        self._repetition = repetition(native)
        self._native = native

    def __enter__(self) -> list[torch.Tensor]:
        self._repetition.__enter__()
        with preparing(self._native):
            return [filled(4, 0.0) for _ in range(3)]

    def __exit__(self, *error: Any) -> None:
        self._repetition.__exit__(*error)


# What PCT promises.

SEEDS = 400


def _depth_one(native: ModuleType) -> bool:
    """Whether a bug shows that takes one constraint: the copy runs before the fill."""
    return _racing(native) == 1.0


def _depth_two(native: ModuleType) -> bool:
    """Whether a bug shows that takes two constraints: the copy runs after the first fill and before the second."""
    fill, ambient = streams(2)
    with repetition(native):
        with preparing(native):
            value, seen = filled(4, 1.0), filled(4, NAN)
        with fill:
            value.fill_(2.0)
            value.fill_(3.0)
        with ambient:
            seen.copy_(value)
    set_schedule(SubmissionOrder())
    return seen[0].item() == 2.0


@pytest.mark.parametrize(("bug", "depth", "steps"), [(_depth_one, 1, 4), (_depth_two, 2, 6)])
def test_pct_finds_a_bug_of_its_depth_at_least_as_often_as_promised(
    native: ModuleType, bug: Callable[[ModuleType], bool], depth: int, steps: int
) -> None:
    found = 0
    for seed in range(SEEDS):
        schedule = ProbabilisticConcurrencyTesting(seed=seed, depth=depth, steps=steps)
        set_schedule(schedule)
        found += bug(native)
    bound = schedule.bound(threads=3, steps=steps)
    assert bound == 1 / (3 * steps ** (depth - 1))
    # The bound is tight for the first, so chance alone may leave the count a little below its expectation.
    assert binomtest(found, SEEDS, bound, alternative="less").pvalue > 0.05, (found, bound)


def test_pct_finds_no_bug_that_takes_more_changes_of_priority_than_it_makes(native: ModuleType) -> None:
    for seed in range(100):
        set_schedule(ProbabilisticConcurrencyTesting(seed=seed, depth=1))
        assert not _depth_two(native)


# Running a body of the lab under a schedule.


@pytest.fixture(scope="module")
def session() -> Any:
    opened = Session(Options(device="sim"))
    yield opened
    opened.close()


BASELINE = Plan()


def _seed_without_a_wait(lab: Lab) -> None:
    leaf, product = lab.product(2.0, 3.0)
    seed = lab.poisoned(product)
    with lab.stream("fill"):
        seed.fill_(5.0)
    with lab.stream("ambient"):
        product.backward(seed)
        lab.observe(leaf.grad, 15.0)


def _run(lab: Lab, schedule: Schedule, plan: Plan = BASELINE) -> Any:
    return run_repetition(lab, lambda: _seed_without_a_wait(lab), 0, plan, schedule=schedule, with_happens_before=False)


def test_a_race_of_a_case_is_replayed_by_the_string_of_its_schedule(session: Session) -> None:
    lab = session.lab()
    assert _run(lab, SUBMISSION_ORDER).judgement.verdict is Verdict.PASS
    for seed in range(20):
        raced = _run(lab, ProbabilisticConcurrencyTesting(seed=seed, depth=2, steps=6))
        if raced.judgement.verdict is Verdict.RACE:
            break
    report = raced.recording.schedule
    assert report is not None
    assert (report.threads, report.steps, report.bound) == (4, 6, 1 / 24)  # with the default stream: three streams
    again = _run(lab, parse_schedule(str(report.schedule)))
    assert again.judgement.verdict is Verdict.RACE
    assert again.recording.schedule == report
    enqueued = [launch.id for launch in raced.recording.launches()]
    executed = [each.launch for each in report.executed]
    assert executed != enqueued
    assert sorted(executed) == sorted(enqueued)
    assert _run(lab, SUBMISSION_ORDER).recording.schedule is None


def test_an_order_of_host_threads_that_a_case_records_replays_it(session: Session) -> None:
    lab = session.lab()
    _run(
        lab, SUBMISSION_ORDER
    )  # names the streams, which each later repetition synchronizes when its inputs are prepared
    recorded = _run(lab, SubmissionOrder(hosts=RECORD)).recording
    assert recorded.schedule is not None
    schedule = recorded.schedule.schedule
    assert isinstance(schedule.hosts, HostOrder)
    assert {thread for thread, _ in schedule.hosts.segments} == {"m", "d0"}
    again = _run(lab, parse_schedule(str(schedule))).recording
    assert again.schedule is not None
    assert again.schedule.schedule == schedule
    assert again.trace == recorded.trace
    assert _run(lab, SUBMISSION_ORDER).recording.schedule is None


def test_pct_promises_nothing_for_a_body_of_more_steps_than_it_was_made_for(session: Session) -> None:
    report = _run(session.lab(), ProbabilisticConcurrencyTesting(depth=2, steps=5)).recording.schedule
    assert (report.steps, report.bound) == (6, None)


def test_what_does_not_go_together_is_refused(session: Session) -> None:
    lab = session.lab()
    held = Plan((LaunchId("fill", 0),))
    with pytest.raises(UsageError, match=r"hold=fill:0 does not go with the schedule random:seed=0: .* 'submission'"):
        _run(lab, RandomWalk(), held)
    with pytest.raises(UsageError, match="serial run leaves the schedule random:seed=0 nothing to decide"):
        session.instrument.begin(Plan(), schedule=RandomWalk(), serial=True)
    assert _run(lab, SUBMISSION_ORDER).judgement.verdict is Verdict.PASS
    assert _run(lab, SUBMISSION_ORDER, held).judgement.verdict is Verdict.RACE


def test_a_real_device_has_no_schedule() -> None:
    class Tap:
        def set_ignored_prefixes(self, prefixes: list[str]) -> None:
            pass

    instrument = Instrument(Tap(), StreamNames())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"the schedule random:seed=0 needs the simulated accelerator"):
        instrument.begin(Plan(), schedule=RandomWalk())


# The threads of the host.


class TwoDevices:
    """Backward on two devices with two streams each; both threads of the engine have work at the same time."""

    def __init__(self, native: ModuleType, sides: Sequence[torch.Stream] | None = None) -> None:
        self._native = native
        self.sides = sides or [stream for device in (0, 1) for stream in streams(2, device)]

    def run(self, rounds: int = 3) -> str:
        """The whole trace, and the order in which launches ran, in one text."""
        with repetition(self._native) as result:
            with preparing(self._native):
                leaves = [filled(8, 2.0, device).requires_grad_() for device in (0, 1)]
            roots = []
            for side in self.sides:
                with side:
                    value = leaves[side.device_index]
                    for _ in range(rounds):
                        value = Twice.apply(value) * 3
                    roots.append(value)
                torch.accelerator.current_stream(side.device_index).wait_stream(side)
            crossed = (roots[1].to("sim:1") * roots[3]).to("sim:0")
            total = roots[0] + roots[1] + (roots[2] + roots[3]).to("sim:0") + crossed
            total.sum().backward()
            del roots, total, value, crossed
        # PyTorch's numbers of threads and the engine's of backwards differ from one run, and process, to the next.
        entries = [entry[:9] + entry[11:] if entry[0] == "launch" else entry for entry in result.entries]
        return repr((entries, self._native.schedule_report()["executed"]))

    def recorded(self) -> HostOrder:
        """The order of the last run."""
        segments, checksum = self._native.schedule_report()["hosts"]
        return HostOrder(tuple(map(tuple, segments)), checksum)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("schedule", [SubmissionOrder(hosts=RECORD), RandomWalk(5, hosts=RECORD)])
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_backward_on_two_devices_is_replayed_by_the_order_of_its_threads(native: ModuleType, schedule: Any) -> None:
    program = TwoDevices(native)
    program.run()  # starts the engine's threads
    set_schedule(schedule)
    recorded = program.run()
    order = program.recorded()
    assert {"m", "d0", "d1"} == {thread for thread, _ in order.segments}
    replay = type(schedule)(**schedule.parameters(), hosts=order)
    set_schedule(replay)
    assert {program.run() for _ in range(50)} == {recorded}
    if isinstance(schedule, SubmissionOrder):
        return
    # The string of the random walk replays its decisions in another process as well.
    sides = [(side.device_index, side.stream_id) for side in program.sides]
    done = run_script(
        f"""
        import warnings
        import torch
        from harness.backends.simulator import set_schedule
        from harness.perturb.schedule import parse_schedule
        from harness.tests.simulator_support import registered
        from harness.tests.test_schedules import TwoDevices
        warnings.simplefilter("ignore")
        native = registered()
        kind = torch.accelerator.current_stream().device_type
        sides = [torch.Stream(stream_id=id, device_index=device, device_type=kind) for device, id in {sides}]
        program = TwoDevices(native, sides)
        program.run()
        set_schedule(parse_schedule({str(replay)!r}))
        print(program.run())
        """
    )
    assert done.stdout == recorded + "\n", done.stderr


@pytest.mark.timeout(60)
def test_an_order_other_than_the_recorded_one_is_followed_as_well(native: ModuleType) -> None:
    """Which of two devices without an edge between them goes first is up to the order alone."""

    def run() -> list[int]:
        """The devices of the multiplications of backward, in the order in which they were enqueued."""
        with repetition(native) as result:
            with preparing(native):
                leaves = [filled(4, 2.0, device).requires_grad_() for device in (0, 1)]
                seeds = [filled(4, 1.0, device) for device in (0, 1)]
            torch.autograd.backward([leaf * 3 for leaf in leaves], seeds)
        return [entry[1] for entry in result.of_kind("launch") if entry[5] == "MulBackward0"]

    def made() -> HostOrder:
        segments, checksum = native.schedule_report()["hosts"]
        return HostOrder(tuple(map(tuple, segments)), checksum)

    run()  # starts the engine's threads
    set_schedule(SubmissionOrder(hosts=RECORD))
    assert run() == [0, 1]
    (_, calls_of_main), (first, calls_of_first), (second, calls_of_second) = made().segments
    assert (first, second) == ("d0", "d1")
    root = 2  # the begin and the end of the graph's root, which the thread of the first root's device takes
    swapped = (("m", calls_of_main), ("d0", root), ("d1", calls_of_second), ("d0", calls_of_first - root))
    set_schedule(SubmissionOrder(hosts=HostOrder(swapped, 0)))
    with pytest.raises(RuntimeError, match="but not the same ones"):
        run()
    assert made().segments == swapped
    set_schedule(SubmissionOrder(hosts=made()))
    for _ in range(10):
        assert run() == [1, 0]


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_program_that_does_not_fit_the_order_gives_one_error_and_does_not_hang(native: ModuleType) -> None:
    program = TwoDevices(native)
    program.run()
    set_schedule(SubmissionOrder(hosts=RECORD))
    program.run()
    order = program.recorded()
    set_schedule(SubmissionOrder(hosts=order))
    misfit = "does not fit the recorded order of its host threads: "
    with pytest.raises(RuntimeError, match=misfit + r"after \d+ calls a call of d0 was to come, but m makes one"):
        program.run(rounds=4)
    set_schedule(SubmissionOrder(hosts=HostOrder(order.segments, order.checksum ^ 1)))
    with pytest.raises(RuntimeError, match=misfit + "its threads made as many calls in turn, but not the same ones"):
        program.run()
    set_schedule(SubmissionOrder(hosts=HostOrder((*order.segments, ("d1", 3)), order.checksum)))
    with pytest.raises(RuntimeError, match=misfit + r"it ended after \d+ calls, where a call of d1 was to come"):
        program.run()
    set_schedule(SubmissionOrder(hosts=order))
    program.run()  # and the process is as good as before


@pytest.mark.timeout(60)
@pytest.mark.parametrize("schedule", ["pct:seed={seed}", "random:seed={seed}", "virtual-time", "random:hosts=record"])
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_two_devices_never_deadlock_under_a_schedule(native: ModuleType, schedule: str) -> None:
    program = TwoDevices(native)
    for seed in range(15):
        set_schedule(parse_schedule(schedule.format(seed=seed)))
        program.run()
