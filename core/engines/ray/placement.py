"""Resources on the nodes for all processes of a run at once, reserved as a placement group of Ray.

A run that waits for its reservation holds nothing, so runs that start together cannot block each other half started.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from core.engines.ray.cluster import ClusterError, Needs, Nodes, alive_nodes, free_resources
from core.runtime.options import RunOptions

DECIMALS = 4  # of an amount, which Ray counts
# Amount of the resource that every node has for its address. Ray places bundles that need such a resource first.
ADDRESS_SHARE = 0.001


class PlacementReservation:
    """Bundles of resources, spread evenly over the nodes: one for each process, and one for a learner with its actors.

    Actors and learners with a host of their own may be on any node, others are on the node of main. A learner's bundle
    includes as many of its actors as have room on a node beside it when the run starts; the others follow where there
    is room. If its node is lost the run ends, so that these actors need no place elsewhere.
    """

    def __init__(self, needs: Needs, home: str, is_local: bool, groups: Sequence[Sequence[str]]):
        """Ask Ray for the reservation.

        Args:
            needs: resources of every process.
            home: id of the node of main.
            is_local: no node can join.
            groups: of each learner that needs not be at home, its name and those of its actors.

        Raises:
            ClusterError: the cluster can never hold these processes at once.
        """
        import ray
        from ray.util.placement_group import placement_group

        anywhere = {name for name in needs if name.startswith("actor")} | {learner for learner, *_ in groups}
        at_home = {name: need for name, need in needs.items() if name not in anywhere}
        if (lack := lack_of(needs if is_local else at_home, home, alive_nodes(), anywhere)) is not None:
            raise ClusterError(lack)
        free = free_resources()
        for need in at_home.values():
            _take(need, free[home])
        together = _with_room_beside(groups, needs, home, free)
        joined = {name for names in together for name in names}
        members = [*([name] for name in needs if name not in joined), *together]
        address = f"node:{ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]
        bundles, labels = list[dict[str, float]](), list[dict[str, str]]()
        self._needs, self._home, self._anywhere = needs, home, anywhere
        self._bundle_of: dict[str, int] = {}  # number of each process's bundle; none for a process that needs nothing
        for names in members:
            bundle = {kind: sum(needs[name][kind] for name in names) for kind in ("CPU", "GPU")}
            bundle = {kind: round(amount, DECIMALS) for kind, amount in bundle.items() if amount}
            if not bundle:
                continue
            is_free = names[0] in anywhere
            self._bundle_of |= dict.fromkeys(names, len(bundles))
            bundles.append(bundle if is_free else {**bundle, address: ADDRESS_SHARE})
            labels.append({} if is_free else {"ray.io/node-id": home})
        self.group: Any = None
        if bundles:
            self.group = placement_group(bundles, "SPREAD", bundle_label_selector=labels)
        self._ready = [self.group.ready()] if self.group else []

    def __str__(self) -> str:
        return _resources(_total(self._needs))

    def is_ready(self, timeout: float) -> bool:
        """Return True if Ray has reserved everything. Wait for that at most `timeout` seconds."""
        import ray

        return not self._ready or bool(ray.wait(self._ready, timeout=timeout)[0])

    def lack(self, nodes: Nodes) -> str | None:
        """Return what these nodes could not hold even if they were empty, or None if they can hold the run."""
        return lack_of(self._needs, self._home, nodes, self._anywhere)

    def has_node(self, name: str, bundle_nodes: dict[int, str]) -> bool:
        """Return True if the bundle of this process is on a node. `bundle_nodes`: number of a bundle -> its node."""
        return name not in self._bundle_of or self._bundle_of[name] in bundle_nodes

    def actor_options(self, name: str) -> dict[str, Any]:
        """Return the options of the Ray actor of this process: its resources, and where they are reserved."""
        need = self._needs[name]
        return {"num_cpus": need["CPU"], "num_gpus": need["GPU"], "scheduling_strategy": self._strategy(name)}

    def host_options(self, learner: str) -> dict[str, Any]:
        """Return the options of the Ray actor that is the host of this learner, on its node."""
        return {"num_cpus": 0, "scheduling_strategy": self._strategy(learner)}

    def _strategy(self, name: str) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if name in self._bundle_of:
            return PlacementGroupSchedulingStrategy(self.group, self._bundle_of[name])
        return "SPREAD" if name in self._anywhere else node_affinity(self._home)


def process_needs(options: RunOptions, roles: Iterable[tuple[str, int]]) -> Needs:
    """Return the CPUs and GPUs that Ray reserves for the process of each role and index, by its name."""
    params, on_gpu = options.ray, options.device.startswith("cuda")
    learner = {"CPU": params.learner_cpus, "GPU": float(on_gpu) if params.learner_gpus is None else params.learner_gpus}
    by_role = {
        "actor": {"CPU": params.actor_cpus, "GPU": params.actor_gpus},
        "learner": learner,
        "tester": learner,
        "evaluator": {"CPU": params.evaluator_cpus, "GPU": 0.0},
        "logger": {"CPU": 0.0, "GPU": 0.0},
    }
    return {f"{role} {index}": by_role[role] for role, index in roles}


def learner_groups(options: RunOptions, learners: Iterable[int]) -> list[Needs]:
    """Return what each of these learners needs together with its actors, of which every learner has as many."""
    count = options.num_actors // options.num_learners
    return [
        process_needs(
            options, [("learner", learner), *(("actor", learner * count + number) for number in range(count))]
        )
        for learner in learners
    ]


def learners_with_room(
    options: RunOptions, roles: Iterable[tuple[str, int]], most: int, home: str, nodes: Nodes
) -> int:
    """Return how many learners, at most this many, a run with these roles could have if the nodes were empty."""
    groups = learner_groups(options, range(most))
    groups[0] |= process_needs(options, [role for role in roles if role[0] not in ("learner", "actor")])
    anywhere = {name for group in groups for name in group if name.startswith("actor")}
    anywhere |= {f"learner {learner}" for learner in range(1, most)}
    return number_with_room(groups, home, nodes, anywhere)


def node_affinity(node: str) -> Any:
    """Return Ray's scheduling strategy for this node and no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def lack_of(needs: Needs, home: str, nodes: Nodes, anywhere: Collection[str]) -> str | None:
    """Return what these nodes lack to hold these processes at once if they were empty, or None if they could.

    A process is on one node. Processes that are not in `anywhere` must be at home.
    """
    free = {name: dict(node["Resources"]) for name, node in nodes.items()}
    total = _total(free)
    # Those that must stay at home come first, then learners, which may need a GPU.
    for name, need in sorted(needs.items(), key=lambda item: (item[0] in anywhere, item[0].startswith("actor"))):
        candidates = [node for key, node in free.items() if key == home or name in anywhere]
        node = next((node for node in candidates if _fits(need, node)), None)
        if node is None:
            where = "" if name in anywhere else " on the node of main.py"
            kinds = [kind.lower() for kind, amount in need.items() if amount or kind == "CPU"]
            options = ", ".join(f"ray.{role}_{kind}s" for kind in kinds for role in ("actor", "learner"))
            return (
                f"{name} needs {_resources(need)}{where} and finds no room: the run needs {_resources(_total(needs))} "
                f"in all, the cluster's nodes ({len(free)}) have {_resources(total)}; add nodes, or lower num_actors, "
                f"{options}"
            )
        _take(need, node)
    return None


def number_with_room(groups: Sequence[Needs], home: str, nodes: Nodes, anywhere: Collection[str]) -> int:
    """Return how many of these groups of processes, in their order, the nodes could hold at once if they were empty.

    Processes that are not in `anywhere` must be at home.
    """
    needs: Needs = {}
    for number, group in enumerate(groups):
        needs |= group
        if lack_of(needs, home, nodes, anywhere) is not None:
            return number
    return len(groups)


def _with_room_beside(groups: Sequence[Sequence[str]], needs: Needs, home: str, free: Needs) -> list[list[str]]:
    """Return each learner with as many of its actors as have room on the same node.

    Args:
        groups: of each learner its name and those of its actors.
        needs: resources of every process.
        home: id of the node of main, which is tried last.
        free: what each node has for these processes, which are taken from it.
    """
    together, taken = [], dict.fromkeys(free, 0)
    for learner, *actors in groups:
        fitting = [node for node in free if _fits(needs[learner], free[node])]
        if not fitting:
            together.append([learner])
            continue
        node = max(fitting, key=lambda node: (-taken[node], node != home, free[node].get("CPU", 0.0)))
        taken[node] += 1
        names = []
        for name in (learner, *actors):
            if _fits(needs[name], free[node]):
                names.append(name)
                _take(needs[name], free[node])
        together.append(names)
    return together


def _fits(need: Mapping[str, float], free: Mapping[str, float]) -> bool:
    return all(free.get(kind, 0.0) >= amount for kind, amount in need.items())


def _take(need: Mapping[str, float], free: dict[str, float]) -> None:
    for kind, amount in need.items():
        free[kind] = round(free.get(kind, 0.0) - amount, DECIMALS)


def _total(amounts: Needs) -> dict[str, float]:
    return {kind: sum(each.get(kind, 0.0) for each in amounts.values()) for kind in ("CPU", "GPU")}


def _resources(amounts: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {kind}s" for kind, amount in amounts.items() if amount or kind == "CPU")
