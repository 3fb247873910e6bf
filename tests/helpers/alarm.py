"""KeyboardInterrupt after a while."""

import signal


class Alarm:
    """Raises KeyboardInterrupt in the main thread, once, after a while, unless disarmed before.

    The timer is pytest-timeout's, too: afterwards that goes on with the time it had left.
    """

    def __enter__(self):
        self.armed = False
        self.timer = signal.setitimer(signal.ITIMER_REAL, 0)
        self.before = signal.signal(signal.SIGALRM, self.ring)
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)
        signal.setitimer(signal.ITIMER_REAL, *self.timer)

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
