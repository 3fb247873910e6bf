"""KeyboardInterrupt after a while."""

import gc
import signal
import sys


class Alarm:
    """Raises KeyboardInterrupt in the main thread, once, after a while, unless disarmed before.

    The timer is pytest-timeout's, too: afterwards that goes on with the time it had left.

    An interrupt in a callback of the collector (hypothesis has one) is swallowed there, and pytest
    keeps it for its report, with the traceback and so the frames of the region around. Meanwhile no
    such callback runs, and what is swallowed elsewhere (in a weak reference's callback) is counted
    in ``swallowed``, not kept.
    """

    def __enter__(self):
        self.callbacks, self.hook, self.swallowed = gc.callbacks[:], sys.unraisablehook, 0
        gc.callbacks.clear()
        sys.unraisablehook = self.swallow
        self.armed = False
        self.timer = signal.setitimer(signal.ITIMER_REAL, 0)
        self.before = signal.signal(signal.SIGALRM, self.ring)
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)
        signal.setitimer(signal.ITIMER_REAL, *self.timer)
        gc.callbacks[:] = self.callbacks
        sys.unraisablehook = self.hook

    def swallow(self, _):
        self.swallowed += 1

    def ring(self, *_):
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def during(self, delay, function, *args):
        """function(*args), or None when it was interrupted; `delay` in seconds, None:
        without an alarm."""
        try:
            if delay is not None:
                self.armed = True
                signal.setitimer(signal.ITIMER_REAL, delay)
            result = function(*args)
            self.armed = False
            return result
        except KeyboardInterrupt:
            return None
        except BaseException:
            self.armed = False  # not while pytest reports it
            raise
