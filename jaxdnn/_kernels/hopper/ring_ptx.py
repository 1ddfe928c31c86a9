"""A ring of places in shared memory that the bulk copy engine fills in turn, in PTX.

Each place has a barrier that counts the bytes on their way to it. One thread asks for them; all who read wait. A place
may be asked for again once all have read it, which a barrier of theirs must have said.
"""

from jaxdnn._kernels.hopper.ptx import Emitter


class Ring:
    """Places of `size` bytes from the register `start` on, their barriers from `barriers` on; `leads` is who asks."""

    def __init__(self, e: Emitter, places: int, size: int, *, start: str, barriers: str, leads: str) -> None:
        self.e, self.places, self.size, self.leads = e, places, size, leads
        self.start, self.barriers = start, barriers
        self.place, self.phase = e.r("mov.b32", 0), e.r("mov.b32", 0)
        for i in range(places):
            e.op("mbarrier.init.shared::cta.b64", f"[{barriers}+{8 * i}]", 1, when=leads)
        e.op("fence.mbarrier_init.release.cluster")
        e.op("fence.proxy.async.shared::cta")

    def ask(self, source: str, size: object, when: str, place: str = "") -> None:
        """Has so many bytes copied into a place, without another the one that is read, if the predicate holds."""
        e = self.e
        place = place or self.place
        there = e.p("and.pred", self.leads, when) if when else self.leads
        barrier = self._barrier(place)
        e.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", barrier, size, when=there)
        copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        e.op(copy, f"[{self.address(place)}]", f"[{source}]", size, barrier, when=there)

    def address(self, place: str = "") -> str:
        return self.e.scaled(place or self.place, self.size, self.start)

    def wait(self) -> None:
        """Until the place that is read now has been filled."""
        e, again = self.e, self.e.label()
        barrier = self._barrier(self.place)
        e.place(again)
        come = e.p("mbarrier.try_wait.parity.shared::cta.b64", barrier, self.phase)
        e.op("bra", again, when="!" + come)

    def advance(self) -> None:
        e = self.e
        e.op("add.s32", self.place, self.place, 1)
        last = e.p("setp.eq.s32", self.place, self.places)
        e.op("mov.b32", self.place, 0, when=last)
        e.op("xor.b32", self.phase, self.phase, 1, when=last)

    def _barrier(self, place: str) -> str:
        return f"[{self.e.scaled(place, 8, self.barriers)}]"
