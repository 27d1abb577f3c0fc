"""Every refusal: its error type, a message that names argument, requirement and what came, and nothing written before it.

Each case changes one thing of a valid call. The oracle and the GPU functions get the same NumPy arguments and must raise the same
error; arguments are checked before a device is touched, so none is needed. What looks odd but is legal must be accepted.
"""
from __future__ import annotations

import contextlib
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import indexer
from indexer import PagedKeyCache, reference
from indexer.batches import make_batch
from indexer.device import NoDeviceError, is_available, stream_handle

TOP_K = 3
SELECT_ONLY = {"top_k", "order", "scores_budget_bytes", "out", "out_scores"}
CACHE_ARRAYS = ("blocks", "scales", "cache_lengths", "lookup_table")
CACHE_OPTIONS = ("max_prompt_length", "max_context_length", "fp8_dtype")
FUNCTIONS = {
    "select": (reference.mla_indexer_ragged_float8_paged, indexer.mla_indexer_ragged_float8_paged),
    "score": (reference.index_scores, indexer.index_scores),
}
FNUZ, FN, E5M2 = (np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fnuz", "float8_e4m3fn", "float8_e5m2"))


# --------------------------------------------------------------------------------------------------------- calls and cases


def valid_arguments(fused=False):
    """A valid call by argument name, with poisoned outputs: B 3, T 5, H 2, D 4, P 4, L 2, 3 pages in use of 5 blocks.

    Requests (n, c) are (3, 5), (0, 6), (2, 0): 8 rows in two pages, none, 2 rows in one.
    """
    batch = make_batch(np.random.default_rng(0), new_tokens=[3, 0, 2], cached=[5, 6, 0], num_heads=2, head_dim=4, page_size=4,
                       num_layers=2, layer_idx=1)
    args = {"q": batch.q, "q_s": batch.q_s, "input_row_offsets": batch.input_row_offsets, "cache_lengths": batch.cache_lengths,
            "lookup_table": batch.lookup_table, "arithmetic": "exact", "top_k": TOP_K,
            "out": np.full((5, TOP_K), 2**31 - 1, np.int32), "out_scores": np.full((5, TOP_K), np.nan, np.float32)}
    if fused:
        return {**args, "pages": batch.fused_pages}
    return {**args, "blocks": batch.blocks, "scales": batch.scales, "layer_idx": 1}


def call(kind, function, args):
    """Builds the cache and calls; `kind` is "select" or "score"."""
    args = dict(args)
    options = {name: args.pop(name) for name in CACHE_OPTIONS if name in args}
    arrays = [args.pop(name, None) for name in CACHE_ARRAYS]
    pages = args.pop("pages", None)
    if "k_collection" not in args:
        args["k_collection"] = (PagedKeyCache(*arrays, **options) if pages is None
                                else PagedKeyCache.from_fused(pages, *arrays[2:], **options))
    if kind == "score":
        args = {name: value for name, value in args.items() if name not in SELECT_ONLY}
    return function(**args)


def contents(args):
    """The bytes of every array."""
    return {name: value.tobytes() for name, value in args.items() if isinstance(value, np.ndarray) and not value.dtype.hasobject}


def changed(args, change):
    """The arguments with what `change`, a function of them, returns; and the names that it changed."""
    update = change(args)
    return {**args, **update}, set(update)


def refusal(name, error, words, change, fused=False):
    """A case: `change` of the valid arguments raises `error`, and the message contains every one of `words`."""
    return pytest.param(error, words, change, fused, id=name)


def cast(name, dtype):
    return lambda a: {name: a[name].astype(dtype)}


def viewed(name, dtype):
    return lambda a: {name: a[name].view(dtype)}


def sliced(name, *index):
    return lambda a: {name: a[name][index]}


def given(**values):
    return lambda a: values


def scattered(array):
    """The same values, every other item along the last axis of a larger array."""
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def misaligned(array, offset=1):
    """The same values at an odd address."""
    memory = np.zeros(array.nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16 + offset
    view = np.frombuffer(memory, array.dtype, array.size, start).reshape(array.shape)
    view[...] = array
    return view


def odd_row_stride(array):
    """The same values of a two-dimensional array, its rows half an item further apart."""
    stride = array.strides[0] + array.itemsize // 2
    view = np.ndarray(array.shape, array.dtype, np.zeros(stride * len(array) + 16, np.uint8), strides=(stride, array.itemsize))
    view[...] = array
    return view


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def entry(name, index, value, dtype=None):
    """One entry replaced."""
    def change(args):
        array = args[name].astype(dtype or args[name].dtype)
        array[index] = value
        return {name: array}
    return change


def page_id(request, page, value, dtype=np.uint32):
    return entry("lookup_table", (request, page), value, dtype)


def overlapping(name, dtype, shape, other, skip=0):
    """Output `name` in the memory of the input `other`, `skip` items behind its start; `other` keeps its contents."""
    def change(args):
        source = args[other]
        size = int(np.prod(shape)) * 4
        memory = np.zeros(source.nbytes + size + 16, np.uint8)
        inside = memory[:source.nbytes].view(source.dtype).reshape(source.shape)
        inside[...] = source
        start = skip * 4
        return {name: memory[start:start + size].view(dtype).reshape(shape), other: inside}
    return change


def one_memory(distance):
    """out and out_scores in one buffer, `distance` items apart."""
    def change(args):
        memory = np.full(64, 2**31 - 1, np.int32)
        count = 5 * TOP_K
        return {"out": memory[:count].reshape(5, TOP_K),
                "out_scores": memory[distance:distance + count].view(np.float32).reshape(5, TOP_K)}
    return change


def fused_pages(change):
    """A change of the fused pages."""
    return lambda a: {"pages": change(a["pages"])}


def pages_of(num_blocks, page_size, row_bytes, **kwargs):
    return np.zeros((num_blocks, page_size, 1, row_bytes), np.uint8, **kwargs)


def of_depth(depth):
    """q and blocks of another depth."""
    return lambda a: {"q": np.zeros((5, 2, depth), FN), "blocks": np.zeros((*a["blocks"].shape[:5], depth), FN)}


OUT_SHAPE = (5, TOP_K)
POSITIONS = 2**31 - 1

WRONG_KINDS = [
    refusal(f"{name}-list", TypeError, [name, "NumPy array", "list"], lambda a, name=name: {name: a[name].tolist()})
    for name in ("q", "q_s", "input_row_offsets", "blocks", "scales", "cache_lengths", "lookup_table", "out", "out_scores")
] + [
    refusal(f"{name}-None", TypeError, [name, "array", "NoneType"], given(**{name: None}))
    for name in ("q", "q_s", "input_row_offsets", "scales", "cache_lengths", "lookup_table")
] + [
    refusal("pages-list", TypeError, ["pages", "NumPy array", "list"], fused_pages(lambda p: p.tolist()), fused=True),
    refusal("k_collection-array", TypeError, ["k_collection", "PagedKeyCache", "ndarray"], lambda a: {"k_collection": a["blocks"]}),
    refusal("k_collection-None", TypeError, ["k_collection", "PagedKeyCache", "NoneType"], given(k_collection=None)),
    refusal("k_collection-dict", TypeError, ["k_collection", "PagedKeyCache", "dict"],
            lambda a: {"k_collection": {name: a[name] for name in CACHE_ARRAYS}}),
]

WRONG_DTYPES = [
    refusal("q-float32", TypeError, ["q must", "float8_e4m3fn", "got float32"], cast("q", np.float32)),
    refusal("q-float16", TypeError, ["q must", "float8_e4m3fn", "got float16"], cast("q", np.float16)),
    refusal("q-bfloat16", TypeError, ["q must", "float8_e4m3fn", "got bfloat16"], cast("q", ml_dtypes.bfloat16)),
    refusal("q-int8", TypeError, ["q must", "float8_e4m3fn", "got int8"], viewed("q", np.int8)),
    refusal("q-e5m2", TypeError, ["q must", "float8_e4m3fn", "got float8_e5m2", "float64"], viewed("q", E5M2)),
    refusal("q-ieee-e4m3", TypeError, ["q must", "float8_e4m3fn", "got float8_e4m3"],
            viewed("q", ml_dtypes.float8_e4m3)),
    refusal("q-fnuz-keys-fn", TypeError, ["q must", "dtype of the keys", "float8_e4m3fn ", "got float8_e4m3fnuz"],
            viewed("q", FNUZ)),
    refusal("q-fn-keys-fnuz", TypeError, ["q must", "dtype of the keys", "float8_e4m3fnuz", "got float8_e4m3fn"],
            lambda a: {"blocks": a["blocks"].view(FNUZ), "fp8_dtype": FNUZ}),
    refusal("q-fn-keys-bytes-fnuz", TypeError, ["q must", "dtype of the keys", "float8_e4m3fnuz", "got float8_e4m3fn"],
            lambda a: {"blocks": a["blocks"].view(np.uint8), "fp8_dtype": "float8_e4m3fnuz"}),
    refusal("q-fn-pages-fnuz", TypeError, ["q must", "dtype of the keys", "float8_e4m3fnuz", "got float8_e4m3fn"],
            given(fp8_dtype=FNUZ), fused=True),
    refusal("blocks-e5m2", TypeError, ["blocks must", "float8_e4m3fn", "got float8_e5m2", "float64"],
            viewed("blocks", E5M2)),
    refusal("blocks-float32", TypeError, ["blocks must", "float8_e4m3fn", "got float32"], cast("blocks", np.float32)),
    refusal("blocks-int8", TypeError, ["blocks must", "float8_e4m3fn", "got int8"], viewed("blocks", np.int8)),
    refusal("blocks-fn-declared-fnuz", TypeError, ["blocks must", "float8_e4m3fnuz", "got float8_e4m3fn"], given(fp8_dtype=FNUZ)),
    refusal("blocks-fnuz-declared-fn", TypeError, ["blocks must", "float8_e4m3fn ", "got float8_e4m3fnuz"],
            lambda a: {"blocks": a["blocks"].view(FNUZ), "q": a["q"].view(FNUZ), "fp8_dtype": FN}),
    refusal("fp8_dtype-e5m2", TypeError, ["fp8_dtype must", "float8_e4m3fn", "got float8_e5m2", "float64"],
            lambda a: {"blocks": a["blocks"].view(np.uint8), "fp8_dtype": "float8_e5m2"}),
    refusal("fp8_dtype-e5m2-dtype", TypeError, ["fp8_dtype must", "float8_e4m3fn", "got float8_e5m2"], given(fp8_dtype=E5M2)),
    refusal("fp8_dtype-e5m2-fused", TypeError, ["fp8_dtype must", "float8_e4m3fn", "got float8_e5m2"],
            given(fp8_dtype=ml_dtypes.float8_e5m2), fused=True),
    refusal("fp8_dtype-float32", TypeError, ["fp8_dtype must", "float8_e4m3fn", "got float32"], given(fp8_dtype=np.float32)),
    refusal("fp8_dtype-unknown", TypeError, ["fp8_dtype must", "float8_e4m3fn", "got fp8"], given(fp8_dtype="fp8")),
    refusal("fp8_dtype-int", TypeError, ["fp8_dtype must", "float8_e4m3fn", "got 8"], given(fp8_dtype=8)),
    refusal("q_s-float64", TypeError, ["q_s must be float32", "got float64"], cast("q_s", np.float64)),
    refusal("q_s-float16", TypeError, ["q_s must be float32", "got float16"], cast("q_s", np.float16)),
    refusal("q_s-big-endian", TypeError, ["q_s must be float32", "got >f4"], cast("q_s", ">f4")),
    refusal("scales-float64", TypeError, ["scales must be float32", "got float64"], cast("scales", np.float64)),
    refusal("scales-big-endian", TypeError, ["scales must be float32", "got >f4"], cast("scales", ">f4")),
    refusal("pages-int8", TypeError, ["pages must be uint8", "got int8"], fused_pages(lambda p: p.view(np.int8)), fused=True),
    refusal("pages-fp8", TypeError, ["pages must be uint8", "got float8_e4m3fn"], fused_pages(lambda p: p.view(FN)), fused=True),
    refusal("out-int64", TypeError, ["out must be int32", "got int64"], cast("out", np.int64)),
    refusal("out-uint32", TypeError, ["out must be int32", "got uint32"], cast("out", np.uint32)),
    refusal("out-float32", TypeError, ["out must be int32", "got float32"], cast("out", np.float32)),
    refusal("out-big-endian", TypeError, ["out must be int32", "got >i4"], cast("out", ">i4")),
    refusal("out_scores-float64", TypeError, ["out_scores must be float32", "got float64"], cast("out_scores", np.float64)),
    refusal("out_scores-int32", TypeError, ["out_scores must be float32", "got int32"],
            viewed("out_scores", np.int32)),
] + [
    refusal(f"{name}-{got}", TypeError, [name, "uint32 or int32", f"got {got}"], cast(name, dtype))
    for name in ("input_row_offsets", "cache_lengths", "lookup_table")
    for dtype, got in ((np.int64, "int64"), (np.uint64, "uint64"), (np.int16, "int16"), (np.float32, "float32"), (">u4", ">u4"),
                       (">i4", ">i4"), (object, "object"))
]

WRONG_SCALARS = [
    refusal(f"{name}-{type(value).__module__}-{type(value).__name__}", TypeError, [f"{name} must be an int", repr(value)],
            given(**{name: value}))
    for name in ("layer_idx", "top_k", "kpool", "scores_budget_bytes")
    for value in (True, np.bool_(True), 1.0, np.float32(1), "1")
] + [
    refusal(f"{name}-{value}", TypeError, [f"{name} must be an int", repr(value)], given(**{name: value}))
    for name in ("max_prompt_length", "max_context_length") for value in (True, 100.0)
] + [
    refusal(f"{name}-None", TypeError, [f"{name} must be an int", "None"], given(**{name: None}))
    for name in ("layer_idx", "top_k", "kpool", "scores_budget_bytes")
] + [
    refusal(f"{name}-{value}", ValueError, [f"{name} must be at least 1", f"got {value}"], given(**{name: value}))
    for name in ("top_k", "kpool", "scores_budget_bytes") for value in (0, -1, -2**40)
] + [
    refusal(f"{name}-negative", ValueError, [f"{name} must be at least 0", "got -1"], given(**{name: -1}))
    for name in ("max_prompt_length", "max_context_length")
] + [
    refusal("layer_idx-L", ValueError, ["layer_idx must be in [0, L) = [0, 2)", "got 2"], given(layer_idx=2)),
    refusal("layer_idx-large", ValueError, ["layer_idx must be in [0, L) = [0, 2)", f"got {2**70}"], given(layer_idx=2**70)),
    refusal("layer_idx-negative", ValueError, ["layer_idx must be", "0", "got -1"], given(layer_idx=-1)),
    refusal("layer_idx-fused", ValueError, ["layer_idx must be in [0, L) = [0, 1)", "got 1"], given(layer_idx=1), fused=True),
] + [
    refusal(f"{name}-{value}", ValueError, [f"{name} must be one of", *choices, f"got {value!r}"], given(**{name: value}))
    for name, choices, values in (("mask", ["'causal'", "'null'"], ["full", "", "Causal"]),
                                  ("order", ["'index'", "'score'"], ["rank", "INDEX"]),
                                  ("arithmetic", ["'exact'", "'wgmma'"], ["fast", "mma"]))
    for value in values
] + [
    refusal(f"{name}-{type(value).__name__}", TypeError, [f"{name} must be a str", f"{value!r}"], given(**{name: value}))
    for name in ("mask", "order", "arithmetic") for value in (None, 0, b"causal")
] + [
    refusal("wgmma-fnuz", ValueError, ['arithmetic must be "exact"', "float8_e4m3fn,", 'got "wgmma" for float8_e4m3fnuz'],
            lambda a: {"arithmetic": "wgmma", "q": a["q"].view(FNUZ), "blocks": a["blocks"].view(FNUZ), "fp8_dtype": FNUZ}),
    refusal("wgmma-fnuz-bytes", ValueError, ['arithmetic must be "exact"', "float8_e4m3fn,", 'got "wgmma" for float8_e4m3fnuz'],
            lambda a: {"arithmetic": "wgmma", "q": a["q"].view(np.uint8), "fp8_dtype": FNUZ}, fused=True),
]

LONG = 10**5000                             # more digits than Python prints


def nested(depth):
    """A tuple so deep that neither its repr nor NumPy gets through it."""
    value = ()
    for _ in range(depth):
        value = (value, 1)
    return value


WRONG_SCALARS += [
    refusal(f"{name}-of-5000-digits", ValueError, [f"{name} must", "got an int of 16610 bits"], given(**{name: value}))
    for name, value in (("layer_idx", LONG), ("top_k", LONG), ("kpool", -LONG), ("scores_budget_bytes", -LONG),
                        ("max_prompt_length", -LONG), ("max_context_length", -LONG))
] + [
    refusal(f"{name}-long-{type(value).__name__}", error, [f"{name} must be", "...", *words], given(**{name: value}))
    for name, value, error, words in (
        ("top_k", "1" * 10**4, TypeError, ["an int, got str '11"]), ("kpool", [0] * 10**4, TypeError, ["an int, got list [0, 0"]),
        ("layer_idx", nested(5000), TypeError, ["an int, got tuple ("]), ("mask", "x" * 10**4, ValueError, ["got 'xx"]),
        ("order", nested(5000), TypeError, ["got tuple ("]), ("fp8_dtype", "x" * 10**4, TypeError, ["got xx"]),
        ("fp8_dtype", nested(5000), TypeError, ["got ("]))
] + [
    refusal("arithmetic-array", TypeError, ["arithmetic must be a str", "got ndarray array(["],
            given(arithmetic=np.array(["auto", "auto"]))),
    refusal("top_k-masked", TypeError, ["top_k must be an int", "got MaskedArray"], given(top_k=np.ma.array(TOP_K, mask=True))),
]

WRONG_SHAPES = [
    refusal("q-2d", ValueError, ["q must have shape [T, H, D]", "got [5, 2]"], sliced("q", slice(None), slice(None), 0)),
    refusal("q-4d", ValueError, ["q must have shape [T, H, D]", "got [5, 1, 2, 4]"], sliced("q", slice(None), None)),
    refusal("q-depth", ValueError, ["q must have shape [T, H, D]", "4]", "got [5, 2, 3]"], sliced("q", ..., slice(3))),
    refusal("q-no-heads", ValueError, ["q must have shape [T, H, D]", "got [5, 0, 4]"],
            lambda a: {"q": a["q"][:, :0], "q_s": a["q_s"][:, :0]}),
    refusal("q_s-tokens", ValueError, ["q_s must have shape [T, H] = [5, 2]", "got [4, 2]"], sliced("q_s", slice(4))),
    refusal("q_s-heads", ValueError, ["q_s must have shape [T, H] = [5, 2]", "got [5, 1]"], sliced("q_s", ..., slice(1))),
    refusal("q_s-1d", ValueError, ["q_s must have shape [T, H] = [5, 2]", "got [5]"], sliced("q_s", ..., 0)),
    refusal("q_s-3d", ValueError, ["q_s must have shape [T, H] = [5, 2]", "got [5, 2, 1]"], sliced("q_s", ..., None)),
    refusal("offsets-short", ValueError, ["input_row_offsets must have shape [B + 1] = [4]", "got [3]"],
            sliced("input_row_offsets", slice(1, None))),
    refusal("offsets-2d", ValueError, ["input_row_offsets must have shape [B + 1] = [4]", "got [4, 1]"],
            sliced("input_row_offsets", ..., None)),
    refusal("offsets-0d", ValueError, ["input_row_offsets must have shape [B + 1] = [4]", "got []"],
            given(input_row_offsets=np.array(5, np.uint32))),
    refusal("blocks-5d", ValueError, ["blocks must have shape [num_blocks, 1, L, P, 1, D]", "got [5, 2, 4, 1, 4]"],
            sliced("blocks", slice(None), 0)),
    refusal("blocks-second-axis", ValueError, ["blocks must have shape [num_blocks, 1, L, P, 1, D]", "got [5, 2, 2, 4, 1, 4]"],
            lambda a: {"blocks": np.repeat(a["blocks"], 2, axis=1)}),
    refusal("blocks-kv-heads", ValueError, ["blocks must have shape [num_blocks, 1, L, P, 1, D]", "got [5, 1, 2, 4, 2, 4]"],
            lambda a: {"blocks": np.repeat(a["blocks"], 2, axis=4)}),
    refusal("blocks-no-layers", ValueError, ["blocks must have", "L", "at least 1", "0"],
            lambda a: {"blocks": a["blocks"][:, :, :0], "scales": a["scales"][:, :, :0]}),
    refusal("blocks-no-slots", ValueError, ["blocks must have", "P", "at least 1", "0"],
            lambda a: {"blocks": a["blocks"][:, :, :, :0], "scales": a["scales"][:, :, :, :0]}),
    refusal("depth-0", ValueError, ["blocks must have", "D from 1 to 1024", "D 0"], of_depth(0)),
    refusal("depth-1025", ValueError, ["blocks must have", "D from 1 to 1024", "D 1025"], of_depth(1025)),
    refusal("scales-blocks", ValueError, ["scales must have shape [num_blocks, 1, L, P, 1, 1] = [5, 1, 2, 4, 1, 1]",
                                          "got [4, 1, 2, 4, 1, 1]"], sliced("scales", slice(4))),
    refusal("scales-layers", ValueError, ["scales must have shape [num_blocks, 1, L, P, 1, 1] = [5, 1, 2, 4, 1, 1]",
                                          "got [5, 1, 1, 4, 1, 1]"], sliced("scales", slice(None), slice(None), slice(1))),
    refusal("scales-slots", ValueError, ["scales must have shape", "[5, 1, 2, 4, 1, 1]", "got [5, 1, 2, 3, 1, 1]"],
            sliced("scales", ..., slice(3), slice(None), slice(None))),
    refusal("scales-per-item", ValueError, ["scales must have shape", "[5, 1, 2, 4, 1, 1]", "got [5, 1, 2, 4, 1, 4]"],
            lambda a: {"scales": np.repeat(a["scales"], 4, axis=5)}),
    refusal("scales-5d", ValueError, ["scales must have shape", "[5, 1, 2, 4, 1, 1]", "got [5, 1, 2, 4, 1]"],
            sliced("scales", ..., 0)),
    refusal("lengths-B", ValueError, ["lookup_table must have shape [B, max_pages] = [2", "got [3, 3]"],
            sliced("cache_lengths", slice(2))),
    refusal("lengths-2d", ValueError, ["cache_lengths must have shape [B]", "got [3, 1]"], sliced("cache_lengths", ..., None)),
    refusal("lengths-0d", ValueError, ["cache_lengths must have shape [B]", "got []"],
            given(cache_lengths=np.array(5, np.uint32))),
    refusal("table-B", ValueError, ["lookup_table must have shape [B, max_pages] = [3", "got [2, 3]"],
            sliced("lookup_table", slice(2))),
    refusal("table-1d", ValueError, ["lookup_table must have shape [B, max_pages]", "got [3]"], sliced("lookup_table", ..., 0)),
    refusal("lengths-and-table-B", ValueError, ["input_row_offsets must have shape [B + 1] = [3]", "got [4]"],
            lambda a: {"cache_lengths": a["cache_lengths"][:2], "lookup_table": a["lookup_table"][:2]}),
    refusal("out-rows", ValueError, ["out must have shape [T, top_k] = [5, 3]", "got [4, 3]"], sliced("out", slice(4))),
    refusal("out-columns", ValueError, ["out must have shape [T, top_k] = [5, 3]", "got [5, 4]"],
            given(out=np.zeros((5, 4), np.int32))),
    refusal("out-1d", ValueError, ["out must have shape [T, top_k] = [5, 3]", "got [15]"],
            lambda a: {"out": a["out"].reshape(-1)}),
    refusal("out_scores-rows", ValueError, ["out_scores must have shape [T, top_k] = [5, 3]", "got [6, 3]"],
            given(out_scores=np.zeros((6, 3), np.float32))),
    refusal("out-narrower-than-top_k", ValueError, ["out must have shape [T, top_k] = [5, 2048]", "got [5, 3]"], given(top_k=2048)),
    refusal("pages-3d", ValueError, ["pages must have shape [num_blocks, P, 1, D + 4]", "got [5, 4, 8]"],
            fused_pages(lambda p: p[:, :, 0]), fused=True),
    refusal("pages-third-axis", ValueError, ["pages must have shape [num_blocks, P, 1, D + 4]", "got [5, 2, 2, 8]"],
            fused_pages(lambda p: p.reshape(5, 2, 2, 8)), fused=True),
    refusal("pages-depth-0", ValueError, ["pages must have shape [num_blocks, P, 1, D + 4]", "D of at least 1", "got [5, 4, 1, 4]"],
            fused_pages(lambda p: pages_of(5, 4, 4)), fused=True),
    refusal("pages-no-slots", ValueError, ["pages must have shape [num_blocks, P, 1, D + 4]", "at least 1", "got [5, 0, 1, 8]"],
            fused_pages(lambda p: p[:, :0]), fused=True),
    refusal("pages-depth-1028", ValueError, ["pages must have", "1024", "1028"], fused_pages(lambda p: pages_of(5, 4, 1032)),
            fused=True),
]

WRONG_LAYOUTS = [
    refusal(f"{name}-scattered", ValueError, [f"{name} must be contiguous along its last axis", f"stride {item} bytes",
                                              f"got stride {2 * item} bytes"], lambda a, name=name: {name: scattered(a[name])})
    for name, item in (("q", 1), ("q_s", 4), ("blocks", 1), ("input_row_offsets", 4), ("cache_lengths", 4), ("lookup_table", 4))
] + [
    refusal(f"{name}-reversed", ValueError, [f"{name} must be contiguous along its last axis", f"got stride {-item} bytes"],
            lambda a, name=name: {name: a[name][..., ::-1]})
    for name, item in (("q", 1), ("q_s", 4), ("blocks", 1), ("lookup_table", 4))
] + [
    refusal(f"{name}-transposed", ValueError, [f"{name} must be contiguous along its last axis", "got stride"],
            lambda a, name=name: {name: np.asfortranarray(a[name])})
    for name in ("q", "q_s", "blocks", "lookup_table")
] + [
    refusal(f"{name}-broadcast", ValueError, [f"{name} must be contiguous along its last axis", "got stride 0 bytes"],
            lambda a, name=name: {name: np.broadcast_to(a[name][..., :1], a[name].shape)})
    for name in ("q", "q_s", "blocks")
] + [
    refusal(f"{name}-misaligned-by-{offset}", ValueError, [f"{name} must be aligned to its 4-byte items", "got address 0x"],
            lambda a, name=name, offset=offset: {name: misaligned(a[name], offset)})
    for name in ("q_s", "scales", "input_row_offsets", "cache_lengths", "lookup_table", "out", "out_scores") for offset in (1, 2)
] + [
    refusal(f"{name}-odd-row-stride", ValueError, [f"{name} must be aligned to its 4-byte items", "strides"],
            lambda a, name=name: {name: odd_row_stride(a[name])})
    for name in ("q_s", "lookup_table")
] + [
    refusal(f"{name}-{how}", ValueError, [f"{name} must be C-contiguous", "got strides"],
            lambda a, name=name, layout=layout: {name: layout(a[name])})
    for name in ("out", "out_scores")
    for how, layout in (("scattered", scattered), ("fortran", np.asfortranarray), ("reversed", lambda x: x[::-1]),
                        ("odd-row-stride", odd_row_stride),
                        ("columns-of-wider", lambda x: np.pad(x, ((0, 0), (0, 1)))[:, :TOP_K]),
                        ("every-other-row", lambda x: np.repeat(x, 2, axis=0)[::2]))
] + [
    refusal(f"{name}-read-only", ValueError, [f"{name} must be writeable", "read-only"],
            lambda a, name=name: {name: read_only(a[name])})
    for name in ("out", "out_scores")
] + [
    refusal("pages-scattered", ValueError, ["pages must be contiguous within a page", "got strides"],
            fused_pages(scattered), fused=True),
    refusal("pages-row-stride", ValueError, ["pages must be contiguous within a page", "8", "got strides", "12"],
            fused_pages(lambda p: np.pad(p, ((0, 0), (0, 0), (0, 0), (0, 4)))[..., :8]), fused=True),
    refusal("pages-rows-reversed", ValueError, ["pages must be contiguous within a page", "got strides", "-8"],
            fused_pages(lambda p: p[:, ::-1]), fused=True),
    # 3 rows of 5 key bytes: the scales would lie 15 bytes behind the page's start
    refusal("pages-P*D", ValueError, ["pages", "P * D", "multiple of 4", "got 15"], fused_pages(lambda p: pages_of(5, 3, 9)),
            fused=True),
    refusal("pages-page-stride", ValueError, ["pages", "page stride", "multiple of 4", "got 34"],
            fused_pages(lambda p: np.pad(p.reshape(5, 32), ((0, 0), (0, 2)))[:, :32].reshape(5, 4, 1, 8)), fused=True),
    refusal("pages-address", ValueError, ["pages", "address", "multiple of 4"], fused_pages(lambda p: misaligned(p, 2)),
            fused=True),
]

WRONG_CONTENTS = [
    refusal("offsets-start", ValueError, ["input_row_offsets must start at 0", "got 1"], entry("input_row_offsets", 0, 1)),
    refusal("offsets-start-negative", ValueError, ["input_row_offsets must", "got -1"],
            entry("input_row_offsets", 0, -1, np.int32)),
    refusal("offsets-end-early", ValueError, ["input_row_offsets must", "end at T = 5", "4"], entry("input_row_offsets", 3, 4)),
    refusal("offsets-end-late", ValueError, ["input_row_offsets must", "end at T = 5", "6"], entry("input_row_offsets", 3, 6)),
    refusal("offsets-end-large", ValueError, ["input_row_offsets must", "end at T = 5", f"{2**32 - 1}"],
            entry("input_row_offsets", 3, 2**32 - 1)),
    refusal("offsets-descend", ValueError, ["input_row_offsets must", "ascend", "4 then 3", "request 1"],
            given(input_row_offsets=np.array([0, 4, 3, 5], np.uint32))),
    refusal("offsets-over-T", ValueError, ["input_row_offsets must", "ascend", "9 then 5", "request 2"],
            given(input_row_offsets=np.array([0, 3, 9, 5], np.uint32))),
    refusal("offsets-negative", ValueError, ["input_row_offsets must", "0 then -2"], entry("input_row_offsets", 1, -2, np.int32)),
    refusal("no-requests-for-tokens", ValueError, ["input_row_offsets must", "end at T = 5", "got 0"],
            given(input_row_offsets=np.zeros(1, np.uint32), cache_lengths=np.zeros(0, np.uint32),
                  lookup_table=np.zeros((0, 3), np.uint32))),
    refusal("lengths-negative", ValueError, ["cache_lengths must", "negative", "got -1", "request 1"],
            entry("cache_lengths", 1, -1, np.int32)),
    refusal("lengths-least", ValueError, ["cache_lengths must", "negative", f"got {-2**31}", "request 0"],
            entry("cache_lengths", 0, -2**31, np.int32)),
    # c + n = (2**31 - 3) + 3
    refusal("position-int32", ValueError, ["cache_lengths", f"at most {POSITIONS}", f"got {2**31}", "request 0"],
            entry("cache_lengths", 0, 2**31 - 3, np.int32)),
    refusal("position-uint32", ValueError, ["cache_lengths", f"at most {POSITIONS}", f"got {2**32 + 1}", "request 2"],
            entry("cache_lengths", 2, 2**32 - 1)),
    refusal("position-pooled", ValueError, ["cache_lengths", f"at most {POSITIONS}", f"got {2**31}", "request 0"],
            lambda a: {**entry("cache_lengths", 0, 2**31 - 3)(a), "kpool": 2**30}),
    refusal("position-without-tokens", ValueError, ["cache_lengths", f"at most {POSITIONS}", f"got {2**31}", "request 1"],
            entry("cache_lengths", 1, 2**31)),
    # 8 rows in pages of 4; then 9, of which the last page is begun only
    refusal("table-narrow", ValueError, ["lookup_table must", "2 columns", "8 cache rows", "request 0", "P = 4", "got 1"],
            sliced("lookup_table", ..., slice(1))),
    refusal("table-narrow-by-one-row", ValueError, ["lookup_table must", "3 columns", "9 cache rows", "request 0", "got 2"],
            lambda a: {"lookup_table": a["lookup_table"][:, :2].copy(), "cache_lengths": np.array([6, 6, 0], np.uint32)}),
    refusal("table-no-columns", ValueError, ["lookup_table must", "columns", "got 0"], sliced("lookup_table", ..., slice(0))),
    refusal("table-narrow-pooled", ValueError, ["lookup_table must", "2 columns", "5 cache rows", "got 1"],
            lambda a: {"kpool": 2, "lookup_table": a["lookup_table"][:, :1].copy(),
                       "cache_lengths": np.array([7, 0, 0], np.uint32)}),
    refusal("table-narrow-fused", ValueError, ["lookup_table must", "2 columns", "8 cache rows", "got 1"],
            sliced("lookup_table", ..., slice(1)), fused=True),
    refusal("page-id-num_blocks", ValueError, ["lookup_table must", "[0, 5)", "got 5", "request 0", "page 1"], page_id(0, 1, 5)),
    refusal("page-id-large", ValueError, ["lookup_table must", "[0, 5)", f"got {2**32 - 1}", "request 2", "page 0"],
            page_id(2, 0, 2**32 - 1)),
    refusal("page-id-negative", ValueError, ["lookup_table must", "[0, 5)", "got -1", "request 0", "page 0"],
            page_id(0, 0, -1, np.int32)),
    refusal("page-id-fused", ValueError, ["lookup_table must", "[0, 5)", "got 7", "request 2", "page 0"], page_id(2, 0, 7),
            fused=True),
    refusal("no-blocks", ValueError, ["lookup_table must", "[0, 0)", "request 0", "page 0"],
            lambda a: {"blocks": a["blocks"][:0], "scales": a["scales"][:0]}),
    refusal("prompt-bound", ValueError, ["max_prompt_length must", "at least", "got 2", "3", "request 0"],
            given(max_prompt_length=2)),
    refusal("context-bound", ValueError, ["max_context_length must", "at least", "got 4", "5", "request 0"],
            lambda a: {"max_context_length": 4, "cache_lengths": np.array([5, 4, 0], np.uint32)}),
    refusal("context-bound-0", ValueError, ["max_context_length must", "at least", "got 0", "request"],
            given(max_context_length=0)),
    refusal("bounds-fused", ValueError, ["max_prompt_length must", "at least", "got 2", "3", "request 0"],
            given(max_prompt_length=2, max_context_length=100), fused=True),
]

OVERLAPS = [
    refusal("outputs-same-memory", ValueError, ["out_scores must not overlap out"], one_memory(0)),
    refusal("outputs-by-one-item", ValueError, ["out_scores must not overlap out"], one_memory(5 * TOP_K - 1)),
] + [
    refusal(f"{name}-{other}", ValueError, [f"{name} must not overlap {other}"], overlapping(name, dtype, OUT_SHAPE, other))
    for name, dtype in (("out", np.int32), ("out_scores", np.float32))
    for other in ("q", "q_s", "input_row_offsets", "blocks", "scales", "cache_lengths", "lookup_table")
] + [
    # q_s ends 10 items behind its start, scales 40: the first item of out is their last
    refusal("out-end-of-q_s", ValueError, ["out must not overlap q_s"], overlapping("out", np.int32, OUT_SHAPE, "q_s", skip=9)),
    refusal("out-end-of-scales", ValueError, ["out must not overlap scales"],
            overlapping("out", np.int32, OUT_SHAPE, "scales", skip=39)),
    refusal("out-pages", ValueError, ["out must not overlap", "got memory"], overlapping("out", np.int32, OUT_SHAPE, "pages"),
            fused=True),
    # 5 pages of 32 bytes are 40 items, the last 4 of which are the last page's scales
    refusal("out-scales-of-pages", ValueError, ["out must not overlap", "got memory"],
            overlapping("out", np.int32, OUT_SHAPE, "pages", skip=39), fused=True),
]

REFUSALS = WRONG_KINDS + WRONG_DTYPES + WRONG_SCALARS + WRONG_SHAPES + WRONG_LAYOUTS + WRONG_CONTENTS + OVERLAPS


@pytest.mark.parametrize(("error", "words", "change", "fused"), REFUSALS)
def test_refusal(error, words, change, fused):
    """The oracle and the GPU function raise the same error; no array has changed."""
    args, names = changed(valid_arguments(fused), change)
    before = contents(args)
    for kind in ("select",) if names & SELECT_ONLY else ("select", "score"):
        messages = []
        for function in FUNCTIONS[kind]:
            with pytest.raises((TypeError, ValueError)) as raised:
                call(kind, function, args)
            assert raised.type is error, raised.value
            messages.append(str(raised.value))
            assert len(messages[-1]) < 400
            missing = [word for word in words if word not in messages[-1]]
            assert not missing, f"{missing} not in {messages[-1]!r}"
        assert messages[0] == messages[1]
    assert contents(args) == before


def test_case_names_are_unique():
    names = [case.id for case in REFUSALS]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


@pytest.mark.parametrize("fused", [False, True])
def test_the_call_that_the_cases_change_is_valid(fused):
    """Else every refusal could be that of something else."""
    for kind in FUNCTIONS:
        assert_accepted(kind, valid_arguments(fused))


def huge(*shape, dtype):
    """An array of any shape in the memory of one item."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def test_dimensions_past_int32_are_refused():
    """Strides are free, so an array of a few bytes can claim them."""
    lengths, table = np.zeros(1, np.uint32), np.zeros((1, 1), np.uint32)
    with pytest.raises(ValueError, match=r"blocks must have num_blocks and P of at most 2147483647, got 1 and 2147483648"):
        PagedKeyCache(huge(1, 1, 1, 2**31, 1, 1, dtype=np.uint8), huge(1, 1, 1, 2**31, 1, 1, dtype=np.float32), lengths, table)
    cache = PagedKeyCache(huge(1, 1, 1, 4, 1, 1, dtype=np.uint8), huge(1, 1, 1, 4, 1, 1, dtype=np.float32), lengths, table)
    offsets = np.uint32([0, 2**31])
    message = r"q must have shape \[T, H, D\] with H of at least 1 and both at most 2147483647"
    for shape in ((2**31, 1), (1, 2**31)):
        for kind in FUNCTIONS:
            for function in FUNCTIONS[kind]:
                with pytest.raises(ValueError, match=message):
                    function(huge(*shape, 1, dtype=np.uint8), huge(*shape, dtype=np.float32), offsets, cache,
                             **({"top_k": 1} if kind == "select" else {}))


@pytest.mark.parametrize("top_k", [2**62, 2**63, 2**70])
def test_a_result_past_the_address_space_is_refused(top_k):
    for function in FUNCTIONS["select"]:
        with pytest.raises(ValueError, match=rf"top_k must leave T x top_k int32 within .* bytes \(T = 5\), got {top_k}"):
            call("select", function, {**valid_arguments(), "top_k": top_k, "out": None, "out_scores": None})


@pytest.mark.parametrize("kpool", [2**31, 2**63, 2**70])
def test_a_pool_longer_than_every_request_is_never_full(kpool):
    args = {**valid_arguments(), "kpool": kpool}
    assert (call("select", FUNCTIONS["select"][0], args) == -1).all()
    assert call("score", FUNCTIONS["score"][0], args).shape == (5, 0)
    with may_lack_device():
        assert (call("select", FUNCTIONS["select"][1], args) == -1).all()


@pytest.mark.parametrize("name", ["q", "q_s", "blocks", "scales", "input_row_offsets", "out"])
def test_masked_arrays_are_refused(name):
    args = valid_arguments()
    args[name] = np.ma.array(args[name], mask=False)
    for kind in ("select",) if name in SELECT_ONLY else FUNCTIONS:
        for function in FUNCTIONS[kind]:
            with pytest.raises(TypeError, match=rf"{name} must be an array without a mask, got MaskedArray"):
                call(kind, function, args)


def test_auto_is_no_arithmetic_of_the_oracle():
    """It depends on the card: the GPU functions take it, the oracle wants the name that it stands for."""
    args = {**valid_arguments(), "arithmetic": "auto"}
    before = contents(args)
    for kind, (oracle, on_gpu) in FUNCTIONS.items():
        with pytest.raises(ValueError, match=r"arithmetic must be one of 'exact', 'wgmma'.*got 'auto'"):
            call(kind, oracle, args)
        assert contents(args) == before
        with may_lack_device():
            call(kind, on_gpu, args)
        args = valid_arguments() | {"arithmetic": "auto"}
        before = contents(args)


def test_contents_are_checked_at_each_call():
    """A cache whose metadata is changed in place after its construction."""
    args = valid_arguments()
    lengths = args["cache_lengths"]
    args["k_collection"] = PagedKeyCache(*(args[name] for name in CACHE_ARRAYS))
    assert_accepted("score", args)
    lengths[0] = 50
    for oracle_or_gpu in FUNCTIONS["score"]:
        with pytest.raises(ValueError, match=r"lookup_table must .* 53 cache rows of request 0"):
            call("score", oracle_or_gpu, args)


# --------------------------------------------------------------------------------------------------- arrays not on the host


class DeviceArray:
    """What a library's GPU array shows of itself, at an address that nobody may touch."""

    def __init__(self, like, address=1 << 40):
        typestr = "|u1" if like.dtype.itemsize == 1 else like.dtype.str
        self.__cuda_array_interface__ = {"shape": like.shape, "typestr": typestr, "data": (address, False), "version": 3,
                                         "strides": None, "stream": None}


def on_device(names):
    """A change: these arguments on a device."""
    return lambda a: {name: DeviceArray(a[name], (1 << 40) + (i << 20)) for i, name in enumerate(names)}


@pytest.mark.parametrize("interface", [
    "text", {"shape": (2,), "typestr": "|u1"}, {"shape": 2, "typestr": "|u1", "data": (64, False)},
    {"shape": ("2",), "typestr": "|u1", "data": (64, False)}, {"shape": (2,), "typestr": "no-type", "data": (64, False)},
    {"shape": (2,), "typestr": "|u1", "data": (64, False), "strides": 1}, {"shape": (2,), "typestr": "|u1", "data": 64},
    {"shape": (-2,), "typestr": "|u1", "data": (64, False)},
    {"shape": (2, 2), "typestr": "|u1", "data": (64, False), "strides": (1,)},
    {"shape": (2,), "typestr": "|u1", "data": (-64, False)}, {"shape": (2,), "typestr": "|u1", "data": (2**64, False)},
    {"shape": (2,), "typestr": "|u1", "data": (64, False), "version": 3, "stream": -1},
    {"shape": (2,), "typestr": "|u1", "data": (64, False), "version": 3, "stream": "x"},
], ids=["text", "no-data", "shape", "axis", "typestr", "strides", "data", "negative-axis", "too-few-strides", "negative-address",
        "high-address", "negative-stream", "stream"])
@pytest.mark.parametrize("name", ["q", "blocks", "lookup_table", "out"])
def test_a_malformed_interface_is_refused(name, interface):
    args = valid_arguments()
    args[name] = type("Array", (), {"__cuda_array_interface__": interface})()
    for function in FUNCTIONS["select"]:
        with pytest.raises(TypeError, match=rf"^{name} must have a __cuda_array_interface__ with shape, typestr and data, got "):
            call("select", function, args)


@pytest.mark.parametrize("name", ["q", "blocks", "lookup_table", "out"])
def test_an_interface_that_raises_is_refused(name):
    class Array:
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("not\nnow")

    args = valid_arguments()
    args[name] = Array()
    for function in FUNCTIONS["select"]:
        with pytest.raises(TypeError, match=rf"^{name} must have a __cuda_array_interface__ .* Array that gives RuntimeError: "):
            call("select", function, args)


def test_an_interface_with_a_mask_is_refused():
    args = valid_arguments()
    args["q_s"] = DeviceArray(args["q_s"])
    args["q_s"].__cuda_array_interface__["mask"] = DeviceArray(np.ones((5, 2), bool))
    for function in FUNCTIONS["select"]:
        with pytest.raises(TypeError, match=r"^q_s must be an array without a mask, got DeviceArray"):
            call("select", function, args)


@pytest.mark.parametrize("names", [
    ["q"], ["q_s"], ["input_row_offsets"], ["blocks"], ["scales"], ["cache_lengths"], ["lookup_table"], ["out"], ["out_scores"],
    ["q", "q_s", "input_row_offsets", "blocks", "scales", "cache_lengths", "lookup_table", "out", "out_scores"],
], ids="-".join)
def test_oracle_takes_numpy_only(names):
    args, changed_names = changed(valid_arguments(), on_device(names))
    before = contents(args)
    for kind in ("select",) if changed_names & SELECT_ONLY else ("select", "score"):
        with pytest.raises(TypeError) as raised:
            call(kind, FUNCTIONS[kind][0], args)
        assert f"{names[0]} must be a NumPy array, got DeviceArray" in str(raised.value)
    assert contents(args) == before


@pytest.mark.parametrize(("names", "named", "wanted", "got"), [
    (["q_s"], "q_s", "on the host as q is", "on a device"),
    (["blocks"], "blocks", "on the host as q is", "on a device"),
    (["scales"], "scales", "on the host as q is", "on a device"),
    (["blocks", "scales"], "blocks", "on the host as q is", "on a device"),
    (["input_row_offsets"], "input_row_offsets", "on the host as q is", "on a device"),
    (["cache_lengths"], "cache_lengths", "on the host as q is", "on a device"),
    (["lookup_table"], "lookup_table", "on the host as q is", "on a device"),
    (["out"], "out", "on the host as q is", "on a device"),
    (["out_scores"], "out_scores", "on the host as q is", "on a device"),
    (["q"], "q_s", "on a device as q is", "on the host"),
    (["q", "q_s", "blocks"], "scales", "on a device as q is", "on the host"),
    (["q", "q_s", "blocks", "scales"], "out", "on a device as q is", "on the host"),
    (["q", "q_s", "blocks", "scales", "out"], "out_scores", "on a device as q is", "on the host"),
])
def test_arrays_in_two_places(names, named, wanted, got):
    """q, q_s, blocks, scales and outputs all on the host or all on the device; metadata may stay on the host, not the reverse."""
    args, _ = changed(valid_arguments(), on_device(names))
    args["q"] = args["q"] if "q" in names else args["q"].view(np.uint8)
    before = contents(args)
    with pytest.raises(ValueError, match=rf"^{named} must be {wanted}, got an array {got}"):
        call("select", FUNCTIONS["select"][1], args)
    assert contents(args) == before


@pytest.mark.parametrize(("names", "change", "message"), [
    (["input_row_offsets", "lookup_table"], entry("cache_lengths", 1, -1, np.int32), "cache_lengths must not be negative, got -1"),
    (["cache_lengths", "lookup_table"], entry("input_row_offsets", 0, 1), "input_row_offsets must start at 0"),
    (["cache_lengths", "lookup_table"], given(max_prompt_length=2), "max_prompt_length must be at least"),
    (["input_row_offsets", "lookup_table"], given(max_context_length=2), "max_context_length must be at least"),
    ([], lambda a: {"lookup_table": DeviceArray(np.zeros((3, 1), np.uint32))}, "lookup_table must have .* got 1"),
    ([], page_id(0, 0, 5), "lookup_table must hold block ids"),
], ids=["lengths", "offsets", "prompt-bound", "context-bound", "table-width", "page-id"])
def test_metadata_on_the_host_is_checked_beside_device_arrays(names, change, message):
    """Whatever part of the metadata is on the host is checked as far as it tells."""
    args = valid_arguments()
    args = {**args, **on_device(["q", "q_s", "blocks", "scales", "out", "out_scores", *names])(args)}
    args, _ = changed(args, change)
    with pytest.raises(ValueError, match=message):
        call("select", FUNCTIONS["select"][1], args)


@pytest.mark.parametrize("stream", [SimpleNamespace(__cuda_stream__=None), SimpleNamespace(__cuda_stream__=(0,)),
                                    SimpleNamespace(ptr="a"), SimpleNamespace(handle=None), "0", 1.5, True])
def test_what_is_no_stream_is_named(stream):
    with pytest.raises(TypeError, match=r"^stream must be None, an int or a stream of torch, CuPy, numba or cuda.core, got "):
        stream_handle(stream, "numba")


@pytest.mark.parametrize(("options", "message"), [
    ({"regime": "foo"}, "regime must be one of"), ({"fp8_dtype": "foo"}, "fp8_dtype must be one of"),
    ({"kpool": 0}, "kpool must be at least 1, got 0"), ({"page_size": 0}, "page_size must be at least 1"),
    ({"new_tokens": [-1]}, "new_tokens and cached must be as many, none negative"), ({"cached": [1, 2]}, "as many")])
def test_batches_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        make_batch(np.random.default_rng(0), **{"new_tokens": [1], "cached": [5], **options})


# ---------------------------------------------------------------------------------------------------------------- accepted


@contextlib.contextmanager
def may_lack_device():
    """What runs inside gets past its argument checks: on a machine without a GPU it must then fail for want of one."""
    if is_available():
        yield
    else:
        with pytest.raises(NoDeviceError, match="no CUDA device"):
            yield


def results(kind, function, args):
    """Bytes of what a call returns, and of `out_scores`, in copies of the outputs."""
    args = {name: value.copy() if name in ("out", "out_scores") and value is not None else value for name, value in args.items()}
    returned = call(kind, function, args)
    return [returned.tobytes()] + ([args["out_scores"].tobytes()] if kind == "select" else [])


def assert_accepted(kind, args, like=None):
    """Both functions take the call; the result is that of the call `like`, a valid one in its plain form."""
    expected = results(kind, FUNCTIONS[kind][0], like or args)
    assert results(kind, FUNCTIONS[kind][0], args) == expected
    if is_available():
        assert results(kind, FUNCTIONS[kind][1], args) == expected
    with may_lack_device():
        call(kind, FUNCTIONS[kind][1], args)


def padded(array, before, after):
    """The same values in the middle of a larger array, all axes but the last padded with 0x7F bytes."""
    width = [(before, after)] * (array.ndim - 1) + [(0, 0)]
    wide = np.pad(array.view(np.uint8) if array.dtype.itemsize == 1 else array, width, constant_values=0x7F).view(array.dtype)
    return wide[tuple(slice(before, before + n) for n in array.shape[:-1])]


def wider_table(columns, dtype=np.uint32, value=2**31 - 1):
    """The table with `columns` unused columns more, full of `value`."""
    return lambda a: {"lookup_table": np.pad(a["lookup_table"].astype(dtype), ((0, 0), (0, columns)), constant_values=value)}


ACCEPTED = {
    "bounds-exact": given(max_prompt_length=3, max_context_length=6),
    "bounds-large": given(max_prompt_length=2**20, max_context_length=2**40),
    "bounds-beyond-64-bits": given(max_prompt_length=2**70, max_context_length=2**70),
    "bounds-beyond-the-table": given(max_context_length=10**6),
    "table-wider": wider_table(100),
    "table-wider-negative-ids": wider_table(2, np.int32, -1),
    "table-exactly-wide-enough": lambda a: {"lookup_table": a["lookup_table"][:, :2].copy()},
    "table-columns-of-a-wider-one": sliced("lookup_table", ..., slice(2)),
    "page-id-unused-slot": page_id(2, 1, 2**32 - 1),
    "page-id-num_blocks-unused-slot": page_id(0, 2, 5),
    "page-id-negative-unused-slot": page_id(2, 1, -1, np.int32),
    "page-id-negative-of-an-empty-request": page_id(1, 0, -2**31, np.int32),
    "empty-request-with-a-long-context": entry("cache_lengths", 1, 2**31 - 1),
    "metadata-int32": lambda a: {name: a[name].astype(np.int32) for name in ("input_row_offsets", "cache_lengths", "lookup_table")},
    "metadata-mixed": cast("cache_lengths", np.int32),
    "metadata-read-only": lambda a: {name: read_only(a[name]) for name in ("input_row_offsets", "cache_lengths", "lookup_table")},
    "inputs-read-only": lambda a: {name: read_only(a[name]) for name in ("q", "q_s", "blocks", "scales")},
    "q-bytes": lambda a: {"q": a["q"].view(np.uint8)},
    "blocks-bytes": lambda a: {"blocks": a["blocks"].view(np.uint8)},
    "blocks-bytes-declared": lambda a: {"blocks": a["blocks"].view(np.uint8), "fp8_dtype": FN},
    "fp8_dtype-class": given(fp8_dtype=ml_dtypes.float8_e4m3fn),
    "fp8_dtype-name": given(fp8_dtype="float8_e4m3fn"),
    "q-strided": lambda a: {"q": padded(a["q"], 1, 2)},
    "q_s-strided": lambda a: {"q_s": padded(a["q_s"], 2, 1)},
    "q-tokens-reversed-in-memory": lambda a: {"q": a["q"][::-1].copy()[::-1]},
    "blocks-strided": lambda a: {"blocks": padded(a["blocks"], 0, 1)[:, :1, :, :, :1]},
    "blocks-layers-first": lambda a: {"blocks": np.moveaxis(np.moveaxis(a["blocks"], 2, 0).copy(), 0, 2)},
    "scales-strided": lambda a: {"scales": padded(a["scales"], 0, 3)},
    "scales-last-stride-of-one-item": lambda a: {"scales": np.repeat(a["scales"], 3, axis=5)[..., :1]},
    "numpy-integers": given(layer_idx=np.int64(1), top_k=np.uint8(TOP_K), kpool=np.int32(1), scores_budget_bytes=np.uint64(2**40)),
    "zero-dimensional-integers": given(layer_idx=np.array(1), top_k=np.array(TOP_K)),
    "bounds-numpy-integers": given(max_prompt_length=np.uint32(3), max_context_length=np.int16(6)),
    "least-budget": given(scores_budget_bytes=1),
    "adjacent-outputs": one_memory(5 * TOP_K),
    "out-left-out": given(out=None),
}


@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted(change):
    """Legal, and without any effect on the result."""
    plain = valid_arguments()
    args, _ = changed(plain, change)
    for kind in FUNCTIONS:
        assert_accepted(kind, args, plain)


@pytest.mark.parametrize("fused", [False, True])
def test_bytes_of_the_declared_kind(fused):
    """uint8 q and keys are bytes of fp8_dtype: as fnuz they give what fnuz arrays give."""
    plain = valid_arguments() | {"layer_idx": 1}
    typed = {**plain, "q": plain["q"].view(FNUZ), "blocks": plain["blocks"].view(FNUZ), "fp8_dtype": FNUZ}
    as_bytes = {**(valid_arguments(fused)), "q": plain["q"].view(np.uint8), "fp8_dtype": "float8_e4m3fnuz"}
    if not fused:
        as_bytes["blocks"] = plain["blocks"].view(np.uint8)
    for kind in FUNCTIONS:
        assert_accepted(kind, as_bytes, typed)
        assert results("score", FUNCTIONS["score"][0], typed) != results("score", FUNCTIONS["score"][0], plain)


@pytest.mark.parametrize("change", [
    lambda p: p,
    lambda p: np.pad(p.reshape(5, 32), ((0, 0), (0, 12)), constant_values=0x7F)[:, :32].reshape(5, 4, 1, 8),
    lambda p: p[::-1].copy()[::-1],
    lambda p: misaligned(p, 4),
    read_only,
], ids=["plain", "page-stride", "pages-reversed-in-memory", "address", "read-only"])
def test_fused_pages_equal_separate_arrays(change):
    args, _ = changed(valid_arguments(fused=True), fused_pages(change))
    for kind in FUNCTIONS:
        assert_accepted(kind, args, valid_arguments())


def test_shared_blocks():
    """The third request on the first one's first block: its rows are what a copy of that block gives."""
    plain = valid_arguments()
    table = plain["lookup_table"].copy()
    first = table[0, 0]
    for name in ("blocks", "scales"):
        plain[name][table[2, 0]] = plain[name][first]
    table[2, 0] = first
    for kind in FUNCTIONS:
        assert_accepted(kind, {**plain, "lookup_table": table}, plain)


def test_rows_behind_kpool_need_no_pages():
    """With a kpool above every length there is no candidate, and any table will do."""
    args = {**valid_arguments(), "kpool": 2**40, "lookup_table": np.zeros((3, 0), np.uint32)}
    for kind in FUNCTIONS:
        assert_accepted(kind, args)
    assert call("select", FUNCTIONS["select"][0], args).tolist() == [[-1] * TOP_K] * 5


def test_empty_arrays_overlap_nothing():
    """An empty table whose address lies inside an output."""
    args = {**valid_arguments(), "kpool": 2**40}
    args["lookup_table"] = args["out"].view(np.uint32)[1:4, :0]
    for function in FUNCTIONS["select"]:
        with may_lack_device() if function is FUNCTIONS["select"][1] else contextlib.nullcontext():
            assert (call("select", function, args) == -1).all()


def test_longest_position_is_legal():
    """c + n of 2**31 - 1 passes its own check: what is missing are the pages."""
    args, _ = changed(valid_arguments(), entry("cache_lengths", 0, 2**31 - 4))
    for function in FUNCTIONS["score"]:
        with pytest.raises(ValueError, match=f"lookup_table must have .* {2**29} columns for the {2**31 - 1} cache rows"):
            call("score", function, args)
