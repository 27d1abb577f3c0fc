"""Rules of the Hopper scorer that need no GPU: its tile, its place in shared memory, which calls it takes."""
import itertools

import numpy as np
import pytest
from h200 import SHARED_BYTES

from indexer.device import SIMULATED

if SIMULATED:
    pytest.skip("the simulator knows no PTX", allow_module_level=True)

from dataclasses import replace

from host_functions import plain

from indexer import tma_scoring, tma_tile, wgmma_scoring
from indexer.batches import make_batch
from indexer.problem import check_call
from indexer.tma_tile import TmaTile, tile_for

arrivals_of, after, page_of, next_page, copied_bytes, swizzled = map(plain, (
    tma_scoring.arrivals_of, tma_scoring.after, tma_scoring.page_of, tma_scoring.next_page, tma_scoring.copied_bytes,
    wgmma_scoring.swizzled))
TILES = [tile_for(heads, depth, tokens, SHARED_BYTES) for heads in (1, 8, 12, 32, 64, 128) for depth in (32, 128)
         for tokens in (1, 2, 3, 9, 5000)]


@pytest.mark.parametrize(("num_heads", "head_dim", "tokens", "expected"), [
    (64, 128, 1, TmaTile(64, 1, 4, 3, 6)),                # decode: more key tiles in flight are no faster
    (64, 128, 2, TmaTile(64, 2, 4, 3, 6)),
    (64, 128, 3, TmaTile(64, 4, 4, 2, 9)),                # 256 columns
    (64, 128, 4096, TmaTile(64, 4, 4, 2, 9)),
    (32, 128, 6, TmaTile(32, 8, 4, 2, 9)),
    (128, 64, 9, TmaTile(128, 2, 2, 2, 9)),
    (3, 20, 9, TmaTile(8, 16, 2, 3, 6)),
])
def test_the_tile_for_a_call(num_heads, head_dim, tokens, expected):
    assert tile_for(num_heads, head_dim, tokens, SHARED_BYTES) == expected


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_shared_memory_regions_follow_each_other(tile):
    """Query tiles, key tiles, scales, items, barriers, scratch: aligned, none over the next."""
    item = [tile.candidates_offset, tile.weights_offset, tile.item_bytes]
    assert item[0] >= 4 * tma_tile.ITEM_WORDS
    assert item[0] + 4 * tile.block_q <= item[1]
    assert item[1] + 4 * tile.columns <= item[2]
    regions = [
        (0, tile.num_q_stages * tile.columns * 128, 1024), (tile.kv_offset, tile.num_kv_stages * 128 * 128, 1024),
        (tile.scales_offset, tile.num_kv_stages * 128 * 4, 16), (tile.items_offset, tile.num_q_stages * tile.item_bytes, 8),
        (tile.q_full, 8 * tile.num_q_stages, 8), (tile.q_empty, 8 * tile.num_q_stages, 8),
        (tile.item_full, 8 * tile.num_q_stages, 8),
        (tile.kv_full, 8 * tile.num_kv_stages, 8), (tile.kv_empty, 8 * tile.num_kv_stages, 8),
        (tile.scratch_offset, 4 * tma_tile.NUM_WARPS, 4)]
    for (start, size, alignment), (after, _, _) in itertools.pairwise(regions):
        assert start % alignment == 0
        assert start + size == after
    assert (tile.weights_offset, tile.item_bytes) == (tile.weights_offset // 8 * 8, tile.item_bytes // 8 * 8)
    assert tile.scratch_offset - tile.q_full == 8 * tile.num_barriers
    assert 1024 + tile.scratch_offset + 4 * tma_tile.NUM_WARPS == tile.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_tile_is_what_the_instructions_take(tile):
    assert tile.heads in (8, 16, 32, 64, 128)
    assert tile.block_q.bit_count() == 1
    assert tile.columns <= 256
    assert tile.num_groups * tile.group_tokens == tile.block_q
    assert tile.group_tokens == 1 or tile.group_tokens % 2 == 0                     # lanes share out pairs of tokens
    assert tile.num_barriers <= tma_tile.THREADS                                 # a thread sets one up
    assert tile.columns // 2 + tile.columns // 4 < tma_tile.MATH_REGISTERS - 30  # accumulators and weights
    assert (tile.num_q_stages * tile.q_tile_bytes) % 1024 == 0
    assert tile.q_tile_bytes < 2**20                                                # a barrier counts so many bytes


def test_arrivals_that_complete_a_phase():
    """Of one lane or of 32 for what they bring; of the 8 math warps, and for an item the key warp, for what they are done with."""
    for tile in TILES:
        q, kv = tile.num_q_stages, tile.num_kv_stages
        want = [32] * q + [8 + 1] * q + [1] * q + [1] * kv + [8] * kv
        assert [arrivals_of(barrier, q, kv) for barrier in range(tile.num_barriers)] == want
        places = [(start - tile.q_full) // 8 for start in (tile.q_full, tile.q_empty, tile.item_full, tile.kv_full, tile.kv_empty)]
        assert places == [0, q, 2 * q, 3 * q, 3 * q + kv]


def test_a_ring_changes_phase_when_it_comes_round():
    stage, phase, seen = 0, 1, []
    for _ in range(7):
        seen.append((stage, phase))
        stage, phase = after(stage, phase, 3)
    assert seen == [(0, 1), (1, 1), (2, 1), (0, 0), (1, 0), (2, 0), (0, 1)]


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256, 384])
def test_the_walk_through_pages(page_size):
    """Copies of a tile: their pages, the rows within them, and the bytes that a barrier waits for: of keys 128, of scales 4."""
    rows = min(page_size, 128)
    shift, copies, tiles_per_page = rows.bit_length() - 1, 128 // rows, max(1, page_size // 128)
    page, part = page_of(5, copies, tiles_per_page)
    for tile in range(5, 40):
        assert (page, part) == page_of(tile, copies, tiles_per_page)
        keys = [(page + i) * page_size + part * 128 + row for i in range(copies) for row in range(rows)]
        assert keys == list(range(128 * tile, 128 * (tile + 1)))
        page, part = next_page(page, part, copies, tiles_per_page)
    for count in range(copies + 1):
        assert copied_bytes(count, shift) == count * rows * (128 + 4)


def test_the_swizzle_is_that_of_the_descriptors():
    """16-byte columns are permuted by the row within its atom of 8; every element has a place of its own."""
    places = {swizzled(row, column): (row, column) for row in range(64) for column in range(128)}
    assert sorted(places) == list(range(64 * 128))
    for row in range(64):
        for column in range(0, 128, 16):
            assert swizzled(row, column) == 128 * row + (column ^ (16 * (row % 8)))
            assert [swizzled(row, column + i) for i in range(16)] == [swizzled(row, column) + i for i in range(16)]


def test_registers_move_between_warpgroups():
    producers, math = 128, 32 * tma_tile.MATH_WARPS
    at_start = 65536 // tma_tile.THREADS // 8 * 8
    assert at_start * tma_tile.THREADS >= producers * tma_tile.PRODUCER_REGISTERS + math * tma_tile.MATH_REGISTERS
    assert tma_tile.PRODUCER_REGISTERS % 8 == tma_tile.MATH_REGISTERS % 8 == 0


def views(**options):
    options = {"new_tokens": [1, 2], "cached": [300, 5], "num_heads": 64, "head_dim": 128, "page_size": 64, "num_layers": 2,
               **options}
    kpool = options.get("kpool", 1)
    batch = make_batch(np.random.default_rng(0), **options)
    call = check_call(*batch.arguments(), mask="causal", kpool=kpool, arithmetic="wgmma", top_k=4)
    aligned = [replace(view, address=4096 * (i + 1)) for i, view in enumerate((call.q, call.keys, call.key_scales))]
    return call, *aligned


@pytest.mark.parametrize("options", [
    *({"page_size": p} for p in (8, 16, 32, 64, 128, 256, 384)), *({"num_heads": h} for h in (1, 3, 64, 128)),
    *({"head_dim": d} for d in (16, 32, 48, 64, 128)), {"kpool": 2**16}, {"num_layers": 3}, {"fused": True}], ids=str)
def test_calls_that_it_takes(options):
    assert tma_tile.supports(*views(**options))


@pytest.mark.parametrize("options", [
    *({"page_size": p} for p in (1, 3, 48, 192)), {"num_heads": 129}, {"head_dim": 20}, {"head_dim": 144}, {"kpool": 2**16 + 1},
], ids=str)
def test_calls_that_it_leaves(options):
    assert not tma_tile.supports(*views(**options))


def test_arrays_that_the_copy_engine_cannot_take_are_left():
    call, q, keys, scales = views()
    assert tma_tile.supports(call, q, keys, scales)
    for view in (q, keys, scales):
        moved = replace(view, address=view.address + 8)
        assert not tma_tile.supports(call, *(moved if v is view else v for v in (q, keys, scales)))
    for strides in ((8200, 128, 1), (8192, 72, 1), (-8192, 128, 1), (8192, 0, 1), (2**40, 128, 1)):
        assert not tma_tile.supports(call, replace(q, strides=strides), keys, scales)
        assert not tma_tile.supports(call, q, replace(keys, strides=strides), scales)
    for strides in ((256, 8), (264, 4), (-256, 4)):
        assert not tma_tile.supports(call, q, keys, replace(scales, strides=strides))
    assert tma_tile.supports(call, q, keys, replace(scales, strides=(0, 4)))     # one page of scales for all


def test_calls_without_requests_pages_or_blocks_are_left():
    call, q, keys, scales = views()
    for shape in ((0, 6), (2, 0)):
        assert not tma_tile.supports(replace(call, table=replace(call.table, shape=shape)), q, keys, scales)
    assert not tma_tile.supports(call, q, replace(keys, shape=(0, 64, 128)), scales)


def test_every_weight_that_is_halved_keeps_its_bits():
    """Halving and doubling again gives a weight back down to the limit, and not below it."""
    limit = np.float32(tma_scoring.SMALLEST_HALVABLE)
    weights = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    weights = np.concatenate([weights[(np.abs(weights) >= limit) & np.isfinite(weights)], [limit, -limit]]).astype(np.float32)
    assert np.array_equal(weights * np.float32(0.5) * np.float32(2), weights)
    below = np.nextafter(limit, np.float32(0))
    assert below * np.float32(0.5) * np.float32(2) != below
