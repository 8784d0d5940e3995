import errno
import os
import signal

import pytest

from chanlab.data.executor import LocalExecutor
from chanlab.errors import ChanlabError, UsageError


def square(x: int) -> tuple[int, int]:
    return x * x, os.getpid()


def fail(x: int) -> int:
    if x == 1:
        raise OSError(errno.ENOSPC, "No space left on device")
    if x == 2:
        raise ZeroDivisionError("no way")
    os.kill(os.getpid(), signal.SIGKILL)
    return x


def test_one_worker_is_this_process():
    assert list(LocalExecutor(1).map_unordered(square, range(3))) == [(x * x, os.getpid()) for x in range(3)]


def test_workers_share_the_tasks_and_end():
    results = list(LocalExecutor(2).map_unordered(square, range(8)))
    assert sorted(x for x, _ in results) == [x * x for x in range(8)]
    pids = {pid for _, pid in results}
    assert os.getpid() not in pids
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert list(LocalExecutor(2).map_unordered(square, [])) == []


def test_what_fails_in_a_worker_is_raised_here():
    with pytest.raises(OSError, match="No space left") as error:
        list(LocalExecutor(2).map_unordered(fail, [1]))
    assert error.value.errno == errno.ENOSPC
    with pytest.raises(ChanlabError, match="ZeroDivisionError: no way"):
        list(LocalExecutor(2).map_unordered(fail, [2]))
    with pytest.raises(ChanlabError, match=r"exit code -9 .*memory.*fewer --workers"):
        list(LocalExecutor(2).map_unordered(fail, [3]))


def test_number_of_workers():
    with pytest.raises(UsageError, match="at least 1"):
        LocalExecutor(0)
