"""`jaxattn verify` as a person calls it."""

import json
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interop import cli, verify
from jaxattn.testing import CASES
from npu import kernels

SOME = tuple(c for c in CASES if c.name in {"causal", "softcap", "tails on both sides"})


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "CASES", SOME)
    monkeypatch.setattr(verify.verify, "__defaults__", (SOME,))


def run(*arguments: str):
    return CliRunner().invoke(cli.app, ["verify", *arguments])


def test_prints_a_line_per_case_and_says_that_it_is_simulated(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "report.json"))
    assert done.exit_code == 0, done.output
    assert "No Ascend NPU here: everything below runs on a simulated NPU." in done.output
    assert "pass    causal" in done.output
    assert "6 lines: 4 pass, 2 refused by name, 0 fail. Ran on: simulated NPU" in done.output
    assert "equal [5, 3, 9]" in done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["simulated"], report["passed"], len(report["lines"])) == (True, True, 6)
    assert report["lines"][0]["eager"]["emptiness_equal"] is True
    assert "softcap" in next(line for line in report["lines"] if line["case"] == "softcap")["refusal"]


def test_a_wrong_kernel_fails_with_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels._one_call

    def wrong(*args, **kwargs):
        out, lse = right(*args, **kwargs)
        out[2, 1] += 1
        return out, lse

    monkeypatch.setattr(kernels, "_one_call", wrong)
    done = run()
    assert done.exit_code == 1
    assert "fail    causal" in done.output
    assert "NPU, eager: `out` is off by" in done.output
    assert "at segment 0, row 2, head 1" in done.output


def test_interrupted_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def two_then_interrupt(*_):
        yield from list(verify.verify(SOME[:1]))
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "verify", two_then_interrupt)
    done = run()
    assert done.exit_code == 130
    assert "Interrupted after 2 of 6 lines." in done.output


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_nobody_hears_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finalised:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    def verify_with_an_interrupt_in_a_finaliser(*_):
        for line in verify.verify(SOME[:1]):
            yield line
            Finalised()

    monkeypatch.setattr(cli, "verify", verify_with_an_interrupt_in_a_finaliser)
    done = run()
    assert done.exit_code == 130
    assert "Interrupted after 2 of 6 lines." in done.output


def test_wrong_arguments_are_one_line_and_status_2(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "missing" / "report.json"))
    assert done.exit_code == 2
    assert "is not a directory" in done.output


def test_help_has_an_example() -> None:
    assert "jaxattn verify --encoder" in run("--help").output


def explained(*arguments: str):
    return CliRunner().invoke(cli.app, ["explain", *arguments])


def test_explain_prints_the_plan_the_work_and_what_decided() -> None:
    done = explained("--q", "5,3", "--k", "2,4", "--heads", "8/2", "--head-dim", "80", "--causal")
    assert done.exit_code == 0, done.output
    assert "head widths padded to 128 and 128" in done.output
    assert "q rows 3:8, k rows 0:6: actual_seq_lengths=[2, 5], actual_seq_lengths_kv=[2, 6]" in done.output
    assert "sparse_mode=3, atten_mask=triangle(2048, 2048)" in done.output
    assert "by npu_fused_infer_attention_score, A2/A3, CANN 8.3: widths" in done.output
    # rows 3 and 4 see 1 and 2 keys, the second segment 2, 3 and 4
    assert "visible pairs of query and key                   12\n" in done.output
    assert f"{2 * 12 * 8 * 160:,} flop" in done.output


def test_explain_needs_no_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_start_npu", lambda _: pytest.fail("an NPU was asked for"))
    done = explained("--q", "5000", "--dtype", "float32", "--window", "128,0")
    assert done.exit_code == 0
    assert done.output.startswith("npu_fusion_attention: out [5000, 8, 64]")  # too long a mask to draw
    assert "products = ('training',) (operator documents: for training products" in done.output


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--q", "5,,3"], "--q: '5,,3'. It takes integers between commas. Use --q 5,3,9."),
        (["--q", "5,x"], "--q: '5,x'. It takes integers between commas. Use --q 5,3,9."),
        (["--q", "5", "--heads", "8/2/1"], "--heads: '8/2/1'. It takes one number, or two as 32/8. Use --heads 32/8."),
        (["--q", "5", "--window", "1"], "--window: '1'. It takes the reach to the left and right. Use --window 4,0."),
        (["--q", "5", "--dtype", "float64"], "dtype float64."),
        (["--q", "5", "--chip", "310P"], "npu_fused_infer_attention_score on 310P: it has no packed layout"),
        (["--q", "5", "--heads", "6/4"], "`q`: 6 query heads over 4 key/value heads leaves 2 over."),
        (["--q", "-5"], "`q`: length -5 at segment 0."),
    ],
)
def test_explain_refuses_with_one_clear_line_and_status_2(arguments: list[str], line: str) -> None:
    done = explained(*arguments)
    assert done.exit_code == 2
    assert line in done.output
