"""`python -m jaxdnn` is the command line `jaxdnn`."""

import sys

from jaxdnn.verify.cli import main

if __name__ == "__main__":
    sys.exit(main())
