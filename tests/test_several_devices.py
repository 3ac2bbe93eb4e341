"""On several devices every shard runs on its own NPU, in one process and in two. Includes the ring."""

import socket

from processes import finish, start


def test_four_devices_in_one_process() -> None:
    printed = finish(start("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/four_devices.py", devices=4))
    assert "passed" in printed


def test_two_processes_on_one_machine() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    both = [start("tests/two_processes.py", address, str(rank), devices=2) for rank in range(2)]
    for rank, process in enumerate(both):
        assert f"process {rank}: value and gradient agree, NPUs used: [True, True, False, False]" in finish(process)
