from __future__ import annotations

import torch

# The models here are so small that a second thread only waits for the first.
torch.set_num_threads(1)
