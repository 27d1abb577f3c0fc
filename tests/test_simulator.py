"""Without a GPU, every test of the kernels runs in numba's simulator: a child pytest, since the choice is made at import. It runs
beside the parent's tests (conftest.py); the one here comes last and waits for it."""
import re

import pytest

from indexer.device import is_available


@pytest.mark.skipif(is_available(), reason="the kernels' tests run directly: on the GPU, or this is the simulator already")
def test_kernels_in_the_simulator(simulator):
    child, output = simulator
    returncode = child.wait()
    output.seek(0)
    report = output.read()[-8000:]
    assert returncode == 0, report
    passed = re.search(r"(\d+) passed", report)
    assert passed, report
    assert int(passed[1]) >= 20, report
