"""What all tests run under.

One thread, except where a test says otherwise: busy machines pay for waiting threads. Compiled
graphs are not kept between runs: those of another build call its operators by its arguments.
"""

import os

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
# Programs that tests start have more threads than one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

torch.set_num_threads(1)
