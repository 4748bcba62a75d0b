"""`python -m ringfence.cli` is the `ringfence` command."""

import sys

from ringfence.cli import main

sys.exit(main())
