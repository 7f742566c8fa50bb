"""`python -m zero_fx`."""

import sys

from .cli import main

sys.exit(main())
