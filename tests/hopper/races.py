"""Whether accesses to shared memory are ordered: a clock for each warp, for the small machines that run in step.

A warp's clock says up to which of every other warp's moments it has been told of, by a barrier that both took part in,
or by a copy that it waited for. Two accesses to one word by different warps, one of them a store, need such an order,
even where a machine that runs in step would do them in the right one. Of a word's readers the last alone is known.
"""

import numpy as np


def _bits(warps: np.ndarray) -> np.ndarray:
    return np.left_shift(np.uint64(1), warps.astype(np.uint64))


class Races:
    def __init__(self, threads: int, size: int) -> None:
        """Of shared memory of so many bytes in all; the copy engine is one warp more."""
        self.engine = -(-threads // 32)
        self.clocks = np.zeros((self.engine + 1, self.engine + 1), np.int64)
        np.fill_diagonal(self.clocks, 1)
        self.stores, self.loads = ((np.full(size // 4, -1), np.zeros(size // 4, np.int64)) for _ in range(2))
        self.unfenced = np.zeros(size // 4, bool)  # stored by threads, and not yet shown to the copy engine
        # Warps, a bit each, that have loaded a word, and the loads not complete; complete, not before the copy engine.
        self.in_flight, self.complete = (np.zeros(size // 4, np.uint64) for _ in range(2))

    def load(self, threads: np.ndarray, places: np.ndarray) -> None:
        """Each thread loads the bytes in its row of `places`."""
        warps, words = self._words(threads, places)
        self._ordered(warps, words, self.stores)
        self.loads[0][words], self.loads[1][words] = warps, self.clocks[warps, warps]
        np.bitwise_or.at(self.in_flight, words, _bits(warps))

    def store(self, threads: np.ndarray, places: np.ndarray) -> None:
        warps, words = self._words(threads, places)
        self._ordered(warps, words, self.stores)
        self._ordered(warps, words, self.loads)
        self.stores[0][words], self.stores[1][words] = warps, self.clocks[warps, warps]
        self.unfenced[words] = True
        for loads in (self.in_flight, self.complete):  # a store to where its warp has loaded comes after that
            np.bitwise_and.at(loads, words, ~_bits(warps))

    def complete_loads(self, threads: np.ndarray) -> None:
        """A fence in the generic proxy."""
        warps = np.bitwise_or.reduce(_bits(threads // 32))
        self.complete |= self.in_flight & warps
        self.in_flight &= ~warps

    def fence(self, threads: np.ndarray) -> None:
        """The copy engine may load what these threads' warps stored, and store to what complete loads have read."""
        self.unfenced &= ~np.isin(self.stores[0], np.unique(threads // 32))
        self.complete &= ~np.bitwise_or.reduce(_bits(threads // 32))

    def meet(self, threads: np.ndarray) -> None:
        """A barrier of these threads."""
        warps = np.unique(threads // 32)
        self.clocks[warps] = self.clocks[warps].max(0)
        self.clocks[warps, warps] += 1

    def copy(self, thread: int, start: int, size: int) -> np.ndarray:
        """The copy engine stores for a thread, at a moment that who waits for it is told of."""
        moment = self.clocks[thread // 32].copy()
        words = np.arange(start // 4, (start + size) // 4)
        for accesses in (self.stores, self.loads):
            self._ordered(np.full(len(words), thread // 32), words, accesses)
        if (self.in_flight | self.complete)[words].any():
            raise RuntimeError(f"the copy engine stores where no fence completes a load, from shared byte {start} on")
        self.clocks[self.engine, self.engine] += 1
        moment[self.engine] = self.clocks[self.engine, self.engine]
        self.stores[0][words], self.stores[1][words] = self.engine, moment[self.engine]
        return moment

    def copy_from(self, thread: int, start: int, size: int) -> np.ndarray:
        """The copy engine loads for a thread, until a moment that the thread is told of if it waits."""
        moment = self.clocks[thread // 32].copy()
        words = np.arange(start // 4, (start + size) // 4)
        self._ordered(np.full(len(words), thread // 32), words, self.stores)
        if self.unfenced[words].any():
            raise RuntimeError(f"the copy engine loads what no fence has shown it, from shared byte {start} on")
        self.clocks[self.engine, self.engine] += 1
        moment[self.engine] = self.clocks[self.engine, self.engine]
        self.loads[0][words], self.loads[1][words] = self.engine, moment[self.engine]
        return moment

    def nothing(self) -> np.ndarray:
        """A moment that tells of nothing."""
        return np.zeros(len(self.clocks), np.int64)

    def left(self, thread: int) -> np.ndarray:
        """The moment until which a thread's warp has done everything, for who waits for a barrier that it tells."""
        warp = thread // 32
        moment = self.clocks[warp].copy()
        self.clocks[warp, warp] += 1
        return moment

    def told(self, thread: int, moment: np.ndarray) -> None:
        self.clocks[thread // 32] = np.maximum(self.clocks[thread // 32], moment)

    @staticmethod
    def _words(threads: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        words = places[:, ::4] // 4
        return np.repeat(threads // 32, words.shape[1]), words.ravel()

    def _ordered(self, warps: np.ndarray, words: np.ndarray, accesses: tuple[np.ndarray, np.ndarray]) -> None:
        others, moments = accesses[0][words], accesses[1][words]
        raced = (others >= 0) & (others != warps) & (moments > self.clocks[warps, others])
        if raced.any():
            first = np.flatnonzero(raced)[0]
            raise RuntimeError(f"warps {others[first]} and {warps[first]} race for shared byte {4 * words[first]}")
