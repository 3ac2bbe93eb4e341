"""`jaxattn verify` as a person calls it."""

import json
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

    def wrong(*args):
        out, lse = right(*args)
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


def test_wrong_arguments_are_one_line_and_status_2(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "missing" / "report.json"))
    assert done.exit_code == 2
    assert "is not a directory" in done.output


def test_help_has_an_example() -> None:
    assert "jaxattn verify --encoder" in run("--help").output
