"""`python -m keepstep.cli`, where the `keepstep` script is not installed."""

from __future__ import annotations

import sys

from keepstep.cli import main

sys.exit(main())
