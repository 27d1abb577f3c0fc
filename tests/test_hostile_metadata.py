"""Metadata on the device is not read back. Whatever it holds, a call stays inside its arrays and ends; a bad length, a bad page id
or a narrow table affects the rows of its request alone, and affected rows hold -1 or positions in [0, W)."""
import itertools
from dataclasses import replace

import numpy as np
import oracle
import pytest
from assertions import assert_same_bits

from indexer import launches
from indexer.batches import make_batch
from indexer.device import SIMULATED
from indexer.fuzz import FILLERS, Way, call

pytestmark = pytest.mark.kernels

VALUES = (2**31 - 1, 2**31, 2**32 - 1, 2**32 - 1000)                    # as int32: the largest, the smallest, -1, -1000
# Query blocks of one and of many tokens for the Hopper scorer; shapes for the other ones; long rows, shared among blocks.
LENGTHS = {"ragged": ([1, 40, 0, 3, 2], [900, 300, 7, 0, 130]), "decode": ([1, 1, 0, 1, 1, 2], [300, 5, 9, 127, 600, 64]),
           "long": ([1, 2, 1], [20_000, 300, 9000])}
DIMENSIONS = {"hopper": {"num_heads": 64, "head_dim": 128}, "small": {"num_heads": 8, "head_dim": 32, "page_size": 16},
              "plain": {"num_heads": 12, "head_dim": 20, "page_size": 3}, "fnuz": {"num_heads": 3, "fp8_dtype": "float8_e4m3fnuz"}}
if SIMULATED:
    LENGTHS = {"ragged": ([1, 3, 0, 2], [9, 5, 7, 0])}
    DIMENSIONS = {"tiny": {"num_heads": 3, "head_dim": 4, "page_size": 4}}
COMBINATIONS = list(itertools.product(DIMENSIONS, LENGTHS, ("index", "score"), (False,) if SIMULATED else (False, True)))
SEEDS = pytest.mark.parametrize("seed", range(len(COMBINATIONS)))


@pytest.fixture(autouse=True)
def half_of_them_without_clusters(request, monkeypatch):
    """Few rows are selected by clusters on some cards, by blocks that hand over on others: either with either order and plan."""
    if hasattr(request.node, "callspec") and request.node.callspec.params["seed"] % 4 in (1, 2):
        monkeypatch.setattr(launches, "max_clusters", lambda _: {})


def drawn(seed):
    """(rng, batch, way) for a combination of dimensions, lengths, order and plan; everything else drawn."""
    rng = np.random.default_rng([31, seed])
    dimensions, lengths, order, planned = COMBINATIONS[seed]
    new_tokens, cached = LENGTHS[lengths]
    batch = make_batch(rng, new_tokens=new_tokens, cached=cached, order=order,
                       mask=str(rng.choice(["causal", "null"])), kpool=int(rng.choice([1, 1, 3])),
                       top_k=int(rng.choice([1, 5, 40] if SIMULATED else [1, 64, 700, 5000])),
                       metadata_dtype=str(rng.choice(["uint32", "int32"])), **DIMENSIONS[dimensions])
    return rng, batch, Way(on_device=True, planned=planned, with_scores=bool(rng.random() < 0.5), filler=int(rng.choice(FILLERS)),
                           pitch=int(rng.choice([0, 16])), own_stream=not SIMULATED and bool(rng.random() < 0.3))


def with_bad(batch, name, index, value):
    """The batch with one entry, or several, of its metadata replaced."""
    bad = getattr(batch, name).copy()
    bad.view(np.uint32)[index] = value
    return replace(batch, **{name: bad})


def assert_lawful(batch, way, affected):
    """Calls with a batch whose metadata is bad; rows of requests that are not `affected` are those of the oracle for `batch`."""
    def check(bad, what):
        width = bad.lookup_table.shape[1] * bad.blocks.shape[3]
        good = np.setdiff1d(np.arange(batch.num_tokens), batch.rows(affected)) if len(affected) else np.arange(batch.num_tokens)
        outcome = call(bad, way)
        assert not outcome.changes, (what, outcome.changes)
        for indices, out_scores in outcome.selections:
            assert ((indices >= -1) & (indices < width)).all(), what
            assert_same_bits(indices[good], want[good], what)
            if out_scores is not None:
                assert_same_bits(out_scores[good], want_scores[good], what)
        assert outcome.scores.shape == (batch.num_tokens, width)
        for row in good:
            v = batch.candidates[row]
            assert_same_bits(outcome.scores[row, :v], matrix[row, :v], what)
            assert (outcome.scores[row, v:] == -np.inf).all(), what

    matrix = batch.score(oracle.scores)
    want_scores = np.empty((batch.num_tokens, batch.top_k), np.float32)
    want = batch.select(oracle.select, out_scores=want_scores)
    return check


@SEEDS
def test_bad_lengths_stay_with_their_request(seed):
    rng, batch, way = drawn(seed)
    b = int(rng.integers(len(batch.cache_lengths)))
    check = assert_lawful(batch, way, [b])
    for value in (int(rng.choice(VALUES)), int(rng.integers(2**31, 2**32)), 10 * batch.lookup_table.size * batch.blocks.shape[3]):
        check(with_bad(batch, "cache_lengths", b, value), f"seed {seed}, length {value} of request {b}")


@SEEDS
def test_bad_page_ids_stay_with_their_request(seed):
    rng, batch, way = drawn(seed)
    b, columns = int(rng.integers(len(batch.cache_lengths))), batch.lookup_table.shape[1]
    check = assert_lawful(batch, way, [b])
    for index in (b, 0), (b, slice(None)), (b, rng.integers(columns, size=2)):
        value = int(rng.choice([*VALUES, len(batch.blocks), len(batch.blocks) + 1]))
        check(with_bad(batch, "lookup_table", index, value), f"seed {seed}, page {value} at {index}")


@SEEDS
def test_a_table_too_narrow_affects_the_requests_that_do_not_fit(seed):
    rng, batch, way = drawn(seed)
    pages = -(-((batch.new_tokens + batch.cache_lengths.astype(np.int64)) // batch.kpool) // batch.blocks.shape[3])
    for columns in {0, 1, int(rng.integers(pages.max()))}:
        # a plan's bound is the table that it is made for; contiguous, or what lies behind a row would be the batch's
        narrow = replace(batch, lookup_table=np.ascontiguousarray(batch.lookup_table[:, :columns]))
        affected = np.flatnonzero((pages > columns) & (batch.new_tokens > 0))
        assert_lawful(batch, way, affected)(narrow, f"seed {seed}, {columns} columns")


def bad_offsets(rng, num_requests, num_tokens):
    """Offsets that descend, exceed T, are negative as int32, are all the same, or are anything."""
    anything = rng.integers(0, 2**32, num_requests + 1)
    huge = rng.choice([*VALUES, num_tokens + 1, 10**9], num_requests + 1)
    true = rng.integers(0, num_tokens + 1, num_requests + 1)
    yield np.sort(true)[::-1]
    yield true
    yield huge
    yield np.where(rng.random(num_requests + 1) < 0.5, true, huge)
    yield np.full(num_requests + 1, huge[0])
    yield np.zeros(num_requests + 1, np.int64)
    yield anything


@SEEDS
def test_bad_offsets_leave_every_row_lawful(seed):
    rng, batch, way = drawn(seed)
    check = assert_lawful(batch, way, range(len(batch.cache_lengths)))
    for offsets in bad_offsets(rng, len(batch.cache_lengths), batch.num_tokens):
        check(with_bad(batch, "input_row_offsets", slice(None), offsets.astype(np.uint32)), f"seed {seed}, offsets {offsets}")


@SEEDS
def test_metadata_of_any_bytes_leaves_every_row_lawful(seed):
    rng, batch, way = drawn(seed)
    check = assert_lawful(batch, way, range(len(batch.cache_lengths)))
    for share in (0.2, 1):
        bad = batch
        for name in ("input_row_offsets", "cache_lengths", "lookup_table"):
            given = getattr(batch, name).view(np.uint32)
            chosen = np.where(rng.random(given.shape) < 0.5, rng.integers(0, 2**32, given.shape), rng.choice(VALUES, given.shape))
            bad = with_bad(bad, name, slice(None), np.where(rng.random(given.shape) < share, chosen, given).astype(np.uint32))
        check(bad, f"seed {seed}, share {share}")


def test_negative_lengths_give_empty_rows():
    _, batch, way = drawn(0)
    batch = replace(batch, mask="causal", kpool=1)
    lengths = batch.cache_lengths.copy()
    lengths.view(np.int32)[:2] = -2**31, -1                             # with -1, some new tokens of the request would see others
    outcome = call(replace(batch, cache_lengths=lengths), way)
    rows = batch.rows([0, 1])
    assert not outcome.changes
    for indices, _ in outcome.selections:
        assert (indices[rows] == -1).all()
