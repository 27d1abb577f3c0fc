"""What the operator takes on this GPU, next to its peers: the measurements of ``python -m indexer bench``.

shape -> inputs on the GPU -> CUDA graphs -> rows compared with the oracle -> times -> table, JSON, chart. Every figure is computed
by a small function that needs no GPU. torch, the peers and matplotlib are imported inside functions only.
"""
from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import reference
from .batches import POISON, Batch
from .problem import FP8_DTYPES, PagedKeyCache

HEAD_DIM, PAGE_SIZE, TOP_K = 128, 64, 2048
KEY_BYTES = PAGE_SIZE * HEAD_DIM              # of a page; its scales lie behind
PAGE_BYTES = PAGE_SIZE * (HEAD_DIM + 4)
FP8 = "float8_e4m3fn"
DEVICE = "cuda"
FLUSH_BYTES = 256 * 2**20                     # read between two replays: more than any L2 holds
COPY_BYTES = 2 * 2**30                        # of the copy that measures the memory's roof
MATMUL_SIZE = 8192                            # of the product that measures the tensor cores' roof
WARM_UPS = 2                                  # replays of each graph that are not counted
GATE_PAIRS = 262_144                          # (token, key) pairs per shape for the oracle: some seconds of 64 heads

# What is timed: the whole operator, whole pipelines in its place, and a part of them.
OURS, TORCH_TOPK = "indexer", "torch.topk"
COMPOSED = DEEPGEMM_TORCH, DEEPGEMM_FLASHINFER = "DeepGEMM + torch.topk", "DeepGEMM + FlashInfer"


class Mismatch(Exception):
    """A row differs from the oracle's; says which and where."""


class Refused(Exception):
    """A peer does not take a shape; says why."""


# ---------------------------------------------------------------------------------------------------------------- shapes


@dataclass(frozen=True)
class Shape:
    """A batch of equal requests, and the time it is to take at most.

    Attributes
    ----------
    kind : {"decode", "prefill"}
        What it is measured by: bytes of keys, or arithmetic.
    num_requests : int
    new_tokens, cached : int
        Of each request.
    num_heads : int
    target_us : float
        For the whole operator, in microseconds.
    """

    kind: str
    num_requests: int
    new_tokens: int
    cached: int
    num_heads: int
    target_us: float

    @property
    def name(self) -> str:
        """Kind, lengths and heads, as tables and ``--filter`` have them."""
        if self.kind == "prefill":
            return f"prefill {self.new_tokens}/{self.cached} H{self.num_heads}"
        keys = f"{self.context // 1024}K" if self.context % 1024 == 0 else str(self.context)
        return f"decode {self.num_requests}x{self.new_tokens} H{self.num_heads} {keys}"

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests, T."""
        return self.num_requests * self.new_tokens

    @property
    def context(self) -> int:
        """Keys of a request: cached and new ones."""
        return self.cached + self.new_tokens

    @property
    def num_pairs(self) -> int:
        """(token, key) pairs under the causal mask."""
        return self.num_requests * (self.new_tokens * self.cached + self.new_tokens * (self.new_tokens + 1) // 2)

    @property
    def num_operations(self) -> int:
        """Multiplications and additions of the dot products of all pairs, those of rows that need no scores too."""
        return 2 * self.num_heads * HEAD_DIM * self.num_pairs

    @property
    def num_key_bytes(self) -> int:
        """Bytes of keys and their scales, each read once."""
        return self.num_requests * self.context * (HEAD_DIM + 4)


# requests, new tokens of each, heads, keys of each in units of 1024, target in microseconds
DECODE = ((64, 1, 64, 32, 84), (1, 1, 64, 128, 22), (8, 1, 64, 64, 33), (128, 1, 64, 8, 48), (8, 2, 64, 64, 36), (8, 6, 32, 76, 45),
          (256, 1, 64, 4, 52), (32, 1, 32, 128, 160))
# new tokens of one request, cached ones, heads, target in microseconds
PREFILL = ((4096, 0, 64, 200), (2048, 30720, 64, 1050), (4096, 61440, 64, 3950), (8192, 57344, 64, 7600), (4096, 61440, 32, 2350),
           (1024, 130048, 64, 2050))
SHAPES = (*(Shape("decode", requests, new, 1024 * keys - new, heads, target) for requests, new, heads, keys, target in DECODE),
          *(Shape("prefill", 1, new, cached, heads, target) for new, cached, heads, target in PREFILL))


def select_shapes(kind: str, text: str) -> list[Shape]:
    """The shapes of a kind ("decode", "prefill" or "all") whose names contain a text, in whatever case."""
    return [shape for shape in SHAPES if kind in ("all", shape.kind) and text.lower() in shape.name.lower()]


# --------------------------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Timing:
    """Median and spread of a sample, in microseconds.

    Attributes
    ----------
    median_us, p10_us, p90_us : float
        50th, 10th and 90th percentile, between neighbours where it falls between them.
    """

    median_us: float
    p10_us: float
    p90_us: float

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Timing:
        """Of these microseconds, at least one."""
        p10, median, p90 = np.percentile(samples_us, [10, 50, 90])
        return cls(float(median), float(p10), float(p90))

    def __str__(self) -> str:
        return f"{self.median_us:.1f} ({self.p10_us:.1f}-{self.p90_us:.1f})"


@dataclass(frozen=True)
class Roofs:
    """What the card reached in this run.

    Attributes
    ----------
    copy_gb_per_s : float
        Of a copy within its memory, bytes read and bytes written.
    matmul_tflop_per_s : float or None
        Of a dense FP8 matrix product; None where torch has none for the card.
    """

    copy_gb_per_s: float
    matmul_tflop_per_s: float | None


def gb_per_s(num_bytes: int, microseconds: float) -> float:
    """Gigabytes (10^9 bytes) per second."""
    return num_bytes / microseconds / 1e3


def tflop_per_s(num_operations: int, microseconds: float) -> float:
    """10^12 operations per second."""
    return num_operations / microseconds / 1e6


@dataclass(frozen=True)
class Result:
    """What was measured of a shape.

    Attributes
    ----------
    shape : Shape
    times : dict of str to Timing
        `OURS` and the peers that ran.
    missing : dict of str to str
        Why the other peers did not.
    host_us : float
        What the host takes for a call that is not captured, in microseconds.
    """

    shape: Shape
    times: dict[str, Timing]
    missing: dict[str, str]
    host_us: float

    @property
    def ours(self) -> Timing:
        """Of the whole operator."""
        return self.times[OURS]

    @property
    def peer(self) -> str | None:
        """The fastest of the composed peers that ran."""
        ran = [name for name in COMPOSED if name in self.times]
        return min(ran, key=lambda name: self.times[name].median_us, default=None)

    @property
    def ratio(self) -> float | None:
        """The peer's median over ours: above 1 where we are faster."""
        return None if self.peer is None else self.times[self.peer].median_us / self.ours.median_us

    @property
    def met(self) -> bool:
        """Whether our median is within the target."""
        return self.ours.median_us <= self.shape.target_us

    @property
    def rate(self) -> tuple[float, str]:
        """Key bytes read per second in decode, operations per second in prefill; with its unit."""
        if self.shape.kind == "decode":
            return gb_per_s(self.shape.num_key_bytes, self.ours.median_us), "GB/s"
        return tflop_per_s(self.shape.num_operations, self.ours.median_us), "TFLOP/s"

    def percent_of_roof(self, roofs: Roofs) -> float | None:
        """The rate in percent of the roof that bounds it; None where that was not measured."""
        roof = roofs.copy_gb_per_s if self.shape.kind == "decode" else roofs.matmul_tflop_per_s
        return None if roof is None else 100 * self.rate[0] / roof


# ---------------------------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class Inputs:
    """The arrays of a shape, torch tensors on the GPU.

    Attributes
    ----------
    shape : Shape
    q : float8_e4m3fn [T, H, D]
    q_s : float32 [T, H]
    offsets : int32 [B + 1]
    pages : uint8 [num_blocks, P, 1, D + 4]
        Fused planar pages.
    lengths : int32 [B]
        Cached tokens.
    table : int32 [B, pages of a request]
        Blocks in random order.
    visible : int32 [T]
        Keys that each token sees.
    """

    shape: Shape
    q: Any
    q_s: Any
    offsets: Any
    pages: Any
    lengths: Any
    table: Any
    visible: Any

    def arguments(self) -> tuple[Any, ...]:
        """Positional arguments of the public functions. The bounds are the real lengths, the metadata is on the device."""
        cache = PagedKeyCache.from_fused(self.pages, self.lengths, self.table, max_prompt_length=self.shape.new_tokens,
                                         max_context_length=self.shape.cached)
        return self.q, self.q_s, self.offsets, cache


def make_inputs(shape: Shape, seed: int) -> Inputs:
    """Random inputs: queries, keys and head weights normal, key scales uniform in [0.1, 1.1)."""
    import torch
    generator = torch.Generator(DEVICE).manual_seed(seed)
    random: dict[str, Any] = {"generator": generator, "device": DEVICE}

    def fp8(*size: int) -> Any:
        return torch.randn(size, **random).to(torch.float8_e4m3fn)

    num_requests, num_tokens = shape.num_requests, shape.num_tokens
    pages_per_request = -(-shape.context // PAGE_SIZE)
    num_blocks = num_requests * pages_per_request
    pages = torch.empty((num_blocks, PAGE_BYTES), dtype=torch.uint8, device=DEVICE)
    for part in pages.split(4096):            # of normal numbers as float32, no more than that at a time
        part[:, :KEY_BYTES] = fp8(len(part), KEY_BYTES).view(torch.uint8)
        part[:, KEY_BYTES:] = (torch.rand((len(part), PAGE_SIZE), **random) + 0.1).view(torch.uint8)
    int32: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
    return Inputs(
        shape, q=fp8(num_tokens, shape.num_heads, HEAD_DIM), q_s=torch.randn((num_tokens, shape.num_heads), **random),
        offsets=torch.arange(num_requests + 1, **int32) * shape.new_tokens,
        pages=pages.view(num_blocks, PAGE_SIZE, 1, HEAD_DIM + 4), lengths=torch.full((num_requests,), shape.cached, **int32),
        table=torch.randperm(num_blocks, **random).int().view(num_requests, pages_per_request),
        visible=(torch.arange(shape.new_tokens, **int32) + shape.cached + 1).repeat(num_requests))


# ------------------------------------------------------------------------------------------------------------------ gate


def sample_rows(shape: Shape, seed: int) -> list[int]:
    """Query rows to compare: the first, the last and random ones, 3 to 8 of them by what their keys cost the oracle; ascending."""
    count = max(3, min(8, GATE_PAIRS // shape.context))
    between = np.arange(1, shape.num_tokens - 1)
    drawn = np.random.default_rng(seed).choice(between, min(count - 2, len(between)), replace=False)
    return sorted({0, shape.num_tokens - 1, *map(int, drawn)})


def token_batch(q: np.ndarray, q_s: np.ndarray, pages: np.ndarray, visible: int) -> Batch:
    """One token as a batch of its own: a request with one new token.

    Parameters
    ----------
    q : uint8 [H, D]
        FP8 bytes.
    q_s : float32 [H]
    pages : uint8 [num_pages, P, 1, D + 4]
        Fused planar pages of the keys that it sees, in order.
    visible : int
        Number of keys that it sees.
    """
    num_pages, page_size, _, row_bytes = pages.shape
    keys, scales = np.split(pages.reshape(num_pages, -1), [page_size * (row_bytes - 4)], axis=1)
    return Batch(
        q=q[None].view(FP8_DTYPES[FP8]), q_s=q_s[None], input_row_offsets=np.array([0, 1], np.int32),
        blocks=np.ascontiguousarray(keys).view(FP8_DTYPES[FP8]).reshape(num_pages, 1, 1, page_size, 1, row_bytes - 4),
        scales=np.ascontiguousarray(scales).view(np.float32).reshape(num_pages, 1, 1, page_size, 1, 1),
        cache_lengths=np.array([visible - 1], np.int32), lookup_table=np.arange(num_pages, dtype=np.int32)[None], fp8_dtype=FP8,
        top_k=TOP_K)


def first_difference(expected: np.ndarray, got: np.ndarray) -> str | None:
    """The first slot in which two rows of positions differ, and what is there; None if none does."""
    different = np.flatnonzero(expected != got)
    return f"slot {different[0]}: expected {expected[different[0]]}, got {got[different[0]]}" if len(different) else None


def check_rows(inputs: Inputs, out: Any, rows: Sequence[int]) -> None:
    """Compares rows of `out`, int32 [T, top_k] on the GPU, with the oracle in the arithmetic that "auto" stands for.

    Raises
    ------
    Mismatch
        At the first row that differs in a bit.
    """
    import torch

    from . import default_arithmetic

    def to_host(tensor: Any) -> np.ndarray:
        return (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor).cpu().numpy()

    shape = inputs.shape
    for row in rows:
        request, index = divmod(row, shape.new_tokens)
        visible = shape.cached + index + 1
        blocks = inputs.table[request, :-(-visible // PAGE_SIZE)].long()
        batch = token_batch(to_host(inputs.q[row]), to_host(inputs.q_s[row]), to_host(inputs.pages[blocks]), visible)
        expected = batch.select(reference.mla_indexer_ragged_float8_paged, arithmetic=default_arithmetic(FP8))
        difference = first_difference(expected[0], to_host(out[row]))
        if difference:
            raise Mismatch(f"{shape.name}, row {row}, {difference}")


# --------------------------------------------------------------------------------------------------------- what is timed


def prepare(inputs: Inputs) -> Callable[[], Any]:
    """The whole operator on a plan, indices only: a function that launches it and returns its output, int32 [T, top_k]."""
    import torch

    from . import IndexerPlan
    shape, arguments = inputs.shape, inputs.arguments()
    plan = IndexerPlan(max_tokens=shape.num_tokens, max_requests=shape.num_requests, max_candidates=shape.context, top_k=TOP_K)
    out = torch.empty((shape.num_tokens, TOP_K), dtype=torch.int32, device=DEVICE)
    return lambda: plan(*arguments, out=out)


def deepgemm_scores(inputs: Inputs) -> Callable[[], Any]:
    """DeepGEMM's scores, its metadata included: a function that returns float32 [T, at least the keys of a request].

    What DeepGEMM leaves to others costs it nothing here: in prefill the keys are gathered from their pages beforehand, and columns
    that a token does not see stay as they are (a selection that is told no lengths would need them overwritten).

    Raises
    ------
    Refused
        For more than two tokens per request in decode, and for more than one request in prefill.
    """
    import deep_gemm
    import torch
    shape = inputs.shape
    if shape.kind == "prefill":
        if shape.num_requests != 1:
            raise Refused(f"{shape.num_requests} requests, takes 1")
        pages = inputs.pages.view(-1, PAGE_BYTES)[inputs.table[0].long()]
        keys = pages[:, :KEY_BYTES].reshape(-1, HEAD_DIM).view(torch.float8_e4m3fn)[:shape.context]
        scales = pages[:, KEY_BYTES:].contiguous().view(torch.float32).flatten()[:shape.context]
        starts = torch.zeros_like(inputs.visible)
        return lambda: deep_gemm.fp8_mqa_logits(inputs.q, (keys, scales), inputs.q_s, starts, inputs.visible, False)

    if shape.new_tokens > 2:
        raise Refused(f"{shape.new_tokens} tokens per request, takes 1 or 2")
    q = inputs.q.view(shape.num_requests, shape.new_tokens, shape.num_heads, HEAD_DIM)
    visible = inputs.visible.view(shape.num_requests, shape.new_tokens)
    num_multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count

    def score() -> Any:
        metadata = deep_gemm.get_paged_mqa_logits_metadata(visible, PAGE_SIZE, num_multiprocessors)
        return deep_gemm.fp8_paged_mqa_logits(q, inputs.pages, inputs.q_s, visible, inputs.table, metadata, shape.context, False)

    return score


def whole_rows(scores: Any) -> Any:
    """A matrix of padded rows with the padding: contiguous, so that no selection copies it first."""
    return scores.as_strided((scores.shape[0], scores.stride(0)), (scores.stride(0), 1))


def deepgemm_and_torch(inputs: Inputs) -> Callable[[], Any]:
    """DeepGEMM's scores and torch.topk."""
    import torch
    score = deepgemm_scores(inputs)
    return lambda: torch.topk(whole_rows(score()), TOP_K, dim=-1, sorted=False)


def deepgemm_and_flashinfer(inputs: Inputs) -> Callable[[], Any]:
    """DeepGEMM's scores and FlashInfer's radix top-k in its default, fastest mode: ties in any order."""
    import flashinfer
    import torch
    score = deepgemm_scores(inputs)
    offsets = torch.zeros_like(inputs.visible)
    return lambda: flashinfer.top_k_ragged_transform(whole_rows(score()), offsets, inputs.visible, TOP_K)


def torch_topk(inputs: Inputs) -> Callable[[], Any]:
    """torch.topk alone, on the operator's scores."""
    import torch

    from . import index_scores
    scores = index_scores(*inputs.arguments())
    return lambda: torch.topk(scores, TOP_K, dim=-1, sorted=False)


PEERS = {DEEPGEMM_TORCH: deepgemm_and_torch, DEEPGEMM_FLASHINFER: deepgemm_and_flashinfer, TORCH_TOPK: torch_topk}


# ---------------------------------------------------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Captured:
    """A call as a CUDA graph.

    Attributes
    ----------
    graph : torch.cuda.CUDAGraph
    call : function
        Holds what the graph reads; to be kept as long as it is replayed.
    out : Any
        What the captured call returned: every replay writes it.
    """

    graph: Any
    call: Callable[[], Any]
    out: Any


def capture(call: Callable[[], Any]) -> Captured:
    """Calls twice, which compiles what there is to compile, then captures a call."""
    import torch
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    return Captured(graph, call, out)


def time_call(call: Callable[[], Any]) -> float:
    """Microseconds that the GPU takes for what a function launches."""
    import torch
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def time_host(call: Callable[[], Any], calls: int = 20, rounds: int = 7) -> float:
    """Microseconds that the host takes to launch a function's work: the median of rounds of so many calls on an idle GPU."""
    import torch
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) * 1e6 / calls)
    torch.cuda.synchronize()
    return Timing.of(samples).median_us


def time_interleaved(captured: dict[str, Captured], reps: int) -> dict[str, Timing]:
    """Replays one graph after the other, `reps` times, each with a flushed L2."""
    import torch
    other = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=DEVICE)
    samples: dict[str, list[float]] = {name: [] for name in captured}
    for _ in range(WARM_UPS + reps):
        for name, each in captured.items():
            other.sum()
            samples[name].append(time_call(each.graph.replay))
    return {name: Timing.of(sample[WARM_UPS:]) for name, sample in samples.items()}


def measure(shape: Shape, reps: int, seed: int) -> Result:
    """Compares rows of a shape with the oracle, then times it and its peers.

    Raises
    ------
    Mismatch
        If a row differs from the oracle's.
    """
    import torch
    torch.cuda.empty_cache()                  # what the last shape's graphs held
    inputs = make_inputs(shape, seed)
    captured, missing = {OURS: capture(prepare(inputs))}, {}
    out = captured[OURS].out
    out.fill_(POISON)
    captured[OURS].graph.replay()
    check_rows(inputs, out, sample_rows(shape, seed))
    for name, peer in PEERS.items():
        try:
            captured[name] = capture(peer(inputs))
        except Refused as error:
            missing[name] = f"refused: {error}"
        except Exception as error:            # whatever one that is absent, or another version, raises
            missing[name] = f"not available: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Result(shape, time_interleaved(captured, reps), missing, time_host(captured[OURS].call))


def measure_roofs(reps: int = 10) -> Roofs:
    """What the card reaches in a copy and in an FP8 matrix product of random numbers: medians."""
    import torch

    def median_us(call: Callable[[], Any]) -> float:
        return Timing.of([time_call(call) for _ in range(WARM_UPS + reps)][WARM_UPS:]).median_us

    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    copy = torch.empty_like(source)
    copied = gb_per_s(2 * COPY_BYTES, median_us(lambda: copy.copy_(source)))
    try:
        a, b = (torch.randn((MATMUL_SIZE, MATMUL_SIZE), device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=DEVICE)
        multiplied = median_us(lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16,
                                                        use_fast_accum=True))
    except RuntimeError:                      # a card without FP8
        return Roofs(copied, None)
    return Roofs(copied, tflop_per_s(2 * MATMUL_SIZE**3, multiplied))


# ---------------------------------------------------------------------------------------------------------------- report


HEADER = ("shape", "ours us (p10-p90)", "peer us", "ratio", "rate", "of roof", "target us", "met", "host us", "topk us", "peer")
WIDTHS = (24, 26, 9, 7, 14, 9, 11, 5, 9, 9)


def format_line(cells: Sequence[str]) -> str:
    """A line of the table: the first and the last column begin where their headers do, the others end there."""
    first, *others, last = cells
    return f"{first:{WIDTHS[0]}}{''.join(f'{cell:>{width}}' for cell, width in zip(others, WIDTHS[1:]))}  {last}"


def result_cells(result: Result, roofs: Roofs) -> list[str]:
    """A result's line of the table, a text for each column of `HEADER`."""
    rate, unit = result.rate
    percent = result.percent_of_roof(roofs)
    peer = None if result.peer is None else result.times[result.peer].median_us
    topk = result.times.get(TORCH_TOPK)
    return [result.shape.name, str(result.ours), "-" if peer is None else f"{peer:.1f}",
            "-" if result.ratio is None else f"{result.ratio:.2f}", f"{rate:.0f} {unit}",
            "-" if percent is None else f"{percent:.0f} %", f"{result.shape.target_us:.0f}", "yes" if result.met else "no",
            f"{result.host_us:.1f}", "-" if topk is None else f"{topk.median_us:.1f}",
            result.peer or result.missing[DEEPGEMM_TORCH]]


def missing_lines(results: Sequence[Result]) -> list[str]:
    """Why peers did not run: a line for each peer and reason, with the shapes it holds for."""
    shapes: dict[str, list[str]] = {}
    for result in results:
        for name, reason in result.missing.items():
            shapes.setdefault(f"{name} {reason}", []).append(result.shape.name)
    return [f"{line} ({'all shapes' if len(names) == len(results) else ', '.join(names)})" for line, names in shapes.items()]


def as_json(results: Sequence[Result], roofs: Roofs, environment: dict[str, Any]) -> dict[str, Any]:
    """Everything measured, for `json.dump`; units are in the keys."""
    def of(result: Result) -> dict[str, Any]:
        rate, unit = result.rate
        return {"shape": result.shape.name, **asdict(result.shape), "met": result.met, "peer": result.peer, "ratio": result.ratio,
                unit.lower().replace("/", "_per_"): rate, "percent_of_roof": result.percent_of_roof(roofs),
                "host_us": result.host_us,
                "times": {name: asdict(timing) for name, timing in result.times.items()}, "missing": result.missing}

    return {**environment, "roofs": asdict(roofs), "shapes": [of(result) for result in results]}


def chart(results: Sequence[Result], title: str) -> Any:
    """Bars of medians, ours and the fastest composed peer's, on a logarithmic scale; their ratio beside them.

    Returns
    -------
    matplotlib.figure.Figure
    """
    from matplotlib.figure import Figure
    figure = Figure(figsize=(10, 1.5 + 0.45 * len(results)), layout="constrained")
    axes = figure.subplots()
    with_peer = [i for i, result in enumerate(results) if result.peer]
    peers = {i: results[i].times[str(results[i].peer)].median_us for i in with_peer}
    axes.barh([i - 0.2 for i in range(len(results))], [result.ours.median_us for result in results], 0.4, label=OURS)
    axes.barh([i + 0.2 for i in with_peer], list(peers.values()), 0.4, label="fastest composed peer")
    for i, peer in peers.items():
        axes.annotate(f"{results[i].ratio:.2f}x", (max(peer, results[i].ours.median_us), i), (4, 0), textcoords="offset points",
                      va="center")
    axes.set_yticks(range(len(results)), [result.shape.name for result in results])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.1, y=0.02)
    axes.set_xlabel("microseconds, median (logarithmic)")
    axes.set_title(title)
    axes.legend()
    return figure


def progress_bar(done: int, total: int, doing: str) -> str:
    """How far it is, in a line."""
    return f"[{'#' * (20 * done // total):20}] {done}/{total} {doing}"


def show(line: str) -> None:
    """Puts a line on stderr in place of the last one, where that is a terminal; an empty one clears it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------------------- run


def obstacle(shapes: Sequence[Shape], with_chart: bool) -> str | None:
    """Why these shapes cannot be measured on this machine; None if they can."""
    if not shapes:
        return f"no shape has that name; there are {', '.join(shape.name for shape in SHAPES)}"
    try:
        import torch
    except ImportError:
        return "torch is not installed, and bench needs it"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    if with_chart:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            return "--plot needs matplotlib, which is not installed: install the extra plot"
    return None


def driver_version() -> str:
    """Of the NVIDIA driver, or "not available"."""
    try:
        return subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True,
                              timeout=60, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "not available"


def is_written(path: str, write: Callable[[str], Any]) -> bool:
    """Calls `write` with the path; False, with the reason on stderr, if that fails."""
    try:
        write(path)
    except OSError as error:
        print(f"{path} could not be written: {error.strerror}", file=sys.stderr)
        return False
    return True


def write_json(path: str, contents: dict[str, Any]) -> bool:
    """Writes a report; whether that went well."""
    return is_written(path, lambda path: Path(path).write_text(json.dumps(contents, indent=2) + "\n"))


def run(options: argparse.Namespace, environment: dict[str, Any]) -> int:
    """Measures the shapes that the options name and reports.

    Parameters
    ----------
    options : argparse.Namespace
        `shapes`, `filter`, `reps`, `seed`; `json` and `plot`, paths or None.
    environment : dict
        What the JSON file says of the machine, besides what is added here.

    Returns
    -------
    int
        Exit status: 1 after a mismatch with the oracle, 2 if nothing could be measured or the JSON file not be written.
    """
    shapes = select_shapes(options.shapes, options.filter)
    reason = obstacle(shapes, options.plot is not None)
    if reason:
        print(f"nothing to measure: {reason}")
        return 2
    environment = {**environment, "driver": driver_version(), "seed": options.seed, "reps": options.reps,
                   "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
    roofs = measure_roofs()
    matmul = "not available" if roofs.matmul_tflop_per_s is None else f"{roofs.matmul_tflop_per_s:.0f} TFLOP/s"
    print(f"device  {environment['device']}, driver {environment['driver']}")
    print(f"roofs   copy {roofs.copy_gb_per_s:.0f} GB/s (read and written), FP8 matrix product {matmul}")
    print(f"times   medians of {options.reps} graph replays, L2 flushed; topk is torch.topk alone")
    print(f"\n{format_line(HEADER)}", flush=True)
    results = []
    for done, shape in enumerate(shapes):
        show(progress_bar(done, len(shapes), shape.name))
        try:
            results.append(measure(shape, options.reps, options.seed))
        except Mismatch as error:
            show("")
            print(f"mismatch with the oracle: {error}")
            return 1
        show("")
        print(format_line(result_cells(results[-1], roofs)), flush=True)
    print("\n".join(["", *missing_lines(results)]))
    written = [write_json(options.json, as_json(results, roofs, environment))] if options.json else []
    if options.plot:
        written.append(is_written(options.plot, chart(results, environment["device"]).savefig))
    return 0 if all(written) else 2
