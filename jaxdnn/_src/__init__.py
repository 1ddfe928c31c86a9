"""The library itself; what users import is named in `jaxdnn`."""
