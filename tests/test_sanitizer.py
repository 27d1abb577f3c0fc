"""A representative set of calls, small enough to run under compute-sanitizer: every kernel, true metadata and bad.

Arrays have no guard zones and scratch is not filled here: the tool watches every allocation to the byte, and sees a read of what
nobody has written. The README has the command lines.
"""
import itertools

import numpy as np
import pytest
from test_hostile_metadata import with_bad

from indexer import launches
from indexer.batches import make_batch
from indexer.fuzz import Way, call, compare

pytestmark = [pytest.mark.gpu, pytest.mark.kernels]

RAGGED = {"new_tokens": [1, 20, 0, 2], "cached": [400, 130, 7, 0], "top_k": 64}
DECODE = {"new_tokens": [1, 1, 0, 1], "cached": [300, 127, 9, 600], "top_k": 64}
LONG = {"new_tokens": [1, 1], "cached": [20_000, 9000], "num_heads": 8, "head_dim": 32, "top_k": 2048}
EXACT = {"fp8_dtype": "float8_e4m3fnuz", "head_dim": 32}
# On Hopper: its scorer with every kind of tile, the plain one, the portable one; each with every selection.
BATCHES = {
    "decode, 64 heads": {**DECODE}, "prefill, 64 heads": {**RAGGED, "kpool": 3}, "prefill, 8 heads": {**RAGGED, "num_heads": 8},
    "two tokens, 128 heads": {**DECODE, "new_tokens": [2, 2, 0, 1], "num_heads": 128, "page_size": 256, "order": "score"},
    "32 deep, pages of 16": {**RAGGED, "num_heads": 32, "head_dim": 32, "page_size": 16, "mask": "null"},
    "plain": {**RAGGED, "num_heads": 12, "head_dim": 20, "page_size": 3, "order": "score"},
    "exact": {**RAGGED, **EXACT, "num_heads": 9, "page_size": 3}, "exact, 64 heads": {**DECODE, **EXACT, "order": "score"},
    "clusters": LONG, "clusters by score": {**LONG, "order": "score"}, "clusters for ties": {**LONG, "regime": "all-ties"},
    "shared rows": LONG, "shared rows by score": {**LONG, "order": "score"}, "shared rows of ties": {**LONG, "regime": "all-ties"},
    "many rows": {"new_tokens": [150], "cached": [100], "num_heads": 8, "top_k": 64},
    "chunks": {**RAGGED, "scores_budget_bytes": 10_000}, "portable selection": {**LONG, "cached": [6000, 9000], "top_k": 5000},
    "portable selection by score": {**LONG, "cached": [6000, 9000], "top_k": 5000, "order": "score"}}
WITHOUT_CLUSTERS = ("shared rows", "portable selection")                # which would take these few rows


@pytest.fixture(autouse=True)
def poisoned_scratch():
    """In place of the one that fills scratch."""


@pytest.fixture(autouse=True)
def no_clusters_for_some(name, monkeypatch):
    if name.startswith(WITHOUT_CLUSTERS):
        monkeypatch.setattr(launches, "max_clusters", lambda _: {})


@pytest.mark.parametrize(("name", "planned"), list(zip(BATCHES, itertools.cycle((False, True)))))
def test_true_metadata(name, planned):
    batch = make_batch(np.random.default_rng(0), **BATCHES[name])
    way = Way(on_device=True, planned=planned, with_index_scores=not planned, with_scores=not planned, filler=None)
    assert compare(batch, way) == []


@pytest.mark.parametrize(("name", "planned"), [
    ("decode, 64 heads", False), ("decode, 64 heads", True), ("plain", False), ("exact", False), ("shared rows", True),
    ("clusters", True), ("clusters by score", False)])
def test_bad_metadata(name, planned):
    batch = make_batch(np.random.default_rng(1), **BATCHES[name])
    way = Way(on_device=True, planned=planned, with_index_scores=False, with_scores=False, filler=None)
    bad = with_bad(with_bad(batch, "cache_lengths", 0, 2**31 - 1), "lookup_table", (1, 0), 2**32 - 1)
    for hostile in (bad, with_bad(batch, "input_row_offsets", slice(None), np.uint32(2**32 - 1) - batch.input_row_offsets)):
        for indices, _ in call(hostile, way).selections:
            assert ((indices >= -1) & (indices < hostile.lookup_table.shape[1] * hostile.blocks.shape[3])).all()
