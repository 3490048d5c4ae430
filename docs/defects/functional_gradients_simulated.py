"""The program of functional_gradients.py on Sidestream's simulated accelerator, without a GPU.

    python docs/defects/functional_gradients_simulated.py

PyTorch's own autograd engine drives the simulator as it drives CUDA.
"""

import runpy
import sys
from pathlib import Path

from harness.backends import simulator

simulator.register(lambda sentence: print(sentence, file=sys.stderr))
runpy.run_path(str(Path(__file__).with_name("functional_gradients.py")), run_name="__main__")
