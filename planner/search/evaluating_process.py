"""A process that evaluates candidates for a search in another one (:mod:`planner.search.evaluations`).

It reads from standard input, and answers on standard output: first what is searched, then branches one by one. It ends
with its input.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys

from planner.base.cpython import on_one_stack
from planner.search.candidate_evaluation import Evaluator


@on_one_stack
def run() -> None:
    """Answer until there is no more input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who began it ends it
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # solvers may print
    evaluator = Evaluator(*pickle.load(asked))
    while True:
        try:
            question = pickle.load(asked)
        except EOFError:
            return
        try:
            found = evaluator.evaluate(*question)
        except Exception:
            found = None  # who asked evaluates it again, and meets the same
        pickle.dump(found, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()
