"""Same seed, same plans, same traces: on the simulator a repetition is a function of its plan."""

from __future__ import annotations

import json
import subprocess
import sys

from harness.tests.suite_runner import REPOSITORY

TRACES = """
import json
import sys
import torch
from harness.campaign.options import Options
from harness.campaign.session import Session
from harness.perturb.plan import Plan

DEVICES = int(sys.argv[1])


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, factor):
        ctx.factor = factor
        return tensor * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def body(lab):
    roots, seeds, leaves = [], [], []
    for device in range(DEVICES):
        with lab.stream(f"forward{device}", device):
            with lab.preparing():
                leaf = torch.full((16,), 2.0, device=f"sim:{device}", requires_grad=True)
                root = Scale.apply(Scale.apply(leaf, 3.0), 1.0) + leaf
        seed = lab.poisoned(root)
        with lab.stream(f"fill{device}", device) as fill:
            seed.fill_(5.0)
        lab.stream(f"ambient{device}", device).wait_stream(fill)
        roots.append(root), seeds.append(seed), leaves.append(leaf)
    with lab.stream("ambient0"):
        for root, seed, leaf, device in zip(roots, seeds, leaves, range(DEVICES)):
            with lab.stream(f"ambient{device}", device):
                root.backward(seed)
                lab.observe(leaf.grad, 20.0)


session = Session(Options())
lab = session.lab()
for plan in ("baseline", "hold=fill0:0", "hold=ambient0:0", "baseline", "hold=fill0:0"):
    lab.begin(Plan.parse(plan), lines=True)
    body(lab)
    recording, observations = lab.finish()
    values = [observation.got[0].item() for observation in observations]
    print(json.dumps({"trace": list(map(repr, recording.trace)), "values": values}))
"""


def traces(devices: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", TRACES, str(devices)],
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
        check=True,
        timeout=240,
    )
    return done.stdout.splitlines()


def test_one_device_gives_identical_traces():
    first, second = traces(1), traces(1)
    assert first == second, "two processes"
    assert first[0] == first[3], "two repetitions of one process"
    assert first[1] == first[4], "two repetitions of one process"
    assert all("Launch" in line for line in first)


def test_two_devices_give_identical_traces_a_stream():
    def by_stream(line: str) -> dict[str, list[str]]:
        # The devices' threads number the blocks of memory as they come, so launches are compared without their bytes.
        streams: dict[str, list[str]] = {}
        for entry in json.loads(line)["trace"]:
            if entry.startswith("Launch"):
                stream = entry.split("stream='")[1].split("'")[0]
                streams.setdefault(stream, []).append(entry.split("accesses")[0])
        return streams

    first, second = traces(2), traces(2)
    for one, other in zip(first, second, strict=True):
        assert by_stream(one) == by_stream(other)
    assert len(by_stream(first[0])) >= 4
