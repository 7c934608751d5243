"""Joiners that take the state: when they have it, and of which generation they say so."""

from __future__ import annotations

from job_rig import training
from perdure.schema import messages as msg


def test_who_had_its_state_in_an_older_generation_may_need_it_again() -> None:
    """A seal overtook the joiner's word: it reported that it was healing still, and is a joiner once more."""
    rig = training(workers=3)
    rig.kill(2)
    rig.serve()
    rig.started()
    rig.serve()
    joiner = rig.hands[3]
    assert joiner.prepared is not None
    old = joiner.prepared.generation
    joiner.generation, joiner.healing, joiner.prepared = old, True, None
    rig.switch()
    rig.say(3, msg.Adopted(old, 0))

    rig.kill(1)
    rig.serve(3)
    (seal,) = rig.told(3, msg.Seal)
    rig.say(3, msg.Report(seal.generation, joiner.position()))
    rig.serve(3)
    (opened,) = rig.told(3, msg.Open)
    assert 3 in opened.plan.joiners
    rig.say(3, msg.Healed(old, 0, 10, 0.1, "replica"))
    assert not rig.job.membership.peers[3].healed
    joiner.healing = False
    rig.say(3, msg.Adopted(opened.plan.generation, 0))
    rig.say(3, msg.Healed(opened.plan.generation, 0, 10, 0.1, "replica"))
    assert rig.job.membership.peers[3].healed
