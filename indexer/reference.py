"""The oracle: what the operator returns, bit for bit, in NumPy.

It imports NumPy, ml_dtypes and the argument checks only, so that it can judge any implementation. It is written for the reader
first: candidates, dot products, head sum, key scale, rank, each in a function of its own, in the order of the README's table.

Source: the published description of ``mla_indexer_ragged_float8_paged`` (the lightning indexer of DeepSeek-V3.2), with the order of
every floating-point operation pinned.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .problem import DEFAULT_SCORES_BUDGET_BYTES, Call, check_call, decode_table

__all__ = ["index_scores", "mla_indexer_ragged_float8_paged"]

NAN_BITS = np.uint32(0x7FFFFFFF)              # the one NaN a score can be
_TILE = 1 << 18                               # (token, head, key) triples worked on at a time: temporaries stay in cache
_KEYS_AT_A_TIME = 4096


def mla_indexer_ragged_float8_paged(
        q: np.ndarray, q_s: np.ndarray, input_row_offsets: np.ndarray, k_collection: Any, layer_idx: int = 0, *, top_k: int,
        mask: str = "causal", kpool: int = 1, scores_budget_bytes: int = DEFAULT_SCORES_BUDGET_BYTES, order: str = "index",
        arithmetic: str = "exact", out: np.ndarray | None = None, out_scores: np.ndarray | None = None) -> np.ndarray:
    """Positions of the `top_k` best keys of every query token.

    Parameters
    ----------
    q : array, FP8 or uint8, [T, H, D]
        Query heads, of the dtype of the keys (uint8: as its bytes).
    q_s : array, float32, [T, H]
        Query scales, any sign; they carry the head weights.
    input_row_offsets : array, uint32 or int32, [B + 1]
        Request ``b`` owns the query rows ``[offsets[b], offsets[b + 1])``.
    k_collection : PagedKeyCache
        The keys, on the host.
    layer_idx : int
        The layer whose keys are scored.
    top_k : int
        Positions per token, at least 1.
    mask : {"causal", "null"}
        Whether a token sees the new tokens behind it.
    kpool : int
        Tokens per cache row; with more than one, candidates and positions count pooled rows.
    scores_budget_bytes : int
        Bound on the score matrix that is held at a time; one row is held whatever it takes.
    order : {"index", "score"}
        Positions ascending, or best first.
    arithmetic : {"exact", "wgmma"}
        How a dot product is rounded: once, from the exact sum; or as Hopper's FP8 tensor cores do.
    out : array, int32, [T, top_k], optional
        Receives the result.
    out_scores : array, float32, [T, top_k], optional
        Receives the scores of the selected keys, -inf behind them.

    Returns
    -------
    array, int32, [T, top_k]
        `out`, or a new array. Row by row ``min(top_k, v)`` positions, then -1.

    Raises
    ------
    TypeError, ValueError
        See `indexer.problem.check_call`; nothing is written before an error.
    """
    call = check_call(q, q_s, input_row_offsets, k_collection, layer_idx, mask=mask, kpool=kpool, arithmetic=arithmetic,
                      top_k=top_k, scores_budget_bytes=scores_budget_bytes, order=order, out=out, out_scores=out_scores,
                      host_only=True)
    if out is None:
        out = np.empty((call.num_tokens, call.top_k), np.int32)
    indices = out if call.out is None else call.out.numpy()
    values = None if call.out_scores is None else call.out_scores.numpy()
    num_rows = call.rows_per_chunk
    scores = np.empty((min(num_rows, call.num_tokens), call.width), np.float32)
    for start in range(0, call.num_tokens, num_rows):
        stop = min(start + num_rows, call.num_tokens)
        candidates = _score_rows(call, start, stop, scores)
        for row in range(start, stop):
            row_scores = scores[row - start, :candidates[row - start]]
            selected = _best(row_scores, call.top_k)
            if order == "index":
                selected.sort()
            indices[row, :len(selected)] = selected
            indices[row, len(selected):] = -1
            if values is not None:
                values[row, :len(selected)] = row_scores[selected]
                values[row, len(selected):] = -np.inf
    return out


def index_scores(q: np.ndarray, q_s: np.ndarray, input_row_offsets: np.ndarray, k_collection: Any, layer_idx: int = 0, *,
                 mask: str = "causal", kpool: int = 1, arithmetic: str = "exact") -> np.ndarray:
    """Scores of all candidates of every query token.

    Parameters are those of `mla_indexer_ragged_float8_paged`.

    Returns
    -------
    array, float32, [T, W]
        W is the largest candidate count of a token; -inf outside each row's candidates.

    Raises
    ------
    TypeError, ValueError
        See `indexer.problem.check_call`.
    """
    call = check_call(q, q_s, input_row_offsets, k_collection, layer_idx, mask=mask, kpool=kpool, arithmetic=arithmetic,
                      scores_only=True, host_only=True)
    scores = np.full((call.num_tokens, call.width), -np.inf, np.float32)
    _score_rows(call, 0, call.num_tokens, scores)
    return scores


def _score_rows(call: Call, start: int, stop: int, scores: np.ndarray) -> np.ndarray:
    """Writes the candidates' scores of the tokens [start, stop) to the first rows of `scores`; returns their counts v, int64."""
    q, q_s = call.q.numpy(), call.q_s.numpy()
    keys, key_scales = call.keys.numpy(), call.key_scales.numpy()
    offsets, lengths = (view.numpy().astype(np.int64) for view in (call.offsets, call.lengths))
    table = call.table.numpy()
    dot = {"exact": _dot_exact, "wgmma": _dot_wgmma}[call.arithmetic]
    candidates = np.zeros(stop - start, np.int64)
    first_request = int(np.searchsorted(offsets, start, side="right")) - 1
    for b in range(first_request, call.num_requests):
        first, last = max(start, offsets[b]), min(stop, offsets[b + 1])
        if offsets[b] >= stop:
            break
        if first >= last:
            continue
        new_tokens = offsets[b + 1] - offsets[b]
        index = np.arange(first, last) - offsets[b]
        visible = lengths[b] + (index + 1 if call.causal else np.full_like(index, new_tokens))
        v = visible // call.kpool
        candidates[first - start:last - start] = v
        for key_start in range(0, int(v.max()), _KEYS_AT_A_TIME):
            position = np.arange(key_start, min(key_start + _KEYS_AT_A_TIME, int(v.max())))
            block, slot = table[b, position // call.page_size], position % call.page_size
            tile_keys, tile_scales = keys[block, slot], key_scales[block, slot]
            for tokens in _blocks(first, last, _TILE // (call.num_heads * len(position))):
                tile = _combine_heads(dot(q[tokens], tile_keys, call.fp8_dtype), q_s[tokens], tile_scales)
                for token, row in zip(range(tokens.start, tokens.stop), tile):
                    count = min(max(int(candidates[token - start]) - key_start, 0), len(position))
                    scores[token - start, key_start:key_start + count] = row[:count]
    return candidates


def _blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` (at least 1) that cover [start, stop)."""
    size = max(1, size)
    return (slice(int(at), int(min(at + size, stop))) for at in range(int(start), int(stop), size))


# ------------------------------------------------------------------------------------------- dot products, two arithmetics


def _dot_exact(q: np.ndarray, keys: np.ndarray, fp8_dtype: str) -> np.ndarray:
    """The exact sum of the exact products, rounded once to float32: [tokens, H, N] from bytes [tokens, H, D] and [N, D].

    A product of two e4m3 values has 8 bits and is a multiple of 2**-20 below 2**18: up to depth 1024 every partial sum fits the 53
    bits of a float64, whatever the order.
    """
    value = decode_table(fp8_dtype)
    finite = np.where(np.isnan(value), 0.0, value)
    num_tokens, num_heads, head_dim = q.shape
    dot = (finite[q.reshape(-1, head_dim)] @ finite[keys].T).astype(np.float32).reshape(num_tokens, num_heads, len(keys))
    return _with_nans(dot + np.float32(0), q, keys, fp8_dtype)          # + 0: an exact zero is +0


def _with_nans(dot: np.ndarray, q: np.ndarray, keys: np.ndarray, fp8_dtype: str) -> np.ndarray:
    """A NaN byte in the query head or in the key makes the dot product NaN, even against a zero."""
    nan = np.isnan(decode_table(fp8_dtype))
    dot[nan[q].any(axis=2)] = np.nan
    dot[:, :, nan[keys].any(axis=1)] = np.nan
    return dot


def _dot_wgmma(q: np.ndarray, keys: np.ndarray, fp8_dtype: str) -> np.ndarray:
    """What ``wgmma m64nNk32 f32.e4m3.e4m3``, chained over D from zero, returns: shapes as `_dot_exact`."""
    num_tokens, num_heads, head_dim = q.shape
    dot = wgmma_chain(q.reshape(-1, head_dim), keys, np.zeros((num_tokens * num_heads, len(keys)), np.float32))
    return _with_nans(dot.reshape(num_tokens, num_heads, len(keys)), q, keys, fp8_dtype)


_NO_EXPONENT = -64                            # of a zero operand: added to any other exponent, below every product's
_LEAST_EXPONENT = -12                         # of a product: two subnormal operands


def wgmma_chain(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Hopper's FP8 tensor cores on e4m3 bytes: ``c + a @ b.T`` with their rounding, 32 products at a time.

    Parameters
    ----------
    a : uint8 [M, D]
    b : uint8 [N, D]
    c : float32 [M, N]
        The first accumulator: zero, of magnitude in [2**-100, 2**100], inf or NaN.

    Returns
    -------
    float32 [M, N]
        NaN bytes count as zero here (`_with_nans` knows them); an accumulator that is inf or NaN stays what it is.
    """
    value = decode_table("float8_e4m3fn").astype(np.float32)
    value[np.isnan(value)] = 0
    exponent = np.where(value == 0, _NO_EXPONENT, np.maximum(np.frexp(value)[1] - 1, -6)).astype(np.int8)
    a_value, a_exponent = value[a], exponent[a]
    b_value, b_exponent = np.ascontiguousarray(value[b].T), np.ascontiguousarray(exponent[b].T)
    out = c.copy()
    for rows in _blocks(0, len(a), _TILE // 8 // max(1, len(b))):
        for k in range(0, a.shape[1], 32):
            out[rows] = _wgmma_step(a_value[rows, k:k + 32], a_exponent[rows, k:k + 32], b_value[k:k + 32], b_exponent[k:k + 32],
                                    out[rows])
    return np.where(np.isfinite(c), out, c)


def _wgmma_step(a: np.ndarray, a_exponent: np.ndarray, b: np.ndarray, b_exponent: np.ndarray, c: np.ndarray) -> np.ndarray:
    """One wgmma: operands [M, k] and [k, N] as values and exponents, accumulator [M, N].

    All products and the accumulator are aligned to the largest exponent among them and cut, toward zero, to 13 fraction bits below
    it; the integer sum is exact; the result is cut to 13 fraction bits again. A product's exponent is the sum of its operands'
    exponents (a subnormal counts as -6), also when its significand reaches 2; zeros have none.
    """
    of_products = np.full(c.shape, 2 * _NO_EXPONENT, np.int8)
    term = np.empty_like(of_products)
    for k in range(len(b)):
        np.add(a_exponent[:, k, None], b_exponent[k], out=term)
        np.maximum(of_products, term, out=of_products)
    accumulator = np.where(np.isfinite(c), c, np.float32(0))
    of_accumulator = ((accumulator.view(np.int32) >> 23) & 0xFF) - 127          # of zero: -127, below all others
    largest = of_products.astype(np.int32)
    largest[largest < _LEAST_EXPONENT] = -127
    np.maximum(largest, of_accumulator, out=largest)
    largest[largest == -127] = 0                                                # every term is zero

    # In units of the 13th fraction bit every cut term is an integer below 2**15 and every sum below 2**21: float32 is exact.
    to_units = _power_of_two(13 - largest)
    total = np.trunc(accumulator * to_units)
    product = np.empty_like(total)
    for k in range(len(b)):
        np.multiply(a[:, k, None], b[k], out=product)
        np.multiply(product, to_units, out=product)
        np.trunc(product, out=product)
        np.add(total, product, out=total)
    result = (total + np.float32(0)) * _power_of_two(largest - 13)              # + 0: an exact zero is +0
    return (result.view(np.uint32) & np.uint32(0xFFFFFC00)).view(np.float32)


def _power_of_two(exponent: np.ndarray) -> np.ndarray:
    """float32 2**exponent from int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(np.float32)


# ------------------------------------------------------------------------------------------------- head sum and key scale


def _combine_heads(dot: np.ndarray, q_s: np.ndarray, key_scales: np.ndarray) -> np.ndarray:
    """score[token, key] = key_scale * sum over heads of relu(dot) * q_s, float32 in the one pinned order.

    Shapes [tokens, H, N], [tokens, H], [N] -> [tokens, N]. Eight chains of fused multiply-adds, one for each ``h % 8``, run over
    ``h // 8`` from zero; the two parities ``h % 2`` of each quarter ``(h % 8) // 2`` are added, then the quarters by twos.
    """
    num_tokens, num_heads, num_keys = dot.shape
    with np.errstate(all="ignore"):
        relu = np.maximum(dot, np.float32(0)) + np.float32(0)           # keeps NaN; + 0: of -0 too, +0
        chains = np.zeros((num_tokens, 8, num_keys), np.float32)
        for h in range(0, num_heads, 8):
            count = min(8, num_heads - h)
            chains[:, :count] = fma(relu[:, h:h + count], q_s[:, h:h + count, None], chains[:, :count])
        quarter = chains[:, 0::2] + chains[:, 1::2]
        total = (quarter[:, 0] + quarter[:, 1]) + (quarter[:, 2] + quarter[:, 3])
        score = total * key_scales
    score.view(np.uint32)[np.isnan(score)] = NAN_BITS
    return score


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 ``a * b + c``, rounded once, to nearest even.

    The product is exact in float64. The float64 sum, rounded to float32, is the right result unless it lies exactly half way
    between two float32 (or in their subnormal range): only then can its own rounding matter. There, it is first rounded to odd,
    which keeps the side on which the exact sum lies.
    """
    product = a.astype(np.float64) * b
    total = product + c
    half_way = (total.view(np.uint64) & np.uint64(0x1FFFFFFF)) == 0x10000000
    doubtful = np.flatnonzero(half_way | ((np.abs(total) < 2.0**-126) & (total != 0)))
    if len(doubtful):
        p, s, t = product.flat[doubtful], np.broadcast_to(c, total.shape).flat[doubtful].astype(np.float64), total.flat[doubtful]
        z = t - p
        error = (p - (t - z)) + (s - z)                                 # two-sum: the exact sum is t + error
        to_odd = (error != 0) & np.isfinite(t) & ((t.view(np.uint64) & np.uint64(1)) == 0)
        total.flat[doubtful] = np.where(to_odd, np.nextafter(t, np.copysign(np.inf, error)), t)
    return total.astype(np.float32)


# -------------------------------------------------------------------------------------------------------------- selection


def _best(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Positions of the `top_k` best of one row's scores, best first, int64 [min(top_k, v)].

    Higher scores first; equal ones (-0 and +0 too) by lower position; NaN last. Score and position make one integer, so no two
    keys are equal.
    """
    bits = np.where(scores == 0, np.float32(0), scores).view(np.uint32)
    ascending = np.where(bits >> 31 != 0, ~bits, bits | np.uint32(0x80000000))    # unsigned order of float32
    ascending[np.isnan(scores)] = 0                                               # below -inf
    rank = (~ascending).astype(np.uint64) << np.uint64(32) | np.arange(len(scores), dtype=np.uint64)
    if top_k < len(rank):
        rank = np.partition(rank, top_k - 1)[:top_k]
    rank.sort()
    return (rank & np.uint64(0xFFFFFFFF)).astype(np.int64)
