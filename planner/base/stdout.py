"""Keeps standard output for what the program says, not for what libraries print."""

from __future__ import annotations

import os
import sys


def keep_stdout() -> None:
    """Have only Python print to stdout from now on, and native code to stderr: for the command line, which ends soon.

    HiGHS prints a line to stdout now and then that none of its options stops (jump-dev/HiGHS.jl, issue 312), which
    would break what is read by programs.
    """
    if sys.stdout is None:  # nobody listens
        return
    sys.stdout.flush()
    words = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(words, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)
