"""Computed tolerances: how far a result may be from its definition in float64, from the op, the data and the schedule.

`activation`, `norm` and `softmax` are the bounds of these families.
"""

from jaxdnn._src.activation import bounds as activation
from jaxdnn._src.activation.bounds import Epilogue
from jaxdnn._src.core.tolerance import (
    ACCUMULATIONS,
    FORMATS,
    Accumulation,
    Comparison,
    compare,
    format_of,
    integer_amplitude,
    output_bound,
    products_are_exact,
    truncated_inputs_error,
)
from jaxdnn._src.norm import bounds as norm
from jaxdnn._src.softmax import bounds as softmax

__all__ = [
    "ACCUMULATIONS",
    "FORMATS",
    "Accumulation",
    "Comparison",
    "Epilogue",
    "activation",
    "compare",
    "format_of",
    "integer_amplitude",
    "norm",
    "output_bound",
    "products_are_exact",
    "softmax",
    "truncated_inputs_error",
]
