"""The command line: what it prints is right, and every exit status is reached."""
from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import indexer
import indexer.__main__ as cli
from indexer import device, reference
from indexer.batches import Batch, make_batch
from indexer.fuzz import Way, draw

ROOT = Path(__file__).resolve().parent.parent
HAS_GPU = device.is_available() and not device.SIMULATED
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")


def python(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in the repository, outside the simulator unless `environment` says so."""
    inherited = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    return subprocess.run([sys.executable, *args], cwd=ROOT, env={**inherited, **environment}, capture_output=True, text=True,
                          timeout=120)


def labelled(text: str) -> dict[str, str]:
    """The lines ``label  value`` of an output."""
    return dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in text.splitlines() if re.search(r"\S\s{2,}\S", line))


@pytest.fixture
def broken_numba(tmp_path: Path) -> dict[str, str]:
    """Environment in which numba raises at import: a machine without a usable GPU, wherever the test runs."""
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise RuntimeError('numba is broken\\non purpose')\n")
    return {"PYTHONPATH": str(tmp_path)}


def tiny_batch(**options: Any) -> Batch:
    """Three requests, the second without tokens, every score a tie: the best keys are the first ones."""
    return make_batch(np.random.default_rng(0), **{"new_tokens": [2, 0, 1], "cached": [13, 5, 0], "num_heads": 2, "head_dim": 4,
                                                   "page_size": 4, "regime": "all-ties", "top_k": 8, **options})


def test_the_readme_names_every_module():
    listed = re.findall(r"^  (\w+\.py)  ", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "indexer").glob("*.py") if path.name != "__init__.py")


# ------------------------------------------------------------------------------------------------------------ whole runs


def test_importing_the_command_line_does_not_import_numba():
    done = python("-c", "import sys, indexer.__main__; print('numba' in sys.modules)")
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr


def test_info_prints_versions_and_arithmetic():
    done = python("-m", "indexer", "info")
    assert done.returncode == 0, done.stderr
    found = labelled(done.stdout)
    assert found["indexer"] == indexer.__version__
    assert found["python"] == platform.python_version()
    for package in ("numpy", "ml_dtypes", "numba", "numba-cuda"):
        assert found[package] == importlib.metadata.version(package)
    assert found["simulator"] == "no"
    for fp8_dtype in ("float8_e4m3fn", "float8_e4m3fnuz"):
        assert found[f"auto, {fp8_dtype}"] == (indexer.default_arithmetic(fp8_dtype) if HAS_GPU else "exact")
    if HAS_GPU:
        assert re.search(r"compute capability \d+\.\d+, \d+ multiprocessors, [\d.]+ GiB", found["device 0"])
    else:
        assert found["device"].startswith("none: ")


def test_info_of_a_package_that_is_not_installed():
    assert cli.version("no-distribution-has-this-name") == "not installed"


def test_without_numba_the_demo_runs_the_oracle_and_prints_its_rows(broken_numba: dict[str, str]):
    done = python("-m", "indexer", **broken_numba)
    assert done.returncode == 0, done.stderr
    found = labelled(done.stdout)
    assert found["device"] == "no GPU: the oracle, NumPy on the CPU"
    assert found["reason"] == "numba-cuda cannot be imported: RuntimeError: numba is broken on purpose"

    batch = cli.demo_batch(large=False)
    scores = reference.index_scores(*batch.arguments())
    printed = re.findall(r"^ +(\d+) +(\d+) +(\d+) +(\d+)  (.*)$", done.stdout, re.MULTILINE)
    assert [int(line[0]) for line in printed] == [0, 1, 2, 4]
    for request, token, candidates, num_unused, positions in printed:
        b = int(request)
        n, c = int(batch.new_tokens[b]), int(batch.cache_lengths[b])
        assert (int(token), int(candidates), int(num_unused)) == (n - 1, c + n, max(0, 2048 - c - n))
        row = scores[int(batch.input_row_offsets[b]) + n - 1, :c + n]
        best = np.sort(np.argsort(-row, kind="stable")[:2048])
        first, last = positions.split(" ... ")
        assert list(map(int, first.split())) == best[:3].tolist()
        assert list(map(int, last.split())) == best[-3:].tolist()


def test_without_numba_check_has_nothing_to_compare_and_info_says_why(broken_numba: dict[str, str]):
    check, info = (python("-m", "indexer", command, **broken_numba) for command in ("check", "info"))
    assert check.returncode == 2, check.stderr
    assert check.stdout.splitlines() == ["nothing to compare: no GPU (numba-cuda cannot be imported: RuntimeError: numba is broken "
                                         "on purpose); NUMBA_ENABLE_CUDASIM=1 runs the kernels in numba's simulator"]
    assert info.returncode == 0, info.stderr
    assert labelled(info.stdout)["device"] == "none: numba-cuda cannot be imported: RuntimeError: numba is broken on purpose"


@pytest.mark.skipif(HAS_GPU or device.SIMULATED, reason="there is something to compare")
def test_without_a_gpu_check_exits_with_2(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["check"]) == 2
    assert capsys.readouterr().out.startswith("nothing to compare: no GPU (")


def test_check_runs_in_the_simulator():
    done = python("-m", "indexer", "check", "--batches", "2", "--seed", "4", NUMBA_ENABLE_CUDASIM="1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = labelled(done.stdout)
    drawn = [draw(4, i, on_gpu=False) for i in range(2)]
    batches = [batch for batch, _ in drawn]
    assert (found["batches"], found["mismatches"], found["seed"]) == ("2", "0", "4")
    assert int(found["calls"]) == sum(way.num_calls for _, way in drawn)
    assert int(found["query rows"]) == sum(batch.num_tokens for batch in batches) > 0
    assert int(found["scored pairs"]) == sum(int(batch.candidates.sum()) for batch in batches) > 0
    assert done.stderr.splitlines()[-1].startswith("100 %  2/2 batches  0 mismatches")


def test_check_for_a_time_runs_in_the_simulator():
    done = python("-m", "indexer", "check", "--hours", "1e-6", "--seed", "4", NUMBA_ENABLE_CUDASIM="1")       # 3.6 ms
    assert done.returncode in (0, 2), done.stdout + done.stderr              # 2: no query rows in the first batches
    found = labelled(done.stdout)
    batches = [draw(4, i, on_gpu=False)[0] for i in range(int(found["batches"]))]
    assert int(found["query rows"]) == sum(batch.num_tokens for batch in batches)
    assert found["mismatches"] == "0"
    assert done.stderr.splitlines()[-1].startswith(f"100 %  {found['batches']} batches  0 mismatches")


def test_device_arrays_in_the_simulator():
    """What `check` and `demo` do with device arrays, metadata included; W is a bound there, wider than the oracle's."""
    done = python("-c", """if True:
        import numpy as np
        from indexer import __main__ as cli, index_scores, reference
        from indexer.fuzz import Way
        from tests.test_cli import tiny_batch
        batch = tiny_batch(new_tokens=[2], cached=[3], top_k=4, regime="gaussian", spare_columns=2)
        print(cli.find_target().kind, batch.score(index_scores, cli.to_device).shape, cli.compare(batch, Way(on_device=True)))
        expected = batch.select(reference.mla_indexer_ragged_float8_paged)
        print(np.array_equal(cli.time_on_gpu(batch, num_calls=1)[0], expected))
        """, NUMBA_ENABLE_CUDASIM="1")
    assert done.stdout.splitlines() == ["simulator (2, 16) []", "True"], done.stderr


@needs_gpu
def test_on_a_gpu_the_demo_agrees_and_check_finds_nothing(capsys: pytest.CaptureFixture[str]):
    assert cli.main([]) == 0
    assert "kernel and oracle agree in " in capsys.readouterr().out
    assert cli.main(["check", "--batches", "12"]) == 0
    found = labelled(capsys.readouterr().out)
    assert (found["batches"], found["mismatches"]) == ("12", "0")


@pytest.mark.parametrize("argv", [["no-such-command"], ["check", "--batches", "0"], ["check", "--seed", "-1"],
                                  ["check", "--batches", "x"], ["check", "--arithmetic", "no-such-arithmetic"],
                                  ["check", "--hours", "0"], ["check", "--hours", "nan"],
                                  ["check", "--hours", "inf"], ["check", "--hours", "x"], ["check", "--hours", "1e300"],
                                  ["check", "--hours", "1", "--batches", "100"], ["check", "--json", "/no folder/x.json"],
                                  ["check", "--json", "/proc/x.json"],                  # no one can write there
                                  ["bench", "--json", "/"], ["bench", "--json", ""], ["bench", "--json", "/no folder/x.json"],
                                  ["bench", "--plot", "x.pdf"], ["bench", "--plot", "bench"]])
def test_bad_arguments_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage: " in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- pieces of it


def test_a_row_is_printed_with_its_first_and_last_positions():
    batch = tiny_batch()
    out = batch.select(reference.mla_indexer_ragged_float8_paged)
    assert cli.format_rows(batch, out) == [
        "request  token  candidates  number of -1  positions",
        "      0      1          15             0  0 1 2 ... 5 6 7",
        "      2      0           1             7  0"]


def test_the_sample_is_the_cheapest_requests_that_fit():
    batch = tiny_batch(new_tokens=[2, 0, 1, 3], cached=[13, 50, 0, 1])        # 14 + 15, none, 1, 2 + 3 + 4 pairs
    assert cli.sample_requests(batch, 100) == [0, 2, 3]
    assert cli.sample_requests(batch, 39) == [0, 2, 3]
    assert cli.sample_requests(batch, 38) == [2, 3]
    assert cli.sample_requests(batch, 9) == [2]
    assert cli.sample_requests(batch, 0) == [2]


def test_requests_alone_have_the_rows_they_have_in_the_batch():
    batch = tiny_batch(new_tokens=[2, 3, 0, 4], cached=[13, 20, 5, 9], regime="gaussian", top_k=3)
    taken, rows = batch.take([1, 3]), batch.rows([1, 3])
    assert rows.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert taken.input_row_offsets.tolist() == [0, 3, 7]
    assert taken.input_row_offsets.dtype == batch.input_row_offsets.dtype
    alone, together = (x.select(reference.mla_indexer_ragged_float8_paged) for x in (taken, batch))
    np.testing.assert_array_equal(alone, together[rows])


def test_the_demos_batches_have_deepseek_dimensions():
    batch = cli.demo_batch(large=False)
    assert batch.q.shape[1:] == (64, 128)
    assert batch.blocks.shape[3] == 64
    assert (batch.top_k, batch.kpool, batch.mask) == (2048, 1, "causal")
    assert 0 in batch.new_tokens
    assert batch.candidates.min() < 2048 < batch.candidates.max()


def test_first_difference_compares_bits():
    zeros = np.zeros((2, 3), np.float32)
    other = zeros.copy()
    other[1, 1:] = -0.0
    assert cli.first_difference("x", zeros, zeros.copy()) == []
    assert cli.first_difference("x", zeros, other) == [
        "x: 2 of 6 entries differ, first row 1, column 1: expected 0.0 (bits 0x00000000), got -0.0 (bits 0x80000000)"]
    assert cli.first_difference("x", zeros, zeros[:, :2]) == ["x: expected float32 [2, 3], got float32 [2, 2]"]
    nan = np.array([[np.nan]], np.float32)
    assert cli.first_difference("x", nan, nan.copy()) == []
    assert len(cli.first_difference("x", nan, np.array([[0x7FFFFFFF]], np.uint32).view(np.float32))) == 1


@pytest.mark.parametrize(("on_terminal", "num_lines", "num_redraws"), [(False, 20, 0), (True, 1, 300)])
def test_progress_is_a_bar_on_a_terminal_and_few_lines_elsewhere(on_terminal: bool, num_lines: int, num_redraws: int,
                                                                 monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: on_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    progress = cli.Progress(300)
    for done in range(1, 301):
        progress.update(done, 7)
    text = stream.getvalue()
    assert len(text.splitlines() if not on_terminal else text.split("\n")) == num_lines
    assert text.count("\r") == num_redraws
    assert "100 %  300/300 batches  7 mismatches" in text
    assert len(text.replace("\r", "\n").splitlines()[-1]) < 80


# ------------------------------------------------------------------------------------------------- planted GPU functions


class Planted:
    """The oracle in the GPU functions' place, with one fault."""

    def __init__(self, fault: str | None) -> None:
        self.fault = fault

    def select(self, *args: Any, arithmetic: str, out: np.ndarray | None = None, out_scores: np.ndarray | None = None,
               **options: Any) -> np.ndarray:
        q, cache = args[0], args[3]
        before = np.empty((len(q), options["top_k"]), np.int32) if out is None else out.copy()
        assert arithmetic in ("auto", "exact")
        out = reference.mla_indexer_ragged_float8_paged(*args, out=out, out_scores=out_scores, **options)
        if out.size:
            if self.fault == "index":
                out[-1, 0] ^= 1
            elif self.fault == "unwritten":
                out[-1, -1] = before[-1, -1]
            elif self.fault == "input":
                cache.lookup_table[-1, -1] = 0
            elif self.fault == "overrun":
                np.lib.stride_tricks.as_strided(out, (out.size + 1,), (4,))[-1] = -1
            elif self.fault == "underrun" and out_scores is not None:
                np.lib.stride_tricks.as_strided(out_scores, (2,), (-4,))[-1] = 0
            elif self.fault == "score" and out_scores is not None:
                out_scores.view(np.uint32)[-1, 0] ^= 1
            elif self.fault == "raises":
                raise ValueError("planted")
        return out

    def score(self, *args: Any, arithmetic: str, **options: Any) -> np.ndarray:
        scores = reference.index_scores(*args, **options)
        if self.fault == "matrix" and scores.size:
            scores.view(np.uint32)[-1, 0] ^= 1
        return scores


FAULTS = {
    "index": r"indices: 1 of 24 entries differ, first row 2, column 0: expected 0 \(bits .*\), got 1 \(bits .*\)",
    "unwritten": r"indices: 1 of 24 entries differ, first row 2, column 7: expected -1 .*, got 2147483647 .*",
    "score": r"out_scores: 1 of 24 entries differ, first row 2, column 0: .*",
    "matrix": r"index_scores: 1 of 45 entries differ, first row 2, column 0: .*",
    "input": r"lookup_table: 4 bytes have changed, the first at offset 56, from 0xff to 0x00",
    "overrun": r"out: 4 bytes around it have changed, the first at offset 96, from 0x7f to 0xff",
    "underrun": r"out_scores: 4 bytes around it have changed, the first at offset -4, from 0x7f to 0x00",
    "raises": r"the GPU function raised ValueError: planted",
}


def plant(monkeypatch: pytest.MonkeyPatch, fault: str | None) -> None:
    for name, function in (("mla_indexer_ragged_float8_paged", Planted(fault).select), ("index_scores", Planted(fault).score),
                           ("default_arithmetic", lambda fp8_dtype: "exact")):
        monkeypatch.setitem(vars(indexer), name, function)
    monkeypatch.setattr(cli, "find_target", lambda: cli.Target("simulator", "planted"))
    monkeypatch.setattr(cli, "draw", draw_for_the_host)


def draw_for_the_host(*args: Any, **options: Any) -> tuple[Batch, Way]:
    """`draw`, without device arrays."""
    batch, way = draw(*args, **options)
    return batch, replace(way, on_device=False, host_metadata=False)


def test_compare_finds_nothing_in_the_oracle_itself(monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch, None)
    assert cli.compare(tiny_batch(), Way()) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_compare_reports_a_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch, fault)
    differences = cli.compare(tiny_batch(), Way())
    assert len(differences) == 1
    assert re.fullmatch(FAULTS[fault], differences[0]), differences[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_check_exits_with_1_and_says_how_to_reproduce(fault: str, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str], tmp_path: Path):
    plant(monkeypatch, fault)
    report = tmp_path / "report.json"
    assert cli.main(["check", "--batches", "20", "--seed", "3", "--max-cached", "30", "--json", str(report)]) == 1
    text = capsys.readouterr().out
    reported = re.findall(r"^mismatch in batch (\d+): NUMBA_ENABLE_CUDASIM=1 python -m indexer (.*)$", text, re.MULTILINE)
    assert len(reported) == int(labelled(text)["mismatches"]) > 0
    written = json.loads(report.read_text())
    assert [failure["reproduce"] for failure in written["failures"]] == [
        f"NUMBA_ENABLE_CUDASIM=1 python -m indexer {command}" for _, command in reported]
    assert (written["batches"], written["mismatches"], written["seed"], written["first"]) == (20, len(reported), 3, 0)
    number, command = reported[-1]
    assert command == f"check --seed 3 --max-cached 30 --first {number} --batches 1"
    of_that_batch = text[text.index(f"mismatch in batch {number}:"):].splitlines()[:2]
    assert cli.main(command.split()) == 1
    assert capsys.readouterr().out.splitlines()[1:3] == of_that_batch


def test_check_exits_with_0_and_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    plant(monkeypatch, None)
    assert cli.main(["check", "--batches", "20", "--first", "5", "--seed", "3", "--max-new", "2"]) == 0
    found = labelled(capsys.readouterr().out)
    drawn = [draw(3, i, on_gpu=False, max_new=2) for i in range(5, 25)]
    batches = [batch for batch, _ in drawn]
    expected = {"batches": 20, "requests": sum(len(batch.cache_lengths) for batch in batches),
                "query rows": sum(batch.num_tokens for batch in batches),
                "scored pairs": sum(int(batch.candidates.sum()) for batch in batches),
                "calls": sum(way.num_calls for _, way in drawn), "mismatches": 0, "seed": 3}
    assert {name: int(found[name]) for name in expected} == expected


class Clock:
    """Time in which a batch takes 90 seconds: it passes with every batch drawn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.drawn = 1000.0, 0
        monkeypatch.setattr(cli.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(cli, "draw", self.draw)

    def draw(self, *args: Any, **options: Any) -> tuple[Batch, Way]:
        self.now, self.drawn = self.now + 90, self.drawn + 1
        return draw_for_the_host(*args, **options)


@pytest.mark.parametrize(("hours", "num_batches"), [("0.5", 20), ("0.51", 21), ("1e-9", 1)])
def test_check_for_a_time_stops_when_it_is_up_and_counts(hours: str, num_batches: int, monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]):
    plant(monkeypatch, None)
    clock = Clock(monkeypatch)
    status = cli.main(["check", "--hours", hours, "--first", "5", "--seed", "3"])
    text = capsys.readouterr()
    found = labelled(text.out)
    batches = [draw(3, i, on_gpu=False)[0] for i in range(5, 5 + num_batches)]
    expected = {"batches": num_batches, "query rows": sum(batch.num_tokens for batch in batches),
                "scored pairs": sum(int(batch.candidates.sum()) for batch in batches), "mismatches": 0, "seed": 3}
    assert {name: int(found[name]) for name in expected} == expected
    assert status == (0 if expected["query rows"] else 2)
    assert (clock.drawn, found["seconds"]) == (num_batches, f"{90 * num_batches}.0")
    assert text.err.splitlines()[-1] == f"100 %  {num_batches} batches  0 mismatches  {90 * num_batches}.0 s"
    assert len(text.err.splitlines()) <= 20


def test_check_for_a_time_goes_on_after_a_mismatch_and_says_how_to_reproduce(monkeypatch: pytest.MonkeyPatch,
                                                                             capsys: pytest.CaptureFixture[str]):
    plant(monkeypatch, "index")
    Clock(monkeypatch)
    assert cli.main(["check", "--hours", "0.5", "--seed", "3"]) == 1
    text = capsys.readouterr().out
    reported = re.findall(r"^mismatch in batch (\d+): NUMBA_ENABLE_CUDASIM=1 python -m indexer (.*)$", text, re.MULTILINE)
    assert len(reported) == int(labelled(text)["mismatches"]) > 1
    assert [command for _, command in reported] == [f"check --seed 3 --first {number} --batches 1" for number, _ in reported]
    assert cli.main(reported[-1][1].split()) == 1


def test_an_interrupted_check_says_what_it_has_done(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                                    tmp_path: Path):
    plant(monkeypatch, None)
    drawn = iter([draw_for_the_host(0, i, on_gpu=False) for i in range(3)])

    def next_drawn(*_: Any, **__: Any) -> tuple[Batch, Way]:
        for batch, way in drawn:
            return batch, way
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "draw", next_drawn)
    report = tmp_path / "report.json"
    assert cli.main(["check", "--hours", "1", "--json", str(report)]) == 130
    assert labelled(capsys.readouterr().out)["batches"] == "3"
    written = json.loads(report.read_text())
    assert (written["batches"], written["interrupted"]) == (3, True)


def test_a_report_that_cannot_be_written_in_the_end_is_no_mismatch(monkeypatch: pytest.MonkeyPatch,
                                                                   capsys: pytest.CaptureFixture[str]):
    plant(monkeypatch, None)
    assert cli.main(["check", "--batches", "3", "--json", "/dev/full"]) == 2
    text = capsys.readouterr()
    assert labelled(text.out)["batches"] == "3"
    assert text.err.splitlines()[-1] == "/dev/full could not be written: No space left on device"


def test_looking_whether_a_file_can_be_written_changes_nothing(tmp_path: Path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("old")
    assert cli._new_file(str(old)) == str(old)
    assert cli._new_file(str(new)) == str(new)
    assert old.read_text() == "old"
    assert not new.exists()


def test_check_of_nothing_but_empty_batches_does_not_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    plant(monkeypatch, None)
    assert cli.main(["check", "--batches", "3", "--max-new", "0"]) == 2
    assert capsys.readouterr().out.splitlines()[-1] == "nothing was compared: no query rows were drawn"


@pytest.mark.parametrize("flipped", [False, True])
def test_the_demo_compares_the_kernels_rows_with_the_oracles(flipped: bool, monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]):
    def time_on_gpu(batch: Batch) -> tuple[np.ndarray, float, str]:
        out = batch.select(reference.mla_indexer_ragged_float8_paged)
        out[2, 0] ^= int(flipped)
        return out, 1e-3, "planted"

    plant(monkeypatch, None)
    monkeypatch.setattr(cli, "find_target", lambda: cli.Target("gpu", "planted"))
    monkeypatch.setattr(cli, "demo_batch", lambda large: tiny_batch())
    monkeypatch.setattr(cli, "time_on_gpu", time_on_gpu)
    assert cli.main(["demo"]) == int(flipped)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "device      planted"
    assert "rate        3e+04 scored pairs/s, 4.8e-07 TFLOP/s (30 candidates)" in lines    # 14 + 15 + 1 pairs, 16 flop each
    if flipped:
        assert lines[-2:] == ["kernel and oracle differ in 3 rows of requests 0 2",
                              "indices: 1 of 24 entries differ, first row 2, column 0: expected 0 (bits 0x00000000), "
                              "got 1 (bits 0x00000001)"]
    else:
        assert lines[-1] == "kernel and oracle agree in 3 rows of requests 0 2"
