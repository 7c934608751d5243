"""A script that does not use perdure: torchrun's answer to a failure, all workers start again.

Whether a script is such a one is seen when a worker ends: nobody has ever joined. (So a worker of a perdure
script that dies during the imports, before any has joined, takes the others with it.)
"""

from __future__ import annotations

from perdure.core.actions import Kill
from perdure.core.office import Office
from perdure.core.staff import Worker

SIGNAL_GRACE_S = 30.0
"""After a signal to the launcher workers have this long to end by themselves, as under torchrun."""

LASTED_S = 30.0
"""Progress is not known here: an attempt that failed within this time failed at start-up."""


class PlainScript:
    """Restart-level recovery."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._started_at: float | None = None
        self._signalled_at: float | None = None

    def is_plain(self) -> bool:
        """Whether nobody has ever joined."""
        return not self._office.staff.joins

    def may_start(self, now: float) -> bool:
        """Whether an attempt may begin: only when nobody is left of the one before, ranks being places."""
        workers = self._office.staff.workers.values()
        if any(worker.stopped or worker.finished is not None for worker in workers):
            return False
        if not workers:
            self._started_at = now
        return True

    def lasted(self, now: float) -> bool:
        """Whether this attempt had got beyond its start-up."""
        return self._started_at is not None and now - self._started_at > LASTED_S

    def finished(self, worker: Worker) -> None:
        """A worker ended well. It stays on the books until all have, or until all start again."""
        staff = self._office.staff
        worker.finished = 0
        staff.workers[worker.id] = worker
        if all(other.finished is not None for other in staff.workers.values()):
            self._office.end(0, "")

    def start_again(self) -> None:
        """A worker failed: nobody can go on without it."""
        staff = self._office.staff
        self._office.attempt += 1
        for other in list(staff.workers.values()):
            if other.finished is not None:
                del staff.workers[other.id]
            else:
                self._office.kill(other.id)

    def asked(self, signum: int, now: float) -> None:
        """Pass a signal to the launcher on, for scripts that save something then."""
        self._signalled_at = now
        self._office.say(f"signal {signum}: passed on to the workers; again to end at once")
        for worker in self._office.staff.workers.values():
            if worker.finished is None:
                worker.stopped = True
                self._office.want(Kill(worker.id, signum))

    @property
    def signalled(self) -> bool:
        """Whether a signal was passed on."""
        return self._signalled_at is not None

    def ended(self, now: float) -> bool:
        """Whether a signalled script is through, or has had its time."""
        if self._signalled_at is None:
            return False
        workers = self._office.staff.workers.values()
        return all(w.finished is not None for w in workers) or now - self._signalled_at > SIGNAL_GRACE_S
