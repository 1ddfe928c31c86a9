"""Engines: the implementations of an op, what each can serve and guarantees, and the rule that chooses one."""

from jaxdnn._src.core.engines import Call, Engine, Measured, Schedule, Slower, names, ops, register, registered
from jaxdnn._src.core.selection import ranked, refusal, select

__all__ = ["Call", "Engine", "Measured", "Schedule", "Slower", "names", "ops", "ranked", "refusal", "register"]
__all__ += ["registered", "select"]
