"""`python -m indexer bench`: every figure against hand-worked values, the gate against the oracle, and on a GPU a small shape."""
from __future__ import annotations

import io
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import python

import indexer.__main__ as cli
from indexer import bench, reference
from indexer.batches import make_batch
from indexer.bench import COMPOSED, DEEPGEMM_FLASHINFER, DEEPGEMM_TORCH, OURS, TORCH_TOPK, Mismatch, Result, Roofs, Shape, Timing

ROOFS = Roofs(copy_gb_per_s=4000.0, matmul_tflop_per_s=1250.0)
DECODE = Shape("decode", num_requests=8, new_tokens=2, cached=65534, num_heads=64, target_us=36)
PREFILL = Shape("prefill", num_requests=1, new_tokens=4096, cached=0, num_heads=64, target_us=200)


def result(shape: Shape = DECODE, missing: dict[str, str] | None = None, **medians: float) -> Result:
    """A result with these medians, percentiles 1 below and 2 above; every other peer missing."""
    names = {"ours": OURS, "torch": DEEPGEMM_TORCH, "flashinfer": DEEPGEMM_FLASHINFER, "topk": TORCH_TOPK}
    times = {names[name]: Timing(median, median - 1, median + 2) for name, median in medians.items()}
    reasons = {name: "not available: absent" for name in bench.PEERS if name not in times}
    return Result(shape, times, {**reasons, **(missing or {})}, 21.25)


# ---------------------------------------------------------------------------------------------------------------- shapes


def test_the_shapes_and_their_targets():
    assert {shape.name: shape.target_us for shape in bench.SHAPES} == {
        "decode 64x1 H64 32K": 84, "decode 1x1 H64 128K": 22, "decode 8x1 H64 64K": 33, "decode 128x1 H64 8K": 48,
        "decode 8x2 H64 64K": 36, "decode 8x6 H32 76K": 45, "decode 256x1 H64 4K": 52, "decode 32x1 H32 128K": 160,
        "prefill 4096/0 H64": 200, "prefill 2048/30720 H64": 1050, "prefill 4096/61440 H64": 3950, "prefill 8192/57344 H64": 7600,
        "prefill 4096/61440 H32": 2350, "prefill 1024/130048 H64": 2050}
    assert DECODE in bench.SHAPES
    assert PREFILL in bench.SHAPES
    assert all(shape.context % bench.PAGE_SIZE == 0 for shape in bench.SHAPES)
    assert Shape("decode", 3, 2, 100, 8, 1).name == "decode 3x2 H8 102"


@pytest.mark.parametrize(("kind", "text", "expected"), [
    ("decode", "64K", ["decode 8x1 H64 64K", "decode 8x2 H64 64K"]),
    ("prefill", "h32", ["prefill 4096/61440 H32"]),
    ("all", "H32", ["decode 8x6 H32 76K", "decode 32x1 H32 128K", "prefill 4096/61440 H32"]),
    ("all", "", [shape.name for shape in bench.SHAPES]),
    ("decode", "prefill", [])])
def test_shapes_are_selected_by_kind_and_text(kind: str, text: str, expected: list[str]):
    assert [shape.name for shape in bench.select_shapes(kind, text)] == expected


def test_counts_of_a_decode_shape():
    assert (DECODE.num_tokens, DECODE.context) == (16, 65536)
    assert DECODE.num_pairs == 8 * (65535 + 65536)
    assert DECODE.num_operations == 2 * 64 * 128 * 1_048_568
    assert DECODE.num_key_bytes == 8 * 65536 * 132


def test_counts_of_a_prefill_shape():
    assert (PREFILL.num_tokens, PREFILL.context) == (4096, 4096)
    assert PREFILL.num_pairs == 8_390_656                     # 1 + 2 + ... + 4096
    assert PREFILL.num_operations == 137_472_507_904
    assert Shape("prefill", 2, 3, 10, 1, 1).num_pairs == 2 * (11 + 12 + 13)


# --------------------------------------------------------------------------------------------------------------- figures


def test_a_timing_is_the_median_and_the_percentiles():
    assert Timing.of([11, 1, 10, 2, 9, 3, 8, 4, 7, 5, 6]) == Timing(6.0, 2.0, 10.0)
    assert Timing.of([3.0]) == Timing(3.0, 3.0, 3.0)
    assert str(Timing(12.34, 11.06, 1000.0)) == "12.3 (11.1-1000.0)"


def test_rates():
    assert bench.gb_per_s(4_000_000_000, 1000.0) == 4000.0          # 4 GB in a millisecond
    assert bench.tflop_per_s(2_000_000_000_000, 2000.0) == 1000.0   # 2e12 operations in two


def test_the_rate_is_of_bytes_in_decode_and_of_operations_in_prefill():
    decode, prefill = result(ours=34.603008), result(PREFILL, ours=137.472507904)
    assert decode.rate == (pytest.approx(2000), "GB/s")             # 69,206,016 bytes
    assert decode.percent_of_roof(ROOFS) == pytest.approx(50)
    assert prefill.rate == (pytest.approx(1000), "TFLOP/s")
    assert prefill.percent_of_roof(ROOFS) == pytest.approx(80)
    assert prefill.percent_of_roof(Roofs(4000.0, None)) is None


def test_the_peer_is_the_fastest_composed_one():
    both = result(ours=30, torch=90, flashinfer=60, topk=10)        # a part of the work is no peer
    assert (both.peer, both.ratio) == (DEEPGEMM_FLASHINFER, 2.0)
    assert (result(ours=30, torch=90, topk=10).peer, result(ours=30, torch=90).ratio) == (DEEPGEMM_TORCH, 3.0)
    assert (result(ours=30, topk=10).peer, result(ours=30, topk=10).ratio) == (None, None)


def test_a_target_is_met_up_to_itself():
    assert result(ours=36.0).met
    assert not result(ours=36.01).met


# ------------------------------------------------------------------------------------------------------------------ gate


def test_rows_are_the_first_the_last_and_random_ones_by_cost():
    for shape in bench.SHAPES:
        rows = bench.sample_rows(shape, 5)
        assert rows == sorted(set(rows)) == bench.sample_rows(shape, 5)
        assert {0, shape.num_tokens - 1} <= set(rows) <= set(range(shape.num_tokens))
        assert len(rows) * shape.context <= 3 * 131_072
    assert bench.sample_rows(bench.SHAPES[1], 0) == [0]
    assert len(bench.sample_rows(PREFILL, 0)) == 8
    assert bench.sample_rows(PREFILL, 0) != bench.sample_rows(PREFILL, 1)
    assert bench.sample_rows(Shape("decode", 2, 1, 99, 8, 1), 0) == [0, 1]
    assert bench.sample_rows(Shape("decode", 3, 1, 99, 8, 1), 0) == [0, 1, 2]


def test_a_token_alone_has_the_row_that_it_has_in_its_batch():
    batch = make_batch(np.random.default_rng(0), new_tokens=[2, 3], cached=[70, 2100], num_heads=4, head_dim=16, page_size=32)
    expected = batch.select(reference.mla_indexer_ragged_float8_paged)
    for row, request, visible in ((0, 0, 71), (1, 0, 72), (2, 1, 2101), (4, 1, 2103)):
        pages = batch.fused_pages[batch.lookup_table[request, :-(-visible // 32)]]
        alone = bench.token_batch(batch.q[row].view(np.uint8), batch.q_s[row], pages, visible)
        assert alone.candidates.tolist() == [visible]
        np.testing.assert_array_equal(alone.select(reference.mla_indexer_ragged_float8_paged)[0], expected[row])


def test_the_first_difference_names_the_slot():
    expected = np.array([4, 7, 9, -1], np.int32)
    assert bench.first_difference(expected, expected.copy()) is None
    assert bench.first_difference(expected, np.array([4, 8, 9, 10], np.int32)) == "slot 1: expected 7, got 8"


# ---------------------------------------------------------------------------------------------------------------- report


def test_lines_of_the_table():
    refused = {DEEPGEMM_TORCH: "refused: 6 tokens per request, takes 1 or 2"}
    lines = [bench.format_line(bench.HEADER),
             bench.format_line(bench.result_cells(result(ours=34.603008, torch=90, flashinfer=69.2, topk=10.04), ROOFS)),
             bench.format_line(bench.result_cells(result(PREFILL, refused, ours=274.945015808), Roofs(4000.0, None)))]
    assert lines == [
        "shape                            ours us (p10-p90)  peer us  ratio          rate  of roof  target us  met  host us"
        "  topk us  peer",
        "decode 8x2 H64 64K                34.6 (33.6-36.6)     69.2   2.00     2000 GB/s     50 %         36  yes     21.2"
        "     10.0  DeepGEMM + FlashInfer",
        "prefill 4096/0 H64             274.9 (273.9-276.9)        -      -   500 TFLOP/s        -        200   no     21.2"
        "        -  refused: 6 tokens per request, takes 1 or 2"]


def test_every_shape_fits_its_column():
    for shape in bench.SHAPES:
        cells = bench.result_cells(result(shape, ours=12345.6, torch=12345.6, topk=12345.6), ROOFS)
        assert all(len(cell) < width for cell, width in zip(cells, bench.WIDTHS)), cells


def test_missing_peers_are_named_once_for_each_reason():
    absent, refused = "not available: absent", "refused: 6 tokens"
    assert bench.missing_lines([result(ours=1, torch=2, topk=2), result(PREFILL, {DEEPGEMM_TORCH: refused}, ours=1, topk=2)]) == [
        f"DeepGEMM + FlashInfer {absent} (all shapes)", f"DeepGEMM + torch.topk {refused} (prefill 4096/0 H64)"]
    assert bench.missing_lines([result(ours=1, torch=2, flashinfer=3, topk=2)]) == []


def test_json_holds_everything_with_units_in_its_keys():
    found = bench.as_json([result(ours=34.603008, torch=69.206016, topk=10.0), result(PREFILL, ours=137.472507904)], ROOFS,
                          {"device": "a card", "seed": 3})
    assert json.loads(json.dumps(found)) == found
    decode, prefill = found.pop("shapes")
    assert found == {"device": "a card", "seed": 3, "roofs": {"copy_gb_per_s": 4000.0, "matmul_tflop_per_s": 1250.0}}
    assert decode == {
        "shape": "decode 8x2 H64 64K", "kind": "decode", "num_requests": 8, "new_tokens": 2, "cached": 65534, "num_heads": 64,
        "target_us": 36, "met": True, "peer": DEEPGEMM_TORCH, "ratio": pytest.approx(2), "gb_per_s": pytest.approx(2000),
        "percent_of_roof": pytest.approx(50), "host_us": 21.25, "missing": {DEEPGEMM_FLASHINFER: "not available: absent"},
        "times": {OURS: {"median_us": 34.603008, "p10_us": 33.603008, "p90_us": 36.603008},
                  DEEPGEMM_TORCH: {"median_us": 69.206016, "p10_us": 68.206016, "p90_us": 71.206016},
                  TORCH_TOPK: {"median_us": 10.0, "p10_us": 9.0, "p90_us": 12.0}}}
    assert (prefill["peer"], prefill["ratio"], prefill["tflop_per_s"]) == (None, None, pytest.approx(1000))
    assert "gb_per_s" not in prefill


def test_the_chart_has_a_bar_for_each_time_and_the_ratios(tmp_path: Path):
    pytest.importorskip("matplotlib")
    figure = bench.chart([result(ours=30, torch=90, flashinfer=60), result(PREFILL, ours=200)], "a card")
    axes, = figure.axes
    assert [[bar.get_width() for bar in bars] for bars in axes.containers] == [[30, 200], [60]]
    assert [text.get_text() for text in axes.texts] == ["2.00x"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [DECODE.name, PREFILL.name]
    assert (axes.get_xscale(), axes.get_title()) == ("log", "a card")
    figure.savefig(tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("on_terminal", [False, True])
def test_progress_is_shown_on_a_terminal_only(on_terminal: bool, monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: on_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    bench.show(bench.progress_bar(7, 14, "decode"))
    assert stream.getvalue() == ("\r\x1b[K[##########          ] 7/14 decode" if on_terminal else "")


# ------------------------------------------------------------------------------------------------------------- whole runs


def fake_torch(available: bool) -> types.SimpleNamespace:
    return types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: available), __version__="2.0")


def test_what_stands_in_the_way(monkeypatch: pytest.MonkeyPatch):
    assert str(bench.obstacle([], False)).startswith("no shape has that name; there are decode 64x1 H64 32K, ")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert bench.obstacle([DECODE], False) == "torch is not installed, and bench needs it"
    monkeypatch.setitem(sys.modules, "torch", fake_torch(available=False))
    assert bench.obstacle([DECODE], False) == "torch 2.0 sees no GPU"
    monkeypatch.setitem(sys.modules, "torch", fake_torch(available=True))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench.obstacle([DECODE], True) == "--plot needs matplotlib, which is not installed: install the extra plot"
    assert bench.obstacle([DECODE], False) is None


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU that there is not; what `measure` was called with, and what it raises under "error"."""
    seen: dict[str, Any] = {"calls": [], "error": None}

    def measure(shape: Shape, reps: int, seed: int) -> Result:
        seen["calls"].append((shape.name, reps, seed))
        if seen["error"]:
            raise seen["error"]
        return result(shape, ours=20, torch=40, topk=10)

    monkeypatch.setitem(sys.modules, "torch", fake_torch(available=True))
    for name, value in (("measure", measure), ("measure_roofs", lambda: ROOFS), ("driver_version", lambda: "580.1")):
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(cli, "find_target", lambda: cli.Target("gpu", "a card"))
    monkeypatch.setattr(cli, "auto_arithmetic", lambda target, fp8_dtype: "wgmma")
    return seen


def test_bench_prints_the_table_and_writes_the_file(planted: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "bench.json"
    assert cli.main(["bench", "--filter", "64K", "--reps", "7", "--seed", "3", "--json", str(path)]) == 0
    assert planted["calls"] == [("decode 8x1 H64 64K", 7, 3), ("decode 8x2 H64 64K", 7, 3)]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "device  a card, driver 580.1"
    assert lines[1] == "roofs   copy 4000 GB/s (read and written), FP8 matrix product 1250 TFLOP/s"
    assert lines[4] == bench.format_line(bench.HEADER)
    assert [line[:18] for line in lines[5:7]] == ["decode 8x1 H64 64K", "decode 8x2 H64 64K"]
    assert lines[-1] == "DeepGEMM + FlashInfer not available: absent (all shapes)"
    found = json.loads(path.read_text())
    assert [shape["shape"] for shape in found["shapes"]] == ["decode 8x1 H64 64K", "decode 8x2 H64 64K"]
    expected = {"device": "a card", "driver": "580.1", "arithmetic": "wgmma", "seed": 3, "reps": 7}
    assert {name: found[name] for name in expected} == expected
    assert found["versions"]["numpy"] == np.__version__
    assert {"torch", "numba-cuda", "CUDA driver", "indexer"} <= set(found["versions"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["date"])


@pytest.mark.usefixtures("planted")
def test_a_report_of_bench_that_cannot_be_written_in_the_end_is_no_mismatch(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "--filter", "64K", "--json", "/dev/full"]) == 2
    text = capsys.readouterr()
    assert text.out.splitlines()[-1] == "DeepGEMM + FlashInfer not available: absent (all shapes)"
    assert text.err.splitlines()[-1] == "/dev/full could not be written: No space left on device"


@pytest.mark.usefixtures("planted")
def test_a_chart_that_cannot_be_written_costs_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]):
    class Full:
        def savefig(self, path: str) -> None:
            raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(bench, "chart", lambda *_: Full())
    chart, report = tmp_path / "bench.png", tmp_path / "bench.json"
    assert cli.main(["bench", "--filter", "64K", "--plot", str(chart), "--json", str(report)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"{chart} could not be written: No space left on device"
    assert json.loads(report.read_text())["shapes"]


def test_bench_draws_the_chart(planted: dict[str, Any], tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.png"
    assert cli.main(["bench", "--shapes", "prefill", "--plot", str(path)]) == 0
    assert len(planted["calls"]) == 6
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_mismatch_ends_bench_with_1(planted: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    planted["error"] = Mismatch("some shape, row 3, slot 1: expected 7, got 8")
    path = tmp_path / "bench.json"
    assert cli.main(["bench", "--json", str(path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "mismatch with the oracle: some shape, row 3, slot 1: expected 7, got 8"
    assert len(planted["calls"]) == 1
    assert not path.exists()


def test_bench_of_no_shape_exits_with_2(planted: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "--filter", "no such shape"]) == 2
    assert capsys.readouterr().out.startswith("nothing to measure: no shape has that name; there are ")
    assert planted["calls"] == []


def test_without_a_gpu_bench_exits_with_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(cli, "find_target", lambda: cli.Target("none", "no driver"))
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().out == "nothing to measure: no GPU (no driver)\n"


def test_help_needs_neither_torch_nor_a_gpu():
    code = "import sys; sys.modules.update(torch=None, numba=None, matplotlib=None); from indexer.__main__ import main; main()"
    done = python("-c", code, "bench", "--help")
    assert done.returncode == 0, done.stderr
    assert "--plot FILE.png" in done.stdout


@pytest.mark.parametrize("arguments", [["--shapes", "both"], ["--reps", "0"], ["--seed", "-1"], ["--json", "/no/such/x.json"]])
def test_bad_arguments_of_bench_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *arguments])
    assert stopped.value.code == 2
    assert "usage: " in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------- on a GPU


SMALL = Shape("decode", num_requests=2, new_tokens=2, cached=4094, num_heads=64, target_us=1e9)


@pytest.mark.gpu
@pytest.mark.kernels
def test_a_small_shape_agrees_and_is_timed():
    pytest.importorskip("torch")
    measured = bench.measure(SMALL, reps=3, seed=0)
    assert {OURS, TORCH_TOPK} <= set(measured.times)
    assert {*measured.times, *measured.missing} == {OURS, *COMPOSED, TORCH_TOPK}
    for timing in measured.times.values():
        assert 0 < timing.p10_us <= timing.median_us <= timing.p90_us


@pytest.mark.gpu
@pytest.mark.kernels
def test_what_is_replayed_is_what_is_compared(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    prepare = bench.prepare

    def prepare_wrong(inputs: bench.Inputs) -> Callable[[], Any]:
        call = prepare(inputs)

        def wrong() -> Any:
            out = call()
            out[:, 7] += 1
            return out

        return wrong

    monkeypatch.setattr(bench, "prepare", prepare_wrong)
    with pytest.raises(Mismatch, match=r"decode 2x2 H64 4K, row 0, slot 7: expected \d+, got \d+"):
        bench.measure(SMALL, reps=3, seed=0)


@pytest.mark.gpu
def test_the_roofs_are_measured():
    pytest.importorskip("torch")
    roofs = bench.measure_roofs(reps=3)
    assert roofs.copy_gb_per_s > 0
    assert roofs.matmul_tflop_per_s is None or roofs.matmul_tflop_per_s > 0
