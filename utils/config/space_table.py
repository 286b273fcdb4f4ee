"""Describe what an environment's spaces became, for `--check`."""

from collections import Counter
from contextlib import suppress

from rich.console import Console
from rich.table import Table
from torch import nn

from core.model import Model
from core.models.layers.torsos import PictureAndVectorTorso
from core.specs import ArraySpec, EnvSpec, ObservationPart, PartKind
from utils.config import validation
from utils.options import Options

WIDTH = 120  # Minimum columns of tables.
MAX_LAYERS = 4  # Layers of one kind that are listed; more are counted.


def wide_console() -> Console:
    """Return a console in which tables are readable, whatever the terminal's width."""
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    return console


def print_refused(options: Options) -> None:
    """Print the table of an environment that can be made although these options are refused."""
    with suppress(Exception):  # Why the environment cannot be made is one of the problems.
        wide_console().print(table(validation.environment_spec(options), None))


def table(spec: EnvSpec, model: Model | None) -> Table:
    """Return a line for each part of an observation and one for the action.

    Args:
        spec: Environment.
        model: Network that reads the observations; None leaves it out.
    """
    columns = ("part", "space", "kind", "stored", "network")
    lines = Table(*columns, title=f"spaces of {spec.name}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for part in spec.parts or [_only_part(spec)]:
        network = describe_torso(model, part.kind) if model is not None and part.shape else ""
        lines.add_row(part.name, part.space, part.kind, _stored(part, spec), network)
    chosen = spec.action.description + (", those that a mask allows" if spec.has_action_mask else "")
    lines.add_row("action", "", type(spec.action).__name__.lower(), describe(spec.action.array), chosen)
    return lines


def describe(array: ArraySpec) -> str:
    """Return dtype and shape of an array."""
    return f"{array.dtype} {list(array.shape)}" if array.shape else array.dtype


def describe_torso(model: Model, kind: PartKind) -> str:
    """Return the layers of the model's first torso that parts of this kind pass, before they join others or a head."""
    torsos = (getattr(module, "torso", None) for module in model.modules())
    torso = next((torso for torso in torsos if isinstance(torso, nn.Module)), None)
    if torso is None:  # A model of a user need not have one.
        return type(model).__name__
    if joined := next((layer for layer in torso.modules() if isinstance(layer, PictureAndVectorTorso)), None):
        torso = joined.convolutions if kind == "picture" else joined.vector
    layers = [layer for layer in torso.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    counts = Counter(map(type, layers))
    listed = [_layer(layer) for layer in layers if counts[type(layer)] <= MAX_LAYERS]
    counted = [f"{count} {kind.__name__}" for kind, count in counts.items() if count > MAX_LAYERS]
    return ", ".join(counted + listed) or "none: the heads read the numbers"


def _layer(layer: nn.Module) -> str:
    if isinstance(layer, nn.Conv2d):
        (height, width), stride = layer.kernel_size, layer.stride[0]
        return f"Conv2d {layer.out_channels} {height}x{width}/{stride}"
    return f"Linear {layer.out_features}"


def _only_part(spec: EnvSpec) -> ObservationPart:
    return ObservationPart("observation", "", "picture" if spec.is_image else "vector", spec.frame.shape)


def _stored(part: ObservationPart, spec: EnvSpec) -> str:
    if not part.shape:
        return "not stored"
    is_picture = part.kind == "picture"
    array = ArraySpec(spec.picture_shape, spec.frame.dtype) if is_picture else ArraySpec(part.shape, "float32")
    return describe(array) + (f", {spec.frame_stack} seen together" if spec.frame_stack else "")
