"""Machine code of every kernel for every target, without a GPU: PTX from NVVM, SASS from ptxas, read by nvdisasm."""
import functools
import importlib.metadata
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from numba import cuda
from wgmma_kernel import WGMMA

from indexer import cuda_kernels, sampled_selection, scoring, selection

TARGETS = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
HEAD_COUNTS = (8, 16, 32, 64)
KERNELS = {
    **{f"exact_scorer_{heads}": scoring.exact_scorer(scoring.score_tile(heads)) for heads in HEAD_COUNTS},
    "select_rows": selection.SELECT_ROWS,
    "select_rows_sampled": sampled_selection.SELECT_ROWS_SAMPLED,
    "rank_rows": selection.RANK_ROWS,
    "locate_rows": cuda_kernels.LOCATE_ROWS,
    "fill_outside": cuda_kernels.FILL_OUTSIDE,
}


def tool(name):
    """Path of ptxas or nvdisasm: from its wheel, or from a CUDA toolkit."""
    site = Path(sysconfig.get_paths()["purelib"])
    found = [path for path in site.glob(f"nvidia/**/bin/{name}") if path.is_file()]
    path = str(found[0]) if found else shutil.which(name, path="/usr/local/cuda/bin") or shutil.which(name)
    assert path, f"{name} is missing: install the extra 'test'"
    return path


@functools.cache
def machine_code(name, capability, tmp):
    """(PTX, ptxas report, SASS) of a kernel."""
    kernel = KERNELS.get(name, WGMMA)
    ptx, _ = cuda.compile(kernel.function, kernel.signature, cc=capability, device=False, abi="numba",
                          launch_bounds=kernel.launch_bounds)
    source, cubin = tmp / f"{name}.ptx", tmp / f"{name}.cubin"
    source.write_text(ptx)
    target = "sm_" + "".join(map(str, capability))
    ptxas = subprocess.run([tool("ptxas"), "-v", f"-arch={target}", source, "-o", cubin], capture_output=True, text=True)
    assert ptxas.returncode == 0, ptxas.stderr
    sass = subprocess.run([tool("nvdisasm"), "-c", cubin], capture_output=True, text=True)
    assert sass.returncode == 0, sass.stderr
    return ptx, ptxas.stderr, sass.stdout


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    return tmp_path_factory.mktemp("code")


def opcodes(sass):
    """Instruction names with their modifiers, in order."""
    return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)", sass, re.MULTILINE)


def count(sass, prefix):
    return sum(name.startswith(prefix) for name in opcodes(sass))


def check_no_spills(ptx, report, sass):
    assert ".local" not in ptx
    assert re.search(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", report), report
    assert count(sass, "LDL") == count(sass, "STL") == 0
    assert len(opcodes(sass)) > 20, "no machine code was read"


@pytest.mark.parametrize("capability", TARGETS, ids=lambda cc: "sm_" + "".join(map(str, cc)))
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_for_every_target(name, capability, tmp):
    ptx, report, sass = machine_code(name, capability, tmp)
    check_no_spills(ptx, report, sass)
    assert "BRA.DIV" not in opcodes(sass)
    assert "ftz" not in ptx                                             # denormals are kept
    if name.startswith("exact_scorer"):
        # integer products of 32 x 32 bits into 64, and one fused multiply-add per relu: nothing in float64
        heads = int(name.rsplit("_", 1)[1])
        dots = heads // scoring.NUM_CHAINS * scoring.score_tile(heads).keys_per_thread
        assert opcodes(sass).count("IMAD.WIDE") >= dots
        assert ptx.count("fma.rn.f32") == dots
        assert not any(count(sass, prefix) for prefix in ("DFMA", "DMUL", "DADD", "HMMA", "IMMA"))
        assert int(re.search(r"(\d+) bytes smem", report)[1]) == scoring.score_tile(heads).shared_bytes
        if heads >= 32:                                                 # operands are read four at a time
            assert sum(name.startswith("LDS") and name.endswith(".128") for name in opcodes(sass)) >= 2
    if name == "select_rows":
        assert count(sass, "ATOMS") >= 1
        assert count(sass, "ATOMG") == count(sass, "RED") == 0


def test_launch_bounds_hold(tmp):
    """Registers per thread leave room for at least three blocks of the scorer on a multiprocessor (65,536 registers)."""
    for capability in TARGETS:
        _, report, _ = machine_code("exact_scorer_64", capability, tmp)
        registers = int(re.search(r"Used (\d+) registers", report)[1])
        assert registers * KERNELS["exact_scorer_64"].threads * 3 <= 65536, report


def test_the_wgmma_probe(tmp):
    """The kernel that checks the oracle's "wgmma" really issues one wgmma for every 32 of depth."""
    ptx, report, sass = machine_code("wgmma", (9, 0, "a"), tmp)
    check_no_spills(ptx, report, sass)
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3") == 4
    assert count(sass, "QGMMA.64x128x32") == 4


def test_numba_cuda_is_the_pinned_one():
    assert importlib.metadata.version("numba-cuda").startswith("0.30.")
