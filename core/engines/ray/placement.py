"""Resources on the nodes for all processes of a run at once, reserved as a placement group of Ray.

A run that waits for its reservation holds nothing, so runs that start together cannot block each other half started.
"""

from typing import Any

from core.engines.ray.cluster import ClusterError

DECIMALS = 4  # of an amount, which Ray counts
# Amount of the resource that every node has for its address. Ray places bundles that need such a resource first.
ADDRESS_SHARE = 0.001

Needs = dict[str, dict[str, float]]  # name of a process -> CPUs and GPUs
Nodes = dict[str, dict[str, Any]]  # node id -> Ray's entry of the node


class PlacementReservation:
    """A bundle of resources for each process: for actors on any node, spread evenly, for others on the node of main."""

    def __init__(self, needs: Needs, home: str, is_local: bool):
        """Ask Ray for the reservation.

        Args:
            needs: resources of every process.
            home: id of the node of main.
            is_local: no node can join.

        Raises:
            ClusterError: the cluster can never hold these processes at once.
        """
        import ray
        from ray.util.placement_group import placement_group

        at_home = {name: need for name, need in needs.items() if not _is_actor(name)}
        check_capacity(needs if is_local else at_home, home, alive_nodes())
        address = f"node:{ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]
        bundles = {name: {kind: amount for kind, amount in need.items() if amount} for name, need in needs.items()}
        bundles = {
            name: bundle if _is_actor(name) else {**bundle, address: ADDRESS_SHARE}
            for name, bundle in bundles.items()
            if bundle
        }
        labels = [{} if _is_actor(name) else {"ray.io/node-id": home} for name in bundles]
        self._needs, self._home = needs, home
        self._names = list(bundles)  # the number of a bundle is its position in this list
        self.group: Any = None
        if bundles:
            self.group = placement_group(list(bundles.values()), "SPREAD", bundle_label_selector=labels)
        self._ready = [self.group.ready()] if self.group else []

    def __str__(self) -> str:
        return _resources(_total(self._needs))

    def is_ready(self, timeout: float) -> bool:
        """Return True if Ray has reserved everything. Wait for that at most `timeout` seconds."""
        import ray

        return not self._ready or bool(ray.wait(self._ready, timeout=timeout)[0])

    def lack(self, nodes: Nodes) -> str | None:
        """Return what these nodes could not hold even if they were empty, or None if they can hold the run."""
        try:
            check_capacity(self._needs, self._home, nodes)
        except ClusterError as error:
            return str(error)
        return None

    def has_node(self, name: str, bundle_nodes: dict[int, str]) -> bool:
        """Return True if the bundle of this process is on a node. `bundle_nodes`: number of a bundle -> its node."""
        return name not in self._names or self._names.index(name) in bundle_nodes

    def actor_options(self, name: str) -> dict[str, Any]:
        """Return the options of the Ray actor of this process: its resources, and where they are reserved."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if name in self._names:
            strategy: Any = PlacementGroupSchedulingStrategy(self.group, self._names.index(name))
        else:
            strategy = "SPREAD" if _is_actor(name) else node_affinity(self._home)
        need = self._needs[name]
        return {"num_cpus": need["CPU"], "num_gpus": need["GPU"], "scheduling_strategy": strategy}


def alive_nodes() -> Nodes:
    """Return the nodes of the cluster that are alive."""
    import ray

    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]


def node_affinity(node: str) -> Any:
    """Return Ray's scheduling strategy for this node and no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def check_capacity(needs: Needs, home: str, nodes: Nodes) -> None:
    """Check that these nodes, if they were empty, could hold these processes at once, each process on one node.

    Raises:
        ClusterError: they could not.
    """
    free = {name: dict(node["Resources"]) for name, node in nodes.items()}
    total = _total(free)
    for name, need in sorted(needs.items(), key=lambda item: _is_actor(item[0])):  # those that must stay at home first
        candidates = [node for key, node in free.items() if key == home or _is_actor(name)]
        node = next(
            (node for node in candidates if all(node.get(kind, 0.0) >= amount for kind, amount in need.items())), None
        )
        if node is None:
            where = "" if _is_actor(name) else " on the node of main.py"
            kinds = [kind.lower() for kind, amount in need.items() if amount or kind == "CPU"]
            options = ", ".join(f"ray.{role}_{kind}s" for kind in kinds for role in ("actor", "learner"))
            raise ClusterError(
                f"{name} needs {_resources(need)}{where} and finds no room: the run needs {_resources(_total(needs))} "
                f"in all, the cluster's nodes ({len(free)}) have {_resources(total)}; add nodes, or lower num_actors, "
                f"{options}"
            )
        for kind, amount in need.items():
            node[kind] = round(node.get(kind, 0.0) - amount, DECIMALS)


def _is_actor(name: str) -> bool:
    return name.startswith("actor")


def _total(amounts: Needs) -> dict[str, float]:
    return {kind: sum(each.get(kind, 0.0) for each in amounts.values()) for kind in ("CPU", "GPU")}


def _resources(amounts: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {kind}s" for kind, amount in amounts.items() if amount or kind == "CPU")
