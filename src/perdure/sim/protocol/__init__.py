"""A search of the protocol in virtual time: the production state machines under a hostile network.

simulation.py   one run: agents, workers, coordinator, judge      (start reading here)
world.py        virtual time, chance, links that keep their order
fabric.py       the connections between workers, by generation
worker.py       a worker: main thread, control thread, data plane, around `core.member.Member`
transports.py   its threads, one for each generation, which may be late
reducing.py     its half of the exchange; healing.py: taking and giving state
coordinator.py  the durable files and the links around `core.job.Job`; agents.py: relays that fork
symbols.py      what is computed: sums as expressions, states as chains
faults.py       what goes wrong and when, drawn from the seed
judge.py        what must never happen
search.py       many seeds; mutants.py: one rule switched off at a time
scenario.py     one scripted run, as text that a reviewer can read
"""
