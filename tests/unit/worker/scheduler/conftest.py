"""Pipeline depths of the scheduler tests: 1 on the CPU, 2 on CUDA."""

import pytest


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def depth(request):
    return request.param
