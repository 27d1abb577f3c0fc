"""Chunks of rows packed by the lengths that are there: the same bits under any bounds and budget, in as few slots as they need."""
from dataclasses import replace

import numpy as np
import oracle
import pytest
from arrays import to_host, to_torch
from assertions import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeded_batches

import indexer
from indexer import rows
from indexer.__main__ import to_device
from indexer.batches import UNUSED_ID, make_batch
from indexer.device import SIMULATED

SELECT = indexer.mla_indexer_ragged_float8_paged


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.kernels(test))


def widened(batch, candidates, **options):
    """The batch with a table for so many candidates more than there are, and no other bounds."""
    columns = -(-candidates // batch.blocks.shape[3])
    table = np.pad(batch.lookup_table, ((0, 0), (0, columns)), constant_values=UNUSED_ID)
    return replace(batch, lookup_table=table, max_prompt_length=None, max_context_length=None, **options)


def select(batch, to=to_device):
    """(indices, out_scores), arrays and metadata on the device."""
    shape = (batch.num_tokens, batch.top_k)
    out_scores = to(np.full(shape, np.nan, np.float32))
    got = batch.select(SELECT, to, out=to(np.full(shape, -7, np.int32)), out_scores=out_scores)
    return to_host(got), to_host(out_scores)


# ----------------------------------------------------------------------------------------------------------- the packing


def packing(new_tokens, cached, *, width, num_scores, mask="causal", kpool=1):
    """(rows of a chunk, pitch, used slots) that the kernel finds."""
    offsets = np.concatenate([[0], np.cumsum(new_tokens)]).astype(np.int32)
    result = to_device(np.full(2, -7, np.int32))
    rows.PACK_CHUNKS.launch(1, 0, to_device(offsets), to_device(np.array(cached, np.int64).astype(np.int32)), int(mask == "causal"),
                            kpool, width, num_scores, int(offsets[-1]), result)
    num_rows, pitch = map(int, to_host(result))
    return num_rows, pitch, -(-int(offsets[-1]) // num_rows)


@pytest.mark.kernels
@pytest.mark.parametrize(("new_tokens", "cached", "options", "want"), [
    ([4096], [61_440], {}, (2048, 65_536, 2)),                        # 128 rows of 2**20: 2048 of 65,536, instead of 32 chunks
    ([4096], [61_440], {"kpool": 4}, (4096, 16_384, 1)),
    ([100, 0, 4000], [1000, 900_000, 8100], {}, (4100, 12_128, 1)),   # a request without tokens does not count; 12,100 to lines
    ([2] * 300, [7] * 299 + [2**20 - 2], {}, (128, 2**20, 5)),        # one that is as long as the bound
    ([2] * 300, [7] * 299 + [2**31 - 1], {}, (128, 2**20, 5)),        # untrue: no longer than the bound
    ([2] * 300, [7] * 299 + [-1], {}, (600, 32, 1)),
    ([2] * 300, [7] * 299 + [2**32 - 900], {}, (600, 32, 1)),
    ([5], [0], {"kpool": 9}, (5, 1, 1)),                              # nothing to score
])
def test_rows_of_a_chunk_follow_the_lengths(new_tokens, cached, options, want):
    assert packing(new_tokens, cached, width=2**20, num_scores=128 * 2**20, **options) == want
    assert packing(new_tokens, cached, width=2**20, num_scores=128 * 2**20, mask="null", **options) == want


@pytest.mark.kernels
@pytest.mark.parametrize("offsets", [[0, 2**32 - 1, 3, 2**31, 44], [2**32 - 1] * 5, [7] * 5, [44, 41, 41, 1, 0]])
@pytest.mark.parametrize("length", [-2**31, -1, 0, 2**31 - 1])
def test_untrue_metadata_pack_within_the_matrix(offsets, length):
    result = to_device(np.full(2, -7, np.int32))
    rows.PACK_CHUNKS.launch(1, 0, to_device(np.array(offsets, np.uint64).astype(np.uint32).view(np.int32)),
                            to_device(np.full(4, length, np.int32)), 1, 1, 1000, 3000, 44, result)
    num_rows, pitch = map(int, to_host(result))
    assert 3 <= num_rows <= 44
    assert 1 <= pitch <= 1000
    assert num_rows * pitch <= 3000


# ------------------------------------------------------------------------------------------------------------ every kernel


@pytest.mark.kernels
@given(seeded_batches(fp8_dtypes=("float8_e4m3fn",)), st.integers(1, 4), st.sampled_from((0, 40, 300)))
def test_bounds_far_above_the_lengths_in_several_chunks(batch, budget_rows, spare):
    wide = widened(batch, spare)
    width = wide.lookup_table.shape[1] * wide.blocks.shape[3]
    wide = replace(wide, scores_budget_bytes=4 * width * budget_rows)
    want_scores = np.empty((batch.num_tokens, batch.top_k), np.float32)
    want = batch.select(oracle.select, out_scores=want_scores)
    got, got_scores = select(wide)
    assert_same_bits(got, want)
    assert_same_bits(got_scores, want_scores)


@pytest.mark.kernels
@pytest.mark.parametrize("order", ["index", "score"])
@pytest.mark.parametrize("length", [-2**31, -1, 2**31 - 1])
def test_an_untrue_length_leaves_the_others_their_rows(length, order):
    new_tokens, cached = ([2, 3, 2], [5, 9, 7]) if SIMULATED else ([40, 30, 2], [500, 900, 2000])
    batch = widened(make_batch(np.random.default_rng(3), new_tokens=new_tokens, cached=cached, num_heads=2, head_dim=16,
                               page_size=8, top_k=4, order=order, metadata_dtype="int32"), 100)
    width = batch.lookup_table.shape[1] * 8
    lengths = batch.cache_lengths.copy()
    lengths[1] = length
    want = np.delete(batch.select(oracle.select), batch.rows([1]), axis=0)
    for budget_rows in (1, 3):
        got, _ = select(replace(batch, cache_lengths=lengths, scores_budget_bytes=4 * width * budget_rows))
        assert ((got >= -1) & (got < width)).all()
        assert_same_bits(np.delete(got, batch.rows([1]), axis=0), want)


# -------------------------------------------------------------------------------------------------------------- real sizes

MILLION = 2**20


def ragged(**options):
    """Prefill and decode with up to 8,200 keys, in a table for a million."""
    batch = make_batch(np.random.default_rng(1), **{"new_tokens": [300, 1, 0, 2, 70], "cached": [7900, 8000, 5, 100, 3000],
                                                    "num_heads": 64, "head_dim": 128, "page_size": 64, "top_k": 2048, **options})
    return widened(batch, MILLION), batch


@on_gpu
@pytest.mark.parametrize("order", ["index", "score"])
@pytest.mark.parametrize("options", [{}, {"head_dim": 100}, {"top_k": 5000}, {"kpool": 4, "mask": "null"}], ids=str)
@pytest.mark.parametrize("budget_rows", [1, 3, 100])
def test_bounds_of_a_million_return_what_exact_bounds_do(budget_rows, options, order):
    """The Hopper scorer, the plain one, the portable selection: in one chunk or more, which 373 or more chunks were planned for."""
    wide, exact = ragged(order=order, **options)
    width = wide.lookup_table.shape[1] * 64
    want, want_scores = select(exact, to=lambda array: array)
    got, got_scores = select(replace(wide, scores_budget_bytes=4 * width * budget_rows))
    assert_same_bits(got, want)
    assert_same_bits(got_scores, want_scores)
    without_scores = to_host(replace(wide, scores_budget_bytes=4 * width * budget_rows).select(SELECT, to_device))
    assert_same_bits(without_scores, want)


@on_gpu
def test_a_captured_plan_packs_by_the_lengths_of_each_replay():
    """Captured at bounds of a million with short requests; replayed as they grow to 50,000 keys, in used slots from 1 to 5."""
    torch = pytest.importorskip("torch")
    longest = [50_000, 20_000, 7, 3000]
    batch = make_batch(np.random.default_rng(2), new_tokens=[150, 0, 40, 4], cached=longest, num_heads=64, head_dim=128,
                       page_size=64, top_k=2048)
    wide = widened(batch, MILLION)
    q, q_s, offsets, cache, _ = wide.arguments(to_torch)
    lengths = cache.cache_lengths
    plan = indexer.IndexerPlan(max_tokens=194, max_requests=4, max_candidates=wide.lookup_table.shape[1] * 64, top_k=2048,
                               scores_budget_bytes=9 * MILLION)                          # 2 rows by bounds
    out = torch.zeros((194, 2048), dtype=torch.int32, device="cuda")
    lengths.fill_(1)
    plan(q, q_s, offsets, cache, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(q, q_s, offsets, cache, out=out)
    for share in (0, 0.02, 0.3, 1, 0.1):
        step = replace(batch, cache_lengths=(np.array(longest) * share).astype(np.uint32))
        lengths.copy_(to_torch(step.cache_lengths))
        out.fill_(-7)
        graph.replay()
        assert_same_bits(to_host(out), step.select(SELECT), f"{share} of the keys")


@on_gpu
@pytest.mark.parametrize("value", [-2**31, -1, 2**31 - 1])
def test_untrue_metadata_stay_in_the_workspace(value):
    """A plan's workspace between guard zones; lengths and offsets that are not true, in several chunks."""
    torch = pytest.importorskip("torch")
    batch = make_batch(np.random.default_rng(4), new_tokens=[30, 1, 40, 4], cached=[5000, 200, 7, 3000], num_heads=64, head_dim=128,
                       page_size=64, top_k=64, metadata_dtype="int32")
    wide, want = widened(batch, 100_000), batch.select(oracle.select)
    width = wide.lookup_table.shape[1] * 64
    bounds = {"max_tokens": 75, "max_requests": 4, "max_candidates": width, "top_k": 64, "scores_budget_bytes": 4 * width * 5}
    num_bytes = indexer.IndexerPlan(**bounds).workspace_bytes
    memory = torch.full((num_bytes + 2**21,), 0x7F, dtype=torch.uint8, device="cuda")
    plan = indexer.IndexerPlan(**bounds, workspace=memory[2**20:2**20 + num_bytes])
    for name, index in (("cache_lengths", 2), ("cache_lengths", slice(None)), ("input_row_offsets", 2),
                        ("input_row_offsets", slice(None))):
        bad = getattr(wide, name).copy()
        bad[index] = value
        out = torch.full((75, 64), -7, dtype=torch.int32, device="cuda")
        got = to_host(plan(*replace(wide, **{name: bad}).arguments(to_torch), out=out))
        assert ((got >= -1) & (got < width)).all()
        assert (memory[:2**20] == 0x7F).all()
        assert (memory[2**20 + num_bytes:] == 0x7F).all()
        if name == "cache_lengths" and index == 2:
            assert_same_bits(np.delete(got, batch.rows([2]), axis=0), np.delete(want, batch.rows([2]), axis=0))
