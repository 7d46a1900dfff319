"""One thread, except where a test says otherwise: waiting threads of a busy machine cost minutes."""

import torch

torch.set_num_threads(1)
