"""Faults that users of this operator reported in other implementations, one section per row of that list.

Expected values are worked out here: a full sort by the total order, keys gathered before they are scored, counts by hand. Most rows
plant their scores: queries and keys are one-hot, so that a key's score is its scale, whatever the arithmetic. Outputs are full of
0x7FFFFFFF and NaN before a call, and so is the kernels' scratch (conftest.py).
"""
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
from arrays import to_host, to_torch
from assertions import assert_same_bits

import indexer
from indexer import PagedKeyCache, reference
from indexer.__main__ import to_device as to_numba
from indexer.batches import make_batch
from indexer.cuda_kernels import Plan
from indexer.problem import check_call

SELECT, SCORE = indexer.mla_indexer_ragged_float8_paged, indexer.index_scores
NAN = np.uint32(0x7FFFFFFF).view(np.float32)
ONE, MINUS_ONE, MINUS_ZERO, NAN_BYTE = 0x38, 0xB8, 0x80, 0x7F               # e4m3fn


@dataclass(frozen=True)
class Side:
    """One implementation: its functions, where its arrays go, the heads and depth that it gets, how often a call is repeated."""

    select: Callable[..., Any]
    score: Callable[..., Any]
    to: Callable[[np.ndarray], Any]
    heads: int
    depth: int
    runs: int


ON_GPU = Side(SELECT, SCORE, to_numba, 64, 128, 25)
ORACLE = pytest.param(Side(oracle.select, oracle.scores, np.asarray, 1, 4, 2), id="oracle")
GPU = pytest.param(ON_GPU, id="gpu", marks=[pytest.mark.kernels, pytest.mark.gpu])
TINY = pytest.param(Side(SELECT, SCORE, to_numba, 1, 4, 2), id="kernels", marks=pytest.mark.kernels)        # the simulator too
on_both_sides = pytest.mark.parametrize("side", [ORACLE, GPU])
on_every_side = pytest.mark.parametrize("side", [ORACLE, TINY, GPU])


def gpu_test(function):
    return pytest.mark.gpu(pytest.mark.kernels(function))


# ------------------------------------------------------------------------------------------------------- calls and answers


def places(batch, b, positions):
    """Where these cache rows of a request lie: an index into `blocks` and `scales`."""
    page_size = batch.blocks.shape[3]
    return batch.lookup_table[b, positions // page_size], 0, 0, positions % page_size, 0


def inject(side, rows, top_k, *, new_tokens=None, weight=1, heads=None, **options):
    """Request b has these scores: q is 1.0 in head 0, dim 0, every key 1.0 in dim 0, q_s `weight` (1 or -1) for head 0, else 0."""
    new_tokens = [1] * len(rows) if new_tokens is None else new_tokens
    batch = make_batch(np.random.default_rng(0), new_tokens=new_tokens, cached=[len(row) - n for row, n in zip(rows, new_tokens)],
                       num_heads=heads or side.heads, head_dim=side.depth, regime="one-bin", top_k=top_k, **options)
    batch.q_s[:, 0] = weight
    for b in np.flatnonzero(batch.new_tokens):
        batch.scales[places(batch, b, np.arange(len(rows[b])))] = np.float32(weight) * rows[b][:, None]
    return batch


def run(side, batch, **options):
    """(indices, out_scores) of a call into poisoned outputs."""
    shape = batch.num_tokens, batch.top_k
    out, out_scores = side.to(np.full(shape, 0x7FFFFFFF, np.int32)), side.to(np.full(shape, np.nan, np.float32))
    batch.select(side.select, side.to, out=out, out_scores=out_scores, **options)
    return to_host(out), to_host(out_scores)


def answer(rows, top_k, order="index"):
    """(indices, out_scores) by a full sort of each token's scores: NaN last, higher first, lower position first."""
    indices, scores = np.full((len(rows), top_k), -1, np.int32), np.full((len(rows), top_k), -np.inf, np.float32)
    for t, row in enumerate(rows):
        nan = np.isnan(row)
        best = np.lexsort((np.arange(len(row)), np.where(nan, 0, -row), nan))[:top_k]
        best = np.sort(best) if order == "index" else best
        indices[t, :len(best)], scores[t, :len(best)] = best, np.where(nan, NAN, row)[best]
    return indices, scores


def assert_same_selection(got, want, what=""):
    assert_same_bits(got[0], want[0], f"indices {what}")
    assert_same_bits(got[1], want[1], f"out_scores {what}")


def assert_selects(side, batch, rows):
    """Each token has the answer for its row: in both orders, and where nobody asks for scores."""
    for order in ("index", "score"):
        assert_same_selection(run(side, batch, order=order), answer(rows, batch.top_k, order), order)
    assert_same_bits(to_host(batch.select(side.select, side.to)), answer(rows, batch.top_k)[0], "indices without scores")


def causal(rows, new_tokens):
    """What each token sees of its request's row."""
    return [row[:len(row) - n + i + 1] for row, n in zip(rows, new_tokens) for i in range(n)]


def gaussian(rng, *sizes):
    return [rng.standard_normal(size, np.float32) for size in sizes]


def from_bits(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def lattice(batch):
    """The batch with small integers and powers of two: the same scores in any order and arithmetic. Unused slots stay NaN."""
    rng, unused = np.random.default_rng(1), np.isnan(batch.scales)
    q, blocks = (rng.integers(-2, 3, array.shape).astype(np.float32).astype(array.dtype) for array in (batch.q, batch.blocks))
    blocks.view(np.uint8)[unused[..., 0]] = NAN_BYTE
    scales = np.where(unused, np.float32(np.nan), rng.choice(np.float32([0.25, 0.5, 1, 2]), unused.shape))
    return replace(batch, q=q, blocks=blocks, scales=scales, q_s=rng.choice(np.float32([-2, -1, 0.5, 1, 2]), batch.q_s.shape))


def gathered(batch):
    """Scores that each token of a lattice batch sees: its request's keys, gathered, then scored in float64."""
    rows = []
    for b, n in enumerate(batch.new_tokens):
        at = places(batch, b, np.arange(int(batch.cache_lengths[b]) + n))
        keys, scales = batch.blocks[at].astype(np.float64), batch.scales[at][:, 0]
        for t in batch.rows([b]):
            relu = np.maximum(keys @ batch.q[t].astype(np.float64).T, 0)
            rows.append(((relu @ batch.q_s[t] + 0) * scales)[:batch.candidates[t]].astype(np.float32))
    return rows


def assert_scores(side, batch, rows):
    """All scores are these, -inf behind each row."""
    got = to_host(batch.score(side.score, side.to))
    for t, row in enumerate(rows):
        assert_same_bits(got[t, :len(row)], row, f"scores of token {t}")
        assert (got[t, len(row):] == -np.inf).all()


def one_at_a_time(batch):
    """Every token as a request of its own, over the same pages; causal, kpool 1."""
    owner, dtype = np.repeat(np.arange(len(batch.new_tokens)), batch.new_tokens), batch.cache_lengths.dtype
    return replace(batch, input_row_offsets=np.arange(batch.num_tokens + 1, dtype=dtype), lookup_table=batch.lookup_table[owner],
                   cache_lengths=(batch.candidates - 1).astype(dtype))


# ------------------------------------------------------------------------------------------------------------------- row 1


@on_both_sides
@pytest.mark.parametrize("top_k", [512, 1024, 2048])
def test_radix_buffer_overflow_loses_keys(side, top_k):
    """Row 1. 20,000 scores in one coarse bin, 3 units apart: the set by its definition, on every run."""
    permutation = np.random.default_rng(1).permutation(20_000)
    rows = [from_bits(0x3F800000 + 3 * permutation)]
    batch = inject(side, rows, top_k)
    assert_selects(side, batch, rows)
    best_first = np.argsort(permutation)[::-1][:top_k].astype(np.int32)
    for _ in range(20):
        assert_same_bits(run(side, batch, order="score")[0][0], best_first)


@on_both_sides
def test_radix_buffer_overflow_loses_keys_of_a_million(side):
    """Row 1. 1,048,576 random scores."""
    rows = gaussian(np.random.default_rng(2), 2**20)
    batch = inject(side, rows, 2048)
    assert_selects(side, batch, rows)
    want = answer(rows, 2048)
    for _ in range(side.runs - 1):
        assert_same_selection(run(side, batch), want)


# ------------------------------------------------------------------------------------------------------------------- row 2


@on_both_sides
@pytest.mark.parametrize("num_infinite", [0, 1000, 7000])
def test_relu_plateau_leaves_minus_one_in_the_valid_prefix(side, num_infinite):
    """Row 2. 100 positives and 8220 zeros; infinite scales make infinities of positives and NaN, which go last, of zeros."""
    rng = np.random.default_rng(3)
    positive = np.sort(rng.choice(8320, 100, replace=False))
    zeros = np.setdiff1d(np.arange(8320), positive)
    scales = rng.uniform(0.5, 2, 8320).astype(np.float32)
    infinite = np.sort(rng.choice(zeros, num_infinite, replace=False))
    scales[infinite] = np.inf
    if num_infinite:
        scales[positive[::10]] = np.inf
    batch = inject(side, [scales], 2048)
    batch.blocks.view(np.uint8)[(*places(batch, 0, zeros), 0)] = MINUS_ONE
    wanted = np.concatenate([positive, np.setdiff1d(zeros, infinite), infinite])[:2048]
    assert_same_bits(run(side, batch)[0], np.sort(wanted)[None].astype(np.int32))
    by_rank, scores = (array[0] for array in run(side, batch, order="score"))
    best_first = positive[np.lexsort((positive, -scales[positive]))]
    assert_same_bits(by_rank, np.concatenate([best_first, wanted[100:]]).astype(np.int32))
    num_nan = max(0, 2048 - 8320 + num_infinite)
    assert_same_bits(scores, np.concatenate([scales[best_first], np.zeros(1948 - num_nan, np.float32), np.repeat(NAN, num_nan)]))


# ------------------------------------------------------------------------------------------------------------------- row 3


@on_both_sides
def test_slots_never_written_when_ties_overflow(side):
    """Row 3. 500 scores in [4, 8), 7113 in [1, 1.0078): one coarse bin holds far more than the 1548 it has to give."""
    rng = np.random.default_rng(4)
    high, low = 0x40800000 + rng.integers(0, 1 << 23, 500), 0x3F800000 + rng.integers(0, 1 << 16, 7113)
    rows = [from_bits(rng.permutation(np.concatenate([high, low])))]
    assert_selects(side, inject(side, rows, 2048), rows)


# ------------------------------------------------------------------------------------------------------------------- row 4


@on_every_side
def test_padding_lanes_beat_real_minus_infinity(side):
    """Row 4. 3 finite scores, the lowest finite one among them, and 48 of -inf, in two requests back to back."""
    finite = [[5, 20, 50], [0, 1, 2]]
    rows = [np.full(51, -np.inf, np.float32) for _ in finite]
    for row, at in zip(rows, finite):
        row[at] = [np.finfo(np.float32).min, 0.5, -1]
    batch = inject(side, rows, 16)
    assert_selects(side, batch, rows)
    assert answer(rows, 16, "score")[0].tolist() == [[20, 50, 5, 0, 1, 2, 3, 4, *range(6, 14)], [1, 2, 0, *range(3, 16)]]


# ------------------------------------------------------------------------------------------------------------------- row 5


@on_both_sides
@pytest.mark.parametrize("share", [0.9, 1])
def test_nan_scores_return_uninitialised_memory(side, share):
    """Row 5. One request of four has NaN scales and key bytes: finite keys win, NaN by position, the others are untouched."""
    rng = np.random.default_rng(5)
    rows = gaussian(rng, 4096, 4096, 4096, 4096)
    rows[2][::40] = -np.inf
    batch = inject(side, rows, 2048)
    clean = run(side, batch)
    poisoned, by_key = np.arange(4096)[rng.random(4096) < share], rng.random(4096) < 0.5
    batch.scales[places(batch, 2, poisoned[~by_key[poisoned]])] = from_bits(0xFFC12345)
    batch.blocks.view(np.uint8)[(*places(batch, 2, poisoned[by_key[poisoned]]), side.depth - 1)] = NAN_BYTE
    rows[2][poisoned] = np.nan
    assert_selects(side, batch, rows)
    got, others = run(side, batch), [0, 1, 3]
    assert_same_selection([array[others] for array in got], [array[others] for array in clean])
    numbers = np.setdiff1d(np.arange(4096), poisoned)
    assert_same_bits(got[0][2], np.sort(np.concatenate([numbers, poisoned])[:2048]).astype(np.int32))


@on_every_side
def test_nan_scores_rank_before_minus_infinity(side):
    """Row 5. NaN by scale and by key byte, behind -inf and by position."""
    rows = [np.float32([np.nan, -np.inf, 1, 7, np.nan, -2, -np.inf, 0, np.nan])]
    batch = inject(side, rows, 7)
    batch.blocks.view(np.uint8)[(*places(batch, 0, 3), side.depth - 1)] = NAN_BYTE
    rows[0][3] = np.nan
    assert_selects(side, batch, rows)
    assert answer(rows, 7, "score")[0].tolist() == [[2, 7, 5, 1, 6, 0, 3]]


# ------------------------------------------------------------------------------------------------------------------- row 6


@on_both_sides
def test_scores_that_differ_in_their_low_bits_only(side):
    """Row 6. 32,768 scores with the same upper 22 bits."""
    rows = [from_bits(0x3F800000 + np.random.default_rng(6).integers(0, 1024, 32_768))]
    assert_selects(side, inject(side, rows, 2048), rows)


# ------------------------------------------------------------------------------------------------------------------- row 7


@on_both_sides
@pytest.mark.parametrize("top_k", [64, 512, 2048])
def test_no_threshold_when_exactly_top_k_keys_are_valid(side, top_k):
    """Row 7. top_k - 1, top_k and top_k + 1 candidates; and rows whose k-th best is the last of its bin, by every digit."""
    rng = np.random.default_rng(7)
    rows = gaussian(rng, top_k - 1, top_k, top_k + 1)
    for size in (top_k + 1, 3 * top_k, 20_000):
        top, below = rng.integers(0x40000001, 0x40800000, top_k - 1), np.full(size - top_k, 0x3FFFFFFF)
        rows.append(from_bits(rng.permutation(np.concatenate([top, [0x40000000], below]))))
    assert_selects(side, inject(side, rows, top_k), rows)


# ------------------------------------------------------------------------------------------------------------------- row 8


@on_both_sides
def test_padding_stops_at_column_1024(side):
    """Row 8. 128 heads, c 2100, 1990, 1500 and 50: the last row is 51 positions and 1997 times -1."""
    rows = gaussian(np.random.default_rng(8), 2101, 1991, 1501, 51)
    batch = inject(side, rows, 2048, heads=128)
    assert_selects(side, batch, rows)
    indices = run(side, batch)[0]
    assert [(row >= 0).sum() for row in indices] == [2048, 1991, 1501, 51]
    assert indices[3].tolist() == [*range(51), *[-1] * 1997]


# ------------------------------------------------------------------------------------------------------------------- row 9


@on_both_sides
@pytest.mark.parametrize(("cached", "new_tokens"), [([896], [179]), ([300, 500, 100], [64, 200, 32])])
def test_rows_shear_apart_where_the_context_is_shorter_than_top_k(side, cached, new_tokens):
    """Row 9. Row i holds exactly its c + i + 1 keys, of 2048."""
    rows = gaussian(np.random.default_rng(9), *np.add(cached, new_tokens))
    batch = inject(side, rows, 2048, new_tokens=new_tokens)
    assert_selects(side, batch, causal(rows, new_tokens))
    visible = np.concatenate([c + 1 + np.arange(n) for c, n in zip(cached, new_tokens)])
    position = np.arange(2048, dtype=np.int32)
    assert_same_bits(run(side, batch)[0], np.where(position < visible[:, None], position, np.int32(-1)))


# ------------------------------------------------------------------------------------------------------------------ row 10


@pytest.mark.parametrize("side", [TINY, GPU])
def test_a_padded_row_of_negative_length_is_read_as_unsigned(side):
    """Row 10. Lengths on the device that leave no candidates, among live rows."""
    new_tokens = [1, 1, 1, 2, 1, 1]
    rows = gaussian(np.random.default_rng(10), *[24] * 6)
    batch = inject(side, rows, 8, new_tokens=new_tokens, metadata_dtype="int32")
    batch.cache_lengths[1:5] = [-1, -7, -2, -2**31]
    seen = causal(rows, new_tokens)
    assert_selects(side, batch, [seen[0], *[seen[0][:0]] * 5, seen[6]])


@pytest.mark.parametrize("function", [reference.mla_indexer_ragged_float8_paged, SELECT])
def test_a_negative_length_on_the_host_is_refused(function):
    """Row 10. Where the host can see it, it is named."""
    batch = inject(ON_GPU, gaussian(np.random.default_rng(10), 24, 24), 8, metadata_dtype="int32")
    batch.cache_lengths[1] = -1
    with pytest.raises(ValueError, match="cache_lengths must not be negative, got -1 at request 1"):
        batch.select(function)


# ------------------------------------------------------------------------------------------------------------------ row 11


@on_every_side
@pytest.mark.parametrize("mask", ["causal", "null"])
@pytest.mark.parametrize(("new_tokens", "cached"), [
    ([1] * 32, [0] * 32), ([1, 3, 2, 1], [0] * 4), ([0] * 4, [0] * 4), ([0, 0], [9, 70]), ([], [])],
    ids=["32 contexts", "4 contexts", "no tokens", "no new tokens", "no requests"])
def test_empty_contexts_are_read_out_of_bounds(side, new_tokens, cached, mask):
    """Row 11. kpool 4 and fewer than 4 tokens each, no tokens at all, no requests: -1 everywhere, or an empty output."""
    batch = make_batch(np.random.default_rng(11), new_tokens=new_tokens, cached=cached, num_heads=side.heads, head_dim=side.depth,
                       kpool=4, mask=mask, top_k=16)
    shape = sum(new_tokens), 16
    for order in ("index", "score"):
        want = np.full(shape, -1, np.int32), np.full(shape, -np.inf, np.float32)
        assert_same_selection(run(side, batch, order=order), want)
    assert_same_bits(to_host(batch.select(side.select, side.to)), np.full(shape, -1, np.int32))


# ------------------------------------------------------------------------------------------------------------------ row 12


@on_both_sides
def test_top_k_larger_than_the_context_narrows_the_output(side):
    """Row 12. 249 tokens without context: the output is 2048 wide, row i has i + 1 positions."""
    rows = gaussian(np.random.default_rng(12), 249)
    batch = inject(side, rows, 2048, new_tokens=[249])
    assert to_host(batch.select(side.select, side.to)).shape == (249, 2048)
    assert_selects(side, batch, causal(rows, [249]))


@on_every_side
def test_one_key_and_top_k_2048(side):
    """Row 12. One position, then -1."""
    batch = inject(side, [np.float32([-3])], 2048)
    assert to_host(batch.select(side.select, side.to)).tolist() == [[0, *[-1] * 2047]]
    assert_selects(side, batch, [np.float32([-3])])


# ------------------------------------------------------------------------------------------------------------------ row 13


@on_both_sides
def test_prefix_cached_prefill_is_bounded_by_its_new_tokens(side):
    """Row 13. 4 new tokens behind 3000 cached ones, of which the best are at 5 and 2990."""
    rng = np.random.default_rng(13)
    row = rng.random(3004, np.float32)
    row[[5, 2990]] = [2, 3]
    batch = inject(side, [row], 2048, new_tokens=[4])
    assert_selects(side, batch, causal([row], [4]))
    assert run(side, batch, order="score")[0][:, :2].tolist() == [[2990, 5]] * 4


# ------------------------------------------------------------------------------------------------------------------ row 14


@on_both_sides
def test_zeros_past_the_length_win_over_negative_scores(side):
    """Row 14. All scores negative; page slots, blocks and table behind the rows would score 0."""
    lengths = 64, 128, 200, 256
    rows = [-1 - np.abs(row) for row in gaussian(np.random.default_rng(14), *lengths)]
    batch = inject(side, rows, 64, weight=-1)
    keys, unused = batch.blocks.view(np.uint8), np.isnan(batch.scales)
    batch.scales[unused], keys[unused[..., 0]] = 0, 0
    batch.lookup_table[batch.lookup_table >= len(batch.blocks)] = 0
    assert_selects(side, batch, rows)
    assert (run(side, batch)[0] < np.array(lengths)[:, None]).all()


# ------------------------------------------------------------------------------------------------------------------ row 15


@on_both_sides
@pytest.mark.parametrize("lengths", [[1], [63], [64], [65], [129], [1, 63, 64, 65, 129]], ids=str)
def test_only_slot_0_of_each_page_is_read(side, lengths):
    """Row 15. Pages of 64 in any order, exactly as many columns as the longest request has pages: gather, then score."""
    batch = lattice(make_batch(np.random.default_rng(15), new_tokens=[1] * len(lengths), cached=[v - 1 for v in lengths],
                               page_size=64, spare_columns=0, top_k=32))
    assert batch.lookup_table.shape[1] == -(-max(lengths) // 64)
    rows = gathered(batch)
    assert_scores(side, batch, rows)
    assert_selects(side, batch, rows)


# ------------------------------------------------------------------------------------------------------------------ row 16


@on_every_side
def test_planar_pages_are_read_as_interleaved(side):
    """Row 16. One planar page of 64 keys of 1.0 with scales 2**(i % 16), 0xFF in the slots from 40 on."""
    scales = np.float32(2.0 ** (np.arange(40) % 16))
    page = np.full(64 * (side.depth + 4), 0xFF, np.uint8)
    page[:40 * side.depth] = ONE
    page[64 * side.depth:].view(np.float32)[:40] = scales
    cache = PagedKeyCache.from_fused(side.to(page.reshape(1, 64, 1, side.depth + 4)), side.to(np.int32([39])),
                                     side.to(np.zeros((1, 1), np.int32)))
    q, q_s = np.zeros((1, side.heads, side.depth), np.uint8), np.zeros((1, side.heads), np.float32)
    q[0, 0, 0], q_s[0, 0] = ONE, 1
    call = side.to(q), side.to(q_s), side.to(np.int32([0, 1])), cache
    got = to_host(side.score(*call))[0]
    assert_same_bits(got[:40], scales)
    assert (got[40:] == -np.inf).all()
    for order in ("index", "score"):
        out_scores = side.to(np.full((1, 48), np.nan, np.float32))
        indices = side.select(*call, top_k=48, order=order, out_scores=out_scores)
        assert_same_selection((to_host(indices), to_host(out_scores)), answer([scales], 48, order), order)


# ------------------------------------------------------------------------------------------------------------------ row 17


@pytest.mark.big
@gpu_test
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("gibibytes", [3, 5])
def test_int32_overflow_in_page_offsets(fused, gibibytes):
    """Row 17. Keys over 2 GiB and over 4 GiB, pages on either side of both: 6 GB, 5 s."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(17)
    page_bytes = 64 * (132 if fused else 128)
    num_blocks = gibibytes * 2**30 // page_bytes
    pages = torch.randint(0, 256, (num_blocks, page_bytes), dtype=torch.uint8, device="cuda").bitwise_and_(0xBF)    # no NaN
    if fused:
        scales = pages[:, 64 * 128:].view(torch.float32).uniform_(-2, 2)
    else:
        scales = torch.empty((num_blocks, 64), device="cuda").uniform_(-2, 2)

    cached, rng = [2000, 99, 640], np.random.default_rng(17)
    table = rng.integers(0, num_blocks, (3, 32)).astype(np.int32)
    edges = [edge // page_bytes + i for edge in (2**31, 2**32) for i in (-1, 0, 1)]
    edges = [page for page in edges if page < num_blocks] + [num_blocks - 1, 0]
    table[0, :len(edges)] = table[2, :len(edges)] = edges
    q = torch.randint(0, 256, (3, 64, 128), dtype=torch.uint8, device="cuda").bitwise_and_(0xBF)
    q_s = torch.randn((3, 64), device="cuda")
    offsets = np.arange(4, dtype=np.int32)

    metadata = to_torch(np.int32(cached)), to_torch(table)
    if fused:
        cache = PagedKeyCache.from_fused(pages.view(num_blocks, 64, 1, 132), *metadata)
    else:
        cache = PagedKeyCache(pages.view(num_blocks, 1, 1, 64, 1, 128), scales.view(num_blocks, 1, 1, 64, 1, 1), *metadata)
    used, renamed = np.unique(table, return_inverse=True)
    used = torch.from_numpy(used).long().cuda()
    on_host = PagedKeyCache(to_host(pages[used][:, :64 * 128]).reshape(-1, 1, 1, 64, 1, 128),
                            to_host(scales[used]).reshape(-1, 1, 1, 64, 1, 1), np.int32(cached),
                            renamed.reshape(table.shape).astype(np.int32))
    want = oracle.scores(to_host(q), to_host(q_s), offsets, on_host)
    assert_same_bits(to_host(SCORE(q, q_s, to_torch(offsets), cache))[:, :want.shape[1]], want)
    want = oracle.select(to_host(q), to_host(q_s), offsets, on_host, top_k=512)
    assert_same_bits(to_host(SELECT(q, q_s, to_torch(offsets), cache, top_k=512)), want)


@pytest.mark.big
@gpu_test
def test_int32_overflow_in_score_offsets():
    """Row 17. 2100 rows of 1,048,576 scores, more than 2**31, as a result and as scratch: 18 GB, 15 s."""
    batch = make_batch(np.random.default_rng(17), new_tokens=[2100], cached=[2**20 - 2100], num_heads=8, head_dim=16,
                       spare_columns=0, top_k=2048)
    arguments, alone = batch.arguments(to_torch), one_at_a_time(batch)
    scores = SCORE(*arguments)
    assert scores.shape == (2100, 2**20)
    selected = SELECT(*arguments, top_k=2048, scores_budget_bytes=2**34)
    for t in (0, 2047, 2048, 2099):                               # row 2048 is at score 2**31
        want, row = alone.take([t]).score(oracle.scores)[0], to_host(scores[t])
        assert_same_bits(row[:len(want)], want, f"scores of token {t}")
        assert (row[len(want):] == -np.inf).all()
        assert_same_bits(to_host(selected[t:t + 1]), answer([want], 2048)[0], f"indices of token {t}")


@pytest.mark.big
@gpu_test
def test_int32_overflow_in_query_and_output_offsets():
    """Row 17. 1,050,000 tokens: 4.3 GB of queries, twice 2**31 outputs; up to 16 pooled keys each: 23 GB, 5 s."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(17)
    num_tokens, top_k, kpool = 1_050_000, 2048, 2**16
    q = torch.randint(0, 256, (num_tokens, 32, 128), dtype=torch.uint8, device="cuda").bitwise_and_(0xBF)
    q_s = torch.randn((num_tokens, 32), device="cuda")
    keys = np.random.default_rng(17).integers(0, 256, (1, 1, 1, 16, 1, 128), np.uint8) & 0xBF
    scales = np.random.default_rng(18).standard_normal((1, 1, 1, 16, 1, 1), np.float32)
    table = np.zeros((1, 1), np.int32)
    cache = PagedKeyCache(*map(to_torch, (keys, scales, np.int32([0]), table)))
    out = torch.full((num_tokens, top_k), 0x7FFFFFFF, dtype=torch.int32, device="cuda")
    out_scores = torch.full((num_tokens, top_k), torch.nan, device="cuda")
    offsets = to_torch(np.int32([0, num_tokens]))
    SELECT(q, q_s, offsets, cache, top_k=top_k, kpool=kpool, order="score", out=out, out_scores=out_scores)
    for first in range(0, num_tokens, 2**17):                     # every row has as many positions as it has candidates
        part = out[first:first + 2**17]
        tokens = torch.arange(first, first + len(part), device="cuda")
        assert torch.equal((part >= 0).sum(dim=1), (tokens + 1) // kpool)
    for t in (0, kpool - 1, 2**19 - 1, 2**19, 2**20 - 1, 2**20, num_tokens - 1):                 # bytes 2**31, 2**32; entry 2**31
        alone = PagedKeyCache(keys, scales, np.int32([t]), table)
        want_scores = np.empty((1, top_k), np.float32)
        want = oracle.select(to_host(q[t:t + 1]), to_host(q_s[t:t + 1]), np.int32([0, 1]), alone, top_k=top_k, kpool=kpool,
                             order="score", out_scores=want_scores)
        assert_same_selection((to_host(out[t:t + 1]), to_host(out_scores[t:t + 1])), (want, want_scores), f"of token {t}")


# ------------------------------------------------------------------------------------------------------------------ row 18


@pytest.mark.big
@gpu_test
def test_more_requests_than_a_grid_dimension_holds():
    """Row 18. 65,537 requests of one token and three keys, with ties: 1 GB, 10 s."""
    rows = list(np.random.default_rng(18).integers(-1, 2, (65_537, 3)).astype(np.float32))
    assert_selects(ON_GPU, inject(ON_GPU, rows, 2, heads=8, page_size=8), rows)


@pytest.mark.big
@gpu_test
def test_more_tokens_than_a_grid_dimension_holds():
    """Row 18. 65,537 tokens of one request with up to three pooled keys, every token with a sign of its own: 1 GB, 10 s."""
    rng = np.random.default_rng(18)
    batch = make_batch(rng, new_tokens=[65_537], cached=[0], num_heads=8, head_dim=128, page_size=8, kpool=20_000, regime="one-bin",
                       top_k=2)
    scales, signs = np.float32([2, -1, 3]), rng.choice(np.float32([-1, 1]), 65_537)
    batch.scales[places(batch, 0, np.arange(3))] = scales[:, None]
    batch.q_s[:, 0] = signs
    assert_selects(ON_GPU, batch, [sign * scales[:(i + 1) // 20_000] for i, sign in enumerate(signs)])


# ---------------------------------------------------------------------------------------------------------- rows 19, 20, 21


class Captured:
    """A call in a graph, all its arrays torch's; called once before, which compiles."""

    def __init__(self, batch):
        torch = pytest.importorskip("torch")
        self.options = {"top_k": batch.top_k, "order": batch.order}
        self.arguments = batch.arguments(to_torch)
        self.outputs = self.eager()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            SELECT(*self.arguments, **self.options, out=self.outputs[0], out_scores=self.outputs[1])

    def eager(self):
        """(indices, out_scores) of the same call outside the graph, poisoned before."""
        torch = pytest.importorskip("torch")
        shape = self.arguments[0].shape[0], self.options["top_k"]
        out = torch.full(shape, 0x7FFFFFFF, dtype=torch.int32, device="cuda")
        out_scores = torch.full(shape, torch.nan, device="cuda")
        SELECT(*self.arguments, **self.options, out=out, out_scores=out_scores)
        return out, out_scores

    def replay(self):
        """(indices, out_scores) of a replay into poisoned outputs, on the host."""
        out, out_scores = self.outputs
        out.fill_(0x7FFFFFFF)
        out_scores.fill_(float("nan"))
        self.graph.replay()
        return to_host(out), to_host(out_scores)


@gpu_test
@pytest.mark.parametrize("order", ["index", "score"])
def test_a_scratch_reset_is_missing_from_a_captured_graph(order):
    """Row 19. Captured at 300 keys, replayed at other lengths, which only the device knows."""
    rows = gaussian(np.random.default_rng(19), 40_000, 40_000, 40_000)
    batch = inject(ON_GPU, rows, 2048, order=order, max_prompt_length=1, max_context_length=39_999)
    batch.cache_lengths[:] = 299
    captured = Captured(batch)
    lengths = captured.arguments[3].cache_lengths
    for live in (300, 40_000, 300, 40_000, 8192, 8193, 300):
        lengths.fill_(live - 1)
        want = answer([row[:live] for row in rows], 2048, order)
        assert_same_selection(captured.replay(), want, f"replayed at {live}")
        assert_same_selection([to_host(array) for array in captured.eager()], want, f"eager at {live}")


@gpu_test
def test_temporaries_of_a_captured_graph_are_freed_by_a_later_call():
    """Row 20. Two graphs, a larger call between them, and memory that others have written since."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(20)

    def captured(num_rows, size, **options):
        rows = gaussian(rng, *[size] * num_rows)
        return Captured(inject(ON_GPU, rows, 2048, **options)), answer(rows, 2048, **options)

    def assert_replays(graph, want):
        torch.cuda.empty_cache()                                  # whatever has been freed is gone, or overwritten
        torch.full((2**28,), torch.nan, device="cuda")
        assert_same_selection(graph.replay(), want)

    small, of_small = captured(3, 9000, order="score")
    assert_replays(small, of_small)
    rows = gaussian(rng, *[70_000] * 40)
    larger = inject(ON_GPU, rows, 2048).select(SELECT, to_torch)
    assert_same_bits(to_host(larger), answer(rows, 2048)[0])
    assert_replays(small, of_small)
    second, of_second = captured(5, 20_000)
    for _ in range(3):
        assert_replays(small, of_small)
        assert_replays(second, of_second)


@gpu_test
@pytest.mark.parametrize("top_k", [512, 2048])
def test_decode_cost_follows_the_captured_maximum(top_k):
    """Row 21. 8 requests of 2049 keys, declared as 4096 and as 1,048,576: the same time within 10 % and 2 us."""
    torch = pytest.importorskip("torch")
    rows = gaussian(np.random.default_rng(21), *[2049] * 8)
    batch = inject(ON_GPU, rows, top_k, spare_columns=2**20 // 64, max_prompt_length=1)
    graphs = [Captured(replace(batch, max_context_length=declared - 1)) for declared in (4096, 2**20)]
    for graph in graphs:
        assert_same_selection(graph.replay(), answer(rows, top_k))
    times = [[], []]
    torch.cuda._sleep(50_000_000)                                 # the replays queue up behind it
    for _ in range(50):
        for graph, pairs in zip(graphs, times):
            pairs.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            pairs[-1][0].record()
            graph.graph.replay()
            pairs[-1][1].record()
    torch.cuda.synchronize()
    narrow, wide = (float(np.median([1000 * start.elapsed_time(end) for start, end in pairs])) for pairs in times)
    assert wide <= 1.1 * narrow + 2, f"{wide:.1f} us with a bound of 1,048,576, {narrow:.1f} us with 4096"


# ------------------------------------------------------------------------------------------------------------------ row 22


@on_both_sides
@pytest.mark.parametrize("depth", [32, 64, 128])
def test_scores_differ_between_identical_launches(side, depth):
    """Row 22. 16 heads over 4096 keys: right for each depth, and the same bits in every run."""
    num_tokens = 128 if side is ON_GPU else 16
    batch = make_batch(np.random.default_rng(22), new_tokens=[num_tokens], cached=[4096 - num_tokens], num_heads=16, head_dim=depth)
    exact = lattice(batch)
    assert_scores(side, exact, gathered(exact))
    want = batch.score(oracle.scores)
    for _ in range(side.runs):
        assert_same_bits(to_host(batch.score(side.score, side.to))[:, :4096], want)


# ------------------------------------------------------------------------------------------------------------------ row 23


@on_both_sides
@pytest.mark.parametrize("num_heads", [32, 64])
@pytest.mark.parametrize("new_tokens", [*([n] * 3 for n in range(1, 10)), [6, 1, 4, 1]], ids=str)
def test_more_than_two_draft_tokens_per_step(side, new_tokens, num_heads):
    """Row 23. Any number of new tokens: right, and the bits of one token at a time. The oracle sees the longest context once."""
    cached = [127, 2000, 33_199, 126][:len(new_tokens)]
    if side is not ON_GPU and len(new_tokens) == 3:
        cached[2] = 4090
    batch = make_batch(np.random.default_rng(23), new_tokens=new_tokens, cached=cached, num_heads=num_heads, head_dim=side.depth)
    exact = lattice(batch)
    assert_scores(side, exact, gathered(exact))
    alone = one_at_a_time(batch)
    scores, scores_alone = (to_host(calls.score(side.score, side.to)) for calls in (batch, alone))
    assert_same_bits(scores, scores_alone)
    rows = [row[:v] for row, v in zip(scores, batch.candidates)]
    for order in ("index", "score"):
        want = answer(rows, 2048, order)
        assert_same_selection(run(side, batch, order=order), want, order)
        assert_same_selection(run(side, alone, order=order), want, f"{order}, one token at a time")


# ------------------------------------------------------------------------------------------------------------------ row 24

BUDGETS = 512 * 2**20, 2**20, 16
OVER_48 = [171] * 32 + [170] * 16                                 # 8192 tokens


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("new_tokens", "cached"), [(OVER_48, 10_240), ([4096], 2**20)], ids=["48 requests", "one request"])
def test_one_score_allocation_is_planned_for_all_rows(new_tokens, cached, budget):
    """Row 24. The score matrix of a plan is within the budget or one row, and its chunks are all rows."""
    batch = make_batch(np.random.default_rng(24), new_tokens=new_tokens, cached=[cached] * len(new_tokens), num_heads=1, head_dim=4,
                       regime="one-bin")
    call = check_call(*batch.arguments(), mask="causal", kpool=1, arithmetic="exact", top_k=2048, scores_budget_bytes=budget)
    plan, width = Plan.of(call, 132, 232_448, with_scores=False), cached + max(new_tokens)
    rows = min(batch.num_tokens, max(1, budget // (4 * width)))
    assert plan.scores_shape == (rows, width)
    assert 4 * rows * width <= max(budget, 4 * width)
    assert (plan.num_chunks - 1) * rows < batch.num_tokens <= plan.num_chunks * rows


@on_both_sides
def test_the_score_budget_changes_bits(side):
    """Row 24. 60 tokens of 4 requests behind 10,240 keys: any budget gives the full sort's answer."""
    new_tokens = [30, 1, 0, 29]
    rows = gaussian(np.random.default_rng(24), *(10_240 + n for n in new_tokens))
    batch = inject(side, rows, 2048, new_tokens=new_tokens)
    want = answer(causal(rows, new_tokens), 2048)
    for budget in BUDGETS:
        assert_same_selection(run(side, batch, scores_budget_bytes=budget), want, f"with {budget} bytes")


@pytest.mark.big
@gpu_test
@pytest.mark.parametrize(("new_tokens", "cached", "num_heads", "head_dim"), [(OVER_48, 10_240, 64, 128), ([4096], 2**20, 8, 16)],
                         ids=["48 requests", "one request"])
def test_one_score_allocation_takes_all_memory(new_tokens, cached, num_heads, head_dim):
    """Row 24. Peak memory is the budget or one row, the output and 16 MiB; the bits do not depend on it: 1 GB, 20 s."""
    torch = pytest.importorskip("torch")
    batch = make_batch(np.random.default_rng(24), new_tokens=new_tokens, cached=[cached] * len(new_tokens), num_heads=num_heads,
                       head_dim=head_dim, spare_blocks=0)
    arguments, width = batch.arguments(to_torch), 64 * batch.lookup_table.shape[1]
    results = []
    for budget in BUDGETS:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results.append(SELECT(*arguments, top_k=2048, scores_budget_bytes=budget))
        scratch = torch.cuda.max_memory_allocated() - before - results[-1].nbytes
        assert scratch <= max(budget, 4 * width) + 16 * 2**20, f"{scratch} bytes of scratch for a budget of {budget}"
    for result in results[1:]:
        assert torch.equal(result, results[0])
    alone = one_at_a_time(batch)
    for t in (0, batch.num_tokens // 2, batch.num_tokens - 1):
        want = answer(alone.take([t]).score(oracle.scores), 2048)[0]
        assert_same_bits(to_host(results[0][t:t + 1]), want, f"token {t}")


# ------------------------------------------------------------------------------------------------------------------ row 25


@gpu_test
def test_scratch_of_a_new_size_on_every_call():
    """Row 25. 60 calls with a context that grows by 4608 within its bound: memory is flat after the first one."""
    torch = pytest.importorskip("torch")
    steps, top_k = 4608 * np.arange(1, 61), 2048
    row, = gaussian(np.random.default_rng(25), steps[-1] + 64)
    batch = inject(ON_GPU, [row], top_k, new_tokens=[64], max_prompt_length=64, max_context_length=int(steps[-1]))
    arguments, reserved = batch.arguments(to_torch), []
    lengths = arguments[3].cache_lengths
    for cached in steps.tolist():
        lengths.fill_(cached)
        indices = SELECT(*arguments, top_k=top_k)
        assert_same_bits(to_host(indices[-1:]), answer([row[:cached + 64]], top_k)[0])
        del indices
        reserved.append(torch.cuda.memory_reserved())
    assert set(reserved) == {reserved[0]}


# ------------------------------------------------------------------------------------------------------------------ row 26


@on_both_sides
def test_selection_changes_from_run_to_run_and_rank_to_rank(side):
    """Row 26. 300 positives and 4700 zeros of both signs: one set, order and bits in any company, place, budget and pages."""
    rng = np.random.default_rng(26)
    cached = rng.integers(0, 3000, 33).tolist()
    cached[20] = 4999
    batch = make_batch(rng, new_tokens=[1] * 33, cached=cached, num_heads=side.heads, head_dim=side.depth, regime="relu-plateau",
                       top_k=2048)
    positive = np.sort(rng.choice(5000, 300, replace=False))
    zeros = np.setdiff1d(np.arange(5000), positive)
    keys, at = batch.blocks.view(np.uint8), places(batch, 20, positive)
    keys[places(batch, 20, zeros)] |= 0x80
    keys[at] &= 0x7F
    batch.scales[at], batch.q_s[20] = np.abs(batch.scales[at]), np.abs(batch.q_s[20]) + 1

    ids, table = rng.permutation(len(keys)), batch.lookup_table.copy()
    in_use = table < len(keys)
    table[in_use] = ids[table[in_use]]
    moved = replace(batch, blocks=batch.blocks[np.argsort(ids)], scales=batch.scales[np.argsort(ids)], lookup_table=table)
    others = [b for b in range(33) if b != 20]
    variants = {"in a batch of 33": (batch, 20), "alone": (batch.take([20]), 0), "at the front": (batch.take([20, *others]), 0),
                "at place 31": (batch.take([*others[:31], 20, 32]), 31), "on other pages": (moved, 20),
                "alone on other pages": (moved.take([20]), 0), "with another budget": (replace(batch, scores_budget_bytes=1), 20)}
    first = {order: [array[20] for array in run(side, batch, order=order)] for order in ("index", "score")}
    assert_same_bits(first["index"][0], np.sort(np.concatenate([positive, zeros[:1748]])).astype(np.int32))
    by_rank, scores = first["score"]
    assert_same_bits(np.sort(by_rank[:300]), positive.astype(np.int32))
    assert_same_bits(by_rank[300:], zeros[:1748].astype(np.int32))
    assert (np.diff(scores[:300]) <= 0).all()
    assert (scores[:300] > 0).all()
    assert (scores[300:] == 0).all()
    for name, (variant, row) in variants.items():
        for _ in range(side.runs):
            for order, want in first.items():
                assert_same_selection([array[row] for array in run(side, variant, order=order)], want, f"{order}, {name}")


# ------------------------------------------------------------------------------------------------------------------ row 27


@pytest.mark.parametrize("function", [reference.mla_indexer_ragged_float8_paged, SELECT])
def test_keys_of_another_fp8_kind_are_reinterpreted(function):
    """Row 27. Keys tagged fnuz are refused beside e4m3fn queries, and e4m3fn keys cannot be tagged so."""
    batch = inject(ON_GPU, [np.float32([1, 2, 3])], 2)
    tag = "float8_e4m3fnuz"
    cache = PagedKeyCache(batch.blocks.view(np.uint8), batch.scales, batch.cache_lengths, batch.lookup_table, fp8_dtype=tag)
    with pytest.raises(TypeError, match=r"q must have the dtype of the keys, float8_e4m3fnuz.*got float8_e4m3fn$"):
        function(batch.q, batch.q_s, batch.input_row_offsets, cache, top_k=2)
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        PagedKeyCache(batch.blocks, batch.scales, batch.cache_lengths, batch.lookup_table, fp8_dtype=tag)
    with pytest.raises(TypeError, match=r"q must have the dtype of the keys, float8_e4m3fn .*got float8_e4m3fnuz$"):
        function(batch.q.view(ml_dtypes.float8_e4m3fnuz), *batch.arguments()[1:4], top_k=2)


@on_every_side
def test_minus_zero_is_read_as_the_nan_of_fnuz(side):
    """Row 27. Bytes 0x80 in the queries, in whole heads of weight 1 and in the keys add nothing; 0x38 is 1.0, not 0.5."""
    rows = gaussian(np.random.default_rng(27), 20)
    batch = inject(side, rows, 7, heads=9)
    q, keys = batch.q.view(np.uint8), batch.blocks.view(np.uint8)
    q[q == 0] = MINUS_ZERO
    keys[keys == 0] = MINUS_ZERO
    batch.q_s[:] = 1
    assert_scores(side, batch, rows)
    assert_selects(side, batch, rows)


# ------------------------------------------------------------------------------------------------------------------ row 28


@on_both_sides
@pytest.mark.parametrize("top_k", [40, 2048])
def test_unused_scores_need_no_fill(side, top_k):
    """Row 28. Negative scores, so that any poison behind a row would win; every length shares the width of the longest."""
    rows = [-1 - np.abs(row) for row in gaussian(np.random.default_rng(28), 1, 63, 64, 65, 2047, 2048, 2049)]
    assert_selects(side, inject(side, rows, top_k), rows)
