"""Which of the autograd engine's synchronization edges a repetition crosses.

An edge is one of the places where the engine orders streams, or leaves it to others. What is known of a repetition
says which it crossed: who issued each synchronization, in which node, for an event that was recorded where. Sources are
below ``torch/csrc/autograd`` in PyTorch, as of 2.13 (from 2.8 on they are as told here).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from harness.observe.synchronizations import Synchronization
from harness.observe.trace import Launch, Trace

INPUT_BUFFER = "InputBuffer::add"
BEFORE_A_NODE = "Engine::evaluate_function"
AT_THE_END = "GraphTask::exec_post_processing"


class Edge(NamedTuple):
    """One edge of the engine."""

    what: str
    seen_as: str
    """What of a repetition shows that it was crossed."""
    source: str


EDGES = {
    "a": Edge(
        "root gradient to first node",
        f"{BEFORE_A_NODE} waits for an event that {INPUT_BUFFER} recorded outside any node, or in GraphRoot",
        "Engine::execute (engine.cpp), GraphRoot (functions/basic_ops.h)",
    ),
    "b": Edge(
        "producer to consumer on another stream",
        f"{BEFORE_A_NODE} waits for an event recorded in another node",
        "InputBuffer::add (input_buffer.cpp), Engine::evaluate_function (engine.cpp)",
    ),
    "c": Edge(
        "accumulation of several producers",
        f"{INPUT_BUFFER} waits",
        "InputBuffer::add (input_buffer.cpp)",
    ),
    "d": Edge(
        "to the stream of a leaf",
        f"{BEFORE_A_NODE} waits in AccumulateGrad",
        "AccumulateGrad (functions/accumulate_grad.h), Engine::evaluate_function (engine.cpp)",
    ),
    "e": Edge(
        "end of backward",
        f"{AT_THE_END} waits",
        "GraphTask::exec_post_processing, GraphTask::stash_current_streams (engine.cpp)",
    ),
    "f": Edge(
        "across devices",
        "the engine makes a stream wait for an event of another device's",
        "Stream sync contract when dealing with multi-deviced-ness (input_buffer.cpp)",
    ),
    "g": Edge(
        "memory used on another stream",
        f"{INPUT_BUFFER} calls record_stream",
        "record_stream_any_impl (input_buffer.cpp)",
    ),
    "h": Edge(
        "callbacks at the end of backward",
        "a backward launches outside its nodes",
        "GraphTask::exec_post_processing, Engine::queue_callback (engine.cpp)",
    ),
    "i": Edge(
        "backward inside backward",
        f"{AT_THE_END} waits while a node is running",
        "Engine::execute_with_graph_task, reentrant (engine.cpp)",
    ),
    "j": Edge(
        "between host and device",
        "a node copies to or from the host",
        "the early return of InputBuffer::add (input_buffer.cpp), CopyBackwards (functions/tensor.cpp)",
    ),
    "k": Edge(
        "threads of the engine",
        "nodes launch or synchronize on several threads, or what is outside backward does",
        "Engine::thread_init, Engine::ready_queue (engine.cpp)",
    ),
}


def crossed(
    synchronizations: Sequence[Synchronization], trace: Trace, device_of: Callable[[str], int | None]
) -> set[str]:
    """The edges that a repetition crossed.

    Args:
        synchronizations: all of it, the recordings of events included.
        trace: of the same repetition.
        device_of: the device of a stream, by its name.
    """
    found: set[str] = set()
    for each in synchronizations:
        issuer, kind = each.id.issuer, each.id.kind
        if issuer == INPUT_BUFFER and kind == "record_stream":
            found.add("g")
        if kind != "wait" or issuer not in (INPUT_BUFFER, BEFORE_A_NODE, AT_THE_END):
            continue
        recorded = None if each.recorded is None else synchronizations[each.recorded]
        if recorded is not None and device_of(recorded.id.stream) != device_of(each.id.stream):
            found.add("f")
        if issuer == INPUT_BUFFER:
            found.add("c")
        elif issuer == AT_THE_END:
            found |= {"e"} if each.node is None else {"e", "i"}
        else:
            found.add("a" if recorded is not None and _brings_a_root(recorded) else "b")
            if _is(each.node, "AccumulateGrad"):
                found.add("d")
    launches = [entry for entry in trace if type(entry) is Launch]
    if any(launch.with_host and launch.node is not None for launch in launches):
        found.add("j")
    if any(launch.backward is not None and launch.node is None for launch in launches):
        found.add("h")
    everything: list[Launch | Synchronization] = [*launches, *synchronizations]
    in_nodes = {each.thread for each in everything if each.node is not None}
    outside = {each.thread for each in everything if each.backward is None}
    if in_nodes and max(len(in_nodes), len(outside)) > 1:
        found.add("k")
    return found


def _brings_a_root(recorded: Synchronization) -> bool:
    return recorded.id.issuer == INPUT_BUFFER and (recorded.node is None or _is(recorded.node, "GraphRoot"))


def _is(node: str | None, name: str) -> bool:
    return node is not None and node.rpartition("::")[2] == name
