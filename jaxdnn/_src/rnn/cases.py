FAMILY = None
