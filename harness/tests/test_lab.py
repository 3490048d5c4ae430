"""The lab of a case: distinct streams, prepared inputs, staged observations; and one repetition with it."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from harness.campaign import lab as lab_module
from harness.campaign.case import Case, CaseError, Control
from harness.campaign.lab import ELEMENTS, Lab, StreamPool
from harness.campaign.options import Options
from harness.campaign.repetition import run_repetition
from harness.campaign.session import Session
from harness.errors import InfrastructureError, UsageError
from harness.judge.values import compare
from harness.judge.verdict import Verdict
from harness.observe.holds import HoldState
from harness.observe.trace import Allocate, Free, Launch
from harness.perturb.plan import LaunchId, Plan
from harness.tests.simulator_support import registered
from harness.tests.test_turns import is_free


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session(Options())
    yield session
    session.close()
    registered()  # the other tests' ignored prefixes


@pytest.fixture
def own_lab(session: Session) -> Lab:
    # Not named lab: a test that uses the fixture of that name is a case, which is repeated.
    return session.lab()


def held(stream: str, index: int = 0) -> Plan:
    return Plan((LaunchId(stream, index),))


# Streams.


def test_distinct_names_are_distinct_streams(own_lab):
    streams = {name: own_lab.stream(name) for name in ("default", *(f"stream-{n}" for n in range(31)))}
    assert len({stream.stream_id for stream in streams.values()}) == 32
    assert all(own_lab.stream(name) == stream for name, stream in streams.items()), "a name keeps its stream"
    assert own_lab.stream_names() == sorted([*streams, "default.1"])


@pytest.mark.parametrize("name", ["default", "ambient"])
def test_a_stream_can_be_made_current_while_it_is_current(own_lab, name):
    with own_lab.stream(name) as outer, own_lab.stream("other"), own_lab.stream(name) as inner:
        assert inner == outer == torch.accelerator.current_stream()
        assert inner is not outer, "which torch 2.9 refuses to make current twice"


def test_default_is_the_default_stream(own_lab):
    assert own_lab.stream("default") == torch.accelerator.current_stream(0)
    with own_lab.stream("ambient"):
        assert own_lab.stream("default").stream_id == 0


@pytest.mark.parametrize(("name", "device"), [("x", 7), ("x", -1), ("default", 2), ("x", "sim:1")])
def test_a_device_that_is_not_there_has_no_streams(own_lab, name, device):
    with pytest.raises(UsageError) as caught:
        own_lab.stream(name, device)
    assert str(caught.value) == (
        f"stream '{name}' is to be on device {device}, and there are devices 0 to 1: a case that needs more says so "
        "with @pytest.mark.devices(count)."
    )


def test_each_device_has_its_own_streams(own_lab):
    near, far = own_lab.stream("near"), own_lab.stream("far", device=1)
    assert (near.device, far.device) == (torch.device("sim", 0), torch.device("sim", 1))
    own_lab.begin(held("far"))
    with far:
        torch.zeros(4, device="sim:1")
    recording, _ = own_lab.finish()
    assert [launch.id for launch in recording.launches()] == [LaunchId("far", 0)]
    assert [hold.state for hold in recording.holds] == [HoldState.PENDING]


def test_names_are_used_again_by_the_next_lab_and_forgotten(session):
    first = session.lab()
    lent = [first.stream("fill"), first.stream("ambient")]
    second = session.lab()
    assert second.stream_names() == ["default", "default.1"]
    assert [second.stream("other"), second.stream("fill")] == lent, "streams are few, so the pool lends them again"
    assert second.stream_names() == ["default", "default.1", "fill", "other"]


def aliasing(monkeypatch, count: int) -> None:
    """Makes ``torch.Stream`` hand out handles of only so many streams, in turn, the first of them the default."""
    streams = [torch.accelerator.current_stream(0), *(torch.Stream("sim:0") for _ in range(count - 1))]
    handles = itertools.cycle(streams)
    monkeypatch.setattr(torch, "Stream", lambda device: next(handles))


def test_handles_that_alias_are_passed_over(session, monkeypatch):
    aliasing(monkeypatch, 4)
    pool = StreamPool("sim")
    assert len({pool.get(0, position).stream_id for position in range(3)} | {0}) == 4


def test_more_names_than_the_simulator_has_streams_are_a_usage_error(own_lab):
    for number in range(32):
        own_lab.stream(f"stream-{number}")
    with pytest.raises(UsageError, match="names 33 streams on sim:0, which has only 32 distinct ones"):
        own_lab.stream("one-too-many")


def test_a_device_with_too_few_streams_is_a_usage_error(session, monkeypatch):
    aliasing(monkeypatch, 3)
    own_lab = Lab(session.backend, session.instrument, StreamPool("sim"))
    own_lab.stream("fill")
    own_lab.stream("ambient")
    with pytest.raises(UsageError) as caught:
        own_lab.stream("third")
    assert str(caught.value) == (
        "this case names 3 streams on sim:0, which has only 2 distinct ones: torch.Stream handles would alias, and the "
        "case would not test what it says."
    )
    assert "third" not in own_lab.stream_names()


def test_streams_of_the_load_are_never_lent(session):
    reserved = [torch.Stream("sim:0") for _ in range(3)]
    pool = StreamPool("sim", [stream.stream_id for stream in reserved])
    lent = {pool.get(0, position).stream_id for position in range(29)}
    assert len(lent) == 29
    assert not lent & {stream.stream_id for stream in reserved}
    with pytest.raises(UsageError, match="names 30 streams on sim:0, which has only 29 distinct ones"):
        pool.get(0, 29)


@pytest.mark.parametrize("name", ["", "a b", "a:0", "a,b", "a/b", "fill\n", "fill[0]", "hold=fill"])
def test_a_name_that_a_plan_could_not_show_is_refused(own_lab, name):
    with pytest.raises(UsageError, match="cannot name a stream: plans are written with names of letters") as caught:
        own_lab.stream(name)
    assert repr(name) in str(caught.value)
    assert own_lab.stream_names() == ["default", "default.1"]


@pytest.mark.parametrize("name", ["0", "fill.1", "a-b_c", "..", "étage", "baseline"])
def test_an_odd_name_can_be_held(own_lab, name):
    plan = held(name)
    assert Plan.parse(str(plan)) == plan
    with own_lab.stream(name):
        own_lab.begin(plan)
        torch.zeros(4, device=own_lab.device)
        recording, _ = own_lab.finish()
    assert [hold.state for hold in recording.holds] == [HoldState.PENDING]


# Prepared inputs.


def test_preparing_leaves_nothing_in_the_trace_and_shifts_no_launch(own_lab):
    ambient = own_lab.stream("ambient")
    own_lab.begin(held("ambient"))
    with ambient:
        with own_lab.preparing():
            kept = torch.ones(4, device=own_lab.device) * 2
            ambient.wait_stream(own_lab.stream("fill"))
            kept.cpu()
        leaf, product = own_lab.product(2.0, 3.0)
        poisoned = own_lab.poisoned(product)
        poisoned.fill_(5.0)
    recording, _ = own_lab.finish()
    (launch,) = recording.trace
    assert isinstance(launch, Launch)
    assert (launch.id, launch.operation) == (LaunchId("ambient", 0), "aten::fill_.Scalar")
    assert [hold.state for hold in recording.holds] == [HoldState.PENDING]
    del kept, leaf


@pytest.mark.parametrize("name", ["fill", "default"])
def test_what_was_enqueued_is_complete_after_preparing(own_lab, name):
    tensor = torch.zeros(4, device=own_lab.device)
    # Nobody has to name the default stream.
    stream = own_lab.stream(name) if name != "default" else torch.accelerator.current_stream()
    own_lab.begin(held(name))
    with stream:
        tensor.fill_(5.0)
    with own_lab.preparing():
        pass
    recording, _ = own_lab.finish()
    assert [hold.state for hold in recording.holds] == [HoldState.FORCED]


def test_preparing_that_fails_is_over(own_lab):
    own_lab.begin(Plan())
    with pytest.raises(ValueError), own_lab.preparing():
        raise ValueError
    torch.zeros(4, device=own_lab.device)
    recording, _ = own_lab.finish()
    assert len(recording.launches()) == 1


def test_a_product_is_ready_and_belongs_to_the_current_stream(own_lab):
    own_lab.begin(Plan())
    with own_lab.stream("ambient") as ambient:
        leaf, product = own_lab.product(2.0, -3.0)
        with own_lab.stream("other"):
            product.backward(torch.full_like(product, 5.0))
    recording, _ = own_lab.finish()
    assert leaf.shape == product.shape == (ELEMENTS,)
    assert leaf.is_leaf and leaf.requires_grad and leaf.dtype is torch.float32
    assert leaf.cpu().unique().tolist() == [2.0]
    assert product.cpu().unique().tolist() == [-6.0]
    nodes = {launch.node: launch.id.stream for launch in recording.launches() if launch.node}
    assert nodes["MulBackward0"] == "ambient"
    assert ambient.stream_id != 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_poisoned_tensor_is_nan_until_it_is_written(own_lab, dtype):
    own_lab.begin(Plan())
    like = torch.zeros(3, 5, dtype=dtype, device=own_lab.device, requires_grad=True)
    poisoned = own_lab.poisoned(like)
    own_lab.finish()
    assert (poisoned.shape, poisoned.dtype, poisoned.device) == (like.shape, dtype, like.device)
    assert poisoned.cpu().isnan().all()
    assert not poisoned.requires_grad


def test_what_the_case_was_given_and_observed_is_not_freed_while_it_runs(own_lab):
    for _ in range(2):
        own_lab.begin(Plan())
        leaf, product = own_lab.product(2.0, 3.0)
        made = torch.zeros(ELEMENTS, device=own_lab.device)
        own_lab.observe(made, 0.0)
        kept = weakref.ref(product)
        del leaf, product, made
        recording, _ = own_lab.finish()
        assert not [entry for entry in recording.trace if isinstance(entry, Free)]
        assert kept() is None, "then it is freed"
    own_lab.begin(Plan())
    poisoned = own_lab.poisoned(torch.zeros(ELEMENTS, device=own_lab.device))
    del poisoned
    recording, _ = own_lab.finish()
    assert [type(entry) for entry in recording.trace].count(Free) >= 1, "a poisoned tensor is the case's to give up"
    tensor = torch.zeros(ELEMENTS, device=own_lab.device)
    own_lab.begin(Plan())
    del tensor
    recording, _ = own_lab.finish()
    assert len([entry for entry in recording.trace if isinstance(entry, Free)]) == 1, "others are seen to be freed"


# Observations.


def made_elsewhere(lab: Lab) -> torch.Tensor:
    """What another stream has made of a tensor that is the function's own, which nothing records there."""
    with lab.stream("fill") as fill:
        own = torch.full((ELEMENTS,), 5.0, device=lab.device)
    with lab.stream("ambient") as ambient:
        ambient.wait_stream(fill)
        return own * 2.0


@pytest.mark.parametrize("observes", [True, False], ids=["the_one_that_observes", "another"])
def test_the_variables_of_a_function_live_on_if_it_is_the_one_that_observes(own_lab, observes):
    def body() -> None:
        if observes:
            with own_lab.stream("fill") as fill:
                own = torch.full((ELEMENTS,), 5.0, device=own_lab.device)
            with own_lab.stream("ambient") as ambient:
                ambient.wait_stream(fill)
                made = own * 2.0
                own_lab.observe(made, 10.0)
        else:
            made = made_elsewhere(own_lab)
            with own_lab.stream("ambient"):
                own_lab.observe(made, 10.0)

    judgement = run_repetition(own_lab, body, 0, Plan(), with_happens_before=True).judgement
    assert [race.kind for race in judgement.races] == ([] if observes else ["freed while in use"])


def test_an_observation_is_a_copy_on_the_current_stream_and_waits_for_nothing(own_lab):
    tensor = torch.zeros(ELEMENTS, device=own_lab.device)
    own_lab.stream("fill")
    for _ in range(2):
        own_lab.begin(held("fill"))
        with own_lab.stream("fill"):
            tensor.fill_(5.0)
        with own_lab.stream("ambient"):
            own_lab.observe(tensor, 5.0)
        recording, (observation,) = own_lab.finish()
        assert not [entry for entry in recording.trace if isinstance(entry, Allocate)]
        assert [entry.id for entry in recording.launches()] == [LaunchId("fill", 0), LaunchId("ambient", 0)]
        tensor.zero_()
    # In the second repetition the place for the copy was there, so even the held launch was not forced.
    assert [hold.state for hold in recording.holds] == [HoldState.PENDING]
    assert [type(entry) for entry in recording.trace] == [Launch, Launch]
    assert observation.got.unique().tolist() == [0.0], "it saw what was there before the held fill"


def test_observations_are_those_of_this_repetition_in_order(own_lab):
    def observe(*values: float) -> list[tuple[str, list[float]]]:
        own_lab.begin(Plan())
        for value in values:
            own_lab.observe(torch.full((4,), value, device=own_lab.device), value)
        _, observations = own_lab.finish()
        assert [compare(observation) for observation in observations] == [None] * len(values)
        return [(observation.label, observation.got.unique().tolist()) for observation in observations]

    expected = [("observation 0", [1.0]), ("observation 1", [2.0]), ("observation 2", [1.0])]
    assert observe(1.0, 2.0, 1.0) == expected
    assert observe(2.0) == [("observation 0", [2.0])]
    assert observe(1.0, 2.0, 1.0) == expected


def test_an_observation_of_another_shape_gets_its_own_place(own_lab):
    for shape in ((4,), (2, 3), (), (4,)):
        own_lab.begin(Plan())
        own_lab.observe(torch.ones(shape, device=own_lab.device), 1.0)
        own_lab.observe(torch.full((4,), 7.0, device=own_lab.device), 7.0)
        _, observations = own_lab.finish()
        assert [tuple(observation.got.shape) for observation in observations] == [shape, (4,)]
        assert [compare(observation) for observation in observations] == [None, None]


def test_an_observation_says_where_it_was_made(own_lab):
    own_lab.begin(Plan())
    frame = inspect.currentframe()
    assert frame is not None
    line = frame.f_lineno + 1
    own_lab.observe(torch.ones(4, device=own_lab.device), 1.0)
    _, (observation,) = own_lab.finish()
    assert observation.line == (__file__, line)


def test_the_expected_value_may_be_a_tensor(own_lab):
    values = torch.arange(4.0)
    own_lab.begin(Plan())
    tensor = values.to(own_lab.device)
    own_lab.observe(tensor, values)
    own_lab.observe(tensor, values.flip(0))
    own_lab.observe(tensor, tensor)
    own_lab.observe(tensor, torch.arange(5.0))
    own_lab.observe(tensor, values.double())
    _, observations = own_lab.finish()
    assert observations[0].expected is values
    right, wrong, on_the_device, longer, wider = map(compare, observations)
    assert right is None and on_the_device is None
    assert wrong is not None and longer is not None and wider is not None
    assert (wrong.index, wrong.expected, wrong.got) == ((0,), "3.0", "0.0")
    assert (longer.found, wider.found) == ("shape", "dtype")


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.full((3, 4), 2.0, device=device).t(),
        lambda device: torch.full((6,), 2.0, device=device)[::2],
        lambda device: torch.full((4,), 2.0, device=device, requires_grad=True),
        lambda device: torch.full((4,), 2.0, dtype=torch.float64, device=device),
        lambda device: torch.full((4,), 2, dtype=torch.int64, device=device),
    ],
    ids=["transposed", "strided", "requires_grad", "float64", "int64"],
)
def test_any_dense_tensor_can_be_observed(own_lab, make):
    own_lab.begin(Plan())
    own_lab.observe(make(own_lab.device), 2)
    _, (observation,) = own_lab.finish()
    assert compare(observation) is None


def test_observing_nothing_is_a_usage_error_with_its_line(own_lab):
    own_lab.begin(Plan())
    frame = inspect.currentframe()
    assert frame is not None
    line = frame.f_lineno + 2
    with pytest.raises(UsageError) as caught:
        own_lab.observe(None, 1.0)
    assert f"test_lab.py:{line}: there is nothing to observe, the tensor is None" in str(caught.value)
    _, observations = own_lab.finish()
    assert observations == []


def test_a_hold_must_outlast_what_runs_after_the_preparations(own_lab, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(lab_module, "time", clock)
    own_lab.begin(Plan())
    clock.now = 101.0
    own_lab.finish()
    assert own_lab.unprepared_ms == pytest.approx(1000.0)
    own_lab.begin(Plan())
    with own_lab.preparing():
        clock.now = 107.0
    clock.now = 107.5
    own_lab.finish()
    assert own_lab.unprepared_ms == pytest.approx(500.0)


# One repetition.


def ordered(lab: Lab) -> Callable[[], None]:
    """A body of two launches on two streams, the second of which waits for the first."""
    like = torch.zeros(4, device=lab.device)

    def body() -> None:
        tensor = lab.poisoned(like)
        with lab.stream("fill") as fill:
            tensor.fill_(5.0)
        with lab.stream("ambient") as ambient:
            ambient.wait_stream(fill)
            lab.observe(tensor, 5.0)

    return body


def unordered(lab: Lab) -> Callable[[], None]:
    """The same body without its wait."""
    like = torch.zeros(4, device=lab.device)

    def body() -> None:
        tensor = lab.poisoned(like)
        with lab.stream("fill"):
            tensor.fill_(5.0)
        with lab.stream("ambient"):
            lab.observe(tensor, 5.0)

    return body


def test_a_repetition_is_judged_by_what_it_observed(own_lab):
    own_lab.stream("fill"), own_lab.stream("ambient")
    verdicts = {}
    for plan in (Plan(), held("fill"), held("ambient")):
        repetition = run_repetition(own_lab, unordered(own_lab), 3, plan, with_happens_before=False)
        verdicts[str(plan)] = repetition.judgement.verdict
        assert (repetition.number, repetition.plan, repetition.judgement.races) == (3, plan, [])
        assert repetition.duration_us > 0
    assert verdicts == {"baseline": Verdict.PASS, "hold=fill:0": Verdict.RACE, "hold=ambient:0": Verdict.PASS}
    assert run_repetition(own_lab, unordered(own_lab), 0, Plan(), with_happens_before=True).judgement.raced_by == [
        "happens-before"
    ]
    serial = run_repetition(own_lab, unordered(own_lab), 0, Plan(), serial=True, with_happens_before=False)
    assert serial.judgement.verdict is Verdict.PASS


def test_a_hold_of_a_launch_that_never_comes_is_inconclusive(own_lab):
    own_lab.stream("fill")
    repetition = run_repetition(own_lab, ordered(own_lab), 0, held("fill", 9), with_happens_before=True)
    assert [hold.state for hold in repetition.holds] == [HoldState.MISSING]
    assert repetition.judgement.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64, torch.bool])
def test_what_was_observed_is_overwritten_after_the_repetition(own_lab, dtype):
    tensor = torch.zeros(2, 3, dtype=dtype, device=own_lab.device)
    own_lab.begin(Plan())
    own_lab.observe(tensor[:, 1:], torch.zeros(2, 2, dtype=dtype))
    own_lab.observe(tensor[0, :1].expand(4), torch.zeros(4, dtype=dtype))
    own_lab.finish()
    spoiled = tensor.cpu() != 0  # so is NaN
    assert spoiled.tolist() == [[True, True, True], [False, True, True]]


def test_a_body_that_raises_leaves_no_work_behind(own_lab):
    tensor = torch.zeros(4, device=own_lab.device)
    own_lab.stream("fill")

    def body() -> None:
        with own_lab.stream("fill"):
            tensor.fill_(5.0)
        own_lab.observe(torch.zeros(4, device=own_lab.device), 0.0)
        raise ZeroDivisionError("from the body")

    with pytest.raises(ZeroDivisionError, match="from the body"):
        run_repetition(own_lab, body, 0, held("fill"), with_happens_before=True)
    assert tensor.cpu().tolist() == [5.0] * 4
    after = run_repetition(own_lab, ordered(own_lab), 1, Plan(), with_happens_before=True)
    assert after.judgement.verdict is Verdict.PASS
    assert [launch.id for launch in after.recording.launches()] == [LaunchId("fill", 0), LaunchId("ambient", 0)]


# What a case learns of its body, and the session.


def test_discovery_names_the_launches_in_order_with_their_lines(session, own_lab):
    discovery = Case("test_x.py::test_x", ordered(own_lab), session, own_lab, None).discover()
    assert discovery.order() == [LaunchId("fill", 0), LaunchId("ambient", 0)]
    assert {launch.line.file for launch in discovery.launches.values() if launch.line} == {__file__}
    assert discovery.aimed == frozenset()


def test_a_control_is_aimed_at_the_access_that_comes_first(session, own_lab):
    control = Control("Nothing orders the fill.", aim="fill")
    assert Case("test_x.py::test_x", unordered(own_lab), session, own_lab, control).discover().aimed == {
        LaunchId("fill", 0)
    }


def test_a_body_that_launches_nothing_is_a_case_error(session, own_lab):
    def body() -> None:
        own_lab.observe(torch.ones(4), 1.0)

    with pytest.raises(CaseError, match="launches nothing on sim:0"):
        Case("test_x.py::test_x", body, session, own_lab, None).discover()


def test_a_body_that_observes_nothing_is_a_case_error(session, own_lab):
    def body() -> None:
        torch.ones(4, device=own_lab.device)

    with pytest.raises(CaseError, match="observes nothing, so no wrong value can show"):
        Case("test_x.py::test_x", body, session, own_lab, None).discover()


@pytest.mark.parametrize(
    ("aim", "sentence"),
    [
        ("file", "aims at stream 'file' but launches nothing there; it launches on fill, ambient."),
        ("ambient", "races, but not with its aim, stream 'ambient'"),
    ],
)
def test_a_control_with_the_wrong_aim_is_a_case_error(session, own_lab, aim, sentence):
    control = Control("Nothing orders the fill.", aim)
    with pytest.raises(CaseError) as caught:
        Case("test_x.py::test_x", unordered(own_lab), session, own_lab, control).discover()
    assert sentence in str(caught.value)


@pytest.mark.parametrize("races", [True, False])
def test_a_race_may_be_why_a_body_does_not_launch_the_same_each_time(session, races):
    lab = session.lab()
    body = (unordered if races else ordered)(lab)
    calls: list[None] = []

    def branching():
        body()
        calls.append(None)
        if len(calls) > 1:  # as after a host's look at a value that was not there yet
            with lab.stream("ambient"):
                torch.zeros(4, device=lab.device)

    case = Case("test_x.py::test_x", branching, session, lab, None)
    if races:
        assert case.discover().launches
    else:
        with pytest.raises(CaseError, match="does not launch the same each time"):
            case.discover()


def test_a_load_on_the_simulator_is_a_usage_error():
    with pytest.raises(UsageError, match="--load compute needs a real device"):
        Session(Options(loads=("compute",)))


def test_the_load_is_measured_in_a_turn_and_rests_when_the_turn_has_ended(tmp_path, monkeypatch):
    path = tmp_path / "gpu.turns"
    seen = []

    class Load:
        stream_ids = ()

        def note(self, what):
            seen.append((what, "free" if is_free(path) else "taken"))

        def pause(self):
            self.note("rests")

        def resume(self):
            self.note("runs")

        def stop(self):
            self.note("stops")

    def start(session):
        load = Load()
        load.note("is measured")
        return load

    monkeypatch.setattr(Session, "_start_load", start)
    session = Session(Options(loads=("compute",), turns=str(path)))
    assert seen == [("is measured", "taken"), ("rests", "taken")]
    assert is_free(path)
    with session.turns.turn():
        assert seen[2:] == [("runs", "taken")]
    session.close()
    assert seen[3:] == [("rests", "taken"), ("stops", "free")]


def test_a_load_that_cannot_start_leaves_the_turn_to_the_others(tmp_path, monkeypatch):
    def fail(session):
        raise InfrastructureError("The compute load cannot run.")

    monkeypatch.setattr(Session, "_start_load", fail)
    with pytest.raises(InfrastructureError):
        Session(Options(loads=("compute",), turns=str(tmp_path / "gpu.turns")))
    assert is_free(tmp_path / "gpu.turns")


@pytest.mark.parametrize(("given_ms", "length", "fixed"), [(None, 4.0, False), (20.0, 20.0, True)])
def test_a_case_starts_with_the_hold_that_was_asked_for(given_ms, length, fixed):
    session = Session(Options(hold_ms=given_ms))
    hold = session.hold_length()
    assert (hold.milliseconds, hold.fixed) == (length, fixed)
    hold.milliseconds = 400.0
    assert session.hold_length().milliseconds == length, "each case has its own"
    assert session.load_reports() == []
    session.close()
