"""Fixtures of the tests of core/."""

from collections.abc import Iterator

import pytest

from tests.core.distributed.learner_pair import LearnerPair


@pytest.fixture(scope="session")
def learner_pair() -> Iterator[LearnerPair]:
    """Two learners in processes of their own."""
    with LearnerPair() as pair:
        yield pair


@pytest.fixture
def learners(learner_pair: LearnerPair) -> LearnerPair:
    """Return two learners that all tests share; a call that failed or timed out is followed by new ones."""
    learner_pair.renew_if_broken()
    return learner_pair
