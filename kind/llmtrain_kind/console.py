"""Progress for people: phases with their seconds, and one rewritten line on a terminal. All of it goes to stderr."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """Print one line of progress."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Print ``name`` and the seconds it took when the block ends well."""
    start = time.monotonic()
    yield
    say(f"  {name:<34} {time.monotonic() - start:6.1f} s")


class ProgressLine:
    """A set of named works under way: one rewritten line on a terminal, a line at each end of a work elsewhere."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._start = time.monotonic()
        self._running: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._terminal = sys.stderr.isatty()

    @contextmanager
    def running(self, work: str) -> Iterator[None]:
        """Show ``work`` as under way while the block runs."""
        begin = time.monotonic()
        with self._lock:
            self._running[work] = begin
        if not self._terminal:
            say(f"    {self._title}: {work} ...")
        try:
            yield
        finally:
            with self._lock:
                del self._running[work]
            self._clear()
            say(f"    {self._title}: {work} took {time.monotonic() - begin:.0f} s")

    def __enter__(self) -> "ProgressLine":
        if self._terminal:
            threading.Thread(target=self._redraw, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._clear()

    def _redraw(self) -> None:
        while not self._stop.wait(0.5):
            with self._lock:
                names = ", ".join(sorted(self._running))
                sys.stderr.write(f"\r\x1b[K    {self._title} ({time.monotonic() - self._start:.0f} s): {names}"[:140])
                sys.stderr.flush()

    def _clear(self) -> None:
        if self._terminal:
            with self._lock:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
