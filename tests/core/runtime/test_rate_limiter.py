from types import SimpleNamespace

import pytest

from core.runtime.run_state import RateLimiter, RateLimiterParams, RunCounters


def make(
    samples_per_insert: float | None = 8.0,
    min_replay_size: int = 100,
    tolerance: int = 10,
    num_actors: int = 2,
    num_learners: int = 1,
):
    counters = RunCounters(num_actors, num_learners)
    return SimpleNamespace(
        counters=counters,
        limiter=RateLimiter(RateLimiterParams(samples_per_insert, min_replay_size, tolerance), counters),
    )


def restore(resumed, run, with_replay: bool) -> None:
    state = {**run.counters.state_dict(), **run.limiter.state_dict()}
    resumed.counters.load_state_dict(state, with_replay)
    resumed.limiter.load_state_dict(state)


def test_learning_waits_for_learn_start_and_actors_run_freely():
    run = make()
    run.counters.count_agent_steps(0, 60)
    run.counters.count_agent_steps(1, 39)
    assert run.limiter.can_insert() and not run.limiter.can_sample(1) and run.limiter.ratio() == 0.0
    run.counters.count_agent_steps(0, 1)
    # started, but no samples are due yet
    assert run.counters.inserted == 100 and run.limiter.can_insert() and not run.limiter.can_sample(1)


def test_the_learner_waits_until_a_whole_batch_is_due():
    run = make()
    run.counters.count_agent_steps(0, 103)
    assert not run.limiter.can_sample(32)  # 24 samples are due
    run.counters.count_agent_steps(1, 1)
    assert run.limiter.can_sample(32)
    run.counters.count_update(0, 32)
    assert not run.limiter.can_sample(32) and run.limiter.ratio() == 8.0


def test_actors_wait_if_the_learner_lags_by_the_tolerance():
    run = make()
    run.counters.count_agent_steps(0, 109)
    assert run.limiter.can_insert()
    run.counters.count_agent_steps(0, 1)
    assert not run.limiter.can_insert()
    run.counters.count_update(0, 32)  # worth four agent steps
    assert run.limiter.can_insert()


@pytest.mark.parametrize(("act_first", "samples_per_insert"), [(True, 8.0), (False, 8.0), (True, 0.5)])
def test_the_ratio_holds_whichever_side_is_faster(act_first, samples_per_insert):
    run = make(samples_per_insert, tolerance=100)
    for _ in range(20_000):
        acts = run.limiter.can_insert() and (act_first or not run.limiter.can_sample(32))
        if acts:
            run.counters.count_agent_steps(0, 16)
        elif run.limiter.can_sample(32):
            run.counters.count_update(0, 32)
        else:
            pytest.fail("both sides wait")
    assert run.limiter.ratio() == pytest.approx(samples_per_insert, rel=0.05)


def test_without_a_ratio_only_learn_start_counts():
    run = make(None)
    run.counters.count_agent_steps(0, 100)
    assert run.limiter.can_sample(1_000_000)
    run.counters.count_agent_steps(0, 1_000_000)
    assert run.limiter.can_insert()


def test_counters_add_up_over_actors_and_learners():
    run = make(num_actors=3, num_learners=2)
    for actor in range(3):
        run.counters.count_agent_steps(actor, 10 * actor, episodes=actor)
    for learner in range(2):
        run.counters.count_update(learner, 32)
    assert (run.counters.agent_steps, run.counters.episodes, run.counters.updates, run.counters.sampled) == (
        30,
        3,
        1,
        64,
    )


@pytest.mark.parametrize("num_actors", [1, 2, 5])
@pytest.mark.parametrize("num_learners", [1, 3])
def test_a_run_resumes_with_other_numbers_of_actors_and_learners(num_actors, num_learners):
    run = make(num_actors=3, num_learners=2)
    for actor in range(3):
        run.counters.count_agent_steps(actor, 40 + actor, episodes=2)
    for learner in range(2):
        run.counters.count_update(learner, 32)
        run.counters.count_update(learner, 32)
    resumed = make(num_actors=num_actors, num_learners=num_learners)
    restore(resumed, run, with_replay=True)
    for name in ("agent_steps", "inserted", "episodes", "updates", "sampled"):
        assert getattr(resumed.counters, name) == getattr(run.counters, name), name
    resumed.counters.count_agent_steps(num_actors - 1, 1)
    resumed.counters.count_update(num_learners - 1, 32)
    assert (
        resumed.counters.agent_steps == run.counters.agent_steps + 1
        and resumed.counters.updates == run.counters.updates + 1
    )


@pytest.mark.parametrize(("before", "after"), [(8.0, 4.0), (4.0, 8.0), (None, 8.0), (8.0, None)])
def test_with_the_replay_a_new_ratio_holds_from_the_resume_on(before, after):
    run = make(before)
    run.counters.count_agent_steps(0, 10_000)
    for _ in range(1_000):
        run.counters.count_update(0, 32)
    resumed = make(after, num_learners=2)
    restore(resumed, run, with_replay=True)
    assert resumed.counters.inserted == 10_000 and resumed.counters.updates == 1_000 and resumed.limiter.can_insert()
    if after is not None:
        assert not resumed.limiter.can_sample(1)
        resumed.counters.count_agent_steps(1, 5)
        assert resumed.limiter.can_sample(5 * int(after)) and not resumed.limiter.can_sample(5 * int(after) + 1)


def test_without_the_replay_the_rate_limiter_restarts():
    run = make()
    run.counters.count_agent_steps(0, 150)
    run.counters.count_update(0, 32)
    resumed = make()
    restore(resumed, run, with_replay=False)
    assert (resumed.counters.agent_steps, resumed.counters.updates) == (150, 1)
    assert (resumed.counters.inserted, resumed.counters.sampled) == (0, 0)
    assert not resumed.limiter.can_sample(1)
