"""Hard state: checkpoints on the way (P18), the last one at the end, and what follows it (P17).

    training ── every member has finished ──▶ saving ── written, or failed ──▶ released ──▶ over

A crash in between is mended: another finished member writes the last state; a crash in the script's tail
is mended by running it again from the last checkpoint, so tail code runs at least once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from perdure.core import checkpoints as ckpt
from perdure.core.actions import SIGTERM, Discard, PublishCheckpoint
from perdure.core.office import Office
from perdure.core.staff import Vacancy, Worker
from perdure.schema import messages as msg
from perdure.schema.ids import WorkerId
from perdure.schema.plan import Record

SAVES_MAX = 10
"""So many tries at the last state; then the run ends without it."""


class Saving:
    """Keeps the checkpoints, and takes the job from its last commit to its exit code."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._checkpoints = ckpt.Checkpoints(office.settings.checkpoint_every)
        self._publishing: dict[str, int] = {}
        self._placed: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._saves = 0
        self._last_step = -1
        self._leader: WorkerId | None = None
        self._rerun: Vacancy | None = None
        self.in_tails = False
        """Whether the last state is in place, and scripts are run to their ends."""
        self.left_after = -1
        """The step after which the script left its loop by itself, once all have done so."""
        self.restorable = office.settings.checkpoints
        """Paths of what the job can go on from, the newest first."""

    # ── on the way ──────────────────────────────────────────────────────────────────────────────────

    def restart(self, step: int) -> None:
        """Training begins after `step` (−1: anew)."""
        self.in_tails = self.in_tails and step >= self._last_step
        self._carry(self._checkpoints.restart(step))

    def record(self, record: Record) -> None:
        """A step is known to be committed: that may be what a checkpoint waited for."""
        self._office.record(record)
        self._carry(self._checkpoints.known(self._office.records.agreed))

    def ask(self, now: float) -> None:
        """Have the next checkpoint written, if it is time."""
        office = self._office
        if office.phase != "training" or office.membership.current is None:
            return
        writer = next(iter(office.at_home(office.membership.members)), None)
        self._carry(self._checkpoints.due(office.reached, writer, now))

    def written(self, worker: WorkerId, message: msg.CheckpointWritten, now: float) -> None:
        """A worker wrote aside."""
        member = worker in self._office.membership.members
        agreed = self._office.records.agreed
        self._carry(self._checkpoints.written(worker, message, member, agreed, now))

    def failed(self, worker: WorkerId, message: msg.CheckpointFailed, now: float) -> None:
        """A worker could not write."""
        office = self._office
        office.event("checkpoint_refused", step=message.step, path="", message=message.reason)
        then = "training goes on" if office.phase == "training" else "the last state is not saved"
        office.say(f"checkpoint of step {message.step} failed: {message.reason}; {then}")
        self._carry(self._checkpoints.failed(worker, message.step, now))
        self._settled(message.step)

    def published(self, written: msg.CheckpointWritten, path: str, reason: str) -> None:
        """What was written aside is in place at `path`, or why not; a later one may be in place already."""
        number = self._publishing.pop(written.partial, 0)
        if reason:
            self._office.event("checkpoint_refused", step=written.step, path=written.partial, message=reason)
            self._office.say(f"checkpoint of step {written.step} was not put in place: {reason}")
            self._checkpoints.not_placed(written.step)
            self.save_again()
            return
        self._placed[path] = number
        self._office.failures.checkpoint(written.step)
        paths = dict.fromkeys((path, *self.restorable))
        self.restorable = tuple(sorted(paths, key=lambda p: -self._placed.get(p, 0)))[:2]
        step, nbytes, seconds = written.step, written.nbytes, written.seconds
        self._office.event("checkpoint_written", step=step, bytes=nbytes, seconds=seconds, path=path)
        self._settled(written.step)

    def lost(self, worker: WorkerId) -> None:
        """What a worker was asked for is lost."""
        self._checkpoints.lost(worker)

    def gone(self, worker: WorkerId) -> None:
        """A worker is no more: it writes nothing, and what it wrote aside goes with it."""
        self._carry(self._checkpoints.gone(worker))

    def _carry(self, actions: Sequence[ckpt.Action]) -> None:
        office = self._office
        for action in actions:
            match action:
                case ckpt.Ask(worker, step):
                    office.send(worker, msg.Checkpoint(step, office.settings.checkpoint_dir))
                case ckpt.Publish(written):
                    self._publishing[written.partial] = next(self._numbers)
                    office.want(PublishCheckpoint(written))
                case ckpt.Discard(written, reason):
                    step, path = written.step, written.partial
                    office.event("checkpoint_refused", step=step, path=path, message=reason)
                    office.want(Discard(written.partial))
                    if not self._publishing:
                        self.save_again()

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────

    def finish(self, stopping: int) -> None:
        """Every member has finished; `stopping` is the signal that asked for it, or 0."""
        office = self._office
        members, workers = office.membership.members, office.staff.workers
        office.phase = "saving"
        step = workers[members[0]].finished
        assert step is not None
        self._last_step = step
        for record in [workers[w].last_record for w in members]:
            if record is not None:
                self.record(record)  # P18: now all are known to have the last step
        if 0 <= step <= office.records.last:
            office.records.agree(step, workers[members[0]].last_digest)  # its line may be of an earlier life
            self._carry(self._checkpoints.known(office.records.agreed))
        broke_off = any(workers[w].broke_off for w in members)
        self.left_after = step if broke_off else -1
        until = office.membership.shape.until if office.membership.shape else 0
        early = step + 1 < until and not broke_off
        # Without `stopping` it was an earlier life of the coordinator that was asked to stop.
        office.exit_code = 128 + (stopping or SIGTERM) if early else 0
        kept = self._checkpoints.last >= step
        if self._checkpoints.off or step < 0 or (kept and not self._publishing):
            self._release()
        elif not kept:
            self._save(step, (office.at_home(members) or list(members))[0])

    def save_again(self) -> None:
        """The last state's writer died, or what it wrote was refused: another finished member writes it."""
        office = self._office
        if office.phase != "saving" or self._checkpoints.asked is not None:
            return
        self._saves += 1
        left = [w for w in office.staff.workers.values() if w.finished is not None and not w.stopped]
        if not left:
            office.phase = "training"  # of nobody: a total loss, as before the last step
        elif self._saves > SAVES_MAX:
            office.say("the last state is not saved")
            self._release()
        else:
            # Not the same one again: what it wrote may have been refused for its own memory's sake.
            writer = left[self._saves % len(left)]
            assert writer.finished is not None
            self._save(writer.finished, writer.id)

    def without(self) -> str:
        """What a stop leaves that comes when nobody is there, as between a total loss and the next start."""
        office = self._office
        if office.membership.begun:
            newest = next(iter(self.restorable), "")
            return (
                f"ended while no worker had the state; a later run goes on from {newest or 'the beginning'}"
            )
        if office.attempt and not office.staff.joins:
            return "ended before the script started again"
        return f"ended before training {'began' if office.records.last < 0 else 'went on'}"

    def tails_lost(self, workers: Sequence[Worker]) -> None:
        """The node of these workers is gone: what only the leader does is done on another one."""
        office = self._office
        if office.phase != "released" or office.exit_code or not office.staff.nodes:
            return
        for worker in workers:
            if worker.id == self._leader:
                if self.restorable:
                    office.say(f"worker {worker.id} led: what follows the loop is run again by another one")
                self.tail_crashed(worker)

    def tail_crashed(self, worker: Worker) -> None:
        """The script failed after its loop: run it again, from the last checkpoint."""
        office = self._office
        office.membership.forget(worker.id)
        if not self.restorable:
            why = "failed after the last step, and without checkpoints it cannot run again"
            office.end(1, f"worker {worker.id} {why}")
            return
        for other in office.staff.workers.values():
            if other.released:
                office.membership.forget(other.id)
        self._rerun = Vacancy(worker.node, worker.slot)
        office.phase = "gathering"

    def keep_tail_going(self, now: float) -> None:
        """Somebody is to run the tail that crashed: who was started for it may be lost as well."""
        workers, nodes = self._office.staff.workers.values(), self._office.staff.nodes
        if self._rerun is None or not nodes or any(not (w.released or w.stopped) for w in workers):
            return
        if self._rerun.node not in nodes:
            home = self._office.settings.home_node  # the checkpoints are there
            self._rerun = Vacancy(home if home in nodes else next(iter(nodes)), 0)
        if now >= nodes[self._rerun.node].hire_from:
            self._office.hire(self._rerun)

    def _save(self, step: int, writer: WorkerId) -> None:
        self._carry(self._checkpoints.final(step, writer))

    def _settled(self, step: int) -> None:
        """A checkpoint of `step` is in place, or will not be: if it was the last, members may go."""
        # Not the last line of metrics.jsonl: that may be of a life that came further before all was lost.
        if self._office.phase == "saving" and step >= self._last_step:
            self._release()

    def _release(self) -> None:
        """Members run the rest of their scripts; workers that only waited are ended."""
        office = self._office
        office.phase, self.in_tails, self._rerun = "released", True, None
        self._leader = next(iter(office.membership.members), None)
        for worker in office.staff.workers.values():
            if worker.ending:
                pass  # in a moment it is known how it ended
            elif worker.finished is None:
                office.kill(worker.id)
            elif not worker.released:
                worker.released = True
                office.send(worker.id, msg.Release(office.exit_code))
        office.membership.end()
