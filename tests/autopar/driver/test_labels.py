"""Labels of distinct blocks are those of the whole graph: of attention, of two stacks, of convolutions."""

import pytest

from autopar.driver.trace import trace
from tests.autopar.models import MODELS
from tests.planner.formulation.test_labels import check_labels


@pytest.mark.parametrize("name", ["t5", "resnet"])
def test_values_of_equal_blocks_have_the_same_labels(name: str) -> None:
    model, batch = MODELS[name].build()
    check_labels(trace(model, example_kwargs=batch).graph)
