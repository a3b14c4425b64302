"""How far long work has come, and how long it will take, for people."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO


class TimeLeft:
    """Says so now and then: on one line of a terminal, or a line each half minute elsewhere.

    Args:
        name: Of the work.
        stream: Where to say it.
        clock: What gives the time in seconds.
    """

    def __init__(
        self,
        name: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._stream, self._clock = name, stream or sys.stderr, clock
        self._terminal = self._stream.isatty()
        self._first: tuple[float, int] | None = None
        self._said = clock()

    def __call__(self, done: int, total: int) -> None:
        """Take note of the places that are done, of all."""
        now = self._clock()
        if self._first is None:
            self._first = now, done
        began, before = self._first
        pause = 0.2 if self._terminal else 30.0
        if now - self._said < pause and done < total:
            return
        self._said = now
        text = f"{self._name}: {done:,} of {total:,} places"
        if before < done < total:
            text += f", {_words((now - began) * (total - done) / (done - before))} left"
        if self._terminal:
            print(f"\r{text:<79}", end="\n" if done == total else "", file=self._stream, flush=True)
        else:
            print(text, file=self._stream, flush=True)


def _words(seconds: float) -> str:
    """A time as one reads it.

    Example:
        >>> _words(42.4), _words(200), _words(9000)
        ('42 s', '3 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
