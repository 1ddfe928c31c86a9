"""Graphs as users build, plan and call them."""

from collections.abc import Callable
from typing import Any

from jaxdnn._src.graph.build import Operations
from jaxdnn._src.graph.heuristics import plans
from jaxdnn._src.graph.plan import Plan


class Graph(Operations):
    """A graph of operations over tensors, built by methods that are named as in cudnn-frontend.

    `validate` infers what was left open and checks the rest, `plan` chooses how the graph is computed, `function` is
    the graph as a function of JAX arrays, and `to_json` its description, which `from_json` reads back.

    Args:
      name: what errors call it.
      io_data_type: the dtype of tensors in memory that set none.
      intermediate_data_type: the dtype of virtual tensors that set none.
      compute_data_type: the dtype in which nodes compute that name none: float32, float64 or int32.
    """

    def plans(self, mode: str = "A", **asked: Any) -> tuple[Plan, ...]:
        """The plans that implement the whole graph as asked, the best first; see `jaxdnn.graph.plans`."""
        return plans(self, mode, **asked)

    def plan(self, mode: str = "A", **asked: Any) -> Plan:
        """The first of `plans`."""
        return self.plans(mode, **asked)[0]

    def function(self, **asked: Any) -> Callable[..., Any]:
        """The graph as a JAX function: arrays in the order of `inputs()`, or by name, to those of `outputs()`."""
        return self.plan(**asked).function
