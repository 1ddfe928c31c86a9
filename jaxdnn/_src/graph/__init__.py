"""Operation graphs: tensors, nodes, plans."""
