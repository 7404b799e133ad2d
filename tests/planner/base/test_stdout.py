"""Stdout of the command line is for what Python prints."""

from __future__ import annotations

import subprocess
import sys

KEEP = "import os; from planner.base.stdout import keep_stdout; keep_stdout(); "


def run(code: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {shell}', sys.executable, code], capture_output=True, text=True, check=False
    )


def test_what_native_code_prints_goes_to_stderr() -> None:
    found = run(KEEP + "print('said'); os.write(1, b'native\\n')")
    assert (found.returncode, found.stdout, found.stderr) == (0, "said\n", "native\n")


def test_a_program_with_a_closed_stdout_goes_on() -> None:
    assert run(KEEP + "import sys; sys.exit(7)", ">&-").returncode == 7
