"""Where generation runs: in this process or in local ones. Other engines implement the same small protocol."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeVar, cast

from chanlab.errors import ChanlabError, UsageError

Task = TypeVar("Task")
Result = TypeVar("Result")


class Executor(Protocol):
    """Runs one function over many tasks.

    `function` is a module-level function; it, its tasks and its results can be pickled (between processes of one run
    only). All processes see the same folder.
    """

    def map_unordered(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield results as they come; an exception of `function` is raised here and ends the run."""
        ...


class LocalExecutor:
    """Processes of this machine, or this very process if `workers` is 1.

    Processes are spawned, since Dr.Jit and CUDA don't survive a fork. They end with their parent, even when it is
    killed.

    Args:
        workers: Number of processes, at least 1.

    Raises:
        UsageError: If `workers` is less than 1.
    """

    def __init__(self, workers: int = 1) -> None:
        if workers < 1:
            raise UsageError(f"workers must be at least 1, not {workers}.")
        self.workers = workers

    def map_unordered(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield results as they come; see `Executor`."""
        if self.workers == 1:
            yield from map(function, tasks)
        else:
            yield from self._map_in_processes(function, list(tasks))

    def _map_in_processes(self, function: Callable[[Task], Result], tasks: list[Task]) -> Iterator[Result]:
        context = mp.get_context("spawn")
        threads = max(1, (os.cpu_count() or 1) // self.workers)
        todo = deque(tasks)
        workers: dict[Connection, Any] = {}
        try:
            for _ in range(min(self.workers, len(tasks))):
                pipe, theirs = context.Pipe()
                workers[pipe] = context.Process(target=_work, args=(theirs, function, threads), daemon=True)
                workers[pipe].start()
                theirs.close()
                pipe.send(todo.popleft())
            for _ in range(len(tasks)):
                pipe = cast(Connection, wait(list(workers))[0])
                try:
                    done, value = pipe.recv()
                except EOFError:
                    raise _died(workers[pipe]) from None
                if not done:
                    raise value
                if todo:
                    pipe.send(todo.popleft())
                yield value
        finally:
            for pipe, process in workers.items():
                process.kill()
                process.join()
                pipe.close()


def _died(process: Any) -> ChanlabError:
    process.join(timeout=5.0)
    reason = "perhaps the machine ran out of memory" if process.exitcode == -signal.SIGKILL else "see its output above"
    return ChanlabError(
        f"a worker process ended with exit code {process.exitcode} ({reason}): run the same command again with fewer "
        "--workers; what is complete is kept."
    )


def _work(pipe: Connection, function: Callable[[Any], Any], threads: int) -> None:
    """What a worker does: tasks from the pipe, results into it, until the parent closes it or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers itself
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if "torch" in sys.modules:  # by what the function imports; without it there are no threads to share out
        sys.modules["torch"].set_num_threads(threads)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = (True, function(task))
        except (ChanlabError, OSError) as error:
            answer = (False, error)
        except Exception:
            answer = (False, ChanlabError(f"a worker process failed:\n{traceback.format_exc()}"))
        try:
            pipe.send(answer)
        except BrokenPipeError:
            return


def _end_with_parent() -> None:
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
