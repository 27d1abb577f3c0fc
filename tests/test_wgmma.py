"""The oracle's "wgmma" arithmetic against a real wgmma on Hopper: vectors that tell it from every rival, and random outputs."""
import ml_dtypes
import numpy as np
import pytest
from assertions import assert_same_bits
from numba import cuda
from wgmma_kernel import wgmma
from wgmma_vectors import WGMMA_VECTORS, operands

from indexer import reference

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper():
    if tuple(cuda.get_current_device().compute_capability) != (9, 0):
        pytest.skip("needs compute capability 9.0")


def without_nans(codes):
    """NaN bytes replaced by zeros; `reference._with_nans` is what knows them."""
    return np.where(codes & 0x7F == 0x7F, codes & 0x80, codes).astype(np.uint8)


def encode(values):
    return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


OPERANDS = {
    "bytes": lambda rng, shape: rng.integers(0, 256, shape, np.uint8),
    "gaussian": lambda rng, shape: encode((rng.standard_normal(shape) * 60).clip(-440, 440)),
    "subnormal": lambda rng, shape: rng.integers(0, 256, shape, np.uint8) & 0x8F,
    "small integers": lambda rng, shape: encode(rng.integers(-8, 9, shape).astype(np.float32)),
}


@pytest.mark.parametrize("with_accumulator", [False, True])
@pytest.mark.parametrize("kind", OPERANDS)
def test_a_million_outputs(kind, with_accumulator):
    rng = np.random.default_rng(7)
    a, b = (without_nans(OPERANDS[kind](rng, (1024, 128))) for _ in range(2))
    c = np.zeros((1024, 1024), np.float32)
    if with_accumulator:
        c = (rng.standard_normal(c.shape) * 2.0 ** rng.integers(-6, 24, c.shape)).astype(np.float32)
    assert_same_bits(wgmma(a, b, c), reference.wgmma_chain(a, b, c))


def test_nan_rows_and_columns():
    rng = np.random.default_rng(8)
    a, b = (rng.integers(0, 256, (256, 128), np.uint8) & 0xBF for _ in range(2))
    for codes in (a, b):
        rows = np.flatnonzero(rng.random(256) < 0.2)
        codes[rows, rng.integers(0, 128, len(rows))] = rng.choice(np.uint8([0x7F, 0xFF]), len(rows))
    got = wgmma(a, b, np.zeros((256, 256), np.float32))
    want = reference._dot_wgmma(a[:, None], b, "float8_e4m3fn")[:, 0]
    nan = np.isnan(want)
    assert 0.1 < nan.mean() < 0.6
    assert (got.view(np.uint32)[nan] == 0x7FFFFFFF).all()
    assert_same_bits(got[~nan], want[~nan])


def test_vectors():
    """Vector i in row i of a and of b, its accumulator at [i, i]; zeros behind its depth leave the result as it is."""
    a, b, c = np.zeros((64, 128), np.uint8), np.zeros((128, 128), np.uint8), np.zeros((64, 128), np.float32)
    for i, (_, depth, products, accumulator, _) in enumerate(WGMMA_VECTORS):
        a[i, :depth], b[i, :depth] = operands(depth, products)
        c.view(np.uint32)[i, i] = accumulator
    got = wgmma(a, b, c).view(np.uint32)
    assert len(WGMMA_VECTORS) == 20
    assert [hex(got[i, i]) for i in range(20)] == [hex(bits) for *_, bits in WGMMA_VECTORS]
