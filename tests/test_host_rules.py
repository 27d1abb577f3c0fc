"""Rules that need no GPU: plans, tiles, byte codes, the order of score bits, array views."""
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from assertions import assert_same_bits
from h200 import CLUSTERS, SHARED_BYTES
from numba.cuda import types

from indexer import device, launches, sampled_selection, scoring, selection
from indexer.batches import make_batch
from indexer.chunks import chunk_rows as device_chunk_rows
from indexer.chunks import packed as device_packed
from indexer.device import MAX_GRID, SIMULATED, Kernel, _words, rounded
from indexer.launches import Plan
from indexer.problem import FP8_DTYPES, ArrayView, check_call, decode_table, describe, fp8_name

decode, chunk_rows, packed = (function.fn if SIMULATED else function.py_func
                              for function in (scoring.decode, device_chunk_rows, device_packed))


def plan_of(num_multiprocessors=132, shared_bytes_limit=SHARED_BYTES, with_scores=False, max_clusters=None, **options):
    """The plan of a call with these lengths. All pages are one, so that a million keys need no memory."""
    options = {"new_tokens": [8], "cached": [992], "num_heads": 64, "head_dim": 32, "page_size": 64, "top_k": 100, **options}
    batch = make_batch(np.random.default_rng(0), **{**options, "cached": [0] * len(options["cached"])})
    most_keys = max(n + c for n, c in zip(options["new_tokens"], options["cached"]))
    batch = replace(batch, cache_lengths=np.array(options["cached"], "uint32"),
                    lookup_table=np.zeros((len(options["cached"]), most_keys // options["page_size"] + 1), "uint32"))
    call = check_call(*batch.arguments(), mask=batch.mask, kpool=batch.kpool, arithmetic="exact", top_k=batch.top_k,
                      order=batch.order, scores_budget_bytes=batch.scores_budget_bytes)
    return Plan.of(call, num_multiprocessors, shared_bytes_limit, with_scores=with_scores, max_clusters=max_clusters)


# ------------------------------------------------------------------------------------------------------------------ plans


@pytest.mark.parametrize(("budget", "rows"), [
    (1, 1),                       # one row, whatever it takes
    (4 * 1000, 1), (8 * 1000 - 1, 1), (8 * 1000, 2),
    (7 * 4000 + 3999, 7), (8 * 4000, 8), (2**40, 8),
])
def test_the_score_matrix_stays_within_the_budget_or_one_row(budget, rows):
    plan = plan_of(scores_budget_bytes=budget)
    assert plan.width == 1000
    assert plan.rows_per_chunk == rows
    assert plan.scores_shape == (rows, 1000)
    assert 4 * rows * 1000 <= max(budget, 4 * 1000)


def slots(num_chunks, rows_per_chunk, pitch, num_rows, packing=()):
    """What every slot of a launch works on."""
    return [chunk_rows((slot, rows_per_chunk, pitch, num_rows), np.array(packing, np.int32)) for slot in range(num_chunks)]


def test_chunks_cover_every_row_once():
    plan = plan_of(scores_budget_bytes=3 * 4000)
    assert (plan.num_chunks, plan.rows_per_chunk, plan.is_packed) == (3, 3, True)
    assert slots(3, 3, 1000, 8) == [(0, 3, 1000), (3, 6, 1000), (6, 8, 1000)]
    assert (plan_of().num_chunks, plan_of().is_packed) == (1, False)
    assert slots(1, 8, 1000, 8) == [(0, 8, 1000)]
    without_keys = plan_of(new_tokens=[3], cached=[0], kpool=4, scores_budget_bytes=1)
    assert (without_keys.num_chunks, without_keys.is_packed) == (3, False)


def test_slots_behind_the_last_row_have_none():
    """Three rows by bounds, seven by the live lengths: of the slots for 20 rows three are used."""
    assert slots(7, 3, 1000, 20, (7, 400)) == [(0, 7, 400), (7, 14, 400), (14, 20, 400), *[(20, 20, 400)] * 4]
    assert slots(2, 2**31 - 1, 10, 2**31 - 1, (2**31 - 1, 10))[1][:2] == (2**31 - 1, 2**31 - 1)        # no product overflows


@pytest.mark.parametrize(("longest", "width", "num_scores", "num_rows", "rows", "pitch"), [
    (64_000, 2**20, 128 * 2**20, 4096, 2097, 64_000),         # 2097 * 64,000 = 134,208,000 of 134,217,728
    (64_001, 2**20, 128 * 2**20, 4096, 2096, 64_032),         # whole lines of 32 scores
    (65, 1000, 3000, 8, 8, 96),                               # all rows
    (1000, 1000, 3000, 8, 3, 1000),                           # no more than the bound, which is no whole line
    (0, 1000, 3000, 8, 8, 1), (0, 1, 1, 8, 1, 1),             # nothing to score: no division by zero
    (2**31 - 1, 2**31 - 1, 2**31 - 1, 8, 1, 2**31 - 1),
])
def test_rows_of_a_chunk_by_the_longest(longest, width, num_scores, num_rows, rows, pitch):
    assert packed(longest, width, num_scores, num_rows) == (rows, pitch)
    assert rows * pitch <= num_scores


def test_blocks_that_take_rows_in_turn():
    """One for each row; where lengths tell how many there are, two per multiprocessor."""
    assert plan_of().row_blocks == 8
    assert plan_of(new_tokens=[1000], cached=[0]).row_blocks == 1000
    packing = plan_of(new_tokens=[1000], cached=[0], scores_budget_bytes=4 * 1000 * 10, order="score")
    assert (packing.rows_per_chunk, packing.num_chunks, packing.row_blocks, packing.ranks_shape) == (10, 100, 264, (264, 128))
    assert packing.num_pieces <= 1
    assert plan_of(scores_budget_bytes=4000).row_blocks == 8


def test_rows_need_no_scores_only_where_all_are_selected_and_nobody_asks():
    assert plan_of().skip_up_to == 100
    assert plan_of(top_k=5000).skip_up_to == 1000
    assert plan_of(with_scores=True).skip_up_to == 0
    assert plan_of(order="score").skip_up_to == 0


def test_sort_scratch_is_bounded_by_top_k():
    assert plan_of().rank_width == 0
    assert plan_of(order="score").rank_width == 128
    assert plan_of(order="score", top_k=128).rank_width == 128
    assert plan_of(order="score", top_k=10**9).rank_width == 1024          # of 1000 candidates
    assert plan_of(order="score").ranks_shape == (8, 128)


@pytest.mark.skipif(SIMULATED, reason="the simulator has no warp collectives")
def test_selection_takes_the_kernel_that_fits():
    assert plan_of().num_pieces == 1
    assert plan_of(shared_bytes_limit=64 * 1024).num_pieces == 0           # less than its buffers
    assert plan_of(top_k=4096).num_pieces == 1
    assert plan_of(top_k=4097).num_pieces == 0                             # more than half of what a block holds
    # 73,888 bytes of buffers and one bit per candidate in lines of 128 bytes, for 131,072 candidates at a time
    assert sampled_selection.shared_bytes(0) == 4 * (2 * 8192 + 2048 + 40) == 73_888
    assert sampled_selection.shared_bytes(33) == 73_888 + 128
    assert sampled_selection.shared_bytes(131_072) == sampled_selection.shared_bytes(2**21) == 73_888 + 16_384
    assert sampled_selection.WINDOW % sampled_selection.CAPACITY == 0
    assert sampled_selection.supports(2**22 - 1, 2048, SHARED_BYTES)
    assert not sampled_selection.supports(2**22, 2048, SHARED_BYTES)                    # a place has 22 bits


@pytest.mark.parametrize(("rows", "width", "pieces"), [
    (1, 131_072, 32), (1, 9000, 3), (8, 65_536, 16), (32, 131_072, 4), (64, 32_768, 2), (128, 8192, 1), (4096, 65_536, 1)])
def test_few_rows_are_shared_among_blocks(rows, width, pieces):
    assert sampled_selection.pieces_per_row(rows, width, 132) == pieces


@pytest.mark.skipif(SIMULATED, reason="the simulator knows no PTX")
@pytest.mark.parametrize(("rows", "width", "blocks"), [
    (1, 131_072, 16), (7, 131_072, 16), (8, 65_536, 8), (15, 65_536, 8), (16, 65_536, 4), (30, 65_536, 4), (31, 40_000, 2),
    (66, 32_768, 2), (67, 8192, 1), (132, 8192, 1), (133, 8192, 0),
    (1, 2047, 0), (1, 4095, 1), (1, 4096, 2), (1, 32_767, 8), (1, 32_768, 16),        # 2048 keys at least
    (132, 2**20, 1), (132, 2**20 + 1, 0), (66, 2**21, 2), (1, 2**24, 16), (1, 2**24 + 1, 0)])        # 2**20 at most
def test_few_rows_are_selected_by_clusters(rows, width, blocks):
    from indexer import cluster_selection
    assert cluster_selection.blocks_per_row(rows, width, CLUSTERS) == blocks
    assert cluster_selection.blocks_per_row(rows, width, {}) == 0


@pytest.mark.skipif(SIMULATED, reason="the simulator knows no PTX")
def test_shared_memory_of_a_cluster_s_blocks():
    """Tiles of 256 keys, 264 words each; in front of them, in words, hand-counted."""
    from indexer import cluster_selection
    histograms, counts, coarse, sent, found, lists, barriers = 3 * 2048, 64 + 1, 32, 16 * (32 + 65 + 2), 3, 2 * 4096, 2 * 8
    front = histograms + counts + coarse + sent + found + lists
    assert cluster_selection.shared_bytes(0) == 4 * ((front + 1) // 2 * 2 + barriers)
    assert cluster_selection.shared_bytes(10) == cluster_selection.shared_bytes(0) + 10 * 264 * 4
    assert cluster_selection.tiles_held(131_072, 16, SHARED_BYTES) == 32
    assert cluster_selection.tiles_held(131_073, 16, SHARED_BYTES) == 33
    most = cluster_selection.tiles_held(2**22, 16, SHARED_BYTES)
    assert cluster_selection.shared_bytes(most) <= SHARED_BYTES < cluster_selection.shared_bytes(most + 1)


@pytest.mark.skipif(SIMULATED, reason="the simulator knows no PTX")
def test_a_plan_of_clusters():
    plan = plan_of(new_tokens=[1] * 8, cached=[65_535] * 8, max_clusters=CLUSTERS)
    assert (plan.cluster_blocks, plan.num_held, plan.num_pieces, plan.lists_shape) == (8, 32, 0, (1, 1))
    assert plan.reach == plan.width == 65_536
    assert plan.cluster_shared_bytes < SHARED_BYTES
    chunked = plan_of(new_tokens=[1] * 8, cached=[65_535] * 8, max_clusters=CLUSTERS, scores_budget_bytes=2**20)
    assert chunked.cluster_blocks == 0                                  # a cluster's row is that token
    assert chunked.num_pieces == 1


@pytest.mark.skipif(SIMULATED, reason="the simulator knows no PTX")
@pytest.mark.parametrize(("rows", "width", "reach", "pieces"), [
    (15, 1_000_000, 1_000_000, 0), (30, 1_000_000, 1_000_000, 0), (31, 81_408, 81_408, 0), (66, 81_409, 81_408, 2),
    (31, 1_000_000, 81_408, 4), (67, 100_000, 100_000, 0), (132, 100_000, 100_000, 0), (133, 100_000, -1, 1)])
def test_rows_whose_pieces_do_not_fit_are_for_another_selection(rows, width, reach, pieces):
    """Of pairs: 159 tiles of 256 keys fit in each block. The lengths tell, on the device, which rows are longer."""
    plan = plan_of(new_tokens=[1] * rows, cached=[width - 1] * rows, max_clusters=CLUSTERS)
    assert (plan.reach, plan.num_pieces) == (reach, pieces)
    assert plan.cluster_shared_bytes <= SHARED_BYTES


@pytest.mark.skipif(SIMULATED, reason="the simulator knows no PTX")
def test_clusters_take_all_rows_where_no_other_selection_can():
    """The sampled selection takes a top_k of at most half of what a block holds, 4096."""
    plan = plan_of(new_tokens=[1] * 66, cached=[99_999] * 66, top_k=4097, max_clusters=CLUSTERS)
    assert (plan.cluster_blocks, plan.reach, plan.num_held, plan.num_pieces) == (2, 100_000, 159, 0)


@pytest.mark.skipif(SIMULATED, reason="the simulator knows no PTX")
def test_slots_that_clusters_cannot_count_are_for_the_portable_selection():
    """They are int32 there, and a cluster of 16 blocks goes 16,384 of them further at a time."""
    for top_k, blocks in ((2**30, 16), (2**30 + 1, 0), (2**31 - 1, 0), (2**31, 0), (2**40, 0)):
        plan = plan_of(new_tokens=[1], cached=[65_535], top_k=top_k, max_clusters=CLUSTERS)
        assert (plan.cluster_blocks, plan.num_pieces) == (blocks, 0), top_k


@pytest.mark.skipif(SIMULATED, reason="the simulator knows no PTX")
def test_scores_alone_compile_no_selection(monkeypatch):
    asked = []
    monkeypatch.setattr(launches, "num_multiprocessors", lambda: 132)
    monkeypatch.setattr(launches, "max_shared_bytes", lambda: SHARED_BYTES)
    monkeypatch.setattr(launches, "max_clusters", lambda kernel: asked.append(kernel) or CLUSTERS)
    batch = make_batch(np.random.default_rng(0), new_tokens=[1], cached=[65_535], num_heads=1, head_dim=16, page_size=64, top_k=8)
    scores = check_call(*batch.arguments(), mask="causal", kpool=1, arithmetic="exact", scores_only=True)
    assert Plan.here(scores, "exact", with_scores=True).cluster_blocks == 0
    assert not asked
    selected = check_call(*batch.arguments(), mask="causal", kpool=1, arithmetic="exact", top_k=8)
    assert Plan.here(selected, "exact", with_scores=False).cluster_blocks == 16
    assert len(asked) == 1


def test_what_is_handed_over_is_allocated_for_shared_rows_only():
    assert plan_of().lists_shape == (1, 1)
    if not SIMULATED:
        assert plan_of(new_tokens=[2], cached=[20_000]).num_pieces == 5
        assert plan_of(new_tokens=[2], cached=[20_000]).lists_shape == (2, 2 * 8192)


def test_a_width_of_zero_has_a_plan():
    plan = plan_of(new_tokens=[3], cached=[0], kpool=4, order="score")
    assert (plan.width, plan.num_splits, plan.rank_width) == (1, 1, 1)


@pytest.mark.parametrize(("rows", "tiles", "multiprocessors", "splits"), [
    (1, 2048, 132, 1056), (1, 5, 132, 5), (8, 512, 132, 132), (4096, 512, 132, 1), (1056, 512, 132, 1), (1055, 512, 132, 2)])
def test_splits_fill_the_gpu_and_no_more(rows, tiles, multiprocessors, splits):
    assert scoring.splits_per_row(rows, tiles, multiprocessors) == splits


def test_launches_stay_within_the_grid():
    kernel = Kernel(lambda: None, (), 32)
    for blocks in (0, -1, MAX_GRID + 1):
        with pytest.raises(ValueError, match=f"got {blocks}"):
            kernel.launch(blocks, 0)


# ----------------------------------------------------------------------------------------------------------------- tiles


@pytest.mark.skipif(SIMULATED, reason="the simulator has small tiles of its own")
@pytest.mark.parametrize(("num_heads", "heads"), [
    (1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (128, 64)])
def test_a_tile_takes_all_heads_in_the_fewest_passes(num_heads, heads):
    tile = scoring.score_tile(num_heads)
    assert tile.heads == heads
    assert tile.threads == 128
    assert tile.shared_bytes <= 48 * 1024


@pytest.mark.skipif(SIMULATED, reason="the simulator has small tiles of its own")
def test_shared_memory_of_a_tile():
    # two operand tiles of 64 x 64 int32, 256 decoded bytes, 8 x 64 sums, 3 x 64 key words, 64 head flags: 36,864 bytes
    assert scoring.score_tile(64).shared_bytes == 4 * (2 * 64 * 64 + 256 + 8 * 64 + 3 * 64 + 64) == 36_864


# --------------------------------------------------------------------------------------------------------------- launches


@pytest.mark.skipif(SIMULATED, reason="the simulator takes arrays as they are")
def test_a_launchs_arguments_as_words():
    """numba's order: of an array no owner, items, bytes per item, address, shape, strides; everything in 8 bytes."""
    view = ArrayView("a", 0x1000, (2, 3), (24, 8), "int32", True, "cuda", None)
    assert _words(types.Array(types.int32, 2, "A"), view) == [0, 0, 6, 4, 0x1000, 2, 3, 24, 8]
    assert _words(types.Array(types.int32, 2, "A"), replace(view, strides=(-24, 8)))[-2:] == [2**64 - 24, 8]
    assert _words(types.UniTuple(types.uint64, 2), (5, 2**64 - 1)) == [5, 2**64 - 1]
    assert _words(types.int32, -1) == [2**64 - 1]
    assert _words(types.float32, np.float32(1.0)) == [0x3F800000]


@pytest.mark.skipif(SIMULATED, reason="its memory is the host's")
@pytest.mark.parametrize("handle", [0, 7])
def test_torchs_memory_comes_from_the_stream_that_uses_it(monkeypatch, handle):
    """torch takes handle 0 of an external stream for "give me one of yours", whose memory other work may get too soon."""
    used = []
    fake = SimpleNamespace(
        device=lambda *_: "cuda:0", float32="float32", empty=lambda shape, dtype, device: (shape, dtype),
        cuda=SimpleNamespace(ExternalStream=lambda pointer, _: f"external {pointer}" if pointer else "one of the pool",
                             default_stream=lambda _: "default", stream=lambda which: used.append(which) or nullcontext()))
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(device.cuda, "current_context", lambda: SimpleNamespace(device=SimpleNamespace(id=0)))
    assert device.Memory("torch", handle).empty((2, 3), "float32") == ((2, 3), "float32")
    assert used == ["external 7" if handle else "default"]


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


@pytest.mark.parametrize("error", [
    OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), MemoryError(), RuntimeError("CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY")])
def test_want_of_memory_is_one_kind_of_error(error):
    with pytest.raises(MemoryError, match="4096 bytes of scratch could not be allocated on the device") as found, \
            device.naming_memory("4096 bytes of scratch"):
        raise error
    assert found.value.__cause__ is error


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match=r"^illegal address$"), device.naming_memory("4096 bytes of scratch"):
        raise RuntimeError("illegal address")


def test_sizes_are_rounded_to_four_per_power_of_two():
    assert [rounded(n) for n in (0, 1, 512, 513, 4096, 4097, 5120, 5121, 2**30 + 1)] == [
        0, 512, 512, 1024, 4096, 5120, 5120, 6144, 2**30 + 2**28]
    for n in range(1, 5000, 7):
        assert n <= rounded(n) <= max(n + 511, n * 1.25 + 1)


# ----------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES)
def test_every_byte_decodes_to_its_value(fp8_dtype):
    code, values = scoring.FP8_CODES[fp8_dtype], decode_table(fp8_dtype)
    for byte, value in enumerate(values):
        is_nan = byte & code.nan_mask == code.nan_bits
        assert is_nan == np.isnan(value), hex(byte)
        if not is_nan:
            assert decode(byte) * code.unit == value, hex(byte)


def test_known_bytes():
    fn, fnuz = decode_table("float8_e4m3fn"), decode_table("float8_e4m3fnuz")
    assert (fn[0x01], fn[0x38], fn[0x7E], fn[0xB8]) == (2.0**-9, 1.0, 448.0, -1.0)
    assert (fnuz[0x01], fnuz[0x40], fnuz[0x7F], fnuz[0xC0]) == (2.0**-10, 1.0, 240.0, -1.0)
    assert np.isnan(fn[[0x7F, 0xFF]]).all()
    assert np.isnan(fn).sum() == 2
    assert np.isnan(fnuz[0x80])
    assert np.isnan(fnuz).sum() == 1


def test_fp8_names():
    for dtype in ("float8_e4m3fn", ml_dtypes.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn)):
        assert fp8_name("x", dtype) == "float8_e4m3fn"
    for dtype in ("float8_e5m2", ml_dtypes.float8_e5m2, np.float32, "nonsense", 7):
        with pytest.raises(TypeError, match="x must be float8_e4m3fn or float8_e4m3fnuz"):
            fp8_name("x", dtype)


# ------------------------------------------------------------------------------------------------------------- selection


def test_score_bits_sort_as_the_scores_do():
    sortable = selection.sortable.fn if SIMULATED else selection.sortable.py_func
    largest = np.finfo(np.float32).max
    ascending = np.float32([-np.inf, -largest, -1, -1e-42, 0, 1e-45, 1e-42, 1, largest, np.inf])
    keys = [int(sortable(bits)) for bits in ascending.view(np.uint32)]
    assert keys == sorted(set(keys))
    assert int(sortable(np.uint32(0x80000000))) == int(sortable(np.uint32(0)))
    for nan in (0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFF800001):
        assert int(sortable(np.uint32(nan))) == 0 < keys[0]


def test_next_power_of_two():
    assert [selection.next_power_of_two(n) for n in (1, 2, 3, 4, 5, 2047, 2048, 2049)] == [1, 2, 4, 4, 8, 2048, 2048, 4096]


def test_digits_cover_a_score():
    assert selection.RADIX_BITS * selection.NUM_DIGITS == 32
    assert selection.THREADS == selection.NUM_BINS == 2**selection.RADIX_BITS
    # both halves of the packed counts hold a whole chunk
    assert selection.THREADS * selection.ITEMS < 2**15


# ----------------------------------------------------------------------------------------------------------------- views


def test_a_view_reads_back_as_the_array():
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for each in (array, array[:, ::2], array[::-1], array.transpose(2, 0, 1), array[:, :0], np.broadcast_to(array[0], (5, 3, 4))):
        view = describe("x", each)
        assert_same_bits(view.numpy(), each)
        assert view.c_contiguous == each.flags.c_contiguous


def test_extents_are_the_bytes_an_array_may_touch():
    array = np.zeros((4, 6), np.int32)
    start = array.ctypes.data
    for each, first, last in ((array, 0, 96), (array[1:3], 24, 72), (array[:, 2:3], 8, 84), (array[::-1], 0, 96), (array[:0], 0, 0),
                              (array[2:, ::-1], 48, 96)):
        assert describe("x", each).extent == (start + first, start + last)


def test_a_view_slices_layers_without_copying():
    blocks = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 1, 3, 4, 1, 5)
    view = describe("blocks", blocks)
    layer = view.sliced(axes=(0, 3, 5), offset=2 * view.strides[2])
    assert_same_bits(layer.numpy(), blocks[:, 0, 2, :, 0])
    blocks[1, 0, 2, 3, 0, 4] = 77
    assert layer.numpy()[1, 3, 4] == 77


def test_a_device_view_names_its_library_and_stream():
    class Foreign:
        __cuda_array_interface__ = {"shape": (2, 3), "typestr": "<f4", "data": (4096, True), "version": 3, "stream": 7}  # noqa: RUF012

    view = describe("x", Foreign())
    assert (view.strides, view.on_device, view.library, view.writeable, view.stream) == ((12, 4), True, "cuda", False, 7)
    assert isinstance(view, ArrayView)
    assert view.__cuda_array_interface__["data"] == (4096, True)
    with pytest.raises(AttributeError):
        _ = view.__array_interface__


@pytest.mark.kernels
@pytest.mark.skipif(not SIMULATED, reason="the GPU's own is one instruction, seen in test_codegen.py")
def test_the_simulated_fma_rounds_once():
    from indexer import reference
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(0, 2**32, (3, 3000), np.uint32).view(np.float32)
    half = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12), np.float32(2.0**-60)      # 1 + 2**-11 + 2**-24, then a little
    a, b, c = (np.append(x, h) for x, h in zip((a, b, c), half))
    with np.errstate(all="ignore"):
        got = np.array([scoring.fma(x, y, z) for x, y, z in zip(a, b, c)], np.float32)
        want = reference.fma(a, b, c)
    nan = np.isnan(want)
    assert_same_bits(np.isnan(got), nan)
    assert_same_bits(got[~nan], want[~nan])
    assert got[-1] != np.float32(half[0] * half[1] + half[2])
