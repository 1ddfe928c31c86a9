"""`jaxdnn bench`: engines against each other and against peers, in one process.

`jaxdnn bench FAMILY` runs the cases of the module that the family's manifest names as `timed`. Such a module has

* `CASES`: a tuple of `jaxdnn._src.cases.timed.Case`s, one for each shape that is measured. A case says how its operands
  are made and, for each of its passes ("forward", "backward", ...), our function, XLA's, PyTorch's if there is one, and
  what work the pass has to do: floating-point operations, or, where memory binds, the bytes that must move.

* `OF_LAYER`: what makes such a case of a layer of a published network, by the layer's op. `--family corpus` runs these
  in every engine that serves them, so that the choice among engines can be judged.

`jaxdnn.bench.cli` does the rest: it times all of them on the same operands in one process (device time by CUPTI on
NVIDIA GPUs), prints a line a pass and a summary, and writes the JSON. A pass that names its bytes runs over rotating
operands of several gigabytes, so that no cache serves them, and is reported in TB/s and as a share of what a plain
device copy reaches in the same process.
"""
