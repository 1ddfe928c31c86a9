"""`jaxdnn bench`: engines against each other and against peers, in one process."""
