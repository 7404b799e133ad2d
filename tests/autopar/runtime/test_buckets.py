"""Memory in which gradients are summed, kept from step to step where nobody holds it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from autopar.runtime.host.gradient_buckets import Buckets

TERMS = (torch.arange(6.0).view(2, 3), torch.arange(6.0, 10.0))


def test_memory_that_nobody_holds_is_filled_again() -> None:
    buckets = Buckets()
    at = buckets.joined("a", TERMS).data_ptr()
    again = buckets.joined("a", [term + 1 for term in TERMS])
    assert again.data_ptr() == at
    assert again.tolist() == [float(i + 1) for i in range(10)]
    assert len(buckets.tensors) == 1


HOLDERS: dict[str, Callable[[Tensor], object]] = {
    "a part of it": lambda t: t.split([6, 4])[1],
    "its storage": lambda t: t.untyped_storage(),
    "numpy": lambda t: t.numpy(),
    "dlpack": lambda t: torch.from_dlpack(t.view(2, 5)),
    "a memoryview": lambda t: memoryview(t.numpy()),
    "detached": lambda t: t.detach(),
}


@pytest.mark.parametrize("who", HOLDERS)
def test_memory_that_somebody_holds_is_left_alone(who: str) -> None:
    buckets = Buckets()
    at = (first := buckets.joined("a", TERMS)).data_ptr()
    value, holder = first.clone(), HOLDERS[who](first)
    other = buckets.joined("a", [term * 2 for term in TERMS])
    assert other.data_ptr() != at
    assert torch.equal(first, value)
    del first
    assert buckets.joined("a", [term * 3 for term in TERMS]).data_ptr() != at
    del holder
    assert buckets.joined("a", [term * 3 for term in TERMS]).data_ptr() == at


@pytest.mark.parametrize("terms", [TERMS[:1], [term.double() for term in TERMS]], ids=["size", "dtype"])
def test_other_memory_is_made_for_what_does_not_fit(terms: list[Tensor]) -> None:
    buckets = Buckets()
    buckets.joined("a", TERMS)
    found = buckets.joined("a", terms)
    assert (found.dtype, found.numel()) == (terms[0].dtype, sum(t.numel() for t in terms))
    assert len(buckets.tensors) == 1


def test_keys_have_memory_of_their_own_and_copies_none() -> None:
    buckets = Buckets()
    places = [buckets.joined(key, TERMS).data_ptr() for key in "ab"]
    assert len(set(places)) == 2
    assert copy.deepcopy(buckets).tensors == ()


def test_fake_tensors_are_followed() -> None:
    buckets = Buckets()
    with FakeTensorMode():
        terms = [torch.empty(3), torch.empty(4)]
        buckets.joined("a", terms)
        assert buckets.joined("a", terms).shape == (7,)
    assert len(buckets.tensors) == 1
