"""Drawn faults in drawn calls: whatever an argument is, the call is right or refused, and a refusal touches nothing.

test_errors.py has the refusals case by case; here the valid call that a case changes is drawn too. The oracle runs every call; what
it refuses, the GPU function must refuse in the same words, which takes no device.
"""
from __future__ import annotations

import decimal
import re
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import indexer
from indexer import PagedKeyCache, reference
from indexer.batches import REGIMES, make_batch
from indexer.problem import ARITHMETICS, FP8_DTYPES, MASKS, ORDERS

SELECT = reference.mla_indexer_ragged_float8_paged, indexer.mla_indexer_ragged_float8_paged
SCORE = reference.index_scores, indexer.index_scores
SELECT_ONLY = ("top_k", "order", "scores_budget_bytes", "out", "out_scores")
CACHE_ARRAYS = ("blocks", "scales", "cache_lengths", "lookup_table")
CACHE_OPTIONS = ("max_prompt_length", "max_context_length", "fp8_dtype")
DATA = ("q", "q_s", "blocks", "scales")
METADATA = ("input_row_offsets", "cache_lengths", "lookup_table")
OUTPUTS = ("out", "out_scores")
ARRAYS = DATA + METADATA + OUTPUTS
INTEGERS = ("top_k", "kpool", "scores_budget_bytes", "layer_idx", "max_prompt_length", "max_context_length")
TEXTS = {"mask": MASKS, "order": ORDERS, "arithmetic": ARITHMETICS}
NAMES = (*ARRAYS, *INTEGERS, *TEXTS, "pages", "k_collection", "fp8_dtype")
MESSAGE = re.compile(rf"({'|'.join(NAMES)})( plus new tokens)? must .*\bgot ", re.DOTALL)
FEW = settings(max_examples=max(5, settings.default.max_examples // 8))       # of each of the many rules


# ------------------------------------------------------------------------------------------------------------------ calls


@st.composite
def valid_calls(draw, fused=None, fp8_dtypes=tuple(FP8_DTYPES)):
    """A valid call by argument name, outputs poisoned: 2 or 3 requests, T, H, K and the table's columns at least 2.

    Request 0 has a token and a page in use, so that a rule about requests, tokens or pages can be broken there.
    """
    kpool = draw(st.sampled_from((1, 1, 2)))
    requests = [(draw(st.integers(2, 3)), draw(st.integers(2, 9))),
                *draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=2))]
    layers, top_k = draw(st.integers(1, 2)), draw(st.integers(2, 6))
    fp8_dtype = draw(st.sampled_from(fp8_dtypes))
    batch = make_batch(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))), new_tokens=[n for n, _ in requests],
        cached=[c for _, c in requests], num_heads=draw(st.sampled_from((2, 3, 9))), head_dim=draw(st.sampled_from((4, 12))),
        page_size=draw(st.sampled_from((1, 3, 4))), num_layers=layers,
        layer_idx=draw(st.integers(0, layers - 1)), kpool=kpool, fp8_dtype=fp8_dtype,
        regime=draw(st.sampled_from(REGIMES)), metadata_dtype=draw(st.sampled_from(("uint32", "int32"))))
    shape = batch.num_tokens, top_k
    args = {"q": batch.q, "q_s": batch.q_s, "input_row_offsets": batch.input_row_offsets, "cache_lengths": batch.cache_lengths,
            "lookup_table": batch.lookup_table, "fp8_dtype": fp8_dtype, "top_k": top_k, "kpool": kpool, "arithmetic": "exact",
            "mask": draw(st.sampled_from(MASKS)), "order": draw(st.sampled_from(ORDERS)), "scores_budget_bytes": 2**20,
            "out": np.full(shape, 2**31 - 1, np.int32), "out_scores": np.full(shape, np.nan, np.float32)}
    if draw(st.booleans()):
        args |= {"max_prompt_length": max(n for n, _ in requests), "max_context_length": max(c for _, c in requests)}
    if draw(st.booleans()) if fused is None else fused:
        return {**args, "pages": batch.fused_pages}
    return {**args, "blocks": batch.blocks, "scales": batch.scales, "layer_idx": batch.layer_idx}


def invoke(function, args):
    """Builds the cache and calls."""
    args = dict(args)
    options = {name: args.pop(name) for name in CACHE_OPTIONS if name in args}
    arrays = [args.pop(name, None) for name in CACHE_ARRAYS]
    fused, pages = "pages" in args, args.pop("pages", None)
    if "k_collection" not in args:
        args["k_collection"] = (PagedKeyCache.from_fused(pages, *arrays[2:], **options) if fused
                                else PagedKeyCache(*arrays, **options))
    if function in SCORE:
        args = {name: value for name, value in args.items() if name not in SELECT_ONLY}
    return function(**args)


def contents(args):
    """The bytes of every array that is no array of objects."""
    arrays = {name: np.ma.getdata(value) for name, value in args.items() if isinstance(value, np.ndarray)}
    return {name: array.tobytes() for name, array in arrays.items() if not array.dtype.hasobject}


def plain(args):
    """The same values in arrays of their own."""
    return {name: np.array(value, order="C") if isinstance(value, np.ndarray) else value for name, value in args.items()}


def results(args):
    """Bytes of what both oracle functions return and write. Raises what the first of them raises."""
    selected = invoke(SELECT[0], args)
    written = [args[name] for name in OUTPUTS if args.get(name) is not None]
    return [array.tobytes() for array in (selected, *written, invoke(SCORE[0], args))]


def refusal(args, functions=SELECT):
    """The error that both functions raise, or None if the oracle takes the call; it is checked against what all refusals keep."""
    before = contents(args)
    try:
        invoke(functions[0], args)
        return None
    except (TypeError, ValueError) as raised:
        error = raised
    assert type(error) in (TypeError, ValueError), repr(error)
    message = str(error)
    assert MESSAGE.match(message), message
    assert len(message) < 400, message
    with pytest.raises((TypeError, ValueError)) as on_gpu:
        invoke(functions[1], args)
    assert (on_gpu.type, str(on_gpu.value)) == (type(error), message)
    assert contents(args) == before
    return error


# ------------------------------------------------------------------------------------------------------- wrong of any kind


def interface(value):
    """An object with this __cuda_array_interface__."""
    return type("Array", (), {"__cuda_array_interface__": value})()


def endless_list():
    value: list[Any] = []
    value.append(value)
    return value


def deep_tuple():
    value: Any = ()
    for _ in range(5000):
        value = (value, 1)
    return value


# Neither an array, nor an integer, nor text, nor an FP8 dtype; made anew for each call.
JUNK = {
    "list": lambda: [1, 2], "tuple": tuple, "dict": lambda: {"shape": (2,)}, "set": lambda: {1}, "bytes": lambda: b"causal",
    "memoryview": lambda: memoryview(b"12345678"), "float": lambda: 1.0, "nan": lambda: float("nan"), "complex": lambda: 1j,
    "bool": lambda: True, "numpy-bool": lambda: np.bool_(True), "numpy-float": lambda: np.float32(2),
    "decimal": lambda: decimal.Decimal(2),
    "object": object, "class": lambda: np.ndarray, "function": lambda: len, "slice": lambda: slice(2), "range": lambda: range(2),
    "generator": lambda: iter(()), "ellipsis": lambda: ..., "long-list": lambda: [0] * 10**4, "endless-list": endless_list,
    "deep-tuple": deep_tuple, "interface-empty": lambda: interface({}), "interface-text": lambda: interface("x"),
    "interface-without-data": lambda: interface({"shape": (2,), "typestr": "|u1"}),
    "interface-masked": lambda: interface({"shape": (2,), "typestr": "|u1", "data": (64, False), "mask": np.ones(2, bool)}),
    "interface-shape": lambda: interface({"shape": 2, "typestr": "|u1", "data": (64, False)}),
    "interface-axis": lambda: interface({"shape": ("2",), "typestr": "|u1", "data": (64, False)}),
    "interface-dtype": lambda: interface({"shape": (2,), "typestr": "|z9", "data": (64, False)}),
    "masked-constant": lambda: np.ma.masked, "masked-integer": lambda: np.ma.array(2, mask=True),
    "masked-array": lambda: np.ma.zeros((2, 2), np.int32),
}
# Arrays of no argument's dtype.
STRANGE_DTYPES = ("object", "bool", "int8", "int64", "uint64", ">f4", ">i4", ">u4", "float64", "complex64", "M8[s]", "S1", "U2",
                  "V4", "float16", np.dtype([("a", "f4"), ("b", "i4")]), ml_dtypes.float8_e5m2, ml_dtypes.bfloat16)
STRANGE_INTEGERS = (0, -1, 2**31, -2**31, 2**62, 2**63, -2**63, 2**64, 2**70, 10**5000, -10**5000, np.uint64(2**64 - 1),
                    np.int8(-1))
STRANGE_TEXTS = ("", "Causal", "x" * 10**4, "\n", "\ud800", "e4m3", "auto ", "\0")


def strange_array(dtype):
    return st.sampled_from([(), (1,), (2,), (0,), (2, 2), (2, 0, 3), (1,) * 7]).map(lambda shape: np.zeros(shape, dtype))


junk = st.sampled_from(sorted(JUNK)).map(lambda name: JUNK[name]())
anything = st.one_of(junk, st.sampled_from(STRANGE_INTEGERS), st.sampled_from(STRANGE_TEXTS), st.none(),
                     st.sampled_from(STRANGE_DTYPES).flatmap(strange_array), st.sampled_from((np.array(2), np.array("null"))))


def longer(array, axis):
    """Its last entry along an axis twice."""
    return np.concatenate([array, array[(slice(None),) * axis + (slice(-1, None),)]], axis)


def misaligned(array, offset):
    """The same values, `offset` bytes behind an address that is a multiple of 16."""
    memory = np.zeros(array.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + offset
    view = memory[start:start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def scattered(array, axis=-1):
    """The same values, every other entry of an axis of a larger array."""
    return np.repeat(array, 2, axis)[(slice(None),) * (axis % array.ndim) + (slice(None, None, 2),)]


def repeated(array, axis):
    """The first entry of an axis for all of them: stride 0."""
    return np.broadcast_to(array[(slice(None),) * (axis % array.ndim) + (slice(1),)], array.shape)


def reversed_in_memory(array, axis):
    """The same values behind a negative stride."""
    return np.flip(np.flip(array, axis).copy(), axis)


def sliding(array, axis):
    """Each entry of the axis one item behind the one before: they overlap."""
    strides = list(array.strides)
    strides[axis] = array.itemsize
    return np.lib.stride_tricks.as_strided(array, array.shape, strides, writeable=array.flags.writeable)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


RESHAPES = {
    "longer": longer, "shorter": lambda x, axis: x[(slice(None),) * axis + (slice(-1),)],
    "no-entries": lambda x, axis: x[(slice(None),) * axis + (slice(0),)], "axis-more": np.expand_dims,
    "axis-less": lambda x, axis: x[(slice(None),) * axis + (0, ...)], "swapped": lambda x, axis: np.swapaxes(x, 0, axis),
}
LAYOUTS = {
    "flipped": np.flip, "reversed": reversed_in_memory, "scattered": scattered, "repeated": repeated, "sliding": sliding,
    "misaligned": lambda x, axis: misaligned(x, axis + 1), "read-only": lambda x, axis: read_only(x),
    "columns-first": lambda x, axis: np.asfortranarray(x),
}
EXTREMES = (0, 1, 5, -1, 2**31 - 1, -2**31, 2**32 - 1)


@st.composite
def wrong_arrays(draw, array):
    """An array that differs in kind, dtype, shape, layout or one value; it may be a legal one."""
    how = draw(st.sampled_from(("anything", "list", "masked", "dtype", "shape", "layout", "layout", "value", "value")))
    axis = draw(st.integers(0, array.ndim - 1))
    if how == "anything":
        return draw(anything)
    if how == "list":
        return array.tolist()
    if how == "masked":
        return array.view(np.ma.MaskedArray)
    if how == "dtype":
        right = "uint8", "int32", "uint32", "float32", *FP8_DTYPES.values()
        return np.zeros(array.shape, draw(st.sampled_from((*STRANGE_DTYPES, *right))))
    if how == "shape":
        return RESHAPES[draw(st.sampled_from(sorted(RESHAPES)))](array, axis)
    if how == "layout":
        return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](array, axis)
    changed = array.copy()
    if changed.size:
        value = np.array([draw(st.sampled_from(EXTREMES)) % 2**32], np.uint32).view(np.uint8)[:array.itemsize]
        changed.reshape(-1).view(np.uint8).reshape(-1, array.itemsize)[draw(st.integers(0, array.size - 1))] = value
    return changed


@st.composite
def wrong_values(draw, args, name):
    """Something else for an argument of a valid call."""
    value = args.get(name)
    if name in INTEGERS:
        return draw(st.one_of(anything, st.sampled_from(STRANGE_INTEGERS), st.integers(0, 3)))
    if name in TEXTS:
        return draw(st.one_of(anything, st.sampled_from((*TEXTS[name], *STRANGE_TEXTS))))
    if name == "fp8_dtype":
        return draw(st.one_of(anything, st.sampled_from((*FP8_DTYPES, *FP8_DTYPES.values(), *STRANGE_DTYPES))))
    if name in OUTPUTS and draw(st.integers(0, 3)) == 0:                # in the memory of another array
        other = args[draw(st.sampled_from(sorted(n for n, v in args.items() if isinstance(v, np.ndarray) and v.nbytes)))]
        memory = other.reshape(-1).view(np.uint8)
        rows = memory[:len(memory) // 4 * 4].view(value.dtype)
        return np.resize(rows, value.shape) if rows.size < value.size else rows[:value.size].reshape(value.shape)
    return draw(wrong_arrays(value) if isinstance(value, np.ndarray) else anything)


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
def test_a_changed_call_is_right_or_refused(name, data):
    """One or two arguments replaced: an error of the two kinds that says which; else the bits that plain copies give."""
    fused = {"pages": True, "blocks": False, "scales": False}.get(name)
    args = data.draw(valid_calls(fused=fused), "valid")
    changes = {name: data.draw(wrong_values(args, name), name)}
    if data.draw(st.booleans(), "another"):
        other = data.draw(st.sampled_from(sorted(set(args) - {name})), "which")
        changes[other] = data.draw(wrong_values(args, other), other)
    args |= changes
    untouched = {n: v for n, v in contents(args).items() if n not in OUTPUTS}
    if name not in SELECT_ONLY:
        refusal(args, SCORE)
    if refusal(args) is None:
        copies = plain(args)
        assert results(args) == results(copies)
    assert {n: v for n, v in contents(args).items() if n not in OUTPUTS} == untouched


# ---------------------------------------------------------------------------------------------------- one rule, one argument


@dataclass(frozen=True)
class Rule:
    """A change of a valid call that breaks one rule: `change(draw, args)` returns the new arguments."""

    named: tuple[str, ...]
    error: type
    change: Any
    fused: bool | None = False


RULES: dict[str, Rule] = {}


def rule(label, named, error, change, fused=False):
    RULES[label] = Rule((named,) if isinstance(named, str) else named, error, change, fused)


def array_rule(label, name, error, change, named=None):
    """`change(draw, array)` of one array."""
    rule(f"{name}-{label}", named or name, error, lambda draw, a: {name: change(draw, a[name])}, fused=name == "pages")


def contents_rule(label, name, change, named=None):
    """`change(draw, copy, args)` writes to a copy of one array, which is int64 and cast to int32 or uint32 behind."""
    def changed(draw, args):
        copy = args[name].astype(np.int64)
        change(draw, copy, args)
        return {name: copy.astype(np.int32 if (copy < 0).any() else np.uint32)}
    rule(f"{name}-{label}", named or name, ValueError, changed, None)


def scalar_rule(label, name, error, change):
    """`change(draw)` is the new value."""
    rule(f"{name}-{label}", name, error, lambda draw, args: {name: change(draw)}, None)


def pick(draw, *values):
    return draw(st.sampled_from(values))


def put(array, index, value):
    array[index] = value


def overlap(name, other):
    """Output `name` begins inside the memory of `other`."""
    def changed(draw, args):
        source, output = args[other], args[name]
        memory = np.zeros(source.nbytes + output.nbytes + 16, np.uint8)
        inside = memory[:source.nbytes].view(source.dtype).reshape(source.shape)
        inside[...] = source
        start = 4 * draw(st.integers(0, (source.nbytes - 1) // 4))
        return {other: inside, name: memory[start:start + output.nbytes].view(output.dtype).reshape(output.shape)}
    return changed


for _name in (*ARRAYS, "pages"):
    array_rule("kind", _name, TypeError, lambda draw, x: draw(junk))
    array_rule("dtype", _name, TypeError, lambda draw, x: np.zeros(x.shape, draw(st.sampled_from(STRANGE_DTYPES))))
    array_rule("masked", _name, TypeError, lambda draw, x: x.view(np.ma.MaskedArray))
    array_rule("axis-more", _name, ValueError, lambda draw, x: np.expand_dims(x, draw(st.integers(0, x.ndim))))
    array_rule("axis-less", _name, ValueError, lambda draw, x: x[(slice(None),) * draw(st.integers(0, x.ndim - 1)) + (0, ...)])
    array_rule("no-axes", _name, ValueError, lambda draw, x: x.reshape(-1)[0:1].reshape(()))
    if _name not in OUTPUTS:
        rule(f"{_name}-None", _name, TypeError, lambda draw, a, name=_name: {name: None}, fused=_name == "pages")
# Sizes are those of the array that is looked at first: T and H of q, B of cache_lengths, the rest of blocks; the next one is named.
for _name, _named in (("q", ("q_s", "q_s", "q")), ("q_s", ("q_s", "q_s")), ("input_row_offsets", ("input_row_offsets",)),
                      ("blocks", ("scales", "blocks", "scales", "scales", "blocks", "q")), ("scales", ("scales",) * 6),
                      ("cache_lengths", ("lookup_table",)), ("lookup_table", ("lookup_table",)), ("out", ("out", "out")),
                      ("out_scores", ("out_scores", "out_scores"))):
    for _axis, _first in enumerate(_named):
        array_rule(f"axis-{_axis}-longer", _name, ValueError, lambda draw, x, axis=_axis: longer(x, axis), _first)
array_rule("axis-2-longer", "pages", ValueError, lambda draw, x: longer(x, 2))
array_rule("axis-3-longer", "pages", ValueError, lambda draw, x: longer(x, 3), ("pages", "q"))      # D + 1, unless P x D is odd
for _name in ("q", "q_s", "blocks", *METADATA, "pages"):
    array_rule("last-axis", _name, ValueError, lambda draw, x: pick(draw, scattered, repeated, reversed_in_memory)(x, -1))
for _name in OUTPUTS:
    array_rule("not-C", _name, ValueError, lambda draw, x: pick(draw, scattered, repeated, reversed_in_memory)(x, pick(draw, 0, 1)))
    array_rule("rows-overlap", _name, ValueError, lambda draw, x: sliding(x, 0))
    array_rule("columns-first", _name, ValueError, lambda draw, x: np.asfortranarray(x))
    array_rule("read-only", _name, ValueError, lambda draw, x: read_only(x))
    for _other in ("q", "q_s", "blocks", "scales", *METADATA):
        rule(f"{_name}-over-{_other}", _name, ValueError, overlap(_name, _other))
    rule(f"{_name}-over-pages", _name, ValueError, overlap(_name, "pages"), fused=True)
rule("out_scores-over-out", "out_scores", ValueError, overlap("out_scores", "out"), fused=None)
rule("out-over-out_scores", "out_scores", ValueError, overlap("out", "out_scores"), fused=None)
for _name in ("q_s", "scales", *METADATA, *OUTPUTS, "pages"):
    array_rule("misaligned", _name, ValueError, lambda draw, x: misaligned(x, draw(st.integers(1, 3))))

contents_rule("start", "input_row_offsets", lambda draw, x, a: put(x, 0, pick(draw, 1, -1, 2**31, 2**32 - 1)))
contents_rule("end", "input_row_offsets", lambda draw, x, a: put(x, -1, x[-1] + pick(draw, -1, 1, 2**31, -2**31)))
contents_rule("descend", "input_row_offsets", lambda draw, x, a: put(
    x, draw(st.integers(1, len(x) - 2)), pick(draw, x[-1] + 1, -1, 2**31 - 1)))
contents_rule("negative", "cache_lengths", lambda draw, x, a: put(
    x, draw(st.integers(0, len(x) - 1)), draw(st.integers(-2**31, -1))))
contents_rule("position", "cache_lengths", lambda draw, x, a: put(
    x, draw(st.integers(0, len(x) - 1)), draw(st.integers(2**31, 2**32 - 1))))
contents_rule("id", "lookup_table", lambda draw, x, a: put(
    x, (0, 0), pick(draw, -1, -2**31, 2**31 - 1, 2**32 - 1, len(a["blocks" if "blocks" in a else "pages"]))))
array_rule("no-columns", "lookup_table", ValueError, lambda draw, x: x[:, :0])
rule("max_prompt_length-small", "max_prompt_length", ValueError, lambda draw, a: {
    "max_prompt_length": draw(st.integers(0, int(np.diff(a["input_row_offsets"].astype(int)).max()) - 1))}, None)
rule("max_context_length-small", "max_context_length", ValueError, lambda draw, a: {
    "max_context_length": draw(st.integers(0, int(a["cache_lengths"].max()) - 1))}, None)

for _name in INTEGERS:
    scalar_rule("kind", _name, TypeError, lambda draw: draw(st.one_of(junk, st.sampled_from(STRANGE_TEXTS))))
    scalar_rule("array", _name, TypeError, lambda draw: pick(
        draw, np.array([2]), np.array(2.0), np.array(True), np.array(None), np.zeros(0, int)))
    scalar_rule("negative", _name, ValueError, lambda draw: pick(draw, *(n for n in STRANGE_INTEGERS if n < 0)))
for _name in ("top_k", "kpool", "scores_budget_bytes"):
    scalar_rule("zero", _name, ValueError, lambda draw: pick(draw, 0, np.uint8(0), np.array(0)))
for _name in TEXTS:
    scalar_rule("kind", _name, TypeError, lambda draw: draw(st.one_of(
        junk, st.none(), st.sampled_from(STRANGE_INTEGERS), st.just(np.array(["null", "auto"])))))
    scalar_rule("unknown", _name, ValueError, lambda draw: pick(draw, *STRANGE_TEXTS))
scalar_rule("large", "layer_idx", ValueError, lambda draw: pick(draw, 2, 2**63, 10**5000))
rule("top_k-large", "top_k", ValueError, lambda draw, a: {
    "top_k": pick(draw, 2**62, 2**63, 2**70, 10**5000), **dict.fromkeys(pick(draw, (), OUTPUTS[:1], OUTPUTS))}, None)
rule("arithmetic-of-the-keys", "arithmetic", ValueError, lambda draw, a: {
    "arithmetic": "wgmma", "fp8_dtype": "float8_e4m3fnuz", "q": a["q"].view(np.uint8), "blocks": a["blocks"].view(np.uint8)})
rule("fp8_dtype-kind", "fp8_dtype", TypeError, lambda draw, a: {
    "fp8_dtype": draw(st.one_of(junk, st.sampled_from((*STRANGE_TEXTS, *STRANGE_DTYPES, *STRANGE_INTEGERS))))}, None)
rule("fp8_dtype-of-blocks", "blocks", TypeError, lambda draw, a: {
    "blocks": a["blocks"].view(next(d for n, d in FP8_DTYPES.items() if n != a["fp8_dtype"]))})
rule("fp8_dtype-of-q", "q", TypeError, lambda draw, a: {
    "q": a["q"].view(next(d for n, d in FP8_DTYPES.items() if n != a["fp8_dtype"]))}, None)
rule("k_collection-kind", "k_collection", TypeError, lambda draw, a: {
    "k_collection": draw(st.one_of(anything, st.sampled_from((PagedKeyCache, a.get("blocks")))))}, None)


@pytest.mark.parametrize("label", RULES)
@FEW
@given(st.data())
def test_the_error_names_the_argument_of_the_broken_rule(label, data):
    rule = RULES[label]
    args = data.draw(valid_calls(fused=rule.fused), "valid")
    error = refusal(args | rule.change(data.draw, args))
    assert error is not None, "accepted"
    assert type(error) is rule.error, error
    assert re.split(r"\W", str(error), maxsplit=1)[0] in rule.named, error


# ------------------------------------------------------------------------------------------------------- legal and harmless


def one_memory(draw, args):
    """All arrays back to back in one buffer: none overlaps the next."""
    arrays = {name: value for name, value in args.items() if isinstance(value, np.ndarray)}
    memory, at, packed = np.zeros(sum(x.nbytes + 4 for x in arrays.values()), np.uint8), 0, {}
    for name in draw(st.permutations(sorted(arrays))):
        array = arrays[name]
        packed[name] = memory[at:at + array.nbytes].view(array.dtype).reshape(array.shape)
        packed[name][...] = array
        at += -(-array.nbytes // 4) * 4
    return packed


def each(names, change):
    """`change(draw, array)` of those of these arrays that the call has."""
    return lambda draw, args: {name: change(draw, args[name]) for name in names if name in args}


INPUTS = (*DATA, *METADATA, "pages")
HARMLESS = {
    "metadata-dtype": each(METADATA, lambda draw, x: x.view(draw(st.sampled_from((np.int32, np.uint32))))),
    "read-only": each(INPUTS, lambda draw, x: read_only(x)),
    "negative-stride": each((*DATA, "lookup_table", "pages"), lambda draw, x: reversed_in_memory(x, 0)),
    "wide-stride": each((*DATA, "lookup_table", "pages"), lambda draw, x: scattered(x, 0)),
    "subclass": each((*INPUTS, *OUTPUTS), lambda draw, x: x.view(type("Array", (np.ndarray,), {}))),
    "bytes": each(("q", "blocks"), lambda draw, x: x.view(np.uint8) if draw(st.booleans()) else x),
    "odd-address": each(("q", "blocks"), lambda draw, x: misaligned(x, draw(st.integers(1, 3)))),
    "one-memory": one_memory,
    "wider-table": each(("lookup_table",), lambda draw, x: np.pad(x, ((0, 0), (0, 3)), constant_values=2**31 - 1)),
    "unused-ids": each(("lookup_table",), lambda draw, x: np.where(x == 2**31 - 1, np.uint32(2**32 - 1), x.view(np.uint32))),
    "unused-blocks": each(("blocks", "scales", "pages"), lambda draw, x: longer(x, 0)),
    "integers": lambda draw, a: {name: draw(st.sampled_from((np.int64, np.uint8, np.array)))(a[name])
                                 for name in ("top_k", "kpool", "layer_idx") if name in a},
    "budget": lambda draw, a: {"scores_budget_bytes": draw(st.sampled_from((1, 100, 2**63, 10**5000)))},
    "bounds": lambda draw, a: {name: draw(st.sampled_from((None, 9, 2**63, 10**5000)))
                               for name in ("max_prompt_length", "max_context_length")},
    "text-subclass": lambda draw, a: {name: np.str_(a[name]) for name in TEXTS},
}


@pytest.mark.parametrize("label", HARMLESS)
@FEW
@given(st.data())
def test_a_harmless_change_gives_the_same_bits(label, data):
    args = data.draw(valid_calls(), "valid")
    changed = args | HARMLESS[label](data.draw, args)
    assert refusal(changed) is None
    assert refusal(changed, SCORE) is None
    assert results(changed) == results(plain(args))
