"""The Hopper scorers on a Hopper GPU: the oracle's bits for every shape, and the two of them against each other at real sizes."""
from dataclasses import replace

import numpy as np
import oracle
import pytest
from assertions import assert_same_bits
from numba import cuda

import indexer
from indexer import tma_tile
from indexer.__main__ import to_device
from indexer.batches import make_batch, random_batch

pytestmark = [pytest.mark.gpu, pytest.mark.kernels]


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Skips other cards; counts the calls that the copy engine's kernel took and those that it left."""
    if tuple(cuda.get_current_device().compute_capability) != (9, 0):
        pytest.skip("needs compute capability 9.0")
    counts = {True: 0, False: 0}
    supports = tma_tile.supports

    def counted(*args):
        counts[supports(*args)] += 1
        return supports(*args)

    monkeypatch.setattr(tma_tile, "supports", counted)
    return counts


def scores(batch, to=to_device, **extra):
    """`indexer.index_scores` from device arrays, on the host."""
    return batch.score(indexer.index_scores, to, arithmetic="wgmma", **extra).copy_to_host()


def assert_scores_of_the_oracle(batch):
    want = batch.score(oracle.scores, arithmetic="wgmma")
    got = scores(batch)
    assert_same_bits(got[:, :want.shape[1]], want)
    assert (got[:, want.shape[1]:] == -np.inf).all()


# ----------------------------------------------------------------------------------------------------------- every shape


LENGTHS = {"decode": ([1, 1, 0, 1, 1], [300, 5, 9, 127, 128]), "two": ([2, 2, 1, 2], [257, 0, 40, 382]),
           "mixed": ([6, 0, 1, 3, 45, 2], [100, 50, 300, 383, 10, 0])}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("num_heads", [8, 16, 32, 64, 128])
def test_every_head_count_depth_page_size_layout_mask_and_pooling(num_heads, lengths, taken):
    new_tokens, cached = LENGTHS[lengths]
    rng = np.random.default_rng([num_heads, len(lengths)])
    cases = [(32, 16, "gaussian"), (64, 32, "bytes"), (128, 64, "few-distinct"), (128, 128, "nan-laced"),
             (64, 256, "infinite-scales"), (128, 16, "bytes"), (128, 256, "bytes"), (32, 64, "relu-plateau")]
    for i, (head_dim, page_size, regime) in enumerate(cases):
        batch = make_batch(rng, new_tokens=new_tokens, cached=cached, num_heads=num_heads, head_dim=head_dim, page_size=page_size,
                           regime=regime, mask=("causal", "null")[i % 2], kpool=(1, 1, 3, 4)[i % 4], num_layers=1 + i % 3,
                           layer_idx=i % 3, fused=i % 2 == 0)
        assert_scores_of_the_oracle(batch)
    assert taken == {True: len(cases), False: 0}


@pytest.mark.parametrize(("num_heads", "head_dim", "page_size"), [
    (1, 128, 64), (5, 48, 8), (12, 16, 64), (24, 96, 128), (100, 128, 384), (3, 112, 64)])
def test_other_shapes_that_the_copy_engine_takes(num_heads, head_dim, page_size, taken):
    for new_tokens, cached in LENGTHS.values():
        assert_scores_of_the_oracle(make_batch(np.random.default_rng(1), new_tokens=new_tokens, cached=cached, num_heads=num_heads,
                                               head_dim=head_dim, page_size=page_size, regime="bytes"))
    assert taken == {True: 3, False: 0}


@pytest.mark.parametrize(("num_heads", "head_dim", "page_size"), [
    (64, 128, 1), (64, 128, 48), (129, 128, 64), (64, 129, 64), (200, 300, 7), (7, 4, 64), (64, 1024, 16), (1, 1, 1)])
def test_shapes_that_the_plain_kernel_takes(num_heads, head_dim, page_size, taken):
    for new_tokens, cached in LENGTHS.values():
        assert_scores_of_the_oracle(make_batch(np.random.default_rng(2), new_tokens=new_tokens, cached=[c // 4 for c in cached],
                                               num_heads=num_heads, head_dim=head_dim, page_size=page_size, regime="bytes"))
    assert taken == {True: 0, False: 3}


@pytest.mark.parametrize("seed", range(40))
def test_random_batches(seed):
    batch = random_batch(np.random.default_rng([21, seed]), heads=(64,), depths=(128,), pages=(16, 64, 256))
    if batch.fp8_dtype == "float8_e4m3fn":
        assert_scores_of_the_oracle(batch)


def test_unaligned_and_strided_arrays_have_the_same_bits(taken):
    batch = make_batch(np.random.default_rng(3), new_tokens=[3, 1], cached=[200, 70], num_heads=64, head_dim=128)
    want = scores(batch)

    def moved(array):
        """On the device, one byte behind an aligned address."""
        if array.dtype.itemsize > 1:
            return to_device(array)
        memory = cuda.to_device(np.concatenate([np.zeros(1, np.uint8), array.view(np.uint8).ravel()]))
        return memory[1:].reshape(array.shape)

    assert_same_bits(scores(batch, moved), want)
    padded = np.zeros((4, 80, 144), np.uint8)
    padded[:, 8:72, :128] = batch.q.view(np.uint8)
    q = cuda.to_device(padded)[:, 8:72, :128]
    _, q_s, offsets, cache, layer = batch.arguments(to_device)
    assert_same_bits(indexer.index_scores(q, q_s, offsets, cache, layer).copy_to_host(), want)
    assert taken == {True: 2, False: 1}


def test_weights_that_cannot_be_halved():
    """Denormal weights: halving one would lose its last bit. The sums are as small as the weights, so a lost bit shows."""
    batch = make_batch(np.random.default_rng(4), new_tokens=[40, 1], cached=[300, 300], num_heads=64, head_dim=128)
    q_s = np.random.default_rng(5).integers(1, 2**24, batch.q_s.shape, np.uint32).view(np.float32)     # up to 2 ** -125
    for some in (q_s, np.where(np.arange(64) == 17, q_s, batch.q_s), np.zeros_like(q_s), -q_s):
        assert_scores_of_the_oracle(replace(batch, q_s=some, scales=np.ones_like(batch.scales)))


@pytest.mark.parametrize("bounds", [{}, {"max_prompt_length": 5000, "max_context_length": 10**6}])
@pytest.mark.parametrize("order", ["index", "score"])
def test_selection_from_the_scores(order, bounds):
    """The whole operator in several chunks, rows with few candidates among them."""
    batch = make_batch(np.random.default_rng(6), new_tokens=[70, 1, 1, 0], cached=[30, 900, 20, 4], num_heads=64, head_dim=128,
                       top_k=64, order=order, scores_budget_bytes=40_000, **bounds)
    want_scores = np.empty((72, 64), np.float32)
    want = batch.select(oracle.select, out_scores=want_scores, arithmetic="wgmma")
    out_scores = cuda.to_device(np.full((72, 64), np.nan, np.float32))
    got = batch.select(indexer.mla_indexer_ragged_float8_paged, to_device, out_scores=out_scores)
    assert_same_bits(got.copy_to_host(), want)
    assert_same_bits(out_scores.copy_to_host(), want_scores)
    assert_same_bits(batch.select(indexer.mla_indexer_ragged_float8_paged, to_device).copy_to_host(), want)


# ------------------------------------------------------------------------------------------------------- untrue metadata


DECODES = {"many": ([1] * 500, [200] * 500), "long": ([1] * 40, [7000] * 40), "chunks": ([2] * 6, [900] * 6)}


@pytest.mark.parametrize("lengths", DECODES)
@pytest.mark.parametrize("value", [2**31 - 1, 2**31, 2**32 - 1, 2**32 - 900])
def test_bad_lengths_and_page_ids_stay_with_their_request(value, lengths, taken):
    """Requests of one or two tokens: more requests than a block has threads, tiles given out on demand, several chunks of rows."""
    new_tokens, cached = DECODES[lengths]
    budget = 20_000 if lengths == "chunks" else 512 * 2**20
    batch = make_batch(np.random.default_rng(9), new_tokens=new_tokens, cached=cached, num_heads=8, head_dim=32, top_k=64,
                       scores_budget_bytes=budget)
    width = batch.lookup_table.shape[1] * batch.blocks.shape[3]
    want = batch.select(oracle.select, arithmetic="wgmma")
    for name, index in (("cache_lengths", 3), ("lookup_table", (3, 0)), ("lookup_table", (3, slice(None)))):
        bad = getattr(batch, name).copy()
        bad[index] = value
        rows = batch.rows([3])
        got = replace(batch, **{name: bad}).select(indexer.mla_indexer_ragged_float8_paged, to_device).copy_to_host()
        assert ((got >= -1) & (got < width)).all()
        assert_same_bits(np.delete(got, rows, axis=0), np.delete(want, rows, axis=0), f"{name} = {value}")
    assert taken[True] == 3
    assert_same_bits(batch.select(indexer.mla_indexer_ragged_float8_paged, to_device).copy_to_host(), want)     # counters are clean


@pytest.mark.parametrize("offsets", [[0, 2**32 - 1, 3, 2**31, 5], [5, 4, 3, 2, 1], [7] * 5, [0, 5, 0, 5, 0], [0, 1, 2, 3, 10**9]])
def test_bad_offsets_leave_no_score_unwritten(offsets):
    batch = make_batch(np.random.default_rng(10), new_tokens=[1, 1, 1, 2], cached=[900] * 4, num_heads=64, head_dim=128)
    bad = replace(batch, input_row_offsets=np.array(offsets, np.uint64).astype(np.uint32))
    got = scores(bad)                                                   # memory for results is poisoned
    assert (got.view(np.uint32) != 0x7F7F7F7F).all()


def test_a_request_longer_than_the_table_is_soon_over():
    """Three requests, two of them with a million tokens against a table of eight keys: the third one's row is right."""
    tokens = 1_000_000
    batch = make_batch(np.random.default_rng(11), new_tokens=[1], cached=[5], num_heads=1, head_dim=16, page_size=8, top_k=1)
    q = cuda.device_array((2 * tokens + 1, 1, 16), np.uint8)
    q_s = cuda.to_device(np.ones((2 * tokens + 1, 1), np.float32))
    q[-1:].copy_to_device(batch.q.view(np.uint8))
    q_s[-1:].copy_to_device(batch.q_s)
    table = np.repeat(batch.lookup_table[:, :1], 3, axis=0)
    cache = indexer.PagedKeyCache(*map(to_device, (batch.blocks, batch.scales, np.uint32([0, 0, 5]), table)))
    offsets = to_device(np.uint32([0, tokens, 2 * tokens, 2 * tokens + 1]))
    got = indexer.mla_indexer_ragged_float8_paged(q, q_s, offsets, cache, top_k=1)
    assert_same_bits(got[-1:].copy_to_host(), batch.select(oracle.select, arithmetic="wgmma"))


def test_no_requests_at_all():
    batch = make_batch(np.random.default_rng(12), new_tokens=[2], cached=[100], num_heads=64, head_dim=128, top_k=4)
    q, q_s, _, _, layer = batch.arguments(to_device)
    cache = indexer.PagedKeyCache(to_device(batch.blocks), to_device(batch.scales), cuda.device_array(0, np.uint32),
                                  cuda.device_array((0, 3), np.uint32))
    got = indexer.mla_indexer_ragged_float8_paged(q, q_s, to_device(np.uint32([0])), cache, layer, top_k=4)
    assert (got.copy_to_host() == -1).all()


# ------------------------------------------------------------------------------------------------------------- real sizes


@pytest.mark.parametrize(("new_tokens", "cached", "options"), [
    ([1] * 64, [20_000] * 64, {}),                                                      # some tiles are given out on demand
    ([1, *[0] * 3, *[1] * 63], [131_071, *[7] * 3, *[999] * 63], {}),                   # one long request beside short ones
    ([600], [9000], {}),
    ([2048], [0], {}),
    ([3, 6, 1, 0, 300, 2], [5000, 70_000, 131_000, 5, 2000, 1], {"page_size": 16}),
    ([6] * 8, [30_000] * 8, {"num_heads": 32, "page_size": 128}),
    ([2] * 8, [60_000] * 8, {"mask": "null"}),
    ([700, 1, 1, 90], [100, 50_000, 3, 12_345], {"num_heads": 16, "page_size": 256, "kpool": 4}),
    ([9], [100_000], {"num_heads": 128}),
    ([1] * 1500, [700] * 1500, {"num_heads": 8}),
])
def test_both_kernels_have_the_same_bits_on_every_run(new_tokens, cached, options, monkeypatch):
    """20 runs. Every tile of 128 keys flips the sign of its scales: a tile that is read before it is there, or after it has been
    overwritten, shows in the score's sign."""
    batch = make_batch(np.random.default_rng(7), new_tokens=new_tokens, cached=cached, head_dim=128, **{"num_heads": 64, **options})
    page_size = batch.blocks.shape[3]
    slots = np.arange(page_size)
    for b, row in enumerate(batch.lookup_table):
        for page in range(-(-(new_tokens[b] + cached[b]) // batch.kpool // page_size) if new_tokens[b] else 0):
            scales = batch.scales[row[page], 0, 0, :, 0, 0]
            scales[:] = np.abs(scales) * np.where((page * page_size + slots) // 128 % 2, -1, 1)
    arguments = batch.arguments(to_device)
    options = {"mask": batch.mask, "kpool": batch.kpool, "arithmetic": "wgmma"}
    runs = [indexer.index_scores(*arguments, **options).copy_to_host().view(np.uint32) for _ in range(20)]
    with monkeypatch.context() as plain:
        plain.setattr(tma_tile, "supports", lambda *_: False)
        want = indexer.index_scores(*arguments, **options).copy_to_host().view(np.uint32)
    for run in runs:
        assert np.array_equal(run, want), f"{(run != want).sum()} of {want.size} scores differ"
    rows = np.random.default_rng(8).choice(batch.num_tokens, 2, replace=False)
    for row in rows:                                                    # and some rows equal the oracle's
        b = int(np.searchsorted(batch.input_row_offsets, row, side="right")) - 1
        index = int(row - batch.input_row_offsets[b])
        one = replace(batch.take([b]), q=batch.q[row:row + 1], q_s=batch.q_s[row:row + 1], input_row_offsets=np.uint32([0, 1]))
        seen = int(batch.cache_lengths[b]) + (index if batch.mask == "causal" else new_tokens[b] - 1)
        one = replace(one, cache_lengths=np.uint32([seen]), mask="causal")
        expected = one.score(oracle.scores, arithmetic="wgmma")[0]
        assert_same_bits(want[row, :len(expected)].view(np.float32), expected)
