"""Fixtures of the tests of core/."""

from collections.abc import Iterator

import pytest

from tests.core.distributed.learner_pair import LearnerPair


@pytest.fixture(scope="module")
def learners() -> Iterator[LearnerPair]:
    """Two learners in processes of their own, shared by the tests of a module."""
    with LearnerPair() as pair:
        yield pair
