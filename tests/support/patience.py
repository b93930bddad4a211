"""The one factor on every time limit of the tests: ``THINWIRE_PATIENCE=5 make test`` on a machine that is very busy.

A limit is there to end what hangs. It judges nothing: what is slow is measured by ``benchmarks/``, on a quiet machine.
"""

from __future__ import annotations

import os

PATIENCE = float(os.environ.get("THINWIRE_PATIENCE", "1"))
