"""Engines: the implementations of an op, what each can serve and promises, and the rule that chooses one."""

from jaxdnn._src.core.engines import Call, Engine, Features, Schedule, names, ops, register, registered
from jaxdnn._src.core.selection import ranked, refusal, select

__all__ = ["Call", "Engine", "Features", "Schedule", "names", "ops", "ranked", "refusal", "register", "registered"]
__all__ += ["select"]
