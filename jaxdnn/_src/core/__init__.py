"""What all families of ops share."""
