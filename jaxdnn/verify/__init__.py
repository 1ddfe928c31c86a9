"""`jaxdnn verify`: every op, engine and dtype against the definition, and every determinism level put to the test."""
