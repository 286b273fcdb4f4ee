"""The devices that tensor tests run on: the CPU, and a GPU if there is one."""

import pytest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
