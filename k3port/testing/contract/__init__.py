"""The parts of the contract suite: references, guarded memory, memory orders, measurements, one call, one invariant."""
