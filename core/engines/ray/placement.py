"""Room on the nodes for all processes of a run at once, kept by Ray as a placement group: a run that waits for it holds nothing."""

from typing import Any

from core.engines.ray.cluster import ClusterError

DECIMALS = 4      # of an amount, that Ray counts
A_LITTLE = 0.001  # of the resource that every node has for its address; Ray finds a place first for what wants such a thing

Needs = dict[str, dict[str, float]]  # name of a process -> CPUs and GPUs


class PlacementReservation:
    """A part for each process: of actors on any node, evenly over them, of others at `home`, the node of main.py."""

    def __init__(self, needs: Needs, home: str, alone: bool):
        """Ask Ray for it. `alone`: no node can join. Raises ClusterError when the cluster cannot hold these processes at once, ever."""
        import ray
        from ray.util.placement_group import placement_group
        up = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        check_room(needs if alone else {name: need for name, need in needs.items() if not _is_actor(name)}, home, up)
        address = f"node:{ray.util.get_node_ip_address()}"
        parts = {name: {kind: amount for kind, amount in need.items() if amount} for name, need in needs.items()}
        parts = {name: part if _is_actor(name) else {**part, address: A_LITTLE} for name, part in parts.items() if part}
        where = [{} if _is_actor(name) else {"ray.io/node-id": home} for name in parts]
        self._needs, self._home, self._parts = needs, home, list(parts)
        self.group: Any = placement_group(list(parts.values()), "SPREAD", bundle_label_selector=where) if parts else None
        self._kept = [self.group.ready()] if self.group else []

    def __str__(self) -> str:
        return _resources(_sum(self._needs))

    def kept(self, timeout: float) -> bool:
        """Whether Ray keeps it, by now or within so many seconds."""
        import ray
        return not self._kept or bool(ray.wait(self._kept, timeout=timeout)[0])

    def lacks(self, nodes: dict[str, dict]) -> str | None:
        """Say what these nodes could not hold even if they were empty; None if they can hold the run."""
        try:
            check_room(self._needs, self._home, nodes)
        except ClusterError as error:
            return str(error)
        return None

    def has_node(self, name: str, bundles: dict[int, str]) -> bool:
        """Return True if the part of this process is on a node. `bundles`: the node of each part that is on one."""
        return name not in self._parts or self._parts.index(name) in bundles

    def place(self, name: str) -> dict[str, Any]:
        """What Ray is told of the process of this name: what it needs and where that is kept."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
        if name in self._parts:
            strategy: Any = PlacementGroupSchedulingStrategy(self.group, self._parts.index(name))
        else:
            strategy = "SPREAD" if _is_actor(name) else at(self._home)
        return {"num_cpus": self._needs[name]["CPU"], "num_gpus": self._needs[name]["GPU"], "scheduling_strategy": strategy}


def at(node: str) -> Any:
    """Ray's way to say: on this node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    return NodeAffinitySchedulingStrategy(node, soft=False)


def check_room(needs: Needs, home: str, nodes: dict[str, dict]) -> None:
    """Raises ClusterError when these nodes, Ray's entries by their ids, can never hold these processes at once, each on one node."""
    left = {name: dict(node["Resources"]) for name, node in nodes.items()}
    total = _sum(left)
    for name, need in sorted(needs.items(), key=lambda item: _is_actor(item[0])):  # those that must stay at home first
        candidates = list(left.values()) if _is_actor(name) else [node for key, node in left.items() if key == home]
        node = next((node for node in candidates if all(node.get(kind, 0.0) >= amount for kind, amount in need.items())), None)
        if node is None:
            where = "" if _is_actor(name) else " on the node of main.py"
            raise ClusterError(
                f"{name} needs {_resources(need)}{where} and finds no room: the run needs {_resources(_sum(needs))} in all, the cluster's "
                f"nodes ({len(left)}) have {_resources(total)}; add nodes, or lower num_actors, {_settings(need)}")
        for kind, amount in need.items():
            node[kind] = round(node.get(kind, 0.0) - amount, DECIMALS)


def _settings(need: dict[str, float]) -> str:
    """Those that say what a process needs, of each kind that this one needs."""
    kinds = [kind.lower() for kind, amount in need.items() if amount or kind == "CPU"]
    return ", ".join(f"ray.{role}_{kind}s" for kind in kinds for role in ("actor", "learner"))


def _is_actor(name: str) -> bool:
    return name.startswith("actor")


def _sum(amounts: Needs) -> dict[str, float]:
    return {kind: sum(each.get(kind, 0.0) for each in amounts.values()) for kind in ("CPU", "GPU")}


def _resources(amounts: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {kind}s" for kind, amount in amounts.items() if amount or kind == "CPU")
