import multiprocessing
import time

import pytest

from core.runtime.clock import Clock, ClockParams


def clock(samples_per_insert: float | None = 8.0, learn_start: int = 100, tolerance: int = 10, num_actors: int = 2, num_learners: int = 1):
    return Clock(num_actors, num_learners, 4, ClockParams(samples_per_insert, learn_start, tolerance))


def test_learning_waits_for_learn_start_and_actors_run_freely():
    run = clock()
    run.count_agent_steps(0, 60)
    run.count_agent_steps(1, 39)
    assert run.can_insert() and not run.can_sample(1) and run.ratio() == 0.0
    run.count_agent_steps(0, 1)
    assert run.inserted == 100 and run.can_insert() and not run.can_sample(1)  # started, but no samples are due yet


def test_the_learner_waits_until_a_whole_batch_is_due():
    run = clock()
    run.count_agent_steps(0, 103)
    assert not run.can_sample(32)  # 24 samples are due
    run.count_agent_steps(1, 1)
    assert run.can_sample(32)
    run.count_update(0, 32)
    assert not run.can_sample(32) and run.ratio() == 8.0


def test_actors_wait_if_the_learner_lags_by_the_tolerance():
    run = clock()
    run.count_agent_steps(0, 109)
    assert run.can_insert()
    run.count_agent_steps(0, 1)
    assert not run.can_insert()
    run.count_update(0, 32)  # worth four agent steps
    assert run.can_insert()


@pytest.mark.parametrize(("act_first", "samples_per_insert"), [(True, 8.0), (False, 8.0), (True, 0.5)])
def test_the_ratio_holds_whichever_side_is_faster(act_first, samples_per_insert):
    run = clock(samples_per_insert, tolerance=100)
    for _ in range(20_000):
        acts = run.can_insert() and (act_first or not run.can_sample(32))
        if acts:
            run.count_agent_steps(0, 16)
        elif run.can_sample(32):
            run.count_update(0, 32)
        else:
            pytest.fail("both sides wait")
    assert run.ratio() == pytest.approx(samples_per_insert, rel=0.05)


def test_without_a_ratio_only_learn_start_counts():
    run = clock(None)
    run.count_agent_steps(0, 100)
    assert run.can_sample(1_000_000)
    run.count_agent_steps(0, 1_000_000)
    assert run.can_insert()


def test_counters_add_up_over_actors_and_learners():
    run = clock(num_actors=3, num_learners=2)
    for actor in range(3):
        run.count_agent_steps(actor, 10 * actor, episodes=actor)
    for learner in range(2):
        run.count_update(learner, 32)
    assert (run.agent_steps, run.episodes, run.updates, run.sampled) == (30, 3, 1, 64)


@pytest.mark.parametrize("num_actors", [1, 2, 5])
@pytest.mark.parametrize("num_learners", [1, 3])
def test_a_run_resumes_with_other_numbers_of_actors_and_learners(num_actors, num_learners):
    run = clock(num_actors=3, num_learners=2)
    for actor in range(3):
        run.count_agent_steps(actor, 40 + actor, episodes=2)
    for learner in range(2):
        run.count_update(learner, 32)
        run.count_update(learner, 32)
    resumed = clock(num_actors=num_actors, num_learners=num_learners)
    resumed.load_state_dict(run.state_dict(), with_rows=True)
    for name in ("agent_steps", "inserted", "episodes", "updates", "sampled"):
        assert getattr(resumed, name) == getattr(run, name), name
    resumed.count_agent_steps(num_actors - 1, 1)
    resumed.count_update(num_learners - 1, 32)
    assert resumed.agent_steps == run.agent_steps + 1 and resumed.updates == run.updates + 1


@pytest.mark.parametrize(("before", "after"), [(8.0, 4.0), (4.0, 8.0), (None, 8.0), (8.0, None)])
def test_with_the_replay_a_new_ratio_holds_from_the_resume_on(before, after):
    run = clock(before)
    run.count_agent_steps(0, 10_000)
    for _ in range(1_000):
        run.count_update(0, 32)
    resumed = clock(after, num_learners=2)
    resumed.load_state_dict(run.state_dict(), with_rows=True)
    assert resumed.inserted == 10_000 and resumed.updates == 1_000 and resumed.can_insert()
    if after is not None:
        assert not resumed.can_sample(1)
        resumed.count_agent_steps(1, 5)
        assert resumed.can_sample(5 * int(after)) and not resumed.can_sample(5 * int(after) + 1)


def test_without_the_replay_the_rate_limiter_restarts():
    run = clock()
    run.count_agent_steps(0, 150)
    run.count_update(0, 32)
    resumed = clock()
    resumed.load_state_dict(run.state_dict(), with_rows=False)
    assert (resumed.agent_steps, resumed.updates) == (150, 1) and (resumed.inserted, resumed.sampled) == (0, 0)
    assert not resumed.can_sample(1)


def test_heartbeats_measure_silence_and_can_be_reset():
    run = clock()
    assert run.seconds_since_heartbeat(2) == 0.0
    run.heartbeat(2)
    time.sleep(0.02)
    assert 0.02 <= run.seconds_since_heartbeat(2) < 5 and run.seconds_since_heartbeat(1) == 0.0
    run.reset_heartbeat(2)
    assert run.seconds_since_heartbeat(2) == 0.0


def act_and_stop(run: Clock) -> None:
    run.count_agent_steps(1, 7)
    run.stop()


def test_a_spawned_process_shares_counters_and_the_stop_flag():
    run = clock()
    process = multiprocessing.get_context("spawn").Process(target=act_and_stop, args=(run,))
    process.start()
    process.join()
    assert run.agent_steps == 7 and run.stopped
