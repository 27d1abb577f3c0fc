"""Machine code of every kernel for every target, without a GPU: PTX from NVVM, SASS from ptxas, read by nvdisasm."""
import functools
import importlib.metadata
import re

import pytest
from codegen import assemble
from h200 import SHARED_BYTES
from numba import cuda
from wgmma_kernel import WGMMA

from indexer import cluster_selection, rows, sampled_selection, scoring, selection, tma_scoring, tma_tile, wgmma_scoring

TARGETS = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
HEAD_COUNTS = (8, 16, 32, 64)
KERNELS = {
    **{f"exact_scorer_{heads}": scoring.exact_scorer(scoring.score_tile(heads)) for heads in HEAD_COUNTS},
    "select_rows": selection.SELECT_ROWS,
    "select_rows_sampled": sampled_selection.SELECT_ROWS_SAMPLED,
    "rank_rows": selection.RANK_ROWS,
    "locate_rows": rows.LOCATE_ROWS,
    "pack_chunks": rows.PACK_CHUNKS,
    "fill_outside": rows.FILL_OUTSIDE,
}
TMA_TILES = {
    f"tma_scorer_{heads}_{depth}_{tokens}": tma_tile.tile_for(heads, depth, tokens, SHARED_BYTES)
    for heads, depth, tokens in ((64, 128, 1), (64, 128, 4), (32, 128, 8), (128, 64, 2), (8, 32, 16), (8, 128, 1), (16, 128, 1),
                                 (32, 64, 2))
}
HOPPER_KERNELS = {
    "wgmma_probe": WGMMA,
    "wgmma_scorer": wgmma_scoring.SCORE_ROWS,
    "select_found_rows": sampled_selection.SELECT_FOUND_ROWS,
    "select_rows_of_clusters": cluster_selection.SELECT_ROWS_OF_CLUSTERS,
    **{name: tma_scoring.tma_scorer(tile) for name, tile in TMA_TILES.items()},
}


@functools.cache
def machine_code(name, capability):
    """(PTX, ptxas report, SASS) of a kernel."""
    kernel = {**KERNELS, **HOPPER_KERNELS}[name]
    ptx, _ = cuda.compile(kernel.function, kernel.signature, cc=capability, device=False, abi="numba",
                          launch_bounds=kernel.launch_bounds)
    return ptx, *assemble(ptx, "sm_" + "".join(map(str, capability)))


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
def test_every_kernel_for_every_target(name, capability):
    ptx, report, sass = machine_code(name, capability)
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


def test_launch_bounds_hold():
    """Registers per thread leave room for at least three blocks of the scorer on a multiprocessor (65,536 registers)."""
    for capability in TARGETS:
        _, report, _ = machine_code("exact_scorer_64", capability)
        registers = int(re.search(r"Used (\d+) registers", report)[1])
        assert registers * KERNELS["exact_scorer_64"].threads * 3 <= 65536, report


def test_the_wgmma_probe():
    """The kernel that checks the oracle's "wgmma" really issues one wgmma for every 32 of depth."""
    ptx, report, sass = machine_code("wgmma_probe", (9, 0, "a"))
    check_no_spills(ptx, report, sass)
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3") == 4
    assert count(sass, "QGMMA.64x128x32") == 4


def check_hopper_kernel(name):
    ptx, report, sass = machine_code(name, (9, 0, "a"))
    check_no_spills(ptx, report, sass)
    assert "BRA.DIV" not in opcodes(sass)
    assert "ftz" not in ptx
    assert "C75" not in report, "products are serialised"
    assert re.search(r"max\.NaN\.f32", ptx)
    assert count(sass, "QGMMA") == ptx.count("wgmma.mma_async")         # ptxas has dropped some elsewhere
    return ptx, report, sass


def test_the_plain_hopper_scorer():
    _, _, sass = check_hopper_kernel("wgmma_scorer")
    assert count(sass, "QGMMA.64x64x32") == 8                           # from zero, and to what is there
    assert opcodes(sass).count("FMNMX.NAN") == opcodes(sass).count("FFMA") == 32


@pytest.mark.parametrize("name", TMA_TILES)
def test_the_hopper_scorer(name):
    tile = TMA_TILES[name]
    _, report, sass = check_hopper_kernel(name)
    columns = tile.columns // tile.num_groups
    walks = 7 if tile.group_tokens > 1 else 5 if tile.num_groups == 2 else 1        # groups in all walks through an item
    products = count(sass, f"QGMMA.64x{columns}x32")
    assert products >= walks * tile.depth_steps
    assert products % tile.depth_steps == 0                             # LLVM may unroll a short walk
    assert count(sass, "UTMALDG.3D") >= 2                               # query tiles, key tiles
    assert count(sass, "UBLKCP") >= 1                                   # key scales
    assert count(sass, "WARPGROUP.DEPBAR") == count(sass, "WARPGROUP.ARRIVE") == products // tile.depth_steps
    assert {".".join(name.split(".")[:2]) for name in opcodes(sass) if name.startswith("USETMAXREG")} == {
        "USETMAXREG.DEALLOC", "USETMAXREG.TRY_ALLOC"}
    assert int(re.search(r"Used (\d+) registers", report)[1]) * tma_tile.THREADS <= 65536
    moved = 128 * tma_tile.PRODUCER_REGISTERS + 32 * tma_tile.MATH_WARPS * tma_tile.MATH_REGISTERS
    assert moved <= 168 * tma_tile.THREADS                           # no more than all have at the start
    assert tile.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("name", ["select_found_rows", "select_rows_of_clusters"])
def test_selections_on_hopper(name):
    ptx, report, sass = machine_code(name, (9, 0, "a"))
    check_no_spills(ptx, report, sass)
    assert "BRA.DIV" not in opcodes(sass)


def test_the_selection_in_clusters():
    """Blocks talk by stores that count at a barrier; a release of the whole cluster would cost more than all the rest."""
    _, _, sass = machine_code("select_rows_of_clusters", (9, 0, "a"))
    assert count(sass, "STAS") >= 5
    assert count(sass, "UCGABAR_ARV") == count(sass, "UCGABAR_WAIT") == 1
    assert count(sass, "MEMBAR") == 0


def test_numba_cuda_is_the_pinned_one():
    assert importlib.metadata.version("numba-cuda").startswith("0.30.")
