"""One thread, except where a test says otherwise: busy machines pay for waiting threads."""

import torch

torch.set_num_threads(1)
