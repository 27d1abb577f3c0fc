"""Ragged batches with known regimes of scores: what the command line and the tests run kernels and oracle on.

Whatever a batch does not use is hostile: unused blocks, page slots behind a request and table entries behind its pages hold NaN
bytes, NaN scales and impossible ids.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .problem import FP8_DTYPES, METADATA_DTYPES, PagedKeyCache, integer, one_of

REGIMES = ("gaussian", "bytes", "few-distinct", "all-ties", "relu-plateau", "one-bin", "nan-laced", "infinite-scales")
NAN_BYTE = {"float8_e4m3fn": 0x7F, "float8_e4m3fnuz": 0x80}
UNUSED_ID = 2**31 - 1                         # no cache has that many blocks
POISON = 0x7FFFFFFF                           # in an output before a call: no position


@dataclass(frozen=True)
class Batch:
    """One call of the operator, as NumPy arrays.

    Attributes
    ----------
    q, q_s, input_row_offsets, blocks, scales, cache_lengths, lookup_table
        As in `PagedKeyCache` and the public functions; `q` and `blocks` of `fp8_dtype`.
    layer_idx, top_k, mask, kpool, order, scores_budget_bytes, max_prompt_length, max_context_length
        The other arguments.
    fused : bool
        Whether the cache is given as fused pages (only the layer in use).
    regime : str
        One of `REGIMES`.
    """

    q: np.ndarray
    q_s: np.ndarray
    input_row_offsets: np.ndarray
    blocks: np.ndarray
    scales: np.ndarray
    cache_lengths: np.ndarray
    lookup_table: np.ndarray
    fp8_dtype: str
    layer_idx: int = 0
    top_k: int = 2048
    mask: str = "causal"
    kpool: int = 1
    order: str = "index"
    scores_budget_bytes: int = 512 * 2**20
    max_prompt_length: int | None = None
    max_context_length: int | None = None
    fused: bool = False
    regime: str = "gaussian"

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def new_tokens(self) -> np.ndarray:
        """New tokens of each request, int64 [B]."""
        return np.diff(self.input_row_offsets.astype(np.int64))

    @property
    def candidates(self) -> np.ndarray:
        """Candidates of each token, int64 [T]."""
        counts = self.new_tokens
        cached = np.repeat(self.cache_lengths.astype(np.int64), counts)
        if self.mask == "null":
            return (cached + np.repeat(counts, counts)) // self.kpool
        index = np.arange(self.num_tokens) - np.repeat(self.input_row_offsets[:-1].astype(np.int64), counts)
        return (cached + index + 1) // self.kpool

    def rows(self, requests: Sequence[int]) -> np.ndarray:
        """Query rows of these requests, in their order, int64."""
        starts = self.input_row_offsets.astype(np.int64)
        return np.concatenate([np.arange(starts[b], starts[b + 1]) for b in requests])

    def take(self, requests: Sequence[int]) -> Batch:
        """These requests alone, in this order, over the same cache."""
        requests, rows = list(requests), self.rows(requests)
        offsets = np.concatenate([[0], np.cumsum(self.new_tokens[requests])]).astype(self.input_row_offsets.dtype)
        return replace(self, q=self.q[rows], q_s=self.q_s[rows], input_row_offsets=offsets,
                       cache_lengths=self.cache_lengths[requests], lookup_table=self.lookup_table[requests])

    @property
    def fused_pages(self) -> np.ndarray:
        """The layer in use as fused planar pages, uint8 [num_blocks, P, 1, D + 4]."""
        num_blocks, _, _, page_size, _, head_dim = self.blocks.shape
        keys = self.blocks[:, 0, self.layer_idx].reshape(num_blocks, -1).view(np.uint8)
        scales = np.ascontiguousarray(self.scales[:, 0, self.layer_idx].reshape(num_blocks, -1)).view(np.uint8)
        return np.concatenate([keys, scales], axis=1).reshape(num_blocks, page_size, 1, head_dim + 4)

    def cache(self, to: Callable[[np.ndarray], Any] = lambda array: array) -> PagedKeyCache:
        """The key cache, every array passed through `to` (a copy to a device, say)."""
        bounds = {"max_prompt_length": self.max_prompt_length, "max_context_length": self.max_context_length}
        lengths, table = to(self.cache_lengths), to(self.lookup_table)
        if self.fused:
            return PagedKeyCache.from_fused(to(self.fused_pages), lengths, table, fp8_dtype=self.fp8_dtype, **bounds)
        return PagedKeyCache(to(self.blocks), to(self.scales), lengths, table, fp8_dtype=self.fp8_dtype, **bounds)

    def arguments(self, to: Callable[[np.ndarray], Any] = lambda array: array) -> tuple[Any, ...]:
        """Positional arguments of the public functions."""
        return to(self.q), to(self.q_s), to(self.input_row_offsets), self.cache(to), 0 if self.fused else self.layer_idx

    @property
    def options(self) -> dict[str, Any]:
        """Named arguments of a ``mla_indexer_ragged_float8_paged``."""
        return {**self.score_options, "top_k": self.top_k, "order": self.order, "scores_budget_bytes": self.scores_budget_bytes}

    @property
    def score_options(self) -> dict[str, Any]:
        """Named arguments of an ``index_scores``."""
        return {"mask": self.mask, "kpool": self.kpool}

    def select(self, function: Callable[..., Any], to: Callable[[np.ndarray], Any] = lambda array: array, **extra: Any) -> Any:
        """Calls a ``mla_indexer_ragged_float8_paged`` with this batch."""
        return function(*self.arguments(to), **{**self.options, **extra})

    def score(self, function: Callable[..., Any], to: Callable[[np.ndarray], Any] = lambda array: array, **extra: Any) -> Any:
        """Calls an ``index_scores`` with this batch."""
        return function(*self.arguments(to), **{**self.score_options, **extra})


def make_batch(rng: np.random.Generator, *, new_tokens: list[int], cached: list[int], num_heads: int = 64, head_dim: int = 128,
               page_size: int = 64, num_layers: int = 1, layer_idx: int = 0, mask: str = "causal", kpool: int = 1,
               fp8_dtype: str = "float8_e4m3fn", regime: str = "gaussian", spare_blocks: int = 2, spare_columns: int = 1,
               metadata_dtype: str = "uint32", **options: Any) -> Batch:
    """A batch with these lengths on shuffled pages.

    Parameters
    ----------
    rng : numpy Generator
        Source of the contents.
    new_tokens, cached : list of int, length B
        n and c of each request.
    regime : str
        One of `REGIMES`: how scores are distributed.
    spare_blocks, spare_columns : int
        Unused blocks, and unused columns of the lookup table.
    metadata_dtype : {"uint32", "int32"}
        Of offsets, lengths and table.
    **options
        Further fields of `Batch`.
    """
    one_of("regime", regime, REGIMES)
    one_of("fp8_dtype", fp8_dtype, tuple(FP8_DTYPES))
    one_of("metadata_dtype", metadata_dtype, METADATA_DTYPES)
    for name, value in (("num_heads", num_heads), ("head_dim", head_dim), ("page_size", page_size), ("num_layers", num_layers),
                        ("kpool", kpool)):
        integer(name, value, 1)
    if len(new_tokens) != len(cached) or min([*new_tokens, *cached], default=0) < 0:
        raise ValueError(f"new_tokens and cached must be as many, none negative, got {new_tokens} and {cached}")
    cache_rows = [(n + c) // kpool for n, c in zip(new_tokens, cached)]
    pages = [-(-rows // page_size) if n else 0 for n, rows in zip(new_tokens, cache_rows)]
    num_blocks = sum(pages) + spare_blocks
    ids = rng.permutation(num_blocks)
    table = np.full((len(pages), max(pages, default=0) + spare_columns), UNUSED_ID, metadata_dtype)
    used = np.zeros((num_blocks, page_size), bool)
    at = 0
    for b, count in enumerate(pages):
        table[b, :count] = ids[at:at + count]
        at += count
        used[table[b, :count]] = True
        if cache_rows[b] % page_size and count:
            used[table[b, count - 1], cache_rows[b] % page_size:] = False

    shapes = (sum(new_tokens), num_heads, head_dim), (num_blocks, num_layers, page_size, head_dim)
    q, keys, q_s, scales = _contents(rng, regime, *shapes, FP8_DTYPES[fp8_dtype])
    keys[~np.broadcast_to(used[:, None], keys.shape[:3])] = NAN_BYTE[fp8_dtype]
    scales[~np.broadcast_to(used[:, None], scales.shape)] = np.nan
    dtype = FP8_DTYPES[fp8_dtype]
    return Batch(
        q=q.view(dtype), q_s=q_s, input_row_offsets=np.concatenate([[0], np.cumsum(new_tokens)]).astype(metadata_dtype),
        blocks=keys.view(dtype).reshape(num_blocks, 1, num_layers, page_size, 1, head_dim),
        scales=scales.reshape(num_blocks, 1, num_layers, page_size, 1, 1), cache_lengths=np.array(cached, metadata_dtype),
        lookup_table=table, fp8_dtype=fp8_dtype, layer_idx=layer_idx, mask=mask, kpool=kpool, regime=regime, **options)


def _contents(rng: np.random.Generator, regime: str, q_shape: tuple[int, ...], key_shape: tuple[int, ...],
              dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q and keys as bytes, q_s and scales, by regime."""
    def gaussian(shape: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def encode(values: np.ndarray) -> np.ndarray:
        return np.clip(values, -200, 200).astype(dtype).view(np.uint8)

    q_s, scales = gaussian(q_shape[:2]), np.abs(gaussian(key_shape[:3])) + np.float32(0.01)
    if regime in ("gaussian", "nan-laced", "infinite-scales"):
        q, keys = encode(gaussian(q_shape) * 16), encode(gaussian(key_shape) * 16)
    if regime == "bytes":
        q, keys = rng.integers(0, 256, q_shape, np.uint8), rng.integers(0, 256, key_shape, np.uint8)
        nan = np.isnan(np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32))
        q[nan[q] & (rng.random(q_shape) < 0.99)] = 1          # NaN bytes stay, but not in every row
        keys[nan[keys] & (rng.random(key_shape) < 0.99)] = 1
        scales = rng.integers(0, 2**32, key_shape[:3], np.uint32).view(np.float32)
        any_bits = rng.integers(0, 2**32, q_s.shape, np.uint32).view(np.float32)
        q_s = np.where(rng.random(q_s.shape) < 0.05, any_bits, q_s)       # NaN, infinite and denormal weights
    elif regime == "few-distinct":
        q, keys = encode(rng.integers(-1, 2, q_shape).astype(np.float32)), np.zeros(key_shape, np.uint8)
        keys[..., :1] = encode(rng.integers(-1, 2, (*key_shape[:3], 1)).astype(np.float32))
        q_s, scales = np.ones_like(q_s), np.ones_like(scales)
    elif regime == "all-ties":
        q, keys = np.broadcast_to(encode(np.ones(1)), q_shape).copy(), np.broadcast_to(encode(np.ones(1)), key_shape).copy()
        q_s, scales = np.ones_like(q_s), np.ones_like(scales)
    elif regime == "relu-plateau":
        q, keys = encode(np.ones(q_shape, np.float32)), encode(-np.abs(gaussian(key_shape)) - 1)
        positive = rng.random(key_shape[:3]) < 0.02
        keys[positive] &= 0x7F
        scales[rng.random(key_shape[:3]) < 0.3] *= -1         # zeros of both signs
    elif regime == "one-bin":
        q, keys = np.zeros(q_shape, np.uint8), np.zeros(key_shape, np.uint8)
        q[:, 0, 0] = keys[..., 0] = encode(np.ones(1))[0]     # the score is the key's scale
        q_s = np.zeros_like(q_s)
        q_s[:, 0] = 1
        count = int(np.prod(key_shape[:3]))
        scales = (np.uint32(0x3F800000) + rng.permutation(count).astype(np.uint32) % np.uint32(1 << 20)).view(np.float32)
        scales = scales.reshape(key_shape[:3])
    elif regime == "nan-laced":
        keys[rng.random(key_shape[:3]) < 0.3, 0] = NAN_BYTE[dtype.name]
        q[rng.random(q_shape[:2]) < 0.02, 0] = NAN_BYTE[dtype.name]
        scales[rng.random(key_shape[:3]) < 0.3] = np.nan
    elif regime == "infinite-scales":
        scales[rng.random(key_shape[:3]) < 0.2] = np.inf
        scales[rng.random(key_shape[:3]) < 0.2] = -np.inf
        scales[rng.random(key_shape[:3]) < 0.2] = np.float32(1e-42)
    return q, keys, q_s, np.ascontiguousarray(scales)


def random_batch(rng: np.random.Generator, *, max_new: int = 40, max_cached: int = 600, max_requests: int = 6,
                 heads: tuple[int, ...] = (1, 3, 4, 8, 16, 32, 64, 100), depths: tuple[int, ...] = (4, 16, 20, 32, 64, 128, 200),
                 pages: tuple[int, ...] = (1, 3, 16, 64), top_ks: tuple[int, ...] = (1, 7, 64, 256, 700, 2048),
                 max_spare_columns: int = 3) -> Batch:
    """A batch with everything drawn: lengths (empty requests, and none at all), dimensions, mask, pooling, layers, layout, shared
    blocks, order, budget, bounds, regime. The table declares up to `max_spare_columns` pages more than there are."""
    num_requests = int(rng.integers(1, max_requests + 1)) if rng.random() < 0.98 else 0
    new_tokens = [int(n) for n in rng.integers(0, max_new + 1, num_requests) * (rng.random(num_requests) < 0.8)]
    if rng.random() < 0.5:                                    # decode
        new_tokens = [min(n, int(rng.integers(1, 4))) for n in new_tokens]
    cached = [int(c) for c in rng.integers(0, max_cached + 1, num_requests) * (rng.random(num_requests) < 0.9)]
    num_layers = int(rng.integers(1, 4))
    kpool = int(rng.choice([1, 1, 2, 4, 7]))
    fp8_dtype = "float8_e4m3fnuz" if rng.random() < 0.2 else "float8_e4m3fn"
    head_dim, page_size = int(rng.choice(depths)), int(rng.choice(pages))
    batch = make_batch(
        rng, new_tokens=new_tokens, cached=cached, num_heads=int(rng.choice(heads)), head_dim=head_dim, page_size=page_size,
        num_layers=num_layers, layer_idx=int(rng.integers(num_layers)), mask=str(rng.choice(["causal", "null"])), kpool=kpool,
        fp8_dtype=fp8_dtype, regime=str(rng.choice(REGIMES)), spare_blocks=int(rng.integers(1, 4)),
        spare_columns=int(rng.integers(0, max_spare_columns + 1)), metadata_dtype=str(rng.choice(["uint32", "int32"])),
        top_k=int(rng.choice(top_ks)), order=str(rng.choice(["index", "score"])))
    fused = page_size * head_dim % 4 == 0 and bool(rng.random() < 0.4)
    budget = int(rng.choice([1, 4000, 100_000, *3 * [512 * 2**20]]))
    bounded = rng.random() < 0.5
    if num_requests > 1 and rng.random() < 0.3:               # a request reads the pages of a longer one
        cache_rows = (batch.new_tokens + batch.cache_lengths.astype(np.int64)) // kpool * (batch.new_tokens > 0)
        longest = int(np.argmax(cache_rows))
        batch.lookup_table[int(rng.integers(num_requests))] = batch.lookup_table[longest]
    return replace(batch, fused=fused, scores_budget_bytes=budget,
                   max_prompt_length=max(new_tokens, default=0) + int(rng.integers(1000)) if bounded else None,
                   max_context_length=max(cached, default=0) + int(rng.integers(10_000)) if bounded else None)
