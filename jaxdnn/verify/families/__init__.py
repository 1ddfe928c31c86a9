"""The families of ops that `jaxdnn verify` knows: which cases and which determinism subjects each has."""
