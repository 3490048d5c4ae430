"""The program of default_streams_between_devices.py on Sidestream's simulated accelerator, without a GPU.

    python docs/defects/default_streams_between_devices_simulated.py

PyTorch's own autograd engine drives the simulator as it drives CUDA. In virtual time a launch takes effect when the
clocks of its stream and of the host say so, so that the sleep delays what it delays on a GPU, every time.
"""

import runpy
import sys
from pathlib import Path

from harness.backends import simulator
from harness.perturb.schedule import VirtualTime

simulator.register(lambda sentence: print(sentence, file=sys.stderr))
simulator.set_schedule(VirtualTime())
runpy.run_path(str(Path(__file__).with_name("default_streams_between_devices.py")), run_name="__main__")
