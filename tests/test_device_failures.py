"""When the device itself fails: every error says what was wanted or what is supported, nothing crashes, and what can go on does."""
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
from arrays import to_cupy, to_host, to_torch
from assertions import assert_same_bits
from numba.cuda import types
from test_gpu import small

import indexer
from indexer import device
from indexer.__main__ import to_device as to_numba
from indexer.batches import make_batch
from indexer.device import SIMULATED, Kernel, Launch

SELECT = indexer.mla_indexer_ragged_float8_paged
DESTROYED = "a stream, or the context of a stream or an array, has been destroyed"
FAILED = "some kernel of this process has failed before"
SUPPORTED = "the kernels need compute capability 7.5 or newer"


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.kernels(test))


# ---------------------------------------------------------------------------------------------------------- without a GPU


class CUDAError(Exception):
    """As cuda.core's: no RuntimeError."""


@pytest.mark.parametrize(("name", "cause"), [
    ("INVALID_HANDLE", DESTROYED), ("CONTEXT_IS_DESTROYED", DESTROYED), ("ILLEGAL_ADDRESS", FAILED), ("LAUNCH_FAILED", FAILED),
    ("NO_BINARY_FOR_GPU", SUPPORTED), ("UNSUPPORTED_PTX_VERSION", SUPPORTED)])
def test_an_error_of_the_driver_comes_with_its_cause(name, cause):
    from cuda.bindings import driver
    with pytest.raises(RuntimeError, match=rf"^CUDA_ERROR_{name}: some text; {cause}") as found, device.explaining_errors():
        raise CUDAError(f"CUDA_ERROR_{name}:\n some text")
    assert isinstance(found.value.__cause__, CUDAError)
    with pytest.raises(RuntimeError, match=rf"^a kernel could not be launched: CUDA_ERROR_{name}; {cause}"):
        device._check((getattr(driver.CUresult, f"CUDA_ERROR_{name}"),), "a kernel could not be launched")


@pytest.mark.parametrize("error", [
    CUDAError("CUDA_ERROR_NOT_READY"), ValueError("q must be in device memory, got address 0x10 (CUDA_ERROR_INVALID_VALUE)"),
    MemoryError("4096 bytes of scratch could not be allocated"), RuntimeError("CUDA_ERROR_INVALID_HANDLE"), KeyError("x")])
def test_other_errors_stay_what_they_are(error):
    expected = RuntimeError if isinstance(error, CUDAError) else type(error)
    with pytest.raises(expected) as found, device.explaining_errors():
        raise error
    assert str(found.value) == str(error)


def test_an_old_card_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(device, "SIMULATED", False)
    monkeypatch.setattr(device, "require_device", lambda: None)
    monkeypatch.setattr(device.cuda, "get_current_device", lambda: SimpleNamespace(compute_capability=(7, 0)), raising=False)
    with pytest.raises(RuntimeError, match=rf"^{SUPPORTED}, this device has 7\.0$"), device.on_device_of([]):
        pass


@pytest.mark.skipif(SIMULATED, reason="the simulator loads no code")
def test_a_kernel_that_the_driver_cannot_load_says_what_is_supported(monkeypatch):
    def get_cufunc():
        raise CUDAError("[209] Call to cuLibraryLoadData results in CUDA_ERROR_NO_BINARY_FOR_GPU")

    monkeypatch.setattr(device.cuda, "get_current_device", lambda: SimpleNamespace(compute_capability=(9, 9), id=0))
    monkeypatch.setattr(device, "_compiled", lambda *_: SimpleNamespace(_codelibrary=SimpleNamespace(get_cufunc=get_cufunc)))
    with pytest.raises(RuntimeError, match=f"CUDA_ERROR_NO_BINARY_FOR_GPU; {SUPPORTED}"):
        Launch(Kernel(lambda _: None, (types.int32,), 32), 1, (0,))


# ------------------------------------------------------------------------------------------------------- want of memory


@on_gpu
@pytest.mark.parametrize("to", [to_torch, to_cupy, to_numba])
def test_want_of_scratch_names_the_budget_and_the_next_call_works(to):
    """A score matrix of 4 TB, by bounds alone: refused by the allocator; then the same call with another budget."""
    rows, top_k = 4096, 16
    batch = make_batch(np.random.default_rng(0), new_tokens=[rows], cached=[100], num_heads=8, head_dim=32, top_k=top_k,
                       spare_columns=2**22, max_prompt_length=rows, max_context_length=2**28, page_size=64)
    arguments = batch.arguments(to)
    with pytest.raises(MemoryError, match=rf"scores_budget_bytes bounds \({2**60} here\), could not be allocated"):
        SELECT(*arguments, top_k=top_k, scores_budget_bytes=2**60)
    assert_same_bits(to_host(SELECT(*arguments, top_k=top_k, scores_budget_bytes=2**31)), batch.select(oracle.select))


@on_gpu
def test_want_of_a_workspace_names_the_budget_and_the_next_plan_works():
    batch = small(page_size=64)
    bounds = {"max_tokens": 2**20, "max_requests": 4, "max_candidates": 2**22, "top_k": batch.top_k}
    with pytest.raises(MemoryError, match=rf"^\d+ bytes of workspace, of which scores_budget_bytes bounds {2**44}, could not be"):
        indexer.IndexerPlan(**bounds, scores_budget_bytes=2**60)
    out = to_numba(np.empty((batch.num_tokens, batch.top_k), np.int32))
    indexer.IndexerPlan(**bounds, scores_budget_bytes=2**30)(*batch.arguments(to_numba), out=out)
    assert_same_bits(to_host(out), batch.select(oracle.select))


# ------------------------------------------------------------------------------------------------ what no call can work on

CHILD = """
import numpy as np
from cuda.bindings import driver
from numba import cuda
import indexer
from indexer.__main__ import to_device
from indexer.batches import make_batch

batch = make_batch(np.random.default_rng(0), new_tokens=[2], cached=[100], num_heads=64, head_dim=128, top_k=16)
arguments, out = batch.arguments(to_device), to_device(np.zeros((2, 16), np.int32))
plan = indexer.IndexerPlan(max_tokens=2, max_requests=1, max_candidates=256, top_k=16)
calls = {
    "function": lambda: indexer.mla_indexer_ragged_float8_paged(*arguments, top_k=16, out=out, stream=stream),
    "plan": lambda: plan(*arguments, out=out, stream=stream)}
stream = None
for call in calls.values():
    call()
cuda.synchronize()
def create_context():
    try:
        return driver.cuCtxCreate(None, 0, 0)[1]              # CUDA 13
    except TypeError:
        return driver.cuCtxCreate(0, 0)[1]
FAILURE
for name, call in calls.items():
    try:
        call()
        cuda.synchronize()
        print(name, "has gone through")
    except Exception as error:
        print(name, type(error).__name__, error)
"""
FAILURES = {
    "stream of a destroyed context": (DESTROYED, """
context = create_context()
stream = int(driver.cuStreamCreate(1)[1])
driver.cuCtxDestroy(context)
"""),
    "failed kernel": (FAILED, """
@cuda.jit("void(uint8[::1], int64)")
def write(array, index):
    array[index] = 1
write[1, 1](to_device(np.zeros(1, np.uint8)), 2**44)
try:
    cuda.synchronize()
except Exception:
    pass
""")}


@on_gpu
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_of_the_driver_is_told_and_kills_nothing(failure):
    """In a process of its own: a context does not recover."""
    cause, code = FAILURES[failure]
    done = subprocess.run([sys.executable, "-c", CHILD.replace("FAILURE", code)], capture_output=True, text=True, timeout=300,
                          cwd=Path(__file__).parent.parent)
    report = f"exit status {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
    lines = done.stdout.splitlines()
    assert [line.split(" ")[:2] for line in lines] == [["function", "RuntimeError"], ["plan", "RuntimeError"]], report
    assert all(cause in line for line in lines), report
    assert done.returncode >= 0, report                                 # no signal
