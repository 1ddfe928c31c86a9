"""`jaxdnn verify`: compares every op, engine and dtype with the definition, and tests every determinism level."""
