"""Connections that cannot be held open for nothing: uvicorn's HTTP/1.1 protocol with a time limit for the head of a request.

uvicorn closes a connection that is silent after an answer, but waits for ever for one that sends its headers byte by byte, and
has a place for only so many. Here a connection without a whole head of a request has `HEAD_SECONDS`, and where more than
`WAITING` of them are open the oldest goes: a client that sends what it has to say gets its answer, whoever else is knocking.

A client may also close its side after a request and read the answer ("half-close"); uvicorn by itself drops it.

Only methods of `asyncio.Protocol` are overridden, and the application says when it begins, has the whole body, and ends: uvicorn
hands it `scope["state"]`, in which the connection is.
"""

import asyncio
import math
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
WAITING = 128
BODY_AFTER_END_SECONDS = 1.0


class Connection(H11Protocol):
    """One connection of a replica; `uvicorn.run(http=…)` takes the class."""

    waiting: ClassVar[dict["Connection", None]] = {}  # those of this process, the oldest first

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = math.inf
        self._requests, self._whole, self._ended = 0, False, False

    def begin(self) -> None:
        """A request has come, without its body."""
        self._requests += 1
        self._whole = False
        self._stop_waiting()

    def has_body(self) -> None:
        """The whole request has come."""
        self._whole = True

    def end(self) -> None:
        """The request is answered, as far as the application is concerned."""
        self._requests -= 1
        if self._ended:
            self.loop.call_soon(self._close_if_idle)  # there may be another request
        elif not self.transport.is_closing():
            self._wait()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.waiting) >= WAITING:
            next(iter(self.waiting)).drop()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def eof_received(self) -> Any:
        self._ended = True
        # Not now: the task of a request that came at the same time has still to begin. No part of a body can come any more.
        self.loop.call_soon(self._close_if_idle)
        return True

    def drop(self) -> None:
        """End the connection at once."""
        self._stop_waiting()
        self.transport.abort()

    def _close_if_idle(self) -> None:
        if not self._requests:
            self.transport.close()  # when everything is sent
        elif not self._whole:
            self.loop.call_later(BODY_AFTER_END_SECONDS, self._drop_if_partial)

    def _drop_if_partial(self) -> None:
        if not self._whole:
            self.drop()

    def _wait(self) -> None:
        self._unsent = math.inf
        self.waiting[self] = None
        self._timer = self.loop.call_later(HEAD_SECONDS, self._late)

    def _stop_waiting(self) -> None:
        self.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if 0 < unsent < self._unsent:  # a long answer, which the client is reading
            self._unsent = unsent
            self._timer = self.loop.call_later(HEAD_SECONDS, self._late)
        else:
            self.drop()
