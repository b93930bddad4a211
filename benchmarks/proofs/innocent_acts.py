"""A long seeded search for an innocent act of a training program that changes a bit: docs/adversarial.md.

    python benchmarks/proofs/innocent_acts.py [--cases 140] [--seed 0] [--case SEED] [--device cuda]

Prints each failure with the number that repeats it. The search itself is in tests/support/user_programs.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from user_programs import main

if __name__ == "__main__":
    sys.exit(main())
