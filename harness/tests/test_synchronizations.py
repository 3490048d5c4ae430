"""The synchronizations of a repetition: who issued which, and what happens when one is left out or misdirected.

On the simulator, and with ``--device cuda`` on a GPU.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from harness.campaign.lab import Lab
from harness.campaign.repetition import Repetition, run_repetition
from harness.campaign.session import Session
from harness.errors import UsageError
from harness.judge.verdict import NO_WAIT_ISSUED, NOT_HONOURED, Verdict
from harness.observe import tap
from harness.observe.synchronizations import KINDS, Fault, SynchronizationId
from harness.observe.trace import HostSync, Record, RecordStream, Wait
from harness.perturb.plan import LaunchId, Plan
from harness.tests.processor_time import seconds

END = "GraphTask::exec_post_processing"
BUFFER = "InputBuffer::add"
# Before torch 2.8 a node's wait was issued as soon as its gradient was added (pytorch/pytorch#151079).
NODE = "Engine::evaluate_function" if TorchVersion(torch.__version__) >= "2.8" else BUFFER


@pytest.fixture
def session(tapped_session: Session) -> Session:
    return tapped_session


@pytest.fixture
def own_lab(session: Session) -> Lab:
    return session.lab()


def seed_elsewhere(lab: Lab) -> Callable[[], None]:
    """A seed filled on one stream, the forward on a second, backward called on a third."""

    def body() -> None:
        with lab.stream("forward"):
            leaf, product = lab.product(2.0, 3.0)
        with lab.stream("fill") as fill:
            seed = lab.poisoned(product)
            seed.fill_(5.0)
        with lab.stream("ambient") as ambient:
            ambient.wait_stream(fill)
            seed.record_stream(ambient)
            product.backward(seed)
            del seed
            lab.observe(leaf.grad, 15.0)

    return body


def run(lab: Lab, body: Callable[[], None], plan: Plan | None = None, **settings: Any) -> Repetition:
    settings.setdefault("synchronizations", True)
    return run_repetition(lab, body, 0, plan or Plan(), with_happens_before=True, **settings)


def ids(repetition: Repetition) -> list[str]:
    return [str(each.id) for each in repetition.recording.synchronizations]


# Who issues what.


def test_each_synchronization_of_a_backward_has_its_issuer(own_lab):
    repetition = run(own_lab, seed_elsewhere(own_lab), lines=True)
    made = {str(each.id): each for each in repetition.recording.synchronizations}
    order = [each.id for each in repetition.recording.synchronizations]
    waits = {
        "wait@ambient:0/user": "record@fill:0/user",
        f"wait@forward:0/{NODE}": f"record@ambient:0/{BUFFER}",
        f"wait@ambient:0/{END}": f"record@forward:0/{END}",
    }
    record_streams = ["record_stream@ambient:0/user", f"record_stream@forward:0/{BUFFER}"]
    assert sorted(made) == sorted([*waits, *waits.values(), *record_streams])
    trace = repetition.recording.trace
    for wait, record in waits.items():
        assert made[wait].recorded == order.index(made[record].id)
        assert isinstance(trace[made[wait].entries[0]], Wait) and isinstance(trace[made[record].entries[0]], Record)
    assert all(isinstance(trace[made[each].entries[0]], RecordStream) for each in record_streams)
    user, engine = made["wait@ambient:0/user"].line, made[f"record_stream@forward:0/{BUFFER}"].line
    assert user is not None and engine is not None and user.file == engine.file == __file__
    assert linecache.getline(__file__, user.line).strip() == "ambient.wait_stream(fill)"
    assert linecache.getline(__file__, engine.line).strip() == "product.backward(seed)", "that called the engine"
    assert not any(each.left_out for each in made.values())


def test_the_engine_waits_where_it_sums_what_two_streams_produce(own_lab):
    def body() -> None:
        with own_lab.preparing():
            leaf = torch.full((4,), 2.0, device=own_lab.device, requires_grad=True)
        products = []
        for name in ("one", "other"):
            with own_lab.stream(name):
                products.append((leaf * 3.0).sum())
        with own_lab.stream("ambient") as ambient:
            for name in ("one", "other"):
                ambient.wait_stream(own_lab.stream(name))
            (products[0] + products[1]).backward()
            own_lab.observe(leaf.grad, 6.0)

    found = ids(run(own_lab, body))
    assert [each for each in found if each.startswith("wait") and each.endswith(BUFFER)]
    assert [each for each in found if each.startswith("record_stream") and each.endswith(BUFFER)]
    assert [each for each in found if each.startswith("wait") and each.endswith(END)]


class WaitsInBackward(torch.autograd.Function):
    """The caller's code in a thread of the engine, between functions of the engine."""

    streams: tuple[torch.Stream, torch.Stream]

    @staticmethod
    def forward(ctx, value):
        return value * 1.0

    @staticmethod
    def backward(ctx, gradient):
        waiting, recorded = WaitsInBackward.streams
        waiting.wait_stream(recorded)
        return gradient


def test_what_a_custom_function_issues_is_the_users(own_lab):
    def body() -> None:
        WaitsInBackward.streams = own_lab.stream("one"), own_lab.stream("other")
        with own_lab.stream("ambient"):
            leaf, product = own_lab.product(2.0, 3.0)
            WaitsInBackward.apply(product).sum().backward()
            own_lab.observe(leaf.grad, 3.0)

    repetition = run(own_lab, body, lines=True)
    waits = [each for each in repetition.recording.synchronizations if each.id.kind == "wait"]
    assert [str(each.id) for each in waits] == ["wait@one:0/user"]
    assert waits[0].node == "WaitsInBackwardBackward" and waits[0].line is not None


def test_host_synchronizations_are_named_after_what_is_waited_for(own_lab):
    def body() -> None:
        with own_lab.stream("fill") as fill:
            tensor = torch.zeros(4, device=own_lab.device)
            event = fill.record_event()
        event.synchronize()
        fill.synchronize()
        torch.accelerator.synchronize(0)
        own_lab.observe(tensor, 0.0)

    repetition = run(own_lab, body)
    made = repetition.recording.synchronizations
    assert ids(repetition) == [
        "record@fill:0/user",
        "synchronize_event@fill:0/user",
        "synchronize_stream@fill:0/user",
        "synchronize_device@device0:0/user",
    ]
    trace = repetition.recording.trace
    assert all(isinstance(trace[at], HostSync) for each in made[1:] for at in each.entries)
    assert len(made[3].entries) == len(own_lab._instrument.names.of_device(0)), "one for each stream of the device"


def test_what_prepares_inputs_is_not_counted(own_lab):
    def body() -> None:
        with own_lab.preparing():
            event = own_lab.stream("fill").record_event()
            own_lab.stream("fill").synchronize()
        own_lab.stream("ambient").wait_event(event)
        own_lab.observe(torch.zeros(4, device=own_lab.device), 0.0)

    repetition = run(own_lab, body)
    (wait,) = repetition.recording.synchronizations
    assert (str(wait.id), wait.recorded, wait.entries) == ("wait@ambient:0/user", None, ())


def test_two_threads_of_the_engine_do_not_change_the_names(session, own_lab):
    if session.backend.device_count < 2:
        pytest.skip("not covered: needs two devices")

    def body() -> None:
        leaves, losses = [], []
        for device in range(2):
            with own_lab.preparing(), own_lab.stream(f"forward{device}", device):
                where = torch.device(own_lab.device.type, device)
                leaf = torch.full((4,), 2.0, device=where, requires_grad=True)
                losses.append((leaf * 3.0).sum())
                leaves.append(leaf)
        with own_lab.stream("ambient0"), own_lab.stream("ambient1", 1):
            torch.autograd.backward(losses)
            for leaf in leaves:
                own_lab.observe(leaf.grad, 3.0)

    assert len({tuple(sorted(ids(run(own_lab, body)))) for _ in range(20)}) == 1


# One goes wrong.


def left_out(text: str) -> Fault:
    return Fault(SynchronizationId.parse(text))


@pytest.mark.parametrize("which", ["wait@ambient:0/user", f"wait@forward:0/{NODE}", f"wait@ambient:0/{END}"])
def test_a_wait_that_is_left_out_is_a_race_that_nobody_issued_a_wait_for(own_lab, which):
    body = seed_elsewhere(own_lab)
    complete = run(own_lab, body)
    without = run(own_lab, body, fault=left_out(which))
    assert complete.judgement.verdict is Verdict.PASS
    assert without.judgement.verdict is Verdict.RACE and without.judgement.attribution == NO_WAIT_ISSUED
    assert ids(without) == ids(complete), "the others keep their names"
    gone = [each for each in without.recording.synchronizations if each.left_out]
    assert [str(each.id) for each in gone] == [which] and gone[0].entries == ()
    kinds = [type(entry) for entry in complete.recording.trace]
    assert [type(entry) for entry in without.recording.trace].count(Wait) == kinds.count(Wait) - 1
    (race,) = without.judgement.races
    assert race.hold is not None
    aimed = run(own_lab, body, Plan((race.hold,)), fault=left_out(which))
    assert aimed.judgement.mismatches, "the value is wrong as well"


def test_a_record_stream_that_is_left_out_lets_the_memory_be_used_again(own_lab):
    def body() -> None:
        with own_lab.stream("fill"):
            tensor = own_lab.poisoned(torch.zeros(4, device=own_lab.device))
        with own_lab.stream("ambient") as ambient:
            copy = tensor * 1.0
            tensor.record_stream(ambient)
            del tensor
            own_lab.observe(copy.isnan(), True)

    assert run(own_lab, body, poison_memory=True).judgement.verdict is Verdict.PASS
    without = run(own_lab, body, fault=left_out("record_stream@ambient:0/user"))
    assert [race.kind for race in without.judgement.races] == ["freed while in use"]


@pytest.mark.parametrize("which", ["synchronize_event@fill:0/user", "synchronize_stream@fill:0/user"])
def test_a_host_synchronization_can_be_left_out(own_lab, which):
    def body() -> None:
        with own_lab.stream("fill") as fill:
            tensor = own_lab.poisoned(torch.empty(4, device=own_lab.device))
            tensor.fill_(5.0)
        fill.record_event().synchronize() if "event" in which else fill.synchronize()
        with own_lab.stream("ambient"):
            own_lab.observe(tensor, 5.0)

    assert run(own_lab, body).judgement.verdict is Verdict.PASS
    aimed = run(own_lab, body, Plan((LaunchId("fill", 0),)), fault=left_out(which))
    assert aimed.judgement.raced_by == ["values", "happens-before"]


def test_a_wait_for_the_wrong_event_is_the_runtimes_fault(own_lab):
    body = seed_elsewhere(own_lab)
    run(own_lab, body)  # its streams have names from now on
    held = Plan((LaunchId("fill", 0),))
    which = SynchronizationId.parse("wait@ambient:0/user")
    misdirected = run(own_lab, body, held, fault=Fault(which, misdirect=True))
    assert misdirected.judgement.mismatches and not misdirected.judgement.races
    assert misdirected.judgement.attribution == NOT_HONOURED
    assert misdirected.judgement.disagreement is not None
    issued = next(each for each in misdirected.recording.synchronizations if each.id == which)
    trace = misdirected.recording.trace
    recorded = next(entry for entry in trace if isinstance(entry, Record))
    assert trace[issued.entries[0]] == Wait("ambient", recorded.event), "the trace says what was asked for"
    assert run(own_lab, body, held, fault=Fault(which)).judgement.attribution == NO_WAIT_ISSUED


def test_only_a_wait_can_be_misdirected(own_lab):
    run(own_lab, seed_elsewhere(own_lab))
    fault = Fault(SynchronizationId.parse("record_stream@ambient:0/user"), misdirect=True)
    with pytest.raises(RuntimeError, match="only the wait for an event can be misdirected"):
        run(own_lab, seed_elsewhere(own_lab), fault=fault)
    assert run(own_lab, seed_elsewhere(own_lab)).judgement.verdict is Verdict.PASS


@pytest.mark.parametrize("ordered", [True, False])
def test_what_torch_cuda_orders_around_the_device_guard_is_seen(session, own_lab, ordered):
    if session.simulated:
        pytest.skip("not covered: torch.cuda is CUDA's")

    def body() -> None:
        fill, ambient = (
            torch.cuda.Stream(
                stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
            )
            for stream in (own_lab.stream("fill"), own_lab.stream("ambient"))
        )
        with torch.cuda.stream(fill):
            tensor = own_lab.poisoned(torch.empty(4, device=own_lab.device))
            tensor.fill_(5.0)
        if ordered:
            event = torch.cuda.Event()
            event.record(fill)
            event.wait(ambient)
        with torch.cuda.stream(ambient):
            own_lab.observe(tensor, 5.0)

    run(own_lab, body)
    repetition = run(own_lab, body)
    assert bool(repetition.judgement.races) is not ordered
    assert ids(repetition) == (["record@fill:0/user", "wait@ambient:0/user"] if ordered else [])
    if ordered:
        assert run(own_lab, body, fault=left_out("wait@ambient:0/user")).judgement.races


# The observer changes nothing.


def test_verdicts_and_traces_are_the_same_with_the_tap_and_without(session, own_lab):
    body = seed_elsewhere(own_lab)
    plans = [Plan(), *(Plan((LaunchId(*each),)) for each in (("fill", 0), ("forward", 0), ("ambient", 0)))]
    run(own_lab, body)  # the memory of the second is that of the first
    with_tap = [run(own_lab, body, plan) for plan in plans]
    unarmed = [run(own_lab, body, plan, synchronizations=False) for plan in plans]
    tap.ignore_synchronizations()
    try:
        without = [run(own_lab, body, plan, synchronizations=False) for plan in plans]
    finally:
        session.use_tap()
    for one, other, third in zip(with_tap, unarmed, without, strict=True):
        assert one.judgement == other.judgement == third.judgement
        assert one.recording.trace == other.recording.trace == third.recording.trace
        assert one.holds == other.holds == third.holds


def test_it_is_gone_when_it_is_removed(session, own_lab):
    wrapped = torch.Tensor.record_stream
    tap.ignore_synchronizations()
    try:
        assert torch.Tensor.record_stream is not wrapped and "record_stream" not in vars(torch.Tensor)
        assert ids(run(own_lab, seed_elsewhere(own_lab))) == []
    finally:
        session.use_tap()
    assert len(ids(run(own_lab, seed_elsewhere(own_lab)))) == 8


MOST_IDLE_US = 2.0


def test_idle_it_costs_next_to_nothing(session, own_lab):
    calls = 1000
    stream, other = own_lab.stream("one"), own_lab.stream("other")
    event = other.record_event()

    def order() -> None:
        for _ in range(calls):
            event.record(other)
            stream.wait_event(event)

    tapped = seconds(order, repeat=10)
    tap.ignore_synchronizations()
    try:
        event = other.record_event()  # an event keeps the guard that it was made with
        bare = seconds(order, repeat=10)
    finally:
        session.use_tap()
    assert (tapped - bare) / (2 * calls) * 1e6 < MOST_IDLE_US


# Names.


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_is_read_back(kind):
    name = SynchronizationId(kind, "a.b-c", 12, "Engine::evaluate_function")
    assert SynchronizationId.parse(str(name)) == name


@pytest.mark.parametrize("text", ["", "wait", "wait@ambient/user", "wait@ambient:x/user", "held@ambient:0/user"])
def test_what_names_no_synchronization_is_refused(text):
    with pytest.raises(UsageError, match="names no synchronization: write kind@stream:index/issuer"):
        SynchronizationId.parse(text)
