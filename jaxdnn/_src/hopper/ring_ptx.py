"""A ring of places in shared memory that the bulk copy engine fills and empties in turn, in PTX.

Each place has a barrier that counts the bytes on their way to it. One thread asks for them; all who read wait. A place
may be asked for again once all have read it, and once the engine has, if it was to bring the place back to memory: of
the first a barrier must have told who asks, for the second he waits himself.
"""

from jaxdnn._src.hopper.ptx import Emitter

_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_STORE = "cp.async.bulk.global.shared::cta.bulk_group"


class Ring:
    """Places of `size` bytes from the register `start` on, their barriers from `barriers` on; `leads` is who asks.

    Three go around: who asks, who waits and reads, and who writes and has that brought back.
    """

    def __init__(self, e: Emitter, places: int, size: int, *, start: str, barriers: str, leads: str) -> None:
        self.e, self.places, self.size, self.leads = e, places, size, leads
        self.start, self.barriers = start, barriers
        self.asked, self.read, self.written = (e.r("mov.b32", 0) for _ in range(3))
        self.phase = e.r("mov.b32", 0)  # of the barrier of the place that is read next
        for i in range(places):
            e.op("mbarrier.init.shared::cta.b64", f"[{barriers}+{8 * i}]", 1, when=leads)
        e.op("fence.mbarrier_init.release.cluster")
        e.op("fence.proxy.async.shared::cta")

    def ask(self, source: str, size: object, when: str) -> None:
        """Has so many bytes copied into the next place, if the predicate holds."""
        e = self.e
        there = e.p("and.pred", self.leads, when)
        barrier = self._barrier(self.asked)
        e.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", barrier, size, when=there)
        e.op(_LOAD, f"[{self.address(self.asked)}]", f"[{source}]", size, barrier, when=there)
        self._step(self.asked)

    def address(self, place: str) -> str:
        return self.e.scaled(place, self.size, self.start)

    def wait(self) -> None:
        """Until the place that is read next has been filled."""
        e, again = self.e, self.e.label()
        barrier = self._barrier(self.read)
        e.place(again)
        come = e.p("mbarrier.try_wait.parity.shared::cta.b64", barrier, self.phase)
        e.op("bra", again, when="!" + come)

    def have_read(self) -> None:
        last = self._step(self.read)
        self.e.op("xor.b32", self.phase, self.phase, 1, when=last)

    def bring_back(self, target: str, size: object) -> None:
        """Has so many bytes of the place that is written now, by the threads of one warp, copied to memory."""
        e = self.e
        e.op("fence.proxy.async.shared::cta")
        e.op("bar.warp.sync", "0xffffffff")
        e.op(_STORE, f"[{target}]", f"[{self.address(self.written)}]", size, when=self.leads)
        e.op("cp.async.bulk.commit_group", when=self.leads)

    def leave(self) -> None:
        """Goes on from the place that is written now."""
        self._step(self.written)

    def wait_until_brought(self) -> None:
        """Until all places that were to be copied to memory have been read, and may be filled again."""
        self.e.op("cp.async.bulk.wait_group.read", 0, when=self.leads)

    def _step(self, place: str) -> str:
        """Goes on to the next place; the predicate that it is the first."""
        e = self.e
        e.op("add.s32", place, place, 1)
        last = e.p("setp.eq.s32", place, self.places)
        e.op("mov.b32", place, 0, when=last)
        return last

    def _barrier(self, place: str) -> str:
        return f"[{self.e.scaled(place, 8, self.barriers)}]"
