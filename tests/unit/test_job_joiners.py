"""Workers that join: they are welcomed, take the state, and say of which generation they have it."""

from __future__ import annotations

from job_rig import Hand, Rig, training
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


def test_who_joined_while_its_agent_was_cut_off_is_welcomed_all_the_same() -> None:
    """Its word, or the answer, was lost with the connection; it would wait for ever."""
    rig = Rig()
    rig.hello(workers=1)
    (start,) = rig.starts
    rig.hands[start.worker] = Hand(start.worker, start.node)
    rig.take(rig.job.worker_started(start.worker, 1000, rig.now))
    rig.take(rig.job.agent_lost("a", rig.now))
    seen = msg.WorkerSeen(start.worker, 1000, True, None)
    rig.take(rig.job.agent_joined(msg.AgentHello("a", "host-a", 1, 0, ("train.py",), "0", (seen,)), rig.now))
    assert rig.told(start.worker, msg.Welcome)
    rig.exit(start.worker, code=1)
    assert rig.ended is None, "it is a script of perdure's: one start-up that failed"


def test_who_is_ready_twice_is_the_same_peer() -> None:
    """It said so while its agent was cut off: the hello has it, and then its own word comes."""
    rig = training(workers=2)
    peer = rig.job.membership.peers[1]
    rig.say(1, rig.ready(Hand(1, "a")))
    assert rig.job.membership.peers[1] is peer
