"""Kernels against the oracle, bit for bit, and every invariance of the operator on both sides."""
from dataclasses import replace

import numpy as np
import oracle
import pytest
from assertions import assert_same_bits
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import byte_batches, lattice_batches, seeded_batches

import indexer
from indexer.batches import make_batch
from indexer.device import SIMULATED

POISON = {np.int32: 0x7FFFFFFF, np.float32: np.nan}


def select(batch, side, **extra):
    """(indices, out_scores) of one side, into poisoned outputs."""
    function = {"oracle": oracle.select, "kernels": indexer.mla_indexer_ragged_float8_paged}[side]
    shape = (batch.num_tokens, batch.top_k)
    out, out_scores = (np.full(shape, POISON[dtype], dtype) for dtype in (np.int32, np.float32))
    result = batch.select(function, out=out, out_scores=out_scores, **extra)
    assert result is out
    return out, out_scores


def assert_same_selection(got, want):
    assert_same_bits(got[0], want[0], "indices")
    assert_same_bits(got[1], want[1], "out_scores")


# ------------------------------------------------------------------------------------------------- kernels against oracle


@pytest.mark.kernels
@given(seeded_batches())
def test_kernels_select_as_the_oracle(batch):
    assert_same_selection(select(batch, "kernels"), select(batch, "oracle"))
    assert_same_bits(batch.select(indexer.mla_indexer_ragged_float8_paged), batch.select(oracle.select))


@pytest.mark.kernels
@given(seeded_batches())
def test_kernels_score_as_the_oracle(batch):
    assert_same_bits(batch.score(indexer.index_scores), batch.score(oracle.scores))


@pytest.mark.kernels
@given(byte_batches())
def test_kernels_equal_the_oracle_on_any_bytes(batch):
    assert_same_selection(select(batch, "kernels"), select(batch, "oracle"))


@pytest.mark.kernels
@pytest.mark.parametrize("regime", ["one-bin", "all-ties", "relu-plateau", "nan-laced"])
@pytest.mark.parametrize("top_k", [1, 15, 16, 17, 31, 32, 33, 40])
def test_kernels_select_at_every_distance_from_the_row_length(regime, top_k):
    """Rows of 32 candidates: fewer, as many and more than top_k, and the k-th score anywhere in its bin."""
    batch = make_batch(np.random.default_rng(top_k), new_tokens=[2], cached=[30], num_heads=1, head_dim=4, page_size=8, mask="null",
                       regime=regime, top_k=top_k, order="score")
    assert_same_selection(select(batch, "kernels"), select(batch, "oracle"))


@pytest.mark.kernels
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_kernels_rank_any_float32_pattern(seed, negate):
    """One-hot queries and keys: the score of a key is its scale, so any float32 row can be planted."""
    rng = np.random.default_rng(seed)
    batch = make_batch(rng, new_tokens=[1], cached=[11 if SIMULATED else 700], num_heads=1, head_dim=4, page_size=4,
                       regime="one-bin", top_k=6 if SIMULATED else 300, order="score")
    patterns = rng.integers(0, 2**32, batch.scales.shape, np.uint32)
    common = np.uint32([0, 0x80000000, 0x7F800000, 0xFF800000, 1, 0x80000001, 0x7FC00000, 0x3F800000])
    patterns = np.where(rng.random(patterns.shape) < 0.5, rng.choice(common, patterns.shape), patterns)
    batch = replace(batch, scales=patterns.view(np.float32), q_s=-batch.q_s if negate else batch.q_s)
    assert_same_selection(select(batch, "kernels"), select(batch, "oracle"))


# ------------------------------------------------------------------------------------------------------------- exact lane


def plain_scores(batch, b, v):
    """Scores of request b's first v keys for each of its tokens, by float64 matrix products: exact on lattice inputs."""
    at = np.arange(v)
    page_size = batch.blocks.shape[3]
    block = batch.lookup_table[b, at // page_size]
    keys = batch.blocks[block, 0, batch.layer_idx, at % page_size, 0].astype(np.float64)
    scales = batch.scales[block, 0, batch.layer_idx, at % page_size, 0, 0]
    rows = slice(batch.input_row_offsets[b], batch.input_row_offsets[b + 1])
    dots = np.maximum(batch.q[rows].astype(np.float64) @ keys.T, 0)
    return np.einsum("thn,th->tn", dots, batch.q_s[rows].astype(np.float64)) * scales


def plain_selection(batch):
    """Indices by a full sort of the plain scores."""
    out = np.full((batch.num_tokens, batch.top_k), -1, np.int32)
    for b, (first, last) in enumerate(zip(batch.input_row_offsets, batch.input_row_offsets[1:])):
        if first == last:
            continue
        scores = plain_scores(batch, b, int(batch.candidates[first:last].max()))
        for token in range(first, last):
            v = batch.candidates[token]
            best = np.argsort(-scores[token - first, :v], kind="stable")[:batch.top_k]
            out[token, :len(best)] = np.sort(best) if batch.order == "index" else best
    return out


@given(lattice_batches())
def test_exact_lane_of_the_oracle(batch):
    for arithmetic in ("exact", "wgmma"):
        assert_same_bits(select(batch, "oracle", arithmetic=arithmetic)[0], plain_selection(batch), arithmetic)


@pytest.mark.kernels
@given(lattice_batches())
def test_exact_lane_of_the_kernels(batch):
    assert_same_bits(select(batch, "kernels")[0], plain_selection(batch))


# ------------------------------------------------------------------------------------------------------------ invariances

SIDES = pytest.mark.parametrize("side", ["oracle", pytest.param("kernels", marks=pytest.mark.kernels)])


def concatenated(parts):
    return tuple(np.concatenate(arrays) for arrays in zip(*parts))


@SIDES
@given(batch=seeded_batches())
def test_repeated_calls_return_the_same(side, batch):
    assert_same_selection(select(batch, side), select(batch, side))


@SIDES
@given(batch=seeded_batches(), data=st.data())
def test_permuted_requests_permute_the_rows(side, batch, data):
    order = data.draw(st.permutations(range(len(batch.cache_lengths))))
    indices, scores = select(batch, side)
    rows = batch.rows(order)
    assert_same_selection(select(batch.take(order), side), (indices[rows], scores[rows]))


@SIDES
@given(batch=seeded_batches())
def test_a_request_alone_returns_the_same(side, batch):
    indices, scores = select(batch, side)
    for b in range(len(batch.cache_lengths)):
        rows = batch.rows([b])
        assert_same_selection(select(batch.take([b]), side), (indices[rows], scores[rows]))


@SIDES
@given(batch=seeded_batches())
def test_requests_without_tokens_change_nothing(side, batch):
    num_requests = len(batch.cache_lengths)
    columns = batch.lookup_table.shape[1]
    offsets = np.repeat(batch.input_row_offsets, 2)[1:]               # an empty request behind every one
    lengths = np.stack([batch.cache_lengths, np.arange(num_requests, dtype=batch.cache_lengths.dtype) * 1000], axis=1).ravel()
    hostile = np.full((num_requests, columns), 2**31 - 1, batch.lookup_table.dtype)
    padded = replace(batch, input_row_offsets=offsets, cache_lengths=lengths,
                     lookup_table=np.stack([batch.lookup_table, hostile], axis=1).reshape(-1, columns))
    assert_same_selection(select(padded, side), select(batch, side))


@SIDES
@given(batch=seeded_batches(), data=st.data())
def test_any_assignment_of_pages_to_blocks_returns_the_same(side, batch, data):
    place = np.array(data.draw(st.permutations(range(len(batch.blocks)))))
    blocks, scales = np.empty_like(batch.blocks), np.empty_like(batch.scales)
    blocks[place], scales[place] = batch.blocks, batch.scales
    used = batch.lookup_table < len(place)
    table = np.where(used, place[np.where(used, batch.lookup_table, 0)], batch.lookup_table).astype(batch.lookup_table.dtype)
    assert_same_selection(select(replace(batch, blocks=blocks, scales=scales, lookup_table=table), side), select(batch, side))


@SIDES
@given(batch=seeded_batches(max_requests=1))
def test_shared_blocks_return_the_same(side, batch):
    """The same request twice over the same blocks, and over two copies of them."""
    assume(batch.num_tokens)
    twice = batch.take([0, 0])
    num_blocks = len(batch.blocks)
    table = twice.lookup_table.copy()
    table[1] = np.where(table[1] < num_blocks, table[1] + num_blocks, table[1])
    copies = replace(twice, lookup_table=table, blocks=np.concatenate([batch.blocks] * 2),
                     scales=np.concatenate([batch.scales] * 2))
    shared = select(twice, side)
    assert_same_selection(shared, select(copies, side))
    assert_same_selection(shared, concatenated([select(batch, side)] * 2))


@SIDES
@given(batch=seeded_batches(), data=st.data())
def test_any_page_size_with_the_same_keys_returns_the_same(side, batch, data):
    page_size = data.draw(st.sampled_from((1, 2, 5, 8)))
    old_size = batch.blocks.shape[3]
    visible = (batch.cache_lengths.astype(np.int64) + batch.new_tokens) // batch.kpool
    rows = np.where(batch.new_tokens > 0, visible, 0)
    pages = -(-rows // page_size)
    shape = (int(pages.sum()) + 1, *batch.blocks.shape[1:3], page_size, 1)
    blocks = np.full((*shape, batch.blocks.shape[-1]), 0x7F, np.uint8).view(batch.blocks.dtype)
    scales = np.full((*shape, 1), np.nan, np.float32)
    table = np.full((len(rows), int(pages.max(initial=0)) + 1), 2**31 - 1, batch.lookup_table.dtype)
    next_block = 0
    for b, count in enumerate(rows):
        table[b, :pages[b]] = np.arange(next_block, next_block + pages[b])
        next_block += pages[b]
        for r in range(count):
            old, new = batch.lookup_table[b, r // old_size], table[b, r // page_size]
            blocks[new, :, :, r % page_size] = batch.blocks[old, :, :, r % old_size]
            scales[new, :, :, r % page_size] = batch.scales[old, :, :, r % old_size]
    assert_same_selection(select(replace(batch, blocks=blocks, scales=scales, lookup_table=table), side), select(batch, side))


@SIDES
@given(batch=seeded_batches(), budget=st.integers(1, 5000))
def test_any_scores_budget_returns_the_same(side, batch, budget):
    assert_same_selection(select(replace(batch, scores_budget_bytes=budget), side), select(batch, side))


@SIDES
@given(batch=seeded_batches(), slack=st.integers(0, 2**40), columns=st.integers(0, 9))
def test_larger_bounds_and_a_wider_table_return_the_same(side, batch, slack, columns):
    table = np.pad(batch.lookup_table, ((0, 0), (0, columns)), constant_values=2**31 - 1)
    wide = replace(batch, lookup_table=table, max_prompt_length=int(batch.new_tokens.max()) + slack,
                   max_context_length=int(batch.cache_lengths.max()) + slack)
    assert_same_selection(select(wide, side), select(batch, side))


@SIDES
@given(batch=seeded_batches(head_dim=12, page_size=3))
def test_fused_and_separate_layouts_return_the_same(side, batch):
    assert_same_selection(select(replace(batch, fused=True), side), select(batch, side))


@SIDES
@given(batch=seeded_batches(), byte=st.integers(0, 255), scale=st.floats(width=32))
def test_unused_slots_blocks_and_layers_change_nothing(side, batch, byte, scale):
    used = np.zeros(batch.scales.shape[:4], bool)
    page_size = batch.blocks.shape[3]
    for b, (n, c) in enumerate(zip(batch.new_tokens, batch.cache_lengths.astype(np.int64))):
        at = np.arange((n + c) // batch.kpool if n else 0)
        used[batch.lookup_table[b, at // page_size], 0, batch.layer_idx, at % page_size] = True
    blocks = np.where(used[..., None, None], batch.blocks.view(np.uint8), np.uint8(byte)).view(batch.blocks.dtype)
    scales = np.where(used[..., None, None], batch.scales, np.float32(scale))
    assert_same_selection(select(replace(batch, blocks=blocks, scales=scales), side), select(batch, side))


@SIDES
@given(batch=seeded_batches())
def test_strided_inputs_return_the_same(side, batch):
    """Every stride above the last axis is free: the same values in arrays twice as large, and queries in reverse order."""
    def spread(array, axes):
        wide = np.repeat(array, 2, axis=axes[0])
        for axis in axes[1:]:
            wide = np.repeat(wide, 2, axis=axis)
        index = tuple(slice(None, None, 2) if axis in axes else slice(None) for axis in range(array.ndim))
        return wide[index]

    strided = replace(batch, q=spread(batch.q, (0, 1)), q_s=spread(batch.q_s, (0,)), blocks=spread(batch.blocks, (0, 2, 3)),
                      scales=spread(batch.scales, (0, 2, 3)), lookup_table=spread(batch.lookup_table, (0,)))
    assert_same_selection(select(strided, side), select(batch, side))
    backwards = replace(batch, q=np.ascontiguousarray(batch.q[::-1])[::-1], q_s=np.ascontiguousarray(batch.q_s[::-1])[::-1])
    assert_same_selection(select(backwards, side), select(batch, side))
