"""The generators generate what they say: a strategy that quietly gives constants would make every property pass."""
import numpy as np
import pytest
from hypothesis import given, settings
from strategies import byte_batches, lattice_batches, seeded_batches

from indexer import reference
from indexer.batches import NAN_BYTE, REGIMES, make_batch, random_batch


def tile(regime, fp8_dtype="float8_e4m3fn"):
    return make_batch(np.random.default_rng(5), new_tokens=[4, 0, 2], cached=[500, 3, 300], num_heads=8, head_dim=32, page_size=16,
                      regime=regime, fp8_dtype=fp8_dtype, mask="null")


def scores_of(batch):
    scores = batch.score(reference.index_scores)
    return [row[:v] for row, v in zip(scores, batch.candidates)]


@pytest.mark.parametrize("fp8_dtype", ["float8_e4m3fn", "float8_e4m3fnuz"])
@pytest.mark.parametrize("regime", REGIMES)
def test_regimes_have_the_scores_they_are_named_after(regime, fp8_dtype):
    rows = scores_of(tile(regime, fp8_dtype))
    scores = np.concatenate(rows)
    finite = scores[np.isfinite(scores)]
    distinct = len(np.unique(finite))
    if regime in ("gaussian", "bytes", "nan-laced"):
        assert distinct > len(finite) * 0.3
    if regime == "few-distinct":
        assert 2 <= distinct <= 30
    if regime == "all-ties":
        assert distinct == 1
    if regime == "relu-plateau":
        assert 0.9 < np.mean(scores == 0) < 1
        assert 0 < np.mean(np.signbit(scores[scores == 0])) < 1
    if regime == "one-bin":
        assert len(np.unique(finite.view(np.uint32) >> 20)) == 1
        assert distinct > 700
    assert np.isnan(scores).any() == (regime in ("bytes", "nan-laced", "infinite-scales"))
    if regime == "infinite-scales":
        assert np.isposinf(scores).any()
        assert np.isneginf(scores).any()


def test_unused_places_are_hostile():
    batch = tile("gaussian")
    keys = batch.blocks.view(np.uint8)[:, 0, 0, :, 0]
    unused = (keys == NAN_BYTE["float8_e4m3fn"]).all(axis=2)
    assert unused.sum() == unused.size - 504 - 302
    assert np.isnan(batch.scales[:, 0, 0, :, 0, 0][unused]).all()
    assert (batch.lookup_table[1] >= len(batch.blocks)).all()


def test_random_batches_cover_what_they_draw():
    drawn = [random_batch(np.random.default_rng(seed), max_cached=40, max_new=5) for seed in range(300)]
    assert {batch.regime for batch in drawn} == set(REGIMES)
    for field in ("mask", "order", "fused", "fp8_dtype", "kpool", "scores_budget_bytes", "layer_idx", "top_k"):
        assert len({getattr(batch, field) for batch in drawn}) >= 2, field
    assert any((batch.new_tokens == 0).any() and batch.num_tokens for batch in drawn)
    assert any((batch.candidates == 0).any() for batch in drawn)


@given(seeded_batches())
def test_seeded_batches_are_valid_calls(batch):
    scores = batch.score(reference.index_scores)
    assert scores.shape == (batch.num_tokens, batch.candidates.max(initial=0))


@given(byte_batches())
@settings(max_examples=20)
def test_byte_batches_are_valid_calls(batch):
    assert batch.score(reference.index_scores).shape == (1, batch.candidates[0])


@given(lattice_batches())
def test_lattice_scores_are_the_same_in_every_arithmetic(batch):
    exact, wgmma = (batch.score(reference.index_scores, arithmetic=name) for name in ("exact", "wgmma"))
    np.testing.assert_array_equal(exact, wgmma)
