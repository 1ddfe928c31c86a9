"""Engines: the implementations of an op, what each can serve and promises, and the rule that chooses one."""

from jaxdnn._src.core.engines import Call, Engine, Schedule, names, ops, ranked, refusal, register, registered, select

__all__ = ["Call", "Engine", "Schedule", "names", "ops", "ranked", "refusal", "register", "registered", "select"]
