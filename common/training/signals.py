"""What signals ask of a run."""

import signal
import threading
from typing import Any

__all__ = ["StopSignal"]


class StopSignal:
    """SIGTERM or Ctrl-C asks for a checkpoint and a clean exit after the current step; Ctrl-C again ends at once."""

    def __init__(self) -> None:
        self.requested = False
        if threading.current_thread() is not threading.main_thread():  # which alone may take signals
            return
        signal.signal(signal.SIGTERM, self._request)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as it is in the background of a shell
            signal.signal(signal.SIGINT, self._request)

    def _request(self, number: int, *_: Any) -> None:
        self.requested = True
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
