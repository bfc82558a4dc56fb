"""Random numbers of Bootseer's own, for pauses and samples: the module `random` belongs to the user's program.

A program seeds it, often alike on all nodes: then all nodes would pause alike, and its results would depend on our
retries. These numbers come from the kernel, so forks of one process have other ones, too. They are no secrets.
"""

from __future__ import annotations

from random import SystemRandom

_system = SystemRandom()
jitter = _system.random  # from 0 to 1
randrange = _system.randrange
getrandbits = _system.getrandbits
