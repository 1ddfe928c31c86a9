"""What the cases of a family are made of, for tests, `jaxdnn verify` and `jaxdnn bench`."""
