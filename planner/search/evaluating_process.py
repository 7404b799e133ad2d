"""A process that evaluates candidates for a search in another one (:mod:`planner.search.evaluations`).

It reads from standard input, and answers on standard output: what is searched, then branches one by one, then perhaps
what is searched next. It ends with its input.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from dataclasses import replace
from typing import Any, BinaryIO

from planner.base.cpython import on_one_stack
from planner.base.errors import AutoparError
from planner.formulation.decisions import DecisionGraph
from planner.search.candidate_evaluation import Evaluator
from planner.search.search_context import SearchContext


@on_one_stack
def run() -> None:
    """Answer until who asks is gone; what is not an error of the model or the cluster ends it, and is told as usual."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # solvers may print
    with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
        _answer(questions, answers)
    os._exit(0)  # without a word on what could not be sent


def _answer(questions: BinaryIO, answers: BinaryIO) -> None:
    decision_graphs = list[DecisionGraph]()
    kept: dict[str, Any] = {"formulated": {}, "chains": {}}  # of all searches
    while True:
        question = pickle.load(questions)
        if isinstance(question[0], SearchContext):
            context, number, told = question
            decision_graphs += [] if told is None else [told]
            evaluator = Evaluator(replace(context, **kept), decision_graphs[number])
            continue
        try:
            found = evaluator.evaluate(*question)
        except AutoparError:
            found = None  # who asked evaluates it again, and meets the same
        pickle.dump(found, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()
