"""The Ray engine counts the learners of an elastic run's next part, and gives up if the head is silent."""

import itertools
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from core.engines.ray import engine as engine_module
from core.engines.ray.cluster import Answer, ClusterError
from core.engines.ray.engine import RayEngine
from core.engines.ray.launcher import RayLauncher
from core.runtime.options import RayParams

ROLES = [("evaluator", 0), ("logger", 0), *itertools.product(("learner", "actor"), range(2))]
CPUS = {"home": 9.0, "b": 2.0, "c": 5.0}  # home holds all but learner 1, which is on b, and c has joined


@pytest.mark.parametrize("order", list(itertools.permutations(CPUS)))
def test_an_elastic_run_grows_only_if_its_next_part_has_more_learners(order):
    """In most orders of the nodes the groups find no room on empty nodes, though there is room for one on c."""
    nodes = {node: {"Resources": {"CPU": CPUS[node]}} for node in order}
    answer = Answer(0.0, nodes, {}, {"home": {"CPU": 0.0}, "b": {"CPU": 0.0}, "c": {"CPU": 5.0}})
    params = RayParams(address="10.0.0.1:6379", learner_cpus=2, actor_cpus=3)
    options = SimpleNamespace(
        ray=params, device="cpu", num_learners=2, num_actors=2, supervisor=SimpleNamespace(elastic=4)
    )
    head = SimpleNamespace(answer=answer, fresh_answer=lambda timeout: answer)
    launcher = RayLauncher(SimpleNamespace(options=options, roles=ROLES), {}, SimpleNamespace(home="home"), None, head)
    more = launcher.room_for_learners()
    assert launcher.learners_of_next_part(2 + more) == 2 + more
    assert more == (order == ("b", "c", "home"))


class Supervisor:
    next_learners = 2

    def __init__(self, context, launcher):
        pass

    def run(self):
        return 0


class Refused(Supervisor):
    def run(self):
        raise ClusterError("no room")


@pytest.mark.parametrize(("learners", "exit_code"), [(2, 0), (None, 4)])
def test_an_elastic_run_whose_head_is_silent_ends_with_its_command(monkeypatch, capsys, learners, exit_code):
    monkeypatch.setattr(engine_module, "Supervisor", Supervisor)
    monkeypatch.setattr(engine_module, "resume_command_hint", lambda options: "the command")
    launcher = SimpleNamespace(learners_of_next_part=lambda most: learners, head_is_silent=lambda: "the head is gone")
    engine = RayEngine.__new__(RayEngine)
    engine._context, engine.next_learners = SimpleNamespace(options=None), None
    assert engine._supervise(launcher) == exit_code and engine.next_learners == learners
    assert ("the head is gone; the command" in capsys.readouterr().err) == (learners is None)


def test_a_part_that_is_refused_is_followed_by_one_with_a_learner_less(monkeypatch):
    monkeypatch.setattr(engine_module, "Supervisor", Refused)
    options = SimpleNamespace(supervisor=SimpleNamespace(elastic=4), resume="test_one", num_learners=3)
    engine = RayEngine.__new__(RayEngine)
    engine._context, engine.next_learners = SimpleNamespace(options=options), None
    with pytest.raises(ClusterError, match="no room"):
        engine._supervise(SimpleNamespace(learners_of_next_part=lambda most: most))
    assert engine.next_learners == 2
