"""What README shows runs, and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
import torch

ROOT = Path(__file__).parents[1]


def test_the_first_program_runs_and_prints_what_it_says() -> None:
    program = programs()[0]
    said = re.search(r"print\(.*\)  # ([\d.]+)", program)
    assert said is not None
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == said[1]


def programs() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_jax_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = {"jnp": jnp}
    exec(programs()[1], names)
    assert (names["first"].shape, names["second"].shape) == ((2, 8, 64), (3, 8, 64))
    assert "q0 x . | . . ." in capsys.readouterr().out


def test_the_torch_program_runs() -> None:
    q = torch.ones(4, 2, 64, dtype=torch.float16, device="npu")
    cu = torch.tensor([0, 4], dtype=torch.int32)
    names = {"q": q, "k": q, "v": q, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    exec(programs()[2], names)
    assert (names["lse"].shape, names["out"].shape) == ((2, 4), (4, 2, 64))
