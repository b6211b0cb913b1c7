"""`python -m sdmlm.cli`, which `accelerate launch -m sdmlm.cli` needs."""

import sys

from sdmlm.cli.main import main

sys.exit(main())
