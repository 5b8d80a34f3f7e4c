"""``python -m gluon_esgd.launch`` takes the same arguments as ``gluon-esgd run``."""

from __future__ import annotations

import sys

from .arguments import main

sys.exit(main())
