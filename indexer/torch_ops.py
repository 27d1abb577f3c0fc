"""The operator as custom ops of torch, for torch.compile and torch.export: ``import indexer.torch_ops`` registers them.

``torch.ops.indexer.mla_indexer_ragged_float8_paged`` returns a new tensor, ``..._paged_out`` writes into one of the caller's.
Both take CUDA tensors and fused planar pages. Nothing else in the package imports this module.
"""
# Without `from __future__ import annotations`: torch reads the schemas from the annotations, older versions not from text.
from typing import Any

import torch

from . import cuda_kernels
from .problem import DEFAULT_SCORES_BUDGET_BYTES, PagedKeyCache

__all__ = ["mla_indexer_ragged_float8_paged", "mla_indexer_ragged_float8_paged_out"]


def _cache(q: torch.Tensor, pages: torch.Tensor, cache_lengths: torch.Tensor, lookup_table: torch.Tensor,
           max_prompt_length: int | None, max_context_length: int | None) -> PagedKeyCache:
    """The cache over the pages; their FP8 kind is that of `q`, float8_e4m3fn where `q` is bytes."""
    return PagedKeyCache.from_fused(
        pages, cache_lengths, lookup_table, max_prompt_length=max_prompt_length, max_context_length=max_context_length,
        fp8_dtype="float8_e4m3fnuz" if q.dtype == torch.float8_e4m3fnuz else "float8_e4m3fn")


@torch.library.custom_op("indexer::mla_indexer_ragged_float8_paged", mutates_args=(), device_types="cuda")
def mla_indexer_ragged_float8_paged(
        q: torch.Tensor, q_s: torch.Tensor, input_row_offsets: torch.Tensor, pages: torch.Tensor, cache_lengths: torch.Tensor,
        lookup_table: torch.Tensor, top_k: int, max_prompt_length: int | None = None, max_context_length: int | None = None,
        mask: str = "causal", kpool: int = 1, scores_budget_bytes: int = DEFAULT_SCORES_BUDGET_BYTES, order: str = "index",
        arithmetic: str = "auto") -> torch.Tensor:
    """`indexer.mla_indexer_ragged_float8_paged` over fused pages, on torch's current stream.

    Parameters
    ----------
    q : Tensor, float8_e4m3fn, float8_e4m3fnuz or uint8, [T, H, D]
        Query heads, on a CUDA device. Their dtype is also the FP8 kind of the keys; uint8 stands for bytes of float8_e4m3fn.
    q_s : Tensor, float32, [T, H]
        Query scales.
    input_row_offsets : Tensor, int32 or uint32, [B + 1]
        Request ``b`` owns the query rows ``[offsets[b], offsets[b + 1])``.
    pages : Tensor, uint8, [num_blocks, P, 1, D + 4]
        Fused planar pages, see `PagedKeyCache.from_fused`: ``P * D`` key bytes, then ``P`` float32 scales.
    cache_lengths : Tensor, int32 or uint32, [B]
        Tokens of each request cached before this call.
    lookup_table : Tensor, int32 or uint32, [B, max_pages]
        Page ``p`` of request ``b`` is block ``lookup_table[b, p]``.
    top_k : int
        Positions per token, at least 1.
    max_prompt_length, max_context_length : int, optional
        Upper bounds of the new and of the cached tokens of a request.
    mask, kpool, scores_budget_bytes, order, arithmetic
        As in `indexer.mla_indexer_ragged_float8_paged`.

    Returns
    -------
    Tensor, int32, [T, top_k]
        Positions, -1 behind a short row; on the device of `q`.

    Raises
    ------
    TypeError, ValueError
        As the plain function, when the op runs; tracing with fake tensors checks nothing.
    NotImplementedError
        From torch, if no tensor is on a CUDA device.

    Notes
    -----
    There is no derivative. Kernels are compiled at the first run with new options, so run it once before capturing a CUDA graph.
    """
    cache = _cache(q, pages, cache_lengths, lookup_table, max_prompt_length, max_context_length)
    result: torch.Tensor = cuda_kernels.mla_indexer_ragged_float8_paged(
        q, q_s, input_row_offsets, cache, top_k=top_k, mask=mask, kpool=kpool, scores_budget_bytes=scores_budget_bytes, order=order,
        arithmetic=arithmetic)
    return result


@mla_indexer_ragged_float8_paged.register_fake
def _fake(q: torch.Tensor, q_s: torch.Tensor, input_row_offsets: torch.Tensor, pages: torch.Tensor, cache_lengths: torch.Tensor,
          lookup_table: torch.Tensor, top_k: int, *_: Any, **__: Any) -> torch.Tensor:
    """What tracing sees of the result."""
    return torch.empty((q.shape[0], top_k), dtype=torch.int32, device=q.device)


@torch.library.custom_op("indexer::mla_indexer_ragged_float8_paged_out", mutates_args={"out"}, device_types="cuda")
def mla_indexer_ragged_float8_paged_out(
        q: torch.Tensor, q_s: torch.Tensor, input_row_offsets: torch.Tensor, pages: torch.Tensor, cache_lengths: torch.Tensor,
        lookup_table: torch.Tensor, top_k: int, out: torch.Tensor, max_prompt_length: int | None = None,
        max_context_length: int | None = None, mask: str = "causal", kpool: int = 1,
        scores_budget_bytes: int = DEFAULT_SCORES_BUDGET_BYTES, order: str = "index", arithmetic: str = "auto") -> None:
    """`mla_indexer_ragged_float8_paged` into a tensor of the caller's, for CUDA graphs.

    Parameters
    ----------
    out : Tensor, int32, [T, top_k]
        Receives the result; C-contiguous, on the device of `q`, over no memory of another argument.
    q, ..., arithmetic
        The others, as in `mla_indexer_ragged_float8_paged`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As there; nothing is written before an error.
    """
    cache = _cache(q, pages, cache_lengths, lookup_table, max_prompt_length, max_context_length)
    cuda_kernels.mla_indexer_ragged_float8_paged(
        q, q_s, input_row_offsets, cache, top_k=top_k, mask=mask, kpool=kpool, scores_budget_bytes=scores_budget_bytes, order=order,
        arithmetic=arithmetic, out=out)


@mla_indexer_ragged_float8_paged_out.register_fake
def _fake_out(*_: Any, **__: Any) -> None:
    """Nothing to allocate: `out` is the caller's."""
