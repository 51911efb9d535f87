"""``Server.serve`` beside a rank's main thread: begun, waited for, and ended with it.

Knows no training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.errors import PacelineError, PeerLost
from paceline.training.relaxed.server import Server, listen
from paceline.training.relaxed.terms import Address

LAST_WORDS_S = 30.0  # for callers to be told that all is done


class Serving:
    """``server.serve`` in a thread for the time of a ``with``; its end is waited for.

    It answers from the start, so that workers are told at once that it does not lead.
    """

    def __init__(self, server: Server, address: Address, deadline_s: float) -> None:
        self.server, self._deadline_s = server, deadline_s
        self._listener = listen(*address)
        host, port = self._listener.getsockname()[:2]
        self.address: Address = (str(host), int(port))
        self._failed: list[PacelineError] = []
        self._abandoned = False
        self._thread = threading.Thread(target=self._serve, name="serve", daemon=True)

    def __enter__(self) -> Serving:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self._abandoned:
            self._thread.join(min(self._deadline_s, LAST_WORDS_S))
        self._listener.close()
        expected = self._abandoned or self.server.released.is_set()
        if kind is None and self._failed and not expected:
            raise self._failed[0]

    def until_done(self, tick_s: float = 0.2, on_tick: Callable[[], bool] | None = None) -> bool:
        """Return True once every share was pushed to its end; raises what ended the server.

        ``on_tick`` is called all the while; where it returns True, stop waiting and return False.
        """
        while not self.server.done.wait(tick_s):
            if self._failed:
                raise self._failed[0]
            if on_tick is not None and on_tick():
                return False
        return True

    def abandon(self, why: PacelineError) -> None:
        """Stop serving at once, whoever is served: the standby takes over."""
        self._abandoned = True
        self.server.end(why)

    def _serve(self) -> None:
        try:
            self.server.serve(self._listener, self._deadline_s)
        except PacelineError as error:
            self._failed.append(error)
        except OSError as error:  # the listener was closed under it: the rank is on its way out
            self._failed.append(PeerLost("parameter server stopped listening", got=error))
