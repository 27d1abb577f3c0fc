"""Command line: ``python -m indexer [demo | check | bench | info]``.

`demo` runs the operator once at DeepSeek-V3.2's dimensions, `check` compares kernels and oracle bit for bit on random ragged
batches, `bench` times the operator next to its peers, `info` says what the kernels would run on. numba is imported inside functions
only, and first behind a guard: `demo` and `info` work on a machine without a GPU, and on one whose driver or numba-cuda is broken.
"""
from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, reference
from . import bench as benchmark
from .batches import Batch, make_batch
from .fuzz import INPUTS, compare, draw, first_difference, one_line
from .problem import FP8_DTYPES

# What the oracle scores in a few seconds on two cores, in (token, key) pairs of 64 heads x 128.
ORACLE_PAIRS = {"exact": 5_000_000, "wgmma": 600_000}
BATCHES = 100                                 # of `check`, unless it is told how many or how long
PACKAGES = ("numpy", "ml_dtypes", "numba", "numba-cuda", "cuda-bindings")
PEER_PACKAGES = ("torch", "deep-gemm", "tokenspeed-deepgemm", "flashinfer-python")


# ---------------------------------------------------------------------------------------------------------------- target


@dataclass(frozen=True)
class Target:
    """What the kernels can run on.

    Attributes
    ----------
    kind : {"gpu", "simulator", "none"}
    description : str
        One line: the current device's name and compute capability; for "none", why there is nothing.
    """

    kind: str
    description: str


def find_target() -> Target:
    """The current device, numba's simulator, or the reason why there is neither. Never raises.

    A device counts once it has run an empty kernel: an old driver, or a compiler that does not match it, shows only there.
    """
    try:
        from numba import cuda
        from numba.cuda import types

        from . import device
    except Exception as error:                # whatever a broken installation raises
        return Target("none", f"numba-cuda cannot be imported: {one_line(error)}")
    if device.SIMULATED:
        return Target("simulator", "numba's CUDA simulator")
    try:
        available = device.is_available()
        gpu = cuda.get_current_device()       # without a driver, its error is the reason
    except Exception as error:
        return Target("none", one_line(error))
    if not available:
        return Target("none", "NVVM is missing: install the extra cu12 or cu13")
    name = f"{gpu.name}, compute capability {_dotted(gpu.compute_capability)}"
    if tuple(gpu.compute_capability) < device.OLDEST_CAPABILITY:
        return Target("none", f"{name}: the kernels need {_dotted(device.OLDEST_CAPABILITY)} or newer")
    try:
        device.Kernel(lambda _: None, (types.int32,), 32).launch(1, 0, 0)
        cuda.synchronize()
    except Exception as error:
        return Target("none", f"{name}: {one_line(error)}")
    return Target("gpu", name)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def auto_arithmetic(target: Target, fp8_dtype: str) -> str:
    """What arithmetic "auto" stands for on the target; "exact" where there is none."""
    if target.kind == "none":
        return "exact"
    from . import default_arithmetic
    return default_arithmetic(fp8_dtype)


def to_device(array: np.ndarray) -> Any:
    """A numba device array with the contents of a host array, FP8 as uint8: array interfaces have no FP8."""
    from numba import cuda
    return cuda.to_device(array.view(np.uint8) if array.dtype in FP8_DTYPES.values() else array)


# ------------------------------------------------------------------------------------------------------------------ demo


def demo(args: argparse.Namespace) -> int:
    """One ragged batch on the GPU, a sample of it compared with the oracle; the oracle alone where there is no GPU.

    Returns
    -------
    int
        Exit status: 1 if kernel and oracle differ.
    """
    target = find_target()
    on_gpu = target.kind == "gpu"
    arithmetic = auto_arithmetic(target, "float8_e4m3fn") if on_gpu else "exact"
    batch = demo_batch(large=on_gpu)
    print(f"device      {target.description if on_gpu else 'no GPU: the oracle, NumPy on the CPU'}")
    if not on_gpu:
        print(f"reason      {target.description}{', too slow for this' if target.kind == 'simulator' else ''}")
    print(f"arithmetic  {arithmetic}")
    print("\n".join(describe_batch(batch)))

    out, seconds, how = time_on_gpu(batch) if on_gpu else time_oracle(batch, arithmetic)
    _, num_heads, head_dim = batch.q.shape
    pairs = int(batch.candidates.sum())       # of rows with at most top_k candidates too, which need no scores
    print(f"time        {seconds * 1e3:.3f} ms, {how}")
    print(f"rate        {pairs / seconds:.3g} scored pairs/s, {2 * num_heads * head_dim * pairs / seconds / 1e12:.3g} TFLOP/s "
          f"({pairs} candidates)")
    print("\n".join(["", *format_rows(batch, out), ""]))

    if not on_gpu:
        print("nothing to compare: the oracle is the reference")
        return 0
    requests = sample_requests(batch, ORACLE_PAIRS[arithmetic])
    sample, rows = batch.take(requests), batch.rows(requests)
    expected = sample.select(reference.mla_indexer_ragged_float8_paged, arithmetic=arithmetic)
    differences = first_difference("indices", expected, out[rows])
    compared = f"{len(rows)} rows of requests {' '.join(map(str, requests))}"
    print("\n".join([f"kernel and oracle differ in {compared}", *differences] if differences
                    else [f"kernel and oracle agree in {compared}"]))
    return 1 if differences else 0


def demo_batch(*, large: bool) -> Batch:
    """Prefill chunks, decode steps and an empty request at DeepSeek-V3.2's dimensions: 64 heads x 128, pages of 64, top_k 2048."""
    if large:
        new_tokens = [1024, 512, 1, 1, 0, 256, 1, 1]
        cached = [0, 7680, 32767, 16384, 9000, 30000, 4095, 100]
    else:
        new_tokens = [16, 64, 1, 0, 1]
        cached = [1000, 5000, 16383, 9000, 4095]
    return make_batch(np.random.default_rng(0), new_tokens=new_tokens, cached=cached)


def describe_batch(batch: Batch) -> list[str]:
    """Its shapes and lengths, a line each."""
    num_tokens, num_heads, head_dim = batch.q.shape
    num_blocks, _, _, page_size, _, _ = batch.blocks.shape
    return [f"queries     {num_tokens} tokens x {num_heads} heads x {head_dim}, {batch.fp8_dtype}",
            f"keys        {num_blocks} pages of {page_size} x {head_dim}",
            f"requests    {len(batch.new_tokens)}: new tokens {' '.join(map(str, batch.new_tokens))}, "
            f"cached {' '.join(map(str, batch.cache_lengths))}",
            f"top_k       {batch.top_k}, {batch.mask} mask"]


def time_on_gpu(batch: Batch, num_calls: int = 5) -> tuple[np.ndarray, float, str]:
    """The GPU function on device arrays: positions [T, K], seconds, and how they were measured."""
    from numba import cuda

    from . import mla_indexer_ragged_float8_paged
    device_batch = replace(batch, **{name: to_device(getattr(batch, name)) for name in INPUTS})
    out = device_batch.select(mla_indexer_ragged_float8_paged)            # compiles the kernels
    seconds = []
    for _ in range(num_calls):
        cuda.synchronize()
        start = time.perf_counter()
        out = device_batch.select(mla_indexer_ragged_float8_paged)
        cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return out.copy_to_host(), statistics.median(seconds), f"median of {num_calls} calls after a warm-up"


def time_oracle(batch: Batch, arithmetic: str) -> tuple[np.ndarray, float, str]:
    """The oracle: as `time_on_gpu`."""
    start = time.perf_counter()
    out = batch.select(reference.mla_indexer_ragged_float8_paged, arithmetic=arithmetic)
    return out, time.perf_counter() - start, "one call of the oracle"


def format_rows(batch: Batch, out: np.ndarray, num_shown: int = 3) -> list[str]:
    """The last row of every request, under a header: request, token, candidates, number of -1, first and last positions."""
    lines = ["request  token  candidates  number of -1  positions"]
    for b, new_tokens in enumerate(batch.new_tokens):
        if new_tokens:
            row = int(batch.input_row_offsets[b + 1]) - 1
            selected = out[row][out[row] >= 0]
            shown = [str(position) for position in selected]
            if len(shown) > 2 * num_shown:
                shown[num_shown:-num_shown] = ["..."]
            lines.append(f"{b:7}  {new_tokens - 1:5}  {batch.candidates[row]:10}  {np.sum(out[row] == -1):12}  "
                         f"{' '.join(shown) or '-'}")
    return lines


def sample_requests(batch: Batch, max_pairs: int) -> list[int]:
    """As many requests with query tokens as have `max_pairs` candidates together, the cheapest first, at least one; ascending."""
    owner = np.repeat(np.arange(len(batch.new_tokens)), batch.new_tokens)
    pairs = np.bincount(owner, weights=batch.candidates, minlength=len(batch.new_tokens))
    cheapest_first = [int(b) for b in np.argsort(pairs, kind="stable") if batch.new_tokens[b]]
    count = int(np.searchsorted(np.cumsum(pairs[cheapest_first]), max_pairs, side="right"))
    return sorted(cheapest_first[:max(1, count)])


# ----------------------------------------------------------------------------------------------------------------- check


def check(args: argparse.Namespace) -> int:
    """GPU functions against the oracle on random ragged batches, bit for bit, every array watched.

    Batch i depends on seed and i alone, and so does the way in which it is called: see `indexer.fuzz`. With `--hours` the batches
    go on until the time is up, at least one.

    Returns
    -------
    int
        Exit status: 1 after a mismatch, 130 if it was interrupted, 2 if nothing could be compared or the file not be written.
    """
    target = find_target()
    if target.kind == "none":
        print(f"nothing to compare: no GPU ({target.description}); NUMBA_ENABLE_CUDASIM=1 runs the kernels in numba's simulator")
        return 2
    given = {name: getattr(args, name) for name in ("max_new", "max_cached", "max_requests") if getattr(args, name) is not None}
    options = {"seed": args.seed, **given, **({} if args.arithmetic == "auto" else {"arithmetic": args.arithmetic})}
    reproduce = "NUMBA_ENABLE_CUDASIM=1 " if target.kind == "simulator" else ""
    reproduce += " ".join(["python -m indexer check", *(f"--{name.replace('_', '-')} {value}" for name, value in options.items())])
    counts = dict.fromkeys(("batches", "requests", "query rows", "scored pairs", "calls", "mismatches"), 0)
    failures: list[dict[str, Any]] = []
    print(f"device        {target.description}")
    progress = Progress(args.batches or BATCHES, None if args.hours is None else 3600 * args.hours)
    interrupted = False
    try:
        for i in itertools.count(args.first):
            batch, way = draw(args.seed, i, on_gpu=target.kind == "gpu", arithmetic=args.arithmetic, **given)
            differences = compare(batch, way)
            counts["batches"] += 1
            counts["requests"] += len(batch.new_tokens)
            counts["query rows"] += batch.num_tokens
            counts["scored pairs"] += int(batch.candidates.sum())
            counts["calls"] += way.num_calls
            if differences:
                counts["mismatches"] += 1
                failures.append({"reproduce": f"{reproduce} --first {i} --batches 1", "differences": differences})
                progress.clear()
                print(f"mismatch in batch {i}: {failures[-1]['reproduce']}")
                print("\n".join(f"  {line}" for line in differences), flush=True)
            if progress.update(counts["batches"], counts["mismatches"]):
                break
    except KeyboardInterrupt:                 # the usual end of a long run
        interrupted = True
    progress.clear()
    summary = {**counts, "seconds": round(progress.elapsed, 1), "seed": args.seed}
    for name, value in summary.items():
        print(f"{name:12}  {value}")
    is_written = True
    if args.json:
        report = {"device": target.description, **{name.replace(" ", "_"): value for name, value in summary.items()},
                  "first": args.first, "interrupted": interrupted, "failures": failures}
        is_written = benchmark.write_json(args.json, report)
    if counts["mismatches"]:
        return 1
    if interrupted:
        return 130
    if not is_written:
        return 2
    if not counts["query rows"]:
        print("nothing was compared: no query rows were drawn")
        return 2
    return 0


class Progress:
    """Progress on stderr: a bar that is redrawn in place on a terminal, at most 20 plain lines elsewhere.

    Parameters
    ----------
    total : int
        Batches to come, at least 1.
    seconds : float, optional
        Batches come for so long instead, however many.
    """

    def __init__(self, total: int, seconds: float | None = None) -> None:
        self.total = total
        self.seconds = seconds
        self.start = time.perf_counter()
        self.on_terminal = sys.stderr.isatty()
        self.twentieths = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    def update(self, done: int, mismatches: int) -> bool:
        """Shows how far it is; True once no batch is to come."""
        at, end = done, self.total
        if self.seconds is not None:              # whole nanoseconds, at most the end
            end = max(1, int(1e9 * self.seconds))
            at = min(int(1e9 * self.elapsed), end)
        twentieths = 20 * at // end
        of_total = f"/{self.total}" if self.seconds is None else ""
        text = f"{100 * at // end:3} %  {done}{of_total} batches  {mismatches} mismatches  {self.elapsed:.1f} s"
        if self.on_terminal:
            print(f"\r[{'#' * twentieths:20}] {text}", end="", file=sys.stderr, flush=True)
        elif twentieths > self.twentieths:
            print(text, file=sys.stderr, flush=True)
        self.twentieths = twentieths
        return at >= end

    def clear(self) -> None:
        """Removes the bar, so that something else can be printed."""
        if self.on_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------------------- bench


def bench(args: argparse.Namespace) -> int:
    """The operator and its peers on the shapes of `indexer.bench`: rows compared with the oracle, then times.

    Returns
    -------
    int
        Exit status: 1 after a mismatch, 2 if nothing could be measured or the file not be written.
    """
    target = find_target()
    if target.kind != "gpu":
        print(f"nothing to measure: no GPU ({target.description})")
        return 2
    versions = {"indexer": __version__, **{name: version(name) for name in (*PACKAGES, *PEER_PACKAGES)}, **dict(cuda_versions())}
    return benchmark.run(args, {"device": target.description, "arithmetic": auto_arithmetic(target, benchmark.FP8),
                                "versions": versions})


# ------------------------------------------------------------------------------------------------------------------ info


def info(args: argparse.Namespace) -> int:
    """Versions, devices and what arithmetic "auto" takes. Returns the exit status, 0."""
    target = find_target()
    lines = [("indexer", __version__), ("python", platform.python_version()), *((name, version(name)) for name in PACKAGES)]
    if target.kind != "simulator":
        lines += cuda_versions()
    lines.append(("simulator", "yes (NUMBA_ENABLE_CUDASIM)" if target.kind == "simulator" else "no"))
    lines += [(f"device {i}", text) for i, text in enumerate(devices())] if target.kind == "gpu" else []
    if target.kind == "none":
        lines.append(("device", f"none: {target.description}"))
    lines += [(f"auto, {name}", auto_arithmetic(target, name)) for name in FP8_DTYPES]
    for label, text in lines:
        print(f"{label:22}  {text}")
    return 0


def version(package: str) -> str:
    """Installed version of a distribution, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def cuda_versions() -> list[tuple[str, str]]:
    """CUDA versions of the driver and the runtime, those that can be asked."""
    def driver() -> tuple[int, ...]:
        from numba.cuda.cudadrv.driver import driver
        return driver.get_version()

    def runtime() -> tuple[int, ...]:
        from numba import cuda
        return cuda.runtime.get_version()

    found = []
    for name, ask in (("CUDA driver", driver), ("CUDA runtime", runtime)):
        try:
            text = _dotted(ask())
        except Exception:                     # no driver, or no numba: find_target() has the reason
            text = "not available"
        found.append((name, text))
    return found


def devices() -> Iterator[str]:
    """A line for each GPU: name, compute capability, multiprocessors, memory."""
    from cuda.bindings import driver
    from numba import cuda
    for gpu in cuda.gpus:
        error, num_bytes = driver.cuDeviceTotalMem(gpu.id)
        memory = "memory unknown" if int(error) else f"{num_bytes / 2**30:.1f} GiB"
        yield (f"{gpu.name}, compute capability {_dotted(gpu.compute_capability)}, {gpu.MULTIPROCESSOR_COUNT} multiprocessors, "
               f"{memory}")


# ---------------------------------------------------------------------------------------------------------- command line


def _at_least(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if not minimum <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(f"must be in [{minimum}, 2**31), got {text}")
        return int(text)
    return integer


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0 < hours < 2**31:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and below 2**31, got {text}")
    return hours


def _new_file(text: str) -> str:
    """A path that can be written now, before hours of work; a file that is there stays as it is."""
    path = Path(text)
    try:
        if not text or path.is_dir() or not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"must name a file in a folder that exists, got {text!r}")
        was_there = path.exists()
        path.open("a").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"must name a file that can be written, got {text!r} ({error.strerror})") from None
    return text


def _new_png(text: str) -> str:
    if Path(text).suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"must end in .png, got {text!r}")
    return _new_file(text)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's own) and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m indexer", description="The FP8 lightning indexer over a paged key cache.")
    parser.set_defaults(run=demo)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands")

    def command(run: Callable[[argparse.Namespace], int], text: str, more: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(run.__name__, help=text, description=f"{more[0].upper()}{more[1:]}")
        added.set_defaults(run=run)
        return added

    command(demo, "one ragged batch at DeepSeek-V3.2's dimensions (the default)",
            "one ragged batch at DeepSeek-V3.2's dimensions, a sample of its rows compared with the oracle; without a GPU, a "
            "smaller one by the oracle alone. Exit status: 1 after a mismatch.")
    checks = command(check, "random batches: GPU functions against the oracle, bit for bit",
                     "random ragged batches, between guard zones: GPU functions against the oracle, bit for bit. A mismatch is "
                     "printed with the command that repeats it. Exit status: 1 after a mismatch, 130 if interrupted, 2 if nothing "
                     "could be compared or the file not be written.")
    extent = checks.add_mutually_exclusive_group()
    extent.add_argument("--batches", type=_at_least(1), help=f"how many (default {BATCHES})")
    extent.add_argument("--hours", type=_hours, help="draws batches for so long instead, as in 0.5")
    checks.add_argument("--seed", type=_at_least(0), default=0, help="batch i is drawn from (seed, i) (default 0)")
    checks.add_argument("--first", type=_at_least(0), default=0, help="the first i (default 0)")
    checks.add_argument("--arithmetic", choices=("auto", "exact"), default="auto", help="of the GPU functions (default auto)")
    checks.add_argument("--max-new", type=_at_least(0), help="at most so many new tokens per request")
    checks.add_argument("--max-cached", type=_at_least(0), help="at most so many cached tokens per request")
    checks.add_argument("--max-requests", type=_at_least(1), help="at most so many requests per batch")
    checks.add_argument("--json", metavar="FILE", type=_new_file, help="writes what was counted, and the mismatches")
    times = command(bench, "times of the operator and its peers on a GPU, with torch",
                    "times of the operator and its peers on a GPU, with torch; before, sampled rows are compared with the oracle. "
                    "Exit status: 1 after a mismatch, 2 if nothing could be measured or the file not be written.")
    times.add_argument("--shapes", choices=("decode", "prefill", "all"), default="all", help="which (default all)")
    times.add_argument("--filter", metavar="TEXT", default="", help="only shapes with this in their names, as in H32 or 64x1")
    times.add_argument("--reps", type=_at_least(1), default=30, help="timed replays of each (default 30)")
    times.add_argument("--seed", type=_at_least(0), default=0, help="of the inputs and of the rows compared (default 0)")
    times.add_argument("--json", metavar="FILE", type=_new_file, help="writes everything measured")
    times.add_argument("--plot", metavar="FILE.png", type=_new_png, help="draws the medians (extra plot)")
    command(info, "versions, devices, arithmetic", "versions, devices, and what arithmetic \"auto\" stands for.")
    args = parser.parse_args(argv)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
