"""Graphs as users build, plan and call them."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxdnn._src.graph.build import Operations
from jaxdnn._src.graph.heuristics import create, knobs_of, plans
from jaxdnn._src.graph.knobs import Knob
from jaxdnn._src.graph.plan import ENGINES, Plan


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

    def get_engine_count(self) -> int:
        """How many engines there are: 0 is "fused", 1 is "single"; see `jaxdnn.graph.plans`."""
        return len(ENGINES)

    def get_knobs_for_engine(self, engine_id: int) -> tuple[Knob, ...]:
        """The knobs of an engine's plan, with their choices; see `Plan.knobs`."""
        return knobs_of(self, engine_id)

    def create_execution_plan(self, engine_id: int, knobs: Mapping[str, Any] | None = None) -> Plan:
        """The plan of an engine with these values of its knobs; what is not given is chosen as by `plan`.

        Raises:
          GraphError: there is no such engine, knob or value.
          NotOffered: the plan cannot be so; the message says why.
        """
        return create(self, engine_id, {} if knobs is None else knobs)

    def function(self, **asked: Any) -> Callable[..., Any]:
        """The graph as a JAX function: arrays in the order of `inputs()`, or by name, to those of `outputs()`."""
        return self.plan(**asked).function
