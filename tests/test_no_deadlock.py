"""Nothing hangs: large arrays, chains, threads, shards that wait for each other, on one core and on all."""

import shutil

import pytest
from processes import finish, start


@pytest.mark.parametrize("cores", ["0", None], ids=["one core", "all cores"])
def test_no_pattern_hangs(cores: str | None) -> None:
    if cores is not None and shutil.which("taskset") is None:
        pytest.skip("no taskset here, which pins a process to a core")
    printed = finish(start("tests/no_deadlock.py", devices=4, cores=cores))
    assert "leaves with work in flight: True" in printed, printed


def test_a_hang_would_be_seen() -> None:
    assert "Timeout (0:00:01)!" in finish(start("tests/no_deadlock.py", "hang", devices=4), returncode=1)
