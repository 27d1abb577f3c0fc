"""Hypothesis strategies for whole calls of the operator. Their own tests are in test_strategies.py."""
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from indexer.batches import REGIMES, make_batch
from indexer.device import SIMULATED

# Shapes grow with what runs them: tiny in the simulator, small for the oracle and the GPU.
MAX_NEW, MAX_CACHED, MAX_REQUESTS = (2, 9, 3) if SIMULATED else (9, 150, 5)
HEADS = (1, 3, 8, 9) if SIMULATED else (1, 3, 12, 64, 129)   # few, as each may need a kernel of its own
DEPTHS = (4, 12) if SIMULATED else (4, 12, 64, 100, 128, 200)
PAGES = (1, 3, 4) if SIMULATED else (1, 3, 16, 64)
TOP_KS = (1, 3, 5, 20) if SIMULATED else (1, 3, 7, 16, 64, 200)


@st.composite
def lengths(draw, max_requests=MAX_REQUESTS):
    """(new_tokens, cached) of 1 ... max_requests requests, empty ones included."""
    pairs = draw(st.lists(st.tuples(st.integers(0, MAX_NEW), st.integers(0, MAX_CACHED)), min_size=1, max_size=max_requests))
    return [n for n, _ in pairs], [c for _, c in pairs]


@st.composite
def seeded_batches(draw, regimes=REGIMES, fp8_dtypes=("float8_e4m3fn", "float8_e4m3fnuz"), max_requests=MAX_REQUESTS, **fixed):
    """Batches of tile-sized shapes: the dimensions are drawn, the contents come from a drawn seed and the name of a regime."""
    new_tokens, cached = draw(lengths(max_requests))
    num_layers = draw(st.integers(1, 2))
    dimensions = {
        "num_heads": draw(st.sampled_from(HEADS)), "head_dim": draw(st.sampled_from(DEPTHS)),
        "page_size": draw(st.sampled_from(PAGES)), "num_layers": num_layers, "layer_idx": draw(st.integers(0, num_layers - 1)),
        "mask": draw(st.sampled_from(("causal", "null"))), "kpool": draw(st.sampled_from((1, 1, 2, 3))),
        "fp8_dtype": draw(st.sampled_from(fp8_dtypes)), "regime": draw(st.sampled_from(regimes)),
        "top_k": draw(st.sampled_from(TOP_KS)), "order": draw(st.sampled_from(("index", "score"))),
        "scores_budget_bytes": draw(st.sampled_from((1, 300, 2**20))),
        "metadata_dtype": draw(st.sampled_from(("uint32", "int32"))),
    }
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return make_batch(rng, new_tokens=new_tokens, cached=cached, **{**dimensions, **fixed})


@st.composite
def byte_batches(draw):
    """One small request whose queries, keys and scales are drawn byte by byte, so that a failure shrinks to its cause."""
    num_keys, num_heads, head_dim = draw(st.integers(1, 6)), draw(st.integers(1, 9)), draw(st.sampled_from((1, 2, 4)))
    batch = make_batch(np.random.default_rng(0), new_tokens=[1], cached=[num_keys - 1], num_heads=num_heads, head_dim=head_dim,
                       page_size=num_keys, spare_blocks=0, top_k=draw(st.integers(1, num_keys + 1)), order="score")

    def contents(array):
        raw = draw(st.binary(min_size=array.nbytes, max_size=array.nbytes))
        return np.frombuffer(raw, array.dtype).reshape(array.shape).copy()

    return replace(batch, q=contents(batch.q), q_s=contents(batch.q_s), blocks=contents(batch.blocks),
                   scales=contents(batch.scales))


@st.composite
def lattice_batches(draw, **fixed):
    """The exact lane: small integers and powers of two, so that every partial result is a float32 in any order."""
    batch = draw(seeded_batches(regimes=("gaussian",), fp8_dtypes=("float8_e4m3fn",), **fixed))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def integers(array):
        return rng.integers(-2, 3, array.shape).astype(np.float32).astype(array.dtype)

    return replace(batch, q=integers(batch.q), blocks=integers(batch.blocks),
                   q_s=rng.choice(np.float32([-2, -1, 0.5, 1, 2]), batch.q_s.shape),
                   scales=rng.choice(np.float32([0.25, 0.5, 1, 2]), batch.scales.shape))
