"""The special function unit of NVIDIA GPUs: 2^x as the instruction `ex2.approx.ftz.f32` gives it, bit for bit.

The unit splits |x|, cut to 23 fractional bits, into a whole part n and a fraction f; of a negative x with a fraction,
the whole part is -n - 1 and the fraction is the ones' complement of f. The first 6 bits of the fraction choose a row
(c0, c1, c2) of `EX2`, the other 17 are the number d, and the significand of the result, with 23 fractional bits, is

    (2^13 c0 + c1 d + c2 s(d) + 30690) / 2^15, cut to a whole number,

where s(d) is about d² / 2^19: a squarer that cuts each partial product. Subnormal numbers, of operands and results,
are 0.

The form, and the constant, are those of Marcin Kościelnicki's description of earlier units (envytools, nvhw/sfu.c); the
rows were found from an H200's results at all 2^23 fractions, which they give without an exception.
`benchmarks/results/exp2_nvidia_h200.json` says which operands have been compared since.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ROUNDING = 30690  # of the sum, in units of 2^-15


def ex2(x: Array) -> Array:
    """2^x of float32 numbers, off by less than 2.1 units in the last place, for positive x 1.4."""
    x = np.asarray(x, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        size = np.abs(np.clip(np.nan_to_num(x, nan=0.0), -256.0, 256.0)).astype(np.float64)
        fixed = np.trunc(size * 2.0**23).astype(np.int64)
    negative = np.signbit(x)
    fixed = np.where(negative, np.where(fixed % 2**23 == 0, -fixed, ~fixed), fixed)
    whole, fraction = fixed >> 23, fixed & (2**23 - 1)
    result = np.ldexp(_significand(fraction) * 2.0**-23, whole)
    result = np.where(whole < -126, 0.0, np.where(whole > 127, np.inf, result)).astype(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), result)


def _significand(fraction: Array) -> Array:
    """2^f for a fraction of 23 bits, with 23 fractional bits: a whole number from 2^23 to 2^24."""
    c0, c1, c2 = np.moveaxis(EX2[fraction >> 17], -1, 0)
    d = fraction & (2**17 - 1)
    return (c0 * 2**13 + c1 * d + c2 * _squared(d) + ROUNDING) >> 15


def _squared(d: Array) -> Array:
    """About d² / 2^19 of 17 bits: the partial products that belong to the bits of d are cut before they are added."""
    total = np.zeros_like(d)
    for i in range(17):
        total += np.where(d >> i & 1, d >> (18 - i), 0)
    return total >> 1


# fmt: off
EX2 = np.array([
    [33554432, 22713, 494], [33919815, 22960, 501], [34289179, 23210, 506], [34662562, 23463, 511],
    [35040015, 23718, 518], [35421574, 23977, 521], [35807289, 24238, 527], [36197206, 24502, 532],
    [36591369, 24768, 541], [36989822, 25038, 546], [37392613, 25311, 551], [37799794, 25586, 559],
    [38211406, 25865, 564], [38627501, 26147, 568], [39048128, 26431, 577], [39473334, 26719, 583],
    [39903170, 27010, 589], [40337687, 27304, 596], [40776934, 27602, 600], [41220967, 27902, 609],
    [41669833, 28206, 615], [42123589, 28513, 622], [42582283, 28824, 627], [43045974, 29138, 633],
    [43514714, 29455, 641], [43988558, 29776, 647], [44467562, 30100, 655], [44951783, 30428, 661],
    [45441275, 30759, 670], [45936098, 31094, 677], [46436311, 31432, 686], [46941968, 31775, 691],
    [47453132, 32121, 699], [47969864, 32471, 705], [48492222, 32824, 715], [49020266, 33182, 721],
    [49554062, 33543, 730], [50093671, 33908, 739], [50639156, 34277, 748], [51190579, 34651, 753],
    [51748008, 35028, 763], [52311507, 35409, 773], [52881143, 35795, 779], [53456980, 36185, 787],
    [54039088, 36579, 796], [54627535, 36977, 806], [55222390, 37380, 813], [55823722, 37787, 822],
    [56431604, 38198, 833], [57046103, 38614, 842], [57667294, 39035, 849], [58295251, 39460, 858],
    [58930045, 39889, 870], [59571751, 40324, 877], [60220444, 40763, 887], [60876202, 41207, 896],
    [61539101, 41655, 909], [62209217, 42109, 917], [62886631, 42568, 925], [63571421, 43031, 938],
    [64263669, 43500, 946], [64963455, 43973, 959], [65670860, 44452, 969], [66385969, 44936, 980],
], np.int64)
# fmt: on
