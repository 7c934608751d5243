"""`python -m perdure` is `perdure`."""

import sys

from perdure.cli.main import main

sys.exit(main())
