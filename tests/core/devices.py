"""The devices that tensor tests run on: the CPU, and a GPU if there is one."""

import pytest
import torch

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=cuda)]
