"""A few threads for work on stretches of a tensor; kernels release the GIL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import torch


def in_pieces(
    numel: int, piece_numel: int, threads: int | None, run: Callable[[int, int], object]
) -> None:
    """Call `run(begin, end)` on pieces of `numel` elements, all of them in this or other threads.

    Args:
        numel: Elements.
        piece_numel: Elements that a thread takes at a time.
        threads: How many threads to use, `torch.get_num_threads()` by default.
        run: Works on elements `begin` to `end`.
    """
    starts = range(0, numel, piece_numel)
    threads = min(threads or torch.get_num_threads(), len(starts))
    queue = iter(starts)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                start = next(queue, None)
            if start is None:
                return
            run(start, min(start + piece_numel, numel))

    if threads < 2:
        work()
        return
    pool = _pool()
    others = [pool.submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        wait(others)  # they hold views of the caller's memory
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="adamw")


# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=_pool.cache_clear)
