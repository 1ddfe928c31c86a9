"""A ring of slots in shared memory that bulk copies (`cp.async.bulk`) fill and store, in PTX.

Each slot has an mbarrier that counts the bytes of the copy into it. One thread, the leader, issues the copies; all
threads that read a slot wait on its mbarrier. The leader may fill a slot again once all threads have read it and, if it
is stored to device memory, once that copy has read it. The caller ensures the first: every reader completes its loads
(`Emitter.loads_done`) before the barrier that tells the leader. For the second the leader waits (`wait_for_stores`).
"""

from jaxdnn._src.hopper.ptx import Emitter

_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_STORE = "cp.async.bulk.global.shared::cta.bulk_group"


class Ring:
    """Slots of `size` bytes at the address `start`, their mbarriers at `barriers`; `leads` is the leader's predicate.

    Three positions advance around the ring: the slot to fill, the slot to read, and the slot to store.
    """

    def __init__(self, e: Emitter, slots: int, size: int, *, start: str, barriers: str, leads: str) -> None:
        self.e, self.slots, self.size, self.leads = e, slots, size, leads
        self.start, self.barriers = start, barriers
        self.filled, self.read, self.written = (e.r("mov.b32", 0) for _ in range(3))
        self.phase = e.r("mov.b32", 0)  # the parity of the phase in which the slot that is read next is filled
        e.make_barriers(barriers, [1] * slots, leads)
        e.barriers_made()
        e.op("fence.proxy.async.shared::cta")

    def fill(self, source: str, size: object, when: str) -> None:
        """Starts the copy of so many bytes into the next slot, if the predicate holds."""
        e = self.e
        issues = e.p("and.pred", self.leads, when)
        barrier = self._barrier(self.filled)
        e.expect(barrier, size, issues)
        e.op(_LOAD, f"[{self.address(self.filled)}]", f"[{source}]", size, f"[{barrier}]", when=issues)
        self._advance(self.filled)

    def address(self, slot: str) -> str:
        return self.e.scaled(slot, self.size, self.start)

    def wait(self) -> None:
        """Waits until the slot that is read next has been filled."""
        self.e.wait(self._barrier(self.read), self.phase)

    def next_read(self) -> None:
        """Advances the slot that is read."""
        first = self._advance(self.read)
        self.e.op("xor.b32", self.phase, self.phase, 1, when=first)

    def store(self, target: str, size: object) -> None:
        """Starts the copy to device memory of so many bytes of the current slot, which one warp has written."""
        e = self.e
        e.op("fence.proxy.async.shared::cta")
        e.op("bar.warp.sync", "0xffffffff")
        e.op(_STORE, f"[{target}]", f"[{self.address(self.written)}]", size, when=self.leads)
        e.op("cp.async.bulk.commit_group", when=self.leads)

    def next_write(self) -> None:
        """Advances the slot that is written and stored."""
        self._advance(self.written)

    def wait_for_stores(self) -> None:
        """The leader waits until the copies to device memory have read their slots, which may then be filled again."""
        self.e.op("cp.async.bulk.wait_group.read", 0, when=self.leads)

    def _advance(self, slot: str) -> str:
        """Advances to the next slot; returns a predicate, whether it is the first one."""
        e = self.e
        e.op("add.s32", slot, slot, 1)
        wraps = e.p("setp.eq.s32", slot, self.slots)
        e.op("mov.b32", slot, 0, when=wraps)
        return wraps

    def _barrier(self, slot: str) -> str:
        return self.e.scaled(slot, 8, self.barriers)
