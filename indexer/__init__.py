"""The FP8 lightning indexer over a paged key cache, for ragged batches: an oracle and GPU kernels that return the same bits.

``import indexer`` loads the oracle only (NumPy, ml_dtypes); the GPU functions are imported when they are first used.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import reference
from .problem import PagedKeyCache

if TYPE_CHECKING:
    from .cuda_kernels import default_arithmetic, index_scores, mla_indexer_ragged_float8_paged
    from .device import NoDeviceError
    from .plan import IndexerPlan

__version__ = "0.1.0"
__all__ = ["IndexerPlan", "NoDeviceError", "PagedKeyCache", "default_arithmetic", "index_scores", "mla_indexer_ragged_float8_paged",
           "reference"]
_LAZY = {"IndexerPlan": "plan", "NoDeviceError": "device", "default_arithmetic": "cuda_kernels", "index_scores": "cuda_kernels",
         "mla_indexer_ragged_float8_paged": "cuda_kernels"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
