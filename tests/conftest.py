"""Where the tests run: on the GPU where there is one; else those of the kernels in numba's simulator, in a child process that
test_simulator.py waits for."""
import os
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from indexer.device import SIMULATED, is_available
from indexer.fuzz import FILLERS, filled_memory

HAS_GPU = is_available() and not SIMULATED
collect_ignore = ["test_codegen.py", "test_ptx.py", "test_wgmma.py"] if SIMULATED else []      # the simulator compiles nothing

# "ci" draws the same examples on every run; "dev" new ones; "nightly" many.
_COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("ci", max_examples=12 if SIMULATED else 40, derandomize=True, **_COMMON)
settings.register_profile("dev", max_examples=12 if SIMULATED else 40, **_COMMON)
settings.register_profile("nightly", max_examples=100 if SIMULATED else 1000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))


def pytest_configure(config):
    config.addinivalue_line("markers", "kernels: calls the kernels; on a GPU where there is one, else in the simulator")
    config.addinivalue_line("markers", "gpu: needs a real GPU")
    config.addinivalue_line("markers", "big: needs tens of GB of GPU memory")
    if SIMULATED:
        _quicken_simulator()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        elif item.get_closest_marker("kernels") and not is_available():
            item.add_marker(pytest.mark.skip(reason="without a GPU it runs in the simulator, in the child of test_simulator.py"))
    items.sort(key=_waits_for_simulator)


def _waits_for_simulator(item):
    return item.path.name == "test_simulator.py"


@pytest.fixture(scope="session", autouse=True)
def simulator(request):
    """The child pytest that runs the kernels' tests in the simulator, and the file of what it prints. It starts with the first test
    of the parent, for those take as long and a second core would else be idle."""
    if is_available() or not any(map(_waits_for_simulator, request.session.items)):
        yield None
        return
    tests = str(request.config.rootpath / "tests")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "kernels and not gpu", "-p", "no:cacheprovider", tests]
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, cwd=request.config.rootpath, env=environment, stdout=output, stderr=subprocess.STDOUT)
        yield child, output
        child.kill()
        child.wait()


@pytest.fixture(autouse=True)
def poisoned_scratch(request):
    """Kernels get their scratch, and the outputs they allocate, full of scores that win and of positions that do not exist."""
    if not request.node.get_closest_marker("kernels"):
        yield
        return
    with filled_memory(FILLERS[0]):
        yield


def _quicken_simulator():
    """Lets the simulator's threads take turns at once, and makes its shared arrays safe for that.

    The simulator polls its threads while it holds the interpreter, so a barrier costs a switch interval, 5 ms by default. It also
    looks up a shared array and makes it in two steps, between which another thread may do the same.
    """
    from numba.cuda import types
    from numba.cuda.np import numpy_support
    from numba.cuda.simulator.kernelapi import FakeCUDAShared

    lock = threading.Lock()

    def array(self, shape, dtype, alignment=None):
        caller = sys._getframe(1)
        key = caller.f_code, caller.f_lineno
        with lock:
            if key not in self._allocations:
                self._allocations[key] = np.empty(shape, numpy_support.as_dtype(dtype) if isinstance(dtype, types.Type) else dtype)
            return self._allocations[key]

    FakeCUDAShared.array = array
    sys.setswitchinterval(1e-5)
