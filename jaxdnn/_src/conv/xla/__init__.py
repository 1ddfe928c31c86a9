"""Convolutions by XLA: the forms of a call that it computes fast, and the engine `ordered`."""
