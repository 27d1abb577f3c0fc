"""Without a GPU, every test of the kernels runs here, in numba's simulator: a child pytest, since the choice is made at import."""
import os
import pathlib
import re
import subprocess
import sys

import pytest

from indexer.device import is_available


@pytest.mark.skipif(is_available(), reason="the kernels' tests run directly: on the GPU, or this is the simulator already")
def test_kernels_in_the_simulator(request):
    root = pathlib.Path(request.config.rootpath)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "kernels and not gpu", "-p", "no:cacheprovider", str(root / "tests")]
    child = subprocess.run(command, cwd=root, env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}, capture_output=True, text=True)
    report = child.stdout[-6000:] + child.stderr[-2000:]
    assert child.returncode == 0, report
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed, report
    assert int(passed[1]) >= 20, report
