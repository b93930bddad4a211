"""A long seeded search for inputs that break a method; what is searched: docs/adversarial.md.

    python benchmarks/proofs/adversarial.py [--cases 500] [--seed 1] [--method NAME] [--case SEED]

Prints each failure with the command that repeats it, and a table by method. The search itself is in
tests/support/adversarial.py; ``make test`` runs it on 2,000 cases.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from adversarial import main

if __name__ == "__main__":
    sys.exit(main())
