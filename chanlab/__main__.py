"""`python -m chanlab`: the same as the `chanlab` command."""

import sys

from chanlab.cli.main import main

sys.exit(main())
