"""One user at a time for a channel: two threads or two streams on it would write the same words."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from m3_core.errors import ResourceBusy, ResourceClosed


class ChannelGuard:
    """Refuses a second thread while one is inside, and a second stream while the first one's work is not done.

    Launches on one stream follow each other, so a stream may enter as often as it likes. Two guards know nothing of each other: two
    channels work side by side.
    """

    def __init__(self, channel: str) -> None:
        """Guard a channel that nobody uses.

        Args:
            channel: its name, for the errors.
        """
        self._channel = channel
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stream: Hashable = None
        self._idle: Callable[[], bool] | None = None
        self._closed = False

    @contextmanager
    def use(self, stream: Hashable = None, idle: Callable[[], bool] | None = None) -> Iterator[None]:
        """Hold the channel while something is enqueued or run on it.

        Args:
            stream: what orders the work that is enqueued here; None for work that is done on return.
            idle: tells whether all work enqueued on ``stream`` is done; asked when another stream wants the channel. None if it
                cannot be told: the channel then stays with the stream until ``drained``.

        Raises:
            ResourceBusy: another thread is inside (this one included: no nesting), or another stream has work in flight.
            ResourceClosed: after ``close``.
        """
        self._enter(stream)
        try:
            yield
        finally:
            with self._lock:
                self._thread = None
                self._stream, self._idle = stream, idle

    def drained(self) -> None:
        """All work on the channel is done, whatever stream it was on."""
        with self._lock:
            self._stream, self._idle = None, None

    def close(self) -> None:
        """Refuse every use from now on.

        Raises:
            ResourceBusy: a thread is inside.
        """
        with self._lock:
            if self._thread is not None:
                raise ResourceBusy(
                    f"{self._channel} closed by thread {threading.current_thread().name!r} while thread {self._thread.name!r} uses it"
                )
            self._closed = True

    def _enter(self, stream: Hashable) -> None:
        current = threading.current_thread()
        with self._lock:
            if self._closed:
                raise ResourceClosed(f"{self._channel} used after close()")
            if self._thread is not None:
                raise ResourceBusy(
                    f"{self._channel} is in use by thread {self._thread.name!r}; thread {current.name!r} must wait for it or use a channel of its own"
                )
            if self._stream is not None and stream != self._stream and not (self._idle is not None and self._idle()):
                raise ResourceBusy(
                    f"{self._channel} has work in flight on stream {self._stream!r}; "
                    f"synchronise that stream before stream {stream!r} uses it, or use a channel of its own"
                )
            self._thread = current
