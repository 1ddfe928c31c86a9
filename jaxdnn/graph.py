"""Operation graphs: what cuDNN's graph API is, over this library's ops, in JAX.

    from jaxdnn.graph import Graph
    g = Graph("block", io_data_type="bfloat16")
    x = g.tensor((8, 64, 56, 56), (200704, 1, 3584, 64), name="x")  # strides of NHWC: an array (8, 56, 56, 64)
    w, b = g.tensor((64, 64, 3, 3), (576, 1, 192, 64), name="w"), g.tensor((1, 64, 1, 1), name="b")
    y = g.relu(g.bias(g.conv_fprop(x, w, padding=[1, 1]), b)).set_output(True)
    plan = g.plan()
    result = plan({"x": x_array, w: w_array, b.uid: b_array})[y]
    print(plan.explain())  # which kernels, what was fused, what was not and why, bytes moved, the level

`plan` may be called within jit, vmap and grad; `g.function()` is the graph as a JAX function. An array stands for a
tensor's memory: its axes are the tensor's by descending stride. The module `jaxdnn_reference.graph` evaluates what
`g.describe()` returns in NumPy. `plans` has heuristic modes and filters; `Graph.from_json` and `Plan.from_json` read
what `to_json` wrote.
"""

from jaxdnn._src.graph.api import Graph as Graph
from jaxdnn._src.graph.errors import GraphError as GraphError
from jaxdnn._src.graph.errors import NotOffered as NotOffered
from jaxdnn._src.graph.heuristics import plans as plans
from jaxdnn._src.graph.knobs import Knob as Knob
from jaxdnn._src.graph.plan import Plan as Plan
from jaxdnn._src.graph.tensors import Tensor as Tensor
from jaxdnn._src.graph.trace import trace as trace

__all__ = ["Graph", "GraphError", "Knob", "NotOffered", "Plan", "Tensor", "plans", "trace"]
