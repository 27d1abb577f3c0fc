"""The oracle on hand-worked cases, and against a slow scalar model of its own in integers and fractions.

No expected value here comes from the code under test, and none has a tolerance: scores are compared as float32 bit patterns. The
scalar model rounds `fractions.Fraction` to float32 once per operation, in the order of the README's score formula.
"""
from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from wgmma_vectors import WGMMA_VECTORS, operands

from indexer import PagedKeyCache, reference

E4M3FN, E4M3FNUZ = "float8_e4m3fn", "float8_e4m3fnuz"
FP8_KINDS = (E4M3FN, E4M3FNUZ)
NAN_BYTES = {E4M3FN: (0x7F, 0xFF), E4M3FNUZ: (0x80,)}
ONE, INF, MINUS_INF, MINUS_ZERO, NAN = 0x3F800000, 0x7F800000, 0xFF800000, 0x80000000, 0x7FFFFFFF
NAN_PAYLOAD = 0xFFC12345                     # a NaN that is not the canonical one
BIG = 2.0**24                                # BIG + 1 is half way between two float32 and goes to BIG, BIG + 2 is exact


# --------------------------------------------------------------------------------------------------------------- building


def encode(values, fp8_dtype=E4M3FN):
    """FP8 bytes of exactly representable values."""
    values = np.asarray(values, np.float64)
    encoded = values.astype(getattr(ml_dtypes, fp8_dtype))
    np.testing.assert_array_equal(encoded.astype(np.float64), values)
    return encoded.view(np.uint8)


def from_bits(bits):
    """float32 array of these bit patterns."""
    return np.asarray(bits, np.uint32).view(np.float32)


def to_bits(values):
    """Bit patterns of a float32 array, as nested lists."""
    values = np.asarray(values)
    assert values.dtype == np.float32
    return values.copy().view(np.uint32).tolist()


def hexadecimal(bits):
    """Nested lists of bit patterns for a readable difference."""
    return [hexadecimal(b) for b in bits] if isinstance(bits, list) else f"{bits:08x}"


def assert_bits(values, expected):
    """`values` has these float32 bit patterns (an array of float32 stands for its own)."""
    if isinstance(expected, np.ndarray):
        expected = to_bits(expected)
    assert hexadecimal(to_bits(values)) == hexadecimal(expected)


def paged_call(q, q_s, keys, scales, *, cached, new_tokens, page_size=2, num_layers=1, layer_idx=0, fused=False, seed=0,
               fp8_dtype=E4M3FN, metadata_dtype=np.uint32):
    """Positional arguments of the public functions: cache rows of every request on shuffled pages.

    Parameters
    ----------
    q : uint8 [T, H, D]
    q_s : float32 [T, H]
    keys, scales : list over requests of uint8 [rows, D] and float32 [rows]
        Whatever they leave unused holds NaN, unused table entries an impossible id.
    """
    head_dim = q.shape[2]
    num_pages = [-(-len(rows) // page_size) for rows in keys]
    num_blocks = sum(num_pages) + 2
    ids = iter(np.random.default_rng(seed).permutation(num_blocks).tolist())
    table = np.full((len(keys), max(num_pages, default=0) + 1), 2**31 - 1, metadata_dtype)
    blocks = np.full((num_blocks, 1, num_layers, page_size, 1, head_dim), NAN_BYTES[fp8_dtype][0], np.uint8)
    block_scales = np.full((num_blocks, 1, num_layers, page_size, 1, 1), np.nan, np.float32)
    for b, rows in enumerate(keys):
        table[b, :num_pages[b]] = [next(ids) for _ in range(num_pages[b])]
        for r, row in enumerate(rows):
            block, slot = table[b, r // page_size], r % page_size
            blocks[block, 0, layer_idx, slot, 0] = row
            block_scales[block, 0, layer_idx, slot, 0, 0] = scales[b][r]
    offsets = np.concatenate([[0], np.cumsum(new_tokens)]).astype(metadata_dtype)
    lengths = np.array(cached, metadata_dtype)
    if fused:
        pages = np.concatenate([blocks.reshape(num_blocks, -1), block_scales.reshape(num_blocks, -1).view(np.uint8)], axis=1)
        cache = PagedKeyCache.from_fused(pages.reshape(num_blocks, page_size, 1, head_dim + 4), lengths, table, fp8_dtype=fp8_dtype)
    else:
        cache = PagedKeyCache(blocks, block_scales, lengths, table, fp8_dtype=fp8_dtype)
    return q, q_s, offsets, cache, layer_idx


def score_pairs(q, q_s, keys, scales, *, fp8_dtype=E4M3FN, arithmetic="exact"):
    """Scores of all tokens against all keys of one request, float32 [T, N]: q uint8 [T, H, D], keys uint8 [N, D]."""
    num_tokens, num_keys = len(q), len(keys)
    extra = max(0, num_tokens - num_keys)                     # under the null mask every token sees all c + n keys
    keys = np.concatenate([keys, np.zeros((extra, keys.shape[1]), np.uint8)])
    scales = np.concatenate([scales, np.zeros(extra, np.float32)])
    call = paged_call(q, q_s, [keys], [scales], cached=[len(keys) - num_tokens], new_tokens=[num_tokens], page_size=3,
                      fp8_dtype=fp8_dtype)
    return reference.index_scores(*call, mask="null", arithmetic=arithmetic)[:, :num_keys]


def score_one(q, key, q_s, scale=1.0, **options):
    """Score of one token against one key: q values [H, D], key values [D], q_s [H]; float32 [1, 1]."""
    fp8_dtype = options.get("fp8_dtype", E4M3FN)
    as_bytes = [x if isinstance(x, np.ndarray) and x.dtype == np.uint8 else encode(x, fp8_dtype) for x in (q, key)]
    return score_pairs(as_bytes[0][None], np.asarray(q_s, np.float32)[None], as_bytes[1][None],
                       np.asarray([scale], np.float32), **options)


def planted(rows, *, page_size=4, **options):
    """A call whose decode requests have these rows of scores: each score is its key's scale (1 * 1 * scale)."""
    rows = [np.asarray(row, np.float32) for row in rows]
    q = np.zeros((len(rows), 2, 4), np.uint8)
    q[:, 0, 0] = encode(1.0)
    q_s = np.tile(np.array([1, 0], np.float32), (len(rows), 1))
    keys = [np.zeros((len(row), 4), np.uint8) for row in rows]
    for request in keys:
        request[:, 0] = encode(1.0)
    return paged_call(q, q_s, keys, rows, cached=[len(row) - 1 for row in rows], new_tokens=[1] * len(rows), page_size=page_size,
                      **options)


# ----------------------------------------------------------------------------------------------------------- scalar model


def round_to_float32(exact, negative=False):
    """Bits of the float32 nearest to a Fraction, ties to even; `negative` is the sign of a zero."""
    if exact == 0:
        return MINUS_ZERO if negative else 0
    sign, magnitude = (MINUS_ZERO if exact < 0 else 0), abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2)**exponent:
        exponent -= 1                                         # now 2**exponent <= magnitude < 2**(exponent + 1)
    exponent = max(exponent, -126)                            # subnormals have the unit of the smallest normals
    units = magnitude / Fraction(2)**(exponent - 23)
    count = units.numerator // units.denominator
    rest = units - count
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and count % 2):
        count += 1
    return sign | min(((exponent + 126) << 23) + count, INF)  # count holds the leading one of a normal number; a carry is right


def classify(bits):
    """("nan" | "inf" | "finite", negative, Fraction value)."""
    negative, field, fraction = bits >> 31 == 1, bits >> 23 & 0xFF, bits & 0x7FFFFF
    if field == 0xFF:
        return ("nan" if fraction else "inf"), negative, Fraction(0)
    significand, exponent = (fraction, -149) if field == 0 else (fraction + 2**23, field - 150)
    value = significand * Fraction(2)**exponent
    return "finite", negative, -value if negative else value


def fma_model(a, b, c):
    """Bits of a * b + c rounded once; every NaN is 0x7FFFFFFF."""
    (kind_a, neg_a, x), (kind_b, neg_b, y), (kind_c, neg_c, z) = map(classify, (a, b, c))
    neg_product = neg_a != neg_b
    if "nan" in (kind_a, kind_b, kind_c):
        return NAN
    if "inf" in (kind_a, kind_b):
        if (kind_a == "finite" and x == 0) or (kind_b == "finite" and y == 0) or (kind_c == "inf" and neg_c != neg_product):
            return NAN
        return MINUS_INF if neg_product else INF
    if kind_c == "inf":
        return c
    both_minus_zero = x * y == 0 and z == 0 and neg_product and neg_c
    return round_to_float32(x * y + z, both_minus_zero)


def add_model(a, b):
    return fma_model(a, ONE, b)


def multiply_model(a, b):
    return fma_model(a, b, MINUS_ZERO)                        # adding -0 leaves also a zero as it is


def decode_model(byte, fp8_dtype):
    """Value of an FP8 byte as a Fraction, None for a NaN: 4 exponent bits of bias 7 (e4m3fn) or 8 (e4m3fnuz), 3 fraction bits."""
    if byte in NAN_BYTES[fp8_dtype]:
        return None
    field, fraction = byte >> 3 & 15, byte & 7
    bias = 7 if fp8_dtype == E4M3FN else 8
    significand, exponent = (fraction, 1 - bias) if field == 0 else (8 + fraction, field - bias)
    value = significand * Fraction(2)**(exponent - 3)
    return -value if byte >> 7 else value


def exact_dot_model(q, key, fp8_dtype=E4M3FN):
    """Bits of the exact sum of products, rounded once; NaN if a byte is."""
    pairs = [(decode_model(a, fp8_dtype), decode_model(b, fp8_dtype)) for a, b in zip(q.tolist(), key.tolist())]
    if any(a is None or b is None for a, b in pairs):
        return NAN
    return round_to_float32(sum((a * b for a, b in pairs), Fraction(0)))


def wgmma_model(a, b, accumulator=0):
    """Bits that Hopper's ``wgmma f32.e4m3.e4m3`` returns for one output, chained over 32 products at a time, in integers."""
    a, b = a.tolist(), b.tolist()
    if any(byte & 0x7F == 0x7F for byte in a + b) or (accumulator >> 23 & 0xFF == 0xFF and accumulator & 0x7FFFFF):
        return NAN
    if accumulator >> 23 & 0xFF == 0xFF:
        return accumulator
    for start in range(0, len(a), 32):
        terms = []                                            # (sign, significand, its fraction bits, exponent), zeros left out
        for x, y in zip(a[start:start + 32], b[start:start + 32]):
            (sig_x, exp_x), (sig_y, exp_y) = ((v & 7, -6) if v >> 3 & 15 == 0 else (8 + (v & 7), (v >> 3 & 15) - 7) for v in (x, y))
            if sig_x * sig_y:
                terms.append((-1 if (x ^ y) >> 7 else 1, sig_x * sig_y, 6, exp_x + exp_y))
        field, fraction = accumulator >> 23 & 0xFF, accumulator & 0x7FFFFF
        if field or fraction:
            terms.append((-1 if accumulator >> 31 else 1, fraction + (2**23 if field else 0), 23, field - 127 if field else -126))
        if not terms:
            accumulator = 0
            continue
        largest = max(exponent for *_, exponent in terms)
        total = 0                                             # in units of 2**(largest - 13)
        for sign, significand, fraction_bits, exponent in terms:
            total += sign * ((significand << 13) >> (fraction_bits + largest - exponent))
        accumulator = 0
        if total:
            magnitude = abs(total)
            lead = magnitude.bit_length() - 1
            kept = magnitude >> lead - 13 if lead > 13 else magnitude << 13 - lead            # 13 fraction bits and the leading one
            accumulator = (MINUS_ZERO if total < 0 else 0) | (largest - 13 + lead + 126 << 23) + (kept << 10)
    return accumulator


def combine_model(dots, q_s, scale, fma=fma_model):
    """Bits of scale * sum of relu(dot) * q_s, in the pinned order; all arguments are bits."""
    chains = {(quarter, parity): 0 for quarter in range(4) for parity in range(2)}
    for h, (dot, weight) in enumerate(zip(dots, q_s)):
        kind, negative, _ = classify(dot)
        relu = dot if kind == "nan" or not negative else 0
        at = (h % 8) // 2, h % 2
        chains[at] = fma(relu, weight, chains[at])
    s = [add_model(chains[quarter, 0], chains[quarter, 1]) for quarter in range(4)]
    return multiply_model(add_model(add_model(s[0], s[1]), add_model(s[2], s[3])), scale)


def assert_equals_model(q, q_s, keys, scales, *, fp8_dtype=E4M3FN, arithmetic="exact"):
    """All (token, key) pairs of q uint8 [T, H, D] and keys uint8 [N, D] against the scalar model."""
    scores = score_pairs(q, q_s, keys, scales, fp8_dtype=fp8_dtype, arithmetic=arithmetic)
    q_s, scales = to_bits(q_s), to_bits(scales)
    expected = []
    for token, heads in enumerate(q):
        expected.append([])
        for n, key in enumerate(keys):
            dots = [wgmma_model(head, key) if arithmetic == "wgmma" else exact_dot_model(head, key, fp8_dtype) for head in heads]
            expected[-1].append(combine_model(dots, q_s[token], scales[n]))
    assert_bits(scores, expected)


@pytest.mark.parametrize(("exact", "bits"), [
    (Fraction(1), 0x3F800000),
    (Fraction(-3, 2), 0xBFC00000),
    (1 + Fraction(1, 2**24), 0x3F800000),                     # half way, the lower one is even
    (1 + Fraction(3, 2**24), 0x3F800002),                     # half way, the upper one is even
    (1 + Fraction(1, 2**24) + Fraction(1, 2**80), 0x3F800001),
    (2 - Fraction(1, 2**24), 0x40000000),                     # half way, carries into the exponent
    (Fraction(1, 3), 0x3EAAAAAB),                             # 0.0101..., the part cut off, 0.1010..., is above a half
    (Fraction(1, 2**149), 0x00000001),
    (Fraction(1, 2**150), 0x00000000),                        # half of the smallest subnormal: to even
    (Fraction(-1, 2**150), 0x80000000),
    (Fraction(3, 2**150), 0x00000002),
    (Fraction(1, 2**126) - Fraction(1, 2**150), 0x00800000),  # half way between the largest subnormal and the smallest normal
    (Fraction(2)**128 - Fraction(2)**104, 0x7F7FFFFF),        # the largest finite
    (Fraction(2)**128 - Fraction(2)**103 - 1, 0x7F7FFFFF),
    (Fraction(2)**128 - Fraction(2)**103, 0x7F800000),        # half way to 2**128: to even, infinity
    (-Fraction(2)**200, 0xFF800000),
])
def test_model_rounds_to_nearest_even(exact, bits):
    """The scalar model's own rounding, by hand."""
    assert hexadecimal(round_to_float32(exact)) == hexadecimal(bits)


# ------------------------------------------------------------------------------------------------------ fused multiply-add


def fma_bits(a, b, c):
    """`reference.fma` on lists of bit patterns; every NaN as 0x7FFFFFFF."""
    with np.errstate(all="ignore"):
        result = reference.fma(from_bits(a), from_bits(b), from_bits(c))
    bits = np.where(np.isnan(result), np.uint32(NAN), result.view(np.uint32))
    return bits.tolist()


def assert_fma(a, b, c):
    """`reference.fma` equals the Fraction model on these bit patterns."""
    a, b, c = (np.asarray(x, np.uint32).tolist() for x in (a, b, c))
    got, want = fma_bits(a, b, c), list(map(fma_model, a, b, c))
    wrong = [i for i in range(len(a)) if got[i] != want[i]]
    assert not wrong, [tuple(hexadecimal([a[i], b[i], c[i], got[i], want[i]])) for i in wrong[:8]]


@pytest.mark.parametrize(("a", "b", "c", "bits"), [
    # (1 + 2**-12)**2 = 1 + 2**-11 + 2**-24: a tie, goes to even; with c a hair below or above it does not
    (0x3F800800, 0x3F800800, 0x00000000, 0x3F801000),
    (0x3F800800, 0x3F800800, 0x00000001, 0x3F801001),         # c = 2**-149 is lost in a float64 sum: two roundings give ...1000
    (0x3F800800, 0x3F800800, 0x80000001, 0x3F801000),
    # (1 + 3 * 2**-12) * (1 + 2**-12) = 1 + 2**-10 + 3 * 2**-24: a tie between odd ...2001 and even ...2002
    (0x3F801800, 0x3F800800, 0x00000000, 0x3F802002),
    (0x3F801800, 0x3F800800, 0x80000001, 0x3F802001),         # two roundings give ...2002
    (0x3F801800, 0x3F800800, 0x00000001, 0x3F802002),
    # 2**-24 + 1, the small one from the product: a tie to even; then with the product a bit larger
    (0x33800000, 0x3F800000, 0x3F800000, 0x3F800000),
    (0x33800001, 0x3F800000, 0x3F800000, 0x3F800001),
    # -(1 + 2**-23) + (1 + 2**-12)**2 = 2**-11 + 2**-24 - 2**-23 = 2**-11 - 2**-24: exact, 2**-12 * (2 - 2**-12)
    (0x3F800800, 0x3F800800, 0xBF800001, 0x39FFF800),
    # cancellation to zero is +0; zeros of one sign keep it
    (0x3F800000, 0x3F800000, 0xBF800000, 0x00000000),
    (0x80000000, 0x3F800000, 0x80000000, 0x80000000),
    (0x80000000, 0x3F800000, 0x00000000, 0x00000000),
    # subnormal results: 2**-75 * 2**-75 = 2**-150 is half of the smallest subnormal
    (0x1A000000, 0x1A000000, 0x00000000, 0x00000000),
    (0x1A000000, 0x1A000000, 0x00000001, 0x00000002),         # 1.5 units: a tie, to even
    (0x1A000001, 0x1A000000, 0x00000000, 0x00000001),         # just above the tie
    (0x1A000001, 0x9A000000, 0x00000001, 0x00000000),         # 1 - 0.5000001 units: just below the tie
    (0x9A000000, 0x1A000000, 0x00000000, 0x80000000),         # -2**-150: to even, -0
    (0x00800000, 0x3F000000, 0x00000000, 0x00400000),         # 2**-127, subnormal, kept
    # the largest subnormal and half a unit more: a tie, up to the smallest normal
    (0x1A000000, 0x1A000000, 0x007FFFFF, 0x00800000),
    # overflow: the largest finite plus 2**103 is half way to 2**128, and anything less is not
    (0x73000000, 0x3F800000, 0x7F7FFFFF, 0x7F800000),
    (0x72FFFFFF, 0x3F800000, 0x7F7FFFFF, 0x7F7FFFFF),
    (0x7F7FFFFF, 0x40000000, 0x00000000, 0x7F800000),
    (0x7F7FFFFF, 0x40000000, 0xFF7FFFFF, 0x7F7FFFFF),         # 2 * max - max: the product alone overflows, the sum does not
    (0x7F7FFFFF, 0xC0000000, 0x00000000, 0xFF800000),
    # infinities and NaN
    (INF, 0x00000000, 0x3F800000, NAN),
    (INF, 0x3F800000, MINUS_INF, NAN),
    (INF, 0xBF800000, 0x3F800000, MINUS_INF),
    (0x3F800000, 0x3F800000, MINUS_INF, MINUS_INF),
    (0x7F7FFFFF, 0x7F7FFFFF, MINUS_INF, MINUS_INF),           # a finite product, however large, is no infinity
    (NAN_PAYLOAD, 0x00000000, 0x00000000, NAN),
    (0x00000000, 0x00000000, 0x7F800001, NAN),
])
def test_fma_by_hand(a, b, c, bits):
    assert hexadecimal(fma_model(a, b, c)) == hexadecimal(bits)
    assert hexadecimal(fma_bits([a], [b], [c])) == hexadecimal([bits])


def test_fma_on_random_bit_patterns():
    rng = np.random.default_rng(1)
    assert_fma(*rng.integers(0, 2**32, (3, 2000), np.uint32))
    # exponents near each other, so that product and addend meet
    a, b, c = rng.integers(0, 2**32, (3, 2000), np.uint32)
    assert_fma(a & 0x81FFFFFF | 0x3E000000, b & 0x81FFFFFF | 0x3E000000, c & 0x83FFFFFF | 0x3C000000)


def test_fma_with_subnormal_results():
    rng = np.random.default_rng(2)
    a, b, c = rng.integers(0, 2**32, (3, 2000), np.uint32)
    small = rng.random(2000) < 0.5
    assert_fma(a & 0x83FFFFFF | 0x18000000, b & 0x83FFFFFF | 0x18000000, np.where(small, c & 0x80FFFFFF, c & 0x8000000F))


def test_fma_near_half_way():
    """Few significant bits in every operand: sums that end in a tie, and ties that a far smaller addend breaks."""
    rng = np.random.default_rng(3)
    sparse = [rng.integers(0, 2, 2000, np.uint32) << 31 | (rng.integers(127 - reach, 127 + 1, 2000).astype(np.uint32) << 23)
              | (rng.integers(0, 2, 2000, np.uint32) << rng.integers(0, 23, 2000, np.uint32))
              | (rng.integers(0, 2, 2000, np.uint32) << rng.integers(0, 23, 2000, np.uint32)) for reach in (2, 24, 80)]
    assert_fma(*sparse)
    assert_fma(sparse[0], sparse[0], sparse[2])
    tie = np.full(2000, 0x3F800800, np.uint32)                # its square is a tie
    assert_fma(tie, tie, sparse[2])


def test_fma_broadcasts():
    """As it is used: [tokens, heads, keys] with weights [tokens, heads, 1]; the ties of `test_fma_by_hand` at every place."""
    a = from_bits(np.full((2, 3, 4), 0x3F800800, np.uint32))
    b = from_bits(np.full((2, 3, 1), 0x3F800800, np.uint32))
    c = from_bits(np.where(np.arange(24).reshape(2, 3, 4) % 2, 1, 0))
    assert_bits(reference.fma(a, b, c), np.where(np.arange(24).reshape(2, 3, 4) % 2, 0x3F801001, 0x3F801000).tolist())


# -------------------------------------------------------------------------------------------------- scores of tiny batches

# Four requests of (n, c) = (2, 1), (0, 4), (1, 0), (1, 2); two heads, D = 2.
HAND_Q = [[[1, 1], [2, -1]], [[0, 1], [-1, 0]], [[1, 0], [0, 1]], [[1, 1], [-1, -1]]]
HAND_Q_S = [[1, -1], [2, 0.5], [1, 1], [1, 3]]
HAND_KEYS = [[[1, 0], [0, 2], [-1, 1]], [[1, 1]] * 4, [[3, 1]], [[2, 2], [1, -3], [0, 0]]]
HAND_SCALES = [[1, 0.5, -2], [1] * 4, [2], [1, 4, 8]]
# token 0: dots (1, 2): 1 - 2 = -1, * 1 | (2, -2): 2 - 0 = 2, * 0.5 | (0, -3): +0, * -2 is -0 (only under the null mask)
# token 1: dots (0, -1): +0           | (2, 0): 4, * 0.5           | (1, 1): 2 + 0.5 = 2.5, * -2
# token 2: dots (3, 1): 4, * 2
# token 3: dots (4, -4): 4, * 1       | (-2, 2): 3 * 2 = 6, * 4    | (0, 0): +0, * 8
HAND_SCORES = {"causal": [[-1, 1, -np.inf], [0, 2, -5], [8, -np.inf, -np.inf], [4, 24, 0]],
               "null": [[-1, 1, -0.0], [0, 2, -5], [8, -np.inf, -np.inf], [4, 24, 0]]}


def hand_call(**layout):
    fp8_dtype = layout.get("fp8_dtype", E4M3FN)
    return paged_call(encode(HAND_Q, fp8_dtype), np.array(HAND_Q_S, np.float32), [encode(k, fp8_dtype) for k in HAND_KEYS],
                      HAND_SCALES, cached=[1, 4, 0, 2], new_tokens=[2, 0, 1, 1], **layout)


@pytest.mark.parametrize("mask", ["causal", "null"])
@pytest.mark.parametrize("layout", [
    {},
    {"page_size": 1},
    {"page_size": 3, "seed": 7},
    {"page_size": 64},
    {"num_layers": 3, "layer_idx": 1},
    {"num_layers": 2, "layer_idx": 1, "page_size": 3, "metadata_dtype": np.int32},
    {"fused": True},
    {"fused": True, "page_size": 4, "seed": 3},
    {"fp8_dtype": E4M3FNUZ},
    {"fp8_dtype": E4M3FNUZ, "fused": True, "metadata_dtype": np.int32},
], ids=str)
def test_scores_of_a_ragged_batch(mask, layout):
    """Every layout of the same keys gives the hand-worked scores; -inf outside each row's candidates."""
    for arithmetic in ("exact",) if layout.get("fp8_dtype") == E4M3FNUZ else ("exact", "wgmma"):
        scores = reference.index_scores(*hand_call(**layout), mask=mask, arithmetic=arithmetic)
        assert_bits(scores, np.array(HAND_SCORES[mask], np.float32))


@pytest.mark.parametrize("mask", ["causal", "null"])
def test_scores_of_long_rows(mask):
    """Three tokens of 64 equal heads over 5000 keys: 64 * q * scale, small integers, with both ends of every row in place."""
    scales = (np.arange(5000) % 37 - 18).astype(np.float32)
    call = paged_call(np.repeat(encode([[[1]], [[2]], [[4]]]), 64, axis=1), np.ones((3, 64), np.float32),
                      [np.broadcast_to(encode(1.0), (5000, 1))], [scales], cached=[4997], new_tokens=[3], page_size=64)
    expected = np.float32(64) * np.array([[1], [2], [4]], np.float32) * scales
    if mask == "causal":
        expected[0, 4998:], expected[1, 4999:] = -np.inf, -np.inf
    assert_bits(reference.index_scores(*call, mask=mask), expected)


def test_q_in_its_own_dtype_or_as_bytes():
    """q of an FP8 dtype, with any strides above the last axis, is its bytes."""
    q, *rest = hand_call()
    padded = np.full((4, 3, 5), 0x7F, np.uint8)
    padded[:, 1:, :2] = q
    for same in (q.view(ml_dtypes.float8_e4m3fn), padded[:, 1:, :2], padded.view(ml_dtypes.float8_e4m3fn)[:, 1:, :2]):
        assert_bits(reference.index_scores(same, *rest), np.array(HAND_SCORES["causal"], np.float32))


def test_requests_share_blocks():
    """Two requests on the same block: each sees the keys of it that its length covers."""
    blocks = encode([1, 2, 4, 8]).reshape(1, 1, 1, 4, 1, 1)
    scales = np.array([1, 10, 100, 1000], np.float32).reshape(1, 1, 1, 4, 1, 1)
    cache = PagedKeyCache(blocks, scales, np.array([3, 1], np.uint32), np.array([[0], [0]], np.uint32))
    call = encode([[[1]], [[2]]]), np.ones((2, 1), np.float32), np.array([0, 1, 2], np.uint32), cache
    # q 1: 1*1, 2*10, 4*100, 8*1000; q 2, two candidates: 2*1, 4*10
    assert_bits(reference.index_scores(*call), np.array([[1, 20, 400, 8000], [2, 40, -np.inf, -np.inf]], np.float32))


@pytest.mark.parametrize(("mask", "cached", "counts"), [
    ("causal", 3, [1, 1, 2]),                                 # visible 4, 5, 6
    ("null", 3, [2, 2, 2]),                                   # visible 6
    ("causal", 0, [0, 0, 1]),                                 # visible 1, 2, 3
    ("null", 1, [1, 1, 1]),                                   # visible 4: the partial second pool is no candidate
    ("causal", 7, [2, 3, 3]),                                 # visible 8, 9, 10
])
@pytest.mark.parametrize("fused", [False, True])
def test_pooled_scores(mask, cached, counts, fused):
    """kpool 3: cache row r is a pool, candidates are whole pools; the table covers pools, not tokens."""
    num_rows = max(counts)
    call = paged_call(encode([[[1, 0]], [[2, 0]], [[4, 0]]]), np.ones((3, 1), np.float32),
                      [encode([[r + 1, 5] for r in range(num_rows)])], [[1, -1, 0.5][:num_rows]], cached=[cached], new_tokens=[3],
                      fused=fused)
    pooled = [1, -2, 1.5]                                     # key r + 1 times its scale, for q = 1
    expected = [[token_q * pooled[r] if r < v else -np.inf for r in range(num_rows)] for token_q, v in zip((1, 2, 4), counts)]
    assert_bits(reference.index_scores(*call, mask=mask, kpool=3), np.array(expected, np.float32))
    selected = reference.mla_indexer_ragged_float8_paged(*call, top_k=3, mask=mask, kpool=3)
    assert selected.tolist() == [list(range(v)) + [-1] * (3 - v) for v in counts]


def test_score_width_is_the_largest_candidate_count():
    """W counts requests that have query tokens only, and neither bounds nor the table's width."""
    q, q_s, offsets, cache, layer_idx = hand_call()
    wide = PagedKeyCache(cache.blocks, cache.scales, cache.cache_lengths,
                         np.concatenate([cache.lookup_table, np.full((4, 9), 2**31 - 1, np.uint32)], axis=1),
                         max_prompt_length=10**6, max_context_length=10**9)
    for k_collection in (cache, wide):
        scores = reference.index_scores(q, q_s, offsets, k_collection, layer_idx)
        assert scores.shape == (4, 3)                         # request 1 has 4 cached keys and no token
        assert scores.dtype == np.float32
        assert reference.index_scores(q, q_s, offsets, k_collection, layer_idx, kpool=2).shape == (4, 1)
        assert reference.index_scores(q, q_s, offsets, k_collection, layer_idx, kpool=4).shape == (4, 0)


def test_no_tokens_and_no_requests():
    """T = 0, and B = 0: outputs without rows."""
    cache = PagedKeyCache(np.zeros((1, 1, 1, 2, 1, 2), np.uint8), np.zeros((1, 1, 1, 2, 1, 1), np.float32),
                          np.array([2, 7], np.uint32), np.zeros((2, 0), np.uint32))
    no_tokens = np.zeros((0, 1, 2), np.uint8), np.zeros((0, 1), np.float32), np.zeros(3, np.uint32), cache
    nobody = PagedKeyCache(cache.blocks, cache.scales, np.zeros(0, np.uint32), np.zeros((0, 3), np.uint32))
    for call in (no_tokens, (*no_tokens[:2], np.zeros(1, np.int32), nobody)):
        assert reference.index_scores(*call).shape == (0, 0)
        out, out_scores = np.empty((0, 5), np.int32), np.empty((0, 5), np.float32)
        for options in ({}, {"out": out, "out_scores": out_scores, "order": "score"}):
            selected = reference.mla_indexer_ragged_float8_paged(*call, top_k=5, **options)
            assert (selected.shape, selected.dtype) == ((0, 5), np.int32)


def test_rows_without_candidates_need_no_cache():
    """kpool 4 and one token per request: v = 0 everywhere, a cache of no blocks and a table of no columns will do."""
    metadata = np.zeros(3, np.uint32), np.zeros((3, 0), np.uint32)
    for cache in (PagedKeyCache(np.zeros((0, 1, 1, 2, 1, 2), np.uint8), np.zeros((0, 1, 1, 2, 1, 1), np.float32), *metadata),
                  PagedKeyCache.from_fused(np.zeros((0, 2, 1, 6), np.uint8), *metadata)):
        call = np.full((3, 1, 2), 0x38, np.uint8), np.ones((3, 1), np.float32), np.arange(4, dtype=np.uint32), cache
        out_scores = np.full((3, 2), np.nan, np.float32)
        selected = reference.mla_indexer_ragged_float8_paged(*call, top_k=2, kpool=4, out_scores=out_scores)
        assert selected.tolist() == [[-1, -1]] * 3
        assert_bits(out_scores, [[MINUS_INF] * 2] * 3)
        assert reference.index_scores(*call, kpool=4).shape == (3, 0)


# --------------------------------------------------------------------------------------------- one score, its order and bits


def test_dot_is_the_exact_sum_rounded_once():
    # 256*256 = 2**16, whose float32 neighbours are 2**-7 apart. 2**-4 * 2**-4 = 2**-8 is half of that: a tie, back to 2**16
    tie = [256, 2**-4], [256, 2**-4]
    # ... and 2**-9 * 2**-9 = 2**-18 more breaks it; a float32 sum, in any order, loses one of the two
    broken = [256, 2**-4, 2**-9], [256, 2**-4, 2**-9]
    # the large products cancel: 2**-18 is left, which a float32 sum from the left loses
    cancelled = [448, 2**-9, -448], [448, 2**-9, 448]
    for (q, key), bits in ((tie, 0x47800000), (broken, 0x47800001), (cancelled, 0x36800000)):
        for order in (slice(None), slice(None, None, -1)):
            assert_bits(score_one([q[order]], key[order], [1]), [[bits]])


def test_dot_at_depth_1024():
    """1023 products of 448 * 448 and one of 2**-9 * 2**-9: 28 bits above the point, 18 behind it."""
    q, key = [448.0] * 1023 + [2**-9], [448.0] * 1023 + [2**-9]
    # 448 * 448 = 0x31000; 0x31000 * 0x3FF = 0xC3CF000 is at least 2**27, float32 neighbours are 16 apart, and 2**-18 is lost.
    # exponent 127 + 27 = 0x9A, fraction (0xC3CF000 - 2**27) / 16 = 0x43CF00
    assert_bits(score_one([q], key, [1]), [[0x4D43CF00]])
    # 1020 of them are 0xC33C000, fraction 0x433C00, even; 2 * 4 = 8 more is half of 16: a tie. 2**-18 more: up
    tie_q, tie_key = [448.0] * 1020 + [2, 0, 0, 0], [448.0] * 1020 + [4, 0, 0, 0]
    assert_bits(score_one([tie_q], tie_key, [1]), [[0x4D433C00]])
    tie_q[-1] = tie_key[-1] = 2**-9
    assert_bits(score_one([tie_q], tie_key, [1]), [[0x4D433C01]])


def unfused(a, b, c):
    """A multiply-add with two roundings."""
    return add_model(multiply_model(a, b), c)


def rivals(weights, scale):
    """Bits of the score by other orders, for heads whose dot is 1: what an order other than the pinned one would give."""
    terms, scale = to_bits(np.asarray(weights, np.float32)), round_to_float32(Fraction(scale))

    def left_to_right(values):
        total = 0
        for value in values:
            total = add_model(total, value)
        return total

    def halves(values):
        return values[0] if len(values) == 1 else add_model(halves(values[:len(values) // 2]), halves(values[len(values) // 2:]))

    padded = terms + [0] * (-len(terms) % 8)
    chains = [left_to_right(padded[lane::8]) for lane in range(8)]
    return {
        "left to right": multiply_model(left_to_right(terms), scale),
        "right to left": multiply_model(left_to_right(terms[::-1]), scale),
        "scale first": left_to_right([multiply_model(term, scale) for term in terms]),
        "rounded once": multiply_model(round_to_float32(sum(map(Fraction, map(float, weights)))), scale),
        "halves": multiply_model(halves(padded), scale),
        "chains left to right": multiply_model(left_to_right(chains), scale),
        "chains by distance 4, 2, 1": multiply_model(halves([chains[i] for i in (0, 4, 2, 6, 1, 5, 3, 7)]), scale),
        "chains of contiguous heads": multiply_model(
            halves([left_to_right(padded[at:at + len(padded) // 8]) for at in range(0, len(padded), len(padded) // 8)]), scale),
        "chains descending": multiply_model(halves([left_to_right(padded[lane::8][::-1]) for lane in range(8)]), scale),
    }


@pytest.mark.parametrize(("weights", "scale", "bits", "differs_from"), [
    # one head, seven chains of +0
    ([3], 2, 0x40C00000, ()),
    # three heads: (B + 1 -> B) + (1 + 0) -> B
    ([BIG, 1, 1], 1, 0x4B800000, ("right to left", "rounded once")),
    # three heads: (1 + 1) + B = B + 2
    ([1, 1, BIG], 1, 0x4B800001, ("right to left",)),
    # eight: ((B + 1 -> B) + (1 + 1) = B + 2) + ((-B + 1 = -(B - 1)) + (0 + 4) = -(B - 5)) = 7; exactly 1 + 2 + 1 + 4 = 8
    ([BIG, 1, 1, 1, -BIG, 1, 0, 4], 1, 0x40E00000,
     ("left to right", "right to left", "rounded once", "chains left to right", "chains by distance 4, 2, 1")),
    # nine: chain 0 is B then + 1 -> B; chain 1 is -B: 0; the rest (1 + 1) = 2 and (1 + 0) + (0 + 0): 0 + 2 + 1 = 3; exactly 4
    ([BIG, -BIG, 1, 1, 1, 0, 0, 0, 1], 1, 0x40400000,
     ("left to right", "right to left", "rounded once", "chains of contiguous heads")),
    # twenty: chain 0: B + 1 + 1 -> B; 1: -1 - 1 - B = -(B + 2); 2: 3; 3: 0; 4: B + 1 -> B; 5: -B - 2; 6: 1 + 1; 7: B - B
    # ((B - (B + 2)) + (3 + 0)) + ((B - (B + 2)) + (2 + 0)) = 1 + 0; * 3; exactly (2 - 2 + 3 + 1 - 2 + 2) * 3 = 12
    ([BIG, -1, 3, 0, BIG, -BIG, 1, BIG, 1, -1, 0, 0, 1, -2, 1, -BIG, 1, -BIG, 0, 0], 3, 0x40400000,
     ("left to right", "right to left", "rounded once", "halves", "chains by distance 4, 2, 1", "chains of contiguous heads",
      "chains descending")),
    # the key scale multiplies last: (B + 1 -> B) * 1.5; distributed over the terms it would be 1.5 B + 1.5 -> 1.5 B + 2
    ([BIG, 1], 1.5, 0x4BC00000, ("scale first",)),
], ids=["1", "3-first", "3-last", "8", "9", "20", "scale-last"])
def test_order_of_the_head_sum(weights, scale, bits, differs_from):
    """Every dot is 1, so a score is its weights' sum in the pinned order, times the key's scale."""
    other = rivals(weights, scale)
    assert all(other[name] != bits for name in differs_from), hexadecimal([other[name] for name in differs_from])
    num_heads = len(weights)
    assert_bits(score_one(np.ones((num_heads, 1)), [1], weights, scale), [[bits]])
    # the same in the tensor cores' arithmetic, whose dot is 1 too
    assert_bits(score_one(np.ones((num_heads, 1)), [1], weights, scale, arithmetic="wgmma"), [[bits]])


def test_multiply_adds_are_fused():
    """Chain 0 of nine heads: -(1 + 2**-12), then + (1 + 2**-12)**2 = 1 + 2**-11 + 2**-24, rounded once."""
    head, key = [1, 2**-6], [1, 2**-6]                        # dot 1 + 2**-12
    q = np.array([head] + [[0, 0]] * 7 + [head])
    q_s = [-1] + [5] * 7 + [1 + 2**-12]
    # fused: 2**-12 + 2**-24 = 2**-12 * (1 + 2**-12): exponent 115 = 0x73, fraction 2**11. Unfused: the product is a tie, 1 + 2**-11
    dots = [0x3F800800] + [0] * 7 + [0x3F800800]
    weights = [0xBF800000] + [0x40A00000] * 7 + [0x3F800800]
    assert hexadecimal(combine_model(dots, weights, ONE, unfused)) == "39800000"
    assert_bits(score_one(q, key, q_s), [[0x39800800]])


def test_multiply_adds_are_fused_with_a_tie_that_float64_loses():
    """Twenty heads, chain 2 (heads 2, 10, 18): the addend -2**-149 decides a tie that a float64 sum cannot see."""
    dot, key = [1, 2**-6], [1, 2**-6]
    q = np.zeros((20, 2))
    q[[2, 10]] = dot
    q_s = np.full(20, -7.0)
    q_s[2], q_s[10] = 2.0**-149, 1 + 2**-12                   # 2**-149 * (1 + 2**-12) -> 2**-149, then + 1 + 2**-11 + 2**-24
    assert_bits(score_one(q, key, q_s), [[0x3F801001]])
    q_s[2] = -(2.0**-149)
    assert_bits(score_one(q, key, q_s), [[0x3F801000]])
    q_s[2] = 0
    assert_bits(score_one(q, key, q_s), [[0x3F801000]])       # the tie itself, to even


def test_negative_weights_and_scales():
    # relu(2) * -3 = -6; relu(-2) * -3 = 0
    assert_bits(score_one([[2]], [1], [-3]), np.array([[-6]], np.float32))
    assert_bits(score_one([[2], [-2]], [1], [-3, -3], -0.5), np.array([[3]], np.float32))
    assert_bits(score_one([[2], [1]], [1], [-3, 6]), [[0]])   # -6 + 6 = +0
    assert_bits(score_one([[2], [1]], [1], [-3, 6], -1), [[MINUS_ZERO]])


def test_zero_dot_is_plus_zero():
    """Also of -0 products only, and of a cancellation, in both arithmetics."""
    q = encode([[[-0.0, 0.0], [1.0, -1.0], [-0.0, -0.0], [0.0, 0.0]]])
    keys = encode([[2.0, 2.0], [0.0, 0.0], [-0.0, -0.0]])
    assert_bits(reference._dot_exact(q, keys, E4M3FN), [[[0, 0, 0]] * 4])
    assert_bits(reference._dot_wgmma(q, keys, E4M3FN), [[[0, 0, 0]] * 4])


@pytest.mark.parametrize("dot", [0, MINUS_ZERO, 0x80000001, 0xC0000000, MINUS_INF], ids=hexadecimal)
def test_relu_gives_plus_zero(dot):
    """relu of -0, of a negative subnormal and of anything below is +0: as a score, and times an infinite weight NaN."""
    def score(weight, scale=1.0):
        return reference._combine_heads(from_bits([[[dot]]]), np.array([[weight]], np.float32), np.array([scale], np.float32))
    assert_bits(score(1.0), [[0]])
    assert_bits(score(-1.0), [[0]])                           # fma(+0, -1, +0) = +0
    assert_bits(score(-0.0), [[0]])
    assert_bits(score(1.0, -1.0), [[MINUS_ZERO]])
    assert_bits(score(np.inf), [[NAN]])


def test_missing_heads_are_plus_zero():
    """A lone head of weight -0 gives fma(1, -0, +0) = +0, and the empty chains add +0."""
    assert_bits(score_one([[1]], [1], [-0.0]), [[0]])
    assert_bits(score_one(np.ones((8, 1)), [1], [-0.0] * 8), [[0]])
    assert_bits(score_one(np.ones((9, 1)), [1], [-0.0] * 9, -1), [[MINUS_ZERO]])


@pytest.mark.parametrize(("q_s", "scale", "bits"), [
    (1.0, 2.0**-149, 0x00000001),
    (-1.0, 2.0**-149, 0x80000001),
    (2.0**-149, 1.0, 0x00000001),                             # from the multiply-add
    (3 * 2.0**-149, 1.0, 0x00000003),
    (2.0**-149, 2.0**24, 0x01000000),                         # 2**-125: a flush before the scale would lose it
    (0.5, 2.0**-149, 0x00000000),                             # half a unit: to even
    (1.5, 2.0**-149, 0x00000002),                             # a tie, to even
    (2.0**-64, 2.0**-64, 0x00200000),                         # 2**-128 = 2**21 units of 2**-149
    (2.0**-126, 0.5, 0x00400000),
    (2.0**127, 2.0, INF),
    (-(2.0**127), 2.0, MINUS_INF),
])
def test_subnormal_and_infinite_scores_are_kept(q_s, scale, bits):
    assert_bits(score_one([[1]], [1], [q_s], scale), [[bits]])


# ------------------------------------------------------------------------------------------------------------ NaN and inf


@pytest.mark.parametrize("fp8_dtype", FP8_KINDS)
@pytest.mark.parametrize("other", [0.0, 1.0, -1.0])
def test_nan_byte_makes_the_score_nan(fp8_dtype, other):
    """A NaN byte in one head, or in the key, even against zero and with weight 0: the one NaN pattern."""
    for byte in NAN_BYTES[fp8_dtype]:
        nan, plain = np.array([byte, 0], np.uint8), encode([other, 0], fp8_dtype)
        assert_bits(score_one(np.stack([plain, nan, plain]), plain, [1, 0, 1], fp8_dtype=fp8_dtype), [[NAN]])
        assert_bits(score_one(np.stack([plain] * 3), nan, [1, 0, 1], fp8_dtype=fp8_dtype), [[NAN]])


@pytest.mark.parametrize("arithmetic", ["exact", "wgmma"])
def test_nan_bytes_stay_in_their_row_and_column(arithmetic):
    """Token 1 has a NaN byte, key 2 too; all other scores are finite: (1 + 1) * scale."""
    q, keys = np.broadcast_to(encode(1.0), (3, 1, 2)).copy(), np.broadcast_to(encode(1.0), (4, 2)).copy()
    q[1, 0, 1], keys[2, 0] = 0x7F, 0xFF
    scores = score_pairs(q, np.ones((3, 1), np.float32), keys, np.array([1, 2, 3, 4], np.float32), arithmetic=arithmetic)
    two, four, eight = 0x40000000, 0x40800000, 0x41000000
    assert_bits(scores, [[two, four, NAN, eight], [NAN] * 4, [two, four, NAN, eight]])


def test_bytes_that_are_nan_in_the_other_kind_only():
    # 0x80 is -0 in e4m3fn: adds nothing. 0x7F is 1.875 * 2**7 = 240 in e4m3fnuz, 0xFF is -240
    assert_bits(score_one(np.array([[0x80, 0x38]], np.uint8), np.array([0x38, 0x38], np.uint8), [1]), [[ONE]])
    q, key = np.array([[0x7F]], np.uint8), np.array([0x40], np.uint8)                        # 240 * 1.0
    assert_bits(score_one(q, key, [1], fp8_dtype=E4M3FNUZ), np.array([[240]], np.float32))
    assert_bits(score_one(q | 0x80, key | 0x80, [1], fp8_dtype=E4M3FNUZ), np.array([[240]], np.float32))
    # the same byte 0x38 is 1 in e4m3fn and 0.5 in e4m3fnuz
    half = np.array([0x38], np.uint8)
    assert_bits(score_one(half[None], half, [1]), [[ONE]])
    assert_bits(score_one(half[None], half, [1], fp8_dtype=E4M3FNUZ), np.array([[0.25]], np.float32))


@pytest.mark.parametrize(("q", "q_s", "scale"), [
    ([[1]], [1], NAN_PAYLOAD),
    ([[1]], [1], 0x7F800001),                                 # a signalling NaN
    ([[-1]], [1], 0x7FC00000),                                # NaN * 0
    ([[1]], [NAN_PAYLOAD], ONE),
    ([[-1]], [0xFFFFFFFF], ONE),                              # relu is 0
    ([[-1]], [INF], ONE),                                     # 0 * inf in the multiply-add
    ([[1], [1]], [INF, MINUS_INF], ONE),                      # inf - inf in the sum
    ([[1]] * 9, [INF] + [0] * 7 + [MINUS_INF], ONE),          # inf - inf in a chain
    ([[-1]], [ONE], INF),                                     # 0 * inf
    ([[-1]], [ONE], MINUS_INF),
    ([[1]], [MINUS_ZERO], INF),                               # (+0) * inf
])
def test_every_nan_score_is_one_pattern(q, q_s, scale):
    weights = [ONE if w == 1 else w for w in q_s]             # 1 for short
    score = score_pairs(encode(q)[None], from_bits(weights)[None], encode([[1]]), from_bits([scale]))
    assert_bits(score, [[NAN]])


def test_infinite_weights_and_scales():
    assert_bits(score_one([[1]], [1], [np.inf]), [[INF]])
    assert_bits(score_one([[1]], [1], [np.inf], -1), [[MINUS_INF]])
    assert_bits(score_one([[1]], [1], [1], np.inf), [[INF]])
    assert_bits(score_one([[1]], [1], [-1], np.inf), [[MINUS_INF]])
    assert_bits(score_one([[1]], [1], [-1], -np.inf), [[INF]])


def test_infinite_scale_of_a_zero_ranks_last():
    """Sums (2, 0, -, 0) with scales (inf, inf, 1, -inf): inf, NaN, a plain 1, NaN."""
    keys = encode([[2], [-1], [1], [-2]])
    call = paged_call(encode([[[1]]]), np.ones((1, 1), np.float32), [keys], [[np.inf, np.inf, 1, -np.inf]], cached=[3],
                      new_tokens=[1])
    out_scores = np.empty((1, 5), np.float32)
    selected = reference.mla_indexer_ragged_float8_paged(*call, top_k=5, order="score", out_scores=out_scores)
    assert selected.tolist() == [[0, 2, 1, 3, -1]]
    assert_bits(out_scores, [[INF, ONE, NAN, NAN, MINUS_INF]])


# ------------------------------------------------------------------------------------------ against the scalar model: scores


def random_pairs(rng, kind, *, num_heads, head_dim, num_tokens=4, num_keys=6, fp8_dtype=E4M3FN):
    """q, q_s, keys, scales of a regime, as `score_pairs` takes them."""
    q, keys = rng.integers(0, 256, (num_tokens, num_heads, head_dim)), rng.integers(0, 256, (num_keys, head_dim))
    q_s, scales = rng.standard_normal((num_tokens, num_heads)), rng.standard_normal(num_keys)
    if kind == "tiny":                                        # subnormal bytes, and the smallest normal ones
        q, keys = q & 0x8F, keys & 0x8F
    if kind == "positive":                                    # nothing is cut off by the relu
        q, keys = q & 0x7F, keys & 0x7F
    if kind != "nan":
        for codes in (q, keys):
            for byte in NAN_BYTES[fp8_dtype]:
                codes[codes == byte] = byte ^ 1
    else:
        q[rng.random(q.shape[:2]) < 0.1, 0] = NAN_BYTES[fp8_dtype][0]
        keys[rng.random(num_keys) < 0.3, -1] = NAN_BYTES[fp8_dtype][-1]
    q_s, scales = q_s.astype(np.float32), scales.astype(np.float32)
    if kind == "bits":                                        # any float32 for weights and scales
        q_s = from_bits(rng.integers(0, 2**32, q_s.shape, np.uint32))
        scales = from_bits(rng.integers(0, 2**32, scales.shape, np.uint32))
    if kind == "subnormal":                                   # scores about and below 2**-126
        q_s, scales = q_s * np.float32(2.0**-100), scales * np.float32(2.0**-36)
    return q.astype(np.uint8), q_s, keys.astype(np.uint8), scales


@pytest.mark.parametrize("kind", ["plain", "positive", "tiny", "nan", "bits", "subnormal"])
@pytest.mark.parametrize("fp8_dtype", FP8_KINDS)
def test_scores_equal_the_scalar_model(kind, fp8_dtype):
    rng = np.random.default_rng([4, *map(ord, kind), len(fp8_dtype)])
    for num_heads, head_dim in ((1, 1), (3, 5), (8, 32), (9, 20), (20, 7), (33, 3)):
        pairs = random_pairs(rng, kind, num_heads=num_heads, head_dim=head_dim, fp8_dtype=fp8_dtype)
        assert_equals_model(*pairs, fp8_dtype=fp8_dtype)


@pytest.mark.parametrize("kind", ["plain", "positive", "tiny", "nan", "bits", "subnormal"])
def test_wgmma_scores_equal_the_scalar_model(kind):
    rng = np.random.default_rng([5, *map(ord, kind)])
    for num_heads, head_dim in ((1, 1), (3, 33), (8, 32), (9, 20), (20, 64)):
        assert_equals_model(*random_pairs(rng, kind, num_heads=num_heads, head_dim=head_dim), arithmetic="wgmma")


# ------------------------------------------------------------------------------------------------------ wgmma, bit for bit


def wgmma_bits(a, b, c=None):
    """Bits of `reference.wgmma_chain` with the NaN bytes seen to, every NaN as 0x7FFFFFFF: a [M, D], b [N, D], c [M, N]."""
    c = np.zeros((len(a), len(b)), np.float32) if c is None else c
    with np.errstate(all="ignore"):
        result = reference._with_nans(reference.wgmma_chain(a, b, c)[:, None], a[:, None], b, E4M3FN)[:, 0]
    return np.where(np.isnan(result), np.uint32(NAN), result.view(np.uint32))


@pytest.mark.parametrize(("depth", "products", "c", "bits"), [vector[1:] for vector in WGMMA_VECTORS],
                         ids=[vector[0] for vector in WGMMA_VECTORS])
def test_wgmma_vectors(depth, products, c, bits):
    """Vectors that were run on an H200: each tells the arithmetic from others, as its name says."""
    a, b = operands(depth, products)
    assert hexadecimal(wgmma_bits(a[None], b[None], from_bits([[c]])).tolist()) == hexadecimal([[bits]])
    assert hexadecimal(wgmma_bits(b[None], a[None], from_bits([[c]])).tolist()) == hexadecimal([[bits]])
    assert hexadecimal(wgmma_model(a, b, c)) == hexadecimal(bits)


@pytest.mark.parametrize("exponent", [-100, -90, -40, 0, 40, 100])
def test_wgmma_zero_products_leave_the_accumulator(exponent):
    """Products 0 x 448 and 448 x -0 have no exponent: C of any magnitude only loses its low 10 bits."""
    a, b = encode([[0.0, 448.0] * 16]), encode([[448.0, -0.0] * 16])
    c = (127 + exponent << 23) + 0x2AABFF
    assert hexadecimal(wgmma_bits(a, b, from_bits([[c]])).tolist()) == hexadecimal([[(127 + exponent << 23) + 0x2AA800]])


def test_wgmma_and_exact_scores_differ():
    """128*128 - 128*128 and thirty times 1*1 in one group: 30 exactly; the tensor cores cut every 1 off."""
    a, b = np.ones(32), np.ones(32)
    a[[0, 4]], b[[0, 4]] = [128, -128], 128
    assert_bits(score_one([a], b, [1]), np.array([[30]], np.float32))
    assert_bits(score_one([a], b, [1], arithmetic="wgmma"), [[0]])
    # in a second group of 32 the ones survive: 32 of them, and then the pair cancels
    a, b = np.ones(64), np.ones(64)
    a[32:], b[32:] = 0, 0
    a[[32, 36]], b[[32, 36]] = [128, -128], 128
    # 32 is aligned to 2**14, whose unit is 2: kept
    assert_bits(score_one([a], b, [1], arithmetic="wgmma"), np.array([[32]], np.float32))


def wgmma_operands(rng, regime, depth, num_rows=16, num_columns=16):
    """e4m3fn bytes without NaN, uint8 [M, D] and [N, D]."""
    def draw(shape):
        if regime == "gaussian":
            return np.clip(rng.standard_normal(shape) * 16, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        codes = rng.integers(0, 256, shape).astype(np.uint8)
        if regime == "tiny":
            codes &= 0x8F
        elif regime == "small integers":
            codes = rng.integers(-8, 9, shape).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        elif regime == "middle":                              # exponents -3 ... 3: room to scale by 2**-3 and 2**3
            codes = codes & 0x87 | (rng.integers(4, 11, shape) << 3).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] ^= 1
        return codes
    return draw((num_rows, depth)), draw((num_columns, depth))


WGMMA_REGIMES = ("bytes", "gaussian", "tiny", "small integers", "middle")


@pytest.mark.parametrize("regime", WGMMA_REGIMES)
def test_wgmma_equals_the_integer_model(regime):
    """256 outputs of depth 128, and 64 with an accumulator to start from."""
    rng = np.random.default_rng([6, *map(ord, regime)])
    a, b = wgmma_operands(rng, regime, 128)
    expected = [[wgmma_model(row, column) for column in b] for row in a]
    assert hexadecimal(wgmma_bits(a, b).tolist()) == hexadecimal(expected)
    c = rng.integers(0, 2, (8, 8), np.uint32) << 31 | (rng.integers(121, 152, (8, 8)).astype(np.uint32) << 23
                                                      ) | rng.integers(0, 2**23, (8, 8), np.uint32)
    expected = [[wgmma_model(a[i], b[j], int(c[i, j])) for j in range(8)] for i in range(8)]
    assert hexadecimal(wgmma_bits(a[:8], b[:8], from_bits(c)).tolist()) == hexadecimal(expected)


@pytest.mark.parametrize("regime", WGMMA_REGIMES)
def test_wgmma_properties(regime):
    """What the hardware's arithmetic gives away without a model: order within a group, cut, symmetry, sign, scale, padding."""
    rng = np.random.default_rng([7, *map(ord, regime)])
    a, b = wgmma_operands(rng, regime, 128)
    bits = wgmma_bits(a, b)
    assert not np.any(bits & 0x3FF)
    within = np.concatenate([start + rng.permutation(32) for start in range(0, 128, 32)])
    np.testing.assert_array_equal(wgmma_bits(a[:, within], b[:, within]), bits)
    np.testing.assert_array_equal(wgmma_bits(b, a), bits.T)
    np.testing.assert_array_equal(wgmma_bits(a ^ 0x80, b), np.where(bits == 0, bits, bits ^ np.uint32(MINUS_ZERO)))
    if regime == "middle":
        for exponent in (-3, 3):                              # in an e4m3 byte the exponent is at bit 3, in a float32 at bit 23
            shifted = (a.astype(np.int64) + (exponent << 3)).astype(np.uint8)
            scaled = (bits.astype(np.int64) + np.where(bits == 0, 0, exponent << 23)).astype(np.uint32)
            np.testing.assert_array_equal(wgmma_bits(shifted, b), scaled)


@pytest.mark.parametrize("head_dim", [1, 20, 31, 33, 64, 100])
def test_wgmma_pads_with_zeros_to_a_multiple_of_32(head_dim):
    rng = np.random.default_rng([8, head_dim])
    q, q_s, keys, scales = random_pairs(rng, "plain", num_heads=3, head_dim=head_dim)
    padding = ((0, 0), (0, -head_dim % 32))
    padded = np.pad(q, ((0, 0), *padding)), q_s, np.pad(keys, padding), scales
    scores = score_pairs(q, q_s, keys, scales, arithmetic="wgmma")
    assert_bits(score_pairs(*padded, arithmetic="wgmma"), scores)
    assert_bits(scores, [[combine_model([wgmma_model(head, key) for head in heads], weights, scale)
                          for key, scale in zip(keys, to_bits(scales))] for heads, weights in zip(q, to_bits(q_s))])


def test_wgmma_chain_is_a_chain():
    """Swapping whole groups of 32 changes the result: 1 32 times then 128*128 survives, the other way round is cut."""
    ones, large = np.ones(32), np.zeros(32)
    large[:2] = [128, -128]
    pair = np.where(large != 0, 128, 0)
    # groups (ones, 2**14): 32 first; then aligned to 2**14 with unit 2: 32 + 2**14 = 16416
    a, b = np.concatenate([ones, [128], np.zeros(31)]), np.concatenate([ones, [128], np.zeros(31)])
    assert_bits(score_one([a], b, [1], arithmetic="wgmma"), np.array([[16416]], np.float32))
    # groups (2**14, ones): every 1 is below the unit 2 of 2**14 and is cut
    a, b = np.concatenate([[128], np.zeros(31), ones]), np.concatenate([[128], np.zeros(31), ones])
    assert_bits(score_one([a], b, [1], arithmetic="wgmma"), np.array([[16384]], np.float32))
    # groups (2**14 - 2**14, ones): the pair is gone before the ones come
    a, b = np.concatenate([large, ones]), np.concatenate([pair, ones])
    assert_bits(score_one([a], b, [1], arithmetic="wgmma"), np.array([[32]], np.float32))


# -------------------------------------------------------------------------------------------------------------- selection

SUBNORMAL = 2.0**-149
RANKED_ROW = [1.0, np.nan, -np.inf, 0.0, -0.0, np.inf, 1.0, -1.0, np.nan, SUBNORMAL, -SUBNORMAL, -np.inf, 3.0]
RANKED = [5, 12, 0, 6, 9, 3, 4, 10, 7, 2, 11, 1, 8]
OTHER_ROW = [-0.0, 0.0, -0.0, np.nan, -np.inf, -SUBNORMAL, SUBNORMAL, 0.0, -3.4e38, 3.4e38, -2.0, -1.0, np.nan]
OTHER_RANKED = [9, 6, 0, 1, 2, 7, 5, 11, 10, 8, 4, 3, 12]


@pytest.mark.parametrize("top_k", range(1, 16))
def test_rank_order(top_k):
    """Score first, ties (-0 and +0 too) by position, -inf above NaN, NaN by position; v = 13, so K from 14 on pads."""
    call = planted([RANKED_ROW, OTHER_ROW])
    for order in ("score", "index"):
        expected, expected_scores = [], []
        for row, ranked in ((RANKED_ROW, RANKED), (OTHER_ROW, OTHER_RANKED)):
            best = ranked[:top_k] if order == "score" else sorted(ranked[:top_k])
            padding = max(0, top_k - 13)
            expected.append(best + [-1] * padding)
            # the scores themselves, -0 as -0, NaN canonical
            expected_scores.append([NAN if np.isnan(row[p]) else to_bits(np.float32(row[p])) for p in best] + [MINUS_INF] * padding)
        out_scores = np.full((2, top_k), np.nan, np.float32)
        selected = reference.mla_indexer_ragged_float8_paged(*call, top_k=top_k, order=order, out_scores=out_scores)
        assert selected.tolist() == expected
        assert selected.dtype == np.int32
        assert_bits(out_scores, expected_scores)


def test_order_is_by_index_unless_asked():
    selected = reference.mla_indexer_ragged_float8_paged(*planted([[1, 5, 3, 4]]), top_k=3)
    assert selected.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("top_k", [1, 5, 6, 7, 100])
def test_rows_shorter_than_top_k_are_padded(top_k):
    """v = 6 and 1: v - 1, v, v + 1, and far above; the worst key is dropped first."""
    out_scores = np.full((2, top_k), np.nan, np.float32)
    selected = reference.mla_indexer_ragged_float8_paged(*planted([[9, 4, 8, 7, 6, 5], [-2]]), top_k=top_k, out_scores=out_scores)
    kept = {1: [0], 5: [0, 2, 3, 4, 5]}.get(top_k, [0, 1, 2, 3, 4, 5])
    assert selected.tolist() == [kept + [-1] * (top_k - len(kept)), [0] + [-1] * (top_k - 1)]
    scores = [[9, 4, 8, 7, 6, 5][p] for p in kept]
    assert_bits(out_scores, np.array([scores + [-np.inf] * (top_k - len(kept)), [-2] + [-np.inf] * (top_k - 1)], np.float32))


def test_negative_scores_beat_what_lies_behind_the_row():
    """All scores negative or -inf: no position at or past v, whatever the slots behind it hold."""
    call = planted([[-3, -1, -2], [-np.inf] * 5])
    selected = reference.mla_indexer_ragged_float8_paged(*call, top_k=4, order="score")
    assert selected.tolist() == [[1, 2, 0, -1], [0, 1, 2, 3]]


@pytest.mark.parametrize(("mask", "expected"), [
    # HAND_SCORES, K = 2: token 0 sees 2 keys under the causal mask and 3, the last -0, under null
    ("causal", [[1, 0], [1, 0], [0, -1], [1, 0]]),
    ("null", [[1, 2], [1, 0], [0, -1], [1, 0]]),
])
def test_selection_of_a_ragged_batch(mask, expected):
    selected = reference.mla_indexer_ragged_float8_paged(*hand_call(), top_k=2, mask=mask, order="score")
    assert selected.tolist() == expected


def test_many_ties():
    """5000 scores i % 3: 1666 twos (2, 5, ..., 4997), then the lowest-indexed ones; positions behind 4096 too."""
    call = planted([np.arange(5000) % 3], page_size=64)
    for top_k in (1, 1000, 1666, 1667, 2000):
        expected = (list(range(2, 5000, 3)) + list(range(1, 5000, 3)))[:top_k]
        for order in ("score", "index"):
            selected = reference.mla_indexer_ragged_float8_paged(*call, top_k=top_k, order=order)
            assert selected[0].tolist() == (expected if order == "score" else sorted(expected))


def test_scores_that_differ_in_their_last_bits():
    """6000 shuffled neighbours of 1.0: the K largest, each where it was put."""
    permutation = np.random.default_rng(9).permutation(6000)
    row = from_bits(ONE + permutation)
    where = np.argsort(permutation)                           # where[i] is the position of the i-th smallest
    selected = reference.mla_indexer_ragged_float8_paged(*planted([row], page_size=16), top_k=512, order="score")
    assert selected[0].tolist() == where[::-1][:512].tolist()


@pytest.mark.parametrize("budget", [1, 4, 16, 40, 2**62])
def test_budget_changes_nothing(budget):
    call, out_scores = planted([RANKED_ROW, OTHER_ROW, [7.0], RANKED_ROW[::-1]]), np.full((4, 3), np.nan, np.float32)
    selected = reference.mla_indexer_ragged_float8_paged(*call, top_k=3, order="score", scores_budget_bytes=budget,
                                                         out_scores=out_scores)
    # reversed, position p is 12 - p: inf at 7, 3 at 0, the ones at 6 and 12
    assert selected.tolist() == [[5, 12, 0], [9, 6, 0], [0, -1, -1], [7, 0, 6]]
    three, largest, seven = 0x40400000, to_bits(np.float32(3.4e38)), 0x40E00000
    assert_bits(out_scores, [[INF, three, ONE], [largest, 1, MINUS_ZERO], [seven, MINUS_INF, MINUS_INF], [INF, three, ONE]])


def test_outputs_are_the_callers_and_overwritten_whole():
    """Poisoned outputs, used again for shorter rows: every entry is written, nothing around them is."""
    memory, score_memory = np.full((4, 4), 2**31 - 1, np.int32), np.full((4, 4), np.nan, np.float32)
    out, out_scores = memory[1:3], score_memory[1:3]
    for rows, expected, scores in (
            ([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]], [[4, 3, 2, 1], [0, 1, 2, 3]], [[5, 4, 3, 2]] * 2),
            ([[np.nan, 8], [6]], [[1, 0, -1, -1], [0, -1, -1, -1]], [[8, None, -np.inf, -np.inf], [6] + [-np.inf] * 3])):
        returned = reference.mla_indexer_ragged_float8_paged(*planted(rows), top_k=4, order="score", out=out, out_scores=out_scores)
        assert returned is out
        assert out.tolist() == expected
        assert_bits(out_scores, [[NAN if s is None else to_bits(np.float32(s)) for s in row] for row in scores])
    assert memory[[0, 3]].tolist() == [[2**31 - 1] * 4] * 2
    assert np.isnan(score_memory[[0, 3]]).all()


def test_inputs_are_left_alone():
    call = hand_call()
    arrays = [*call[:3], call[3].blocks, call[3].scales, call[3].cache_lengths, call[3].lookup_table]
    before = [array.tobytes() for array in arrays]
    reference.mla_indexer_ragged_float8_paged(*call, top_k=2)
    reference.index_scores(*call, arithmetic="wgmma")
    assert [array.tobytes() for array in arrays] == before


# ---------------------------------------------------------------------------------------------------------------- imports


@pytest.mark.parametrize("module", ["indexer.reference", "indexer.problem", "indexer"])
def test_imports_no_fast_code(module):
    """Neither the oracle nor the package itself loads more than NumPy, ml_dtypes, the standard library and the oracle's modules."""
    script = f"""
import sys
import ml_dtypes, numpy
before = set(sys.modules)
import {module}
loaded = set(sys.modules) - before
print(*sorted({{name.split('.')[0] for name in loaded}} - set(sys.stdlib_module_names)))
print(*sorted(name for name in loaded if name.split('.')[0] == 'indexer'))
assert not {{'numba', 'torch', 'cuda', 'cupy', 'numba_cuda'}} & {{name.split('.')[0] for name in sys.modules}}
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    others, modules = result.stdout.splitlines()
    assert set(others.split()) <= {"indexer", "numpy", "ml_dtypes"}
    assert set(modules.split()) == {"indexer", "indexer.dlpack", "indexer.problem", "indexer.reference"}
