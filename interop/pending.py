"""Errors that had to wait: raised inside a program that runs on several devices, told afterwards.

A shard that raises leaves the others waiting for it in the next collective operation, until XLA ends the process. So a
failing shard answers with NaN, and its exception is kept here until somebody can hear it.
"""

import atexit
import sys
import traceback
from contextlib import suppress
from functools import lru_cache
from threading import Lock

import jax

_kept: list[Exception] = []
_lock = Lock()


def keep(error: Exception) -> None:
    """Keep an exception for `raise_pending`, with where it was raised as text. May be called from any thread.

    Its traceback goes: the frames hold buffers that are XLA's again as soon as the callback returns.
    """
    if where := traceback.extract_tb(error.__traceback__):
        error.add_note(f"In a shard, at {where[-1].filename}, line {where[-1].lineno}, in {where[-1].name}.")
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    with _lock:
        _kept.append(error)


def raise_pending() -> None:
    """Raise the first error that shards of earlier programs met, with its own type; do nothing if there was none.

    Under `jax.shard_map` an error in a shard cannot be raised where it happens: the shard's results are NaN, and the
    exception waits for this function or for the next call of `npu_packed_attention` outside of a compiled program. Call
    it once the results are there:

        loss = jax.block_until_ready(train_step(batch))
        interop.raise_pending()

    Errors after the first are notes of it. All of them count as told.
    """
    with _lock:
        if not _kept:
            return
        first, *others = _kept
        _kept.clear()
    for other in others:
        first.add_note(f"Another shard, or a later call: {type(other).__name__}: {other}")
    raise first


@lru_cache(maxsize=1)
def be_ready_for_exit() -> None:
    """Make the process wait for programs in flight before it ends, and name what was never raised.

    Called before the first program with a callback runs; further calls do nothing.
    """
    atexit.register(_before_exit)


def _before_exit() -> None:
    # A callback needs the interpreter. Programs whose results nobody holds any more cannot be waited for.
    for array in jax.live_arrays():
        with suppress(Exception):  # its error is its reader's, and nobody reads any more
            array.block_until_ready()
    with _lock:
        if _kept:
            more = f" (and {len(_kept) - 1} more)" if len(_kept) > 1 else ""
            text = " ".join(str(_kept[0]).split())
            print(
                f"npu_packed_attention: an error was never raised{more}: {type(_kept[0]).__name__}: {text} Call "
                f"interop.raise_pending() when results are there.",
                file=sys.stderr,
            )
