"""The model checker and the simulator of the protocol, apart from the system that they check.

- ``rules``: the protocol as a value, one rule a field, and the size of the world to explore.
- ``world``: the states of a small world and every step that can follow.
- ``properties``: what must hold, and how a violation reads.
- ``explorer``: breadth first, every state once, shortest counterexample.
- ``scopes``, ``mutants``: the worlds that are checked, and the wrong protocols that must be caught.
- ``traces``: the vocabulary of recorded runs, and their check against the protocol.
- ``simulator``: long random runs of many ranks on real words, replayable from one seed.
"""
