"""Workers of a loader that outlive SIGTERM and Ctrl-C: a cluster that ends a job, or a terminal, sends it to every
process, but the run needs its workers until it has written a checkpoint."""

import os
import signal
from multiprocessing import parent_process
from threading import Thread

__all__ = ["outlive_sigterm"]


def outlive_sigterm(worker: int) -> None:
    """A loader's ``worker_init_fn``: a worker ends by a SIGTERM of its own parent, and by no other; not by Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()  # not os.getppid(): a server may have forked it, as from Python 3.14 on
    if parent is not None and hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        Thread(target=_wait_for, args=(parent.pid,), daemon=True).start()


def _wait_for(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)
