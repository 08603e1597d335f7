# SPDX-License-Identifier: Apache-2.0
"""Parameters of an optimizer: their names, those that take part, this rank's shards of them, and fingerprints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from sparsifiers import Kind, native
from sparsifiers.native import checksum

# Shards of DTensors. A plain tensor is its own shard.
#
# FSDP2 makes parameters and gradients DTensors. Their class belongs to ``torch.distributed``, which this room may not
# import: they are recognised by ``to_local``, a method that a plain tensor does not have.

FSDP1 = (
    "parameter {name!r} belongs to FullyShardedDataParallel (FSDP1), which is not supported, because it flattens "
    "parameters. Shard the model with torch.distributed.fsdp.fully_shard (FSDP2)."
)
REPLICATED = (
    "parameter {name!r} is replicated over mesh dimension {dimension!r}, over which FSDP already averages gradients. "
    "Pass the mesh of the shards to fully_shard, such as mesh['shard'], and the mesh of the replicas as process_set=, "
    "such as mesh['replicate']."
)
PARTIAL = (
    "parameter {name!r} is a partial sum over mesh dimension {dimension!r} ({placement}), which is not supported. "
    "Redistribute it first, to shards of the sum."
)
OTHER_PLACEMENTS = (
    "parameter {name!r} has the placements {own}, but its gradient has {gradients}, so a rank lacks the gradient of "
    "its own shard. Redistribute the gradient first."
)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, spread over several ranks."""
    return hasattr(tensor, "to_local")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``tensor``, a view without autograd history; a plain tensor itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    if not torch.is_grad_enabled():
        return tensor.to_local()  # type: ignore[no-any-return]
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[no-any-return]


def like(whole: Any, local: torch.Tensor) -> torch.Tensor:
    """Return ``local``, this rank's shard, as a DTensor with the mesh and placements of ``whole``; nothing is copied.

    Where ``whole`` is a plain tensor, ``local`` itself.
    """
    if not hasattr(whole, "to_local"):
        return local
    made: torch.Tensor = type(whole).from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


def set_gradient(parameter: torch.Tensor, local: torch.Tensor | None) -> None:
    """Make ``local`` this rank's shard of ``parameter.grad``; None: no gradient."""
    parameter.grad = None if local is None else like(parameter, local)


class Gradients:
    """Setter of parameters' gradients. DTensors are made once and kept, for making one costs as much as a hook."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by parameter: local shard, and its DTensor

    def set(self, parameter: torch.Tensor, local: torch.Tensor | None) -> None:
        """Make ``local`` this rank's shard of ``parameter.grad``; None: no gradient."""
        if local is None or not hasattr(parameter, "to_local"):
            parameter.grad = local
            return
        if parameter.grad is not None and local_of(parameter.grad) is local:
            return  # it was written there, so the gradient is the right one already
        made = self._made.get(id(parameter))
        if made is None or made[0] is not local:
            made = self._made[id(parameter)] = (local, like(parameter, local))
        parameter.grad = made[1]


def gradient_of(parameter: Any, name: str) -> torch.Tensor | None:
    """Return this rank's shard of ``parameter.grad``; ``ValueError`` if its placements are not the parameter's.

    ``name``: for the error.
    """
    gradient = parameter.grad
    if gradient is None or not hasattr(gradient, "to_local"):
        return gradient  # type: ignore[no-any-return]
    if gradient.placements != parameter.placements:
        own = _text(parameter.placements)
        raise ValueError(OTHER_PLACEMENTS.format(name=name, own=own, gradients=_text(gradient.placements)))
    return local_of(gradient)


def shard_of(parameter: Any) -> str:
    """Return which shard this rank has, such as ``"shard 0/2 S(0)"``; "" for a plain parameter.

    For each dimension of the mesh: its name, this rank's coordinate, its size, and the placement of the tensor along
    it.
    """
    if not hasattr(parameter, "to_local"):
        return ""
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or [f"mesh dimension {number}" for number in range(mesh.ndim)]
    places = zip(names, mesh.get_coordinate() or [], mesh.shape, parameter.placements, strict=True)
    return ", ".join(f"{name} {place}/{size} {placement}" for name, place, size, placement in places)


def why_not_exchangeable(parameter: Any, name: str) -> str:
    """Return why ranks with the same shard cannot combine updates of ``parameter``; "" if they can."""
    if hasattr(parameter, "_is_flat_param") or hasattr(parameter, "_fsdp_flattened"):
        return FSDP1.format(name=name)
    if not hasattr(parameter, "to_local"):
        return ""
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or range(mesh.ndim)
    for dimension, placement in zip(names, parameter.placements, strict=True):
        if placement.is_replicate():
            return REPLICATED.format(name=name, dimension=dimension)
        if placement.is_partial():
            return PARTIAL.format(name=name, dimension=dimension, placement=placement)
    return ""


def _text(placements: Any) -> str:
    return f"({', '.join(map(str, placements))})"


# Fingerprints, computed on a tensor's own device: replicas compare them in place of the tensors.

WORD = 8  # bytes
CHUNK = 1 << 19  # words that are read at a time without compiled loops: each takes three times its own memory


def fingerprints(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return 128 bits for each of ``tensors``: int64[n, 2], on the host.

    They are the checksum of its bytes, and that of its bytes but the first four. One or two differing bits always
    change them; any other difference does with probability 1 - 2**-64. Integer sums make them equal in any order of
    addition and on every device. Of a DTensor the local shard counts. Copies only tensors that are not contiguous.
    """
    octets = [_octets(local_of(tensor).detach()) for tensor in tensors]
    pairs = [torch.stack([_checksum(one), _checksum(one[WORD // 2 :])]) for one in octets]  # devices are not waited for
    return torch.stack([pair.cpu() for pair in pairs]) if pairs else torch.empty(0, 2, dtype=torch.int64)


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor``, in the order of its elements: uint8[n]."""
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # one element counts as contiguous with any stride
    return flat.view(torch.uint8)


def _checksum(octets: torch.Tensor) -> torch.Tensor:
    """Return :func:`sparsifiers.native.checksum` of ``octets``, uint8[n], on their device: int64[]."""
    if native.plain(octets, dtype=torch.uint8):
        found = checksum(octets)
        return torch.tensor(found - (found >> 63 << 64))
    return _checksum_by_torch(octets)


def _checksum_by_torch(octets: torch.Tensor) -> torch.Tensor:
    """Return the same with torch's operations, chunk by chunk, so that little memory is needed: int64[]."""
    total = torch.zeros((), dtype=torch.int64, device=octets.device)
    for first in range(0, len(octets), CHUNK * WORD):
        part = octets[first : first + CHUNK * WORD]
        words = pad(part, (0, -len(part) % WORD)).clone().view(torch.int64)  # a copy begins at a multiple of a word
        weights = torch.arange(len(words), device=octets.device) * 2 + (2 * first // WORD + 1)
        total = total + (words * weights).sum()
    return total


# Names, and parameters that take part.


@dataclass(frozen=True)
class ParameterInfo:
    """Description of a parameter that takes part in the exchange, as it is now."""

    name: str
    parameter: torch.Tensor  # the script's own, perhaps a DTensor
    dtype: torch.dtype  # of its gradient
    device: torch.device
    shape: tuple[int, ...]  # of `local`
    kind: Kind = Kind.DENSE  # of its tensor class
    density: float | None = None  # of its own, where the script gives densities by pattern
    is_figure: bool = False  # no parameter: numbers of each rank, whole ones, that are averaged with the others

    @property
    def local(self) -> torch.Tensor:
        """Return this rank's shard of a DTensor, or the plain parameter: the tensor that is exchanged."""
        return local_of(self.parameter)

    @property
    def shard(self) -> str:
        """Return which shard of the parameter this rank has, in words; "" for a plain one."""
        return shard_of(self.parameter)

    def describe(self) -> str:
        """Return the text of a handshake: ``float32[10, 20] cpu sparse``. The number of a device does not matter."""
        treatment = self.kind.value
        treatment += "" if self.density is None else f" at {self.density}"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} {self.device.type} {treatment}"


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a gradient is accumulated: the parameter's, or its ``grad_dtype`` (torch 2.10)."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


class Grouped(Protocol):
    """Anything with parameters in groups, as an optimizer has them."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups: each has a list of parameters under "params"."""


def optimizers_of(owner: Any) -> list[Any]:
    """Return the optimizers that step when ``owner`` does: those of an ``OptimizerGroup``, or it alone."""
    return list(getattr(owner, "stepped_together", (owner,)))


def why_not_usable(parameter: torch.Tensor) -> str:
    """Return why a parameter cannot be trained as it is, as the end of a sentence; "" if it can."""
    if torch.nn.parameter.is_lazy(parameter):
        return "has no shape yet (a lazy module). Run a forward pass before you wrap the optimizer"
    if parameter.is_inference():
        return "was created in torch.inference_mode(), so it has no gradients. Create the model outside inference mode"
    if parameter.device.type == "meta":
        return "is on the meta device, so it has no values. Load the weights before you create the optimizer"
    if not parameter.is_leaf:
        return (
            "is the result of operations (differentiable=True, for example), which is not supported. Pass leaf "
            "tensors to the optimizer, such as model.parameters()"
        )
    if parameter.requires_grad and str(gradient_dtype(parameter)).startswith(("torch.float8", "torch.float4")):
        return (
            f"is {gradient_dtype(parameter)}, in which gradients cannot be summed. Store it in 16 or 32 bits, or "
            "freeze it with requires_grad_(False)"
        )
    return ""


def check_spread_alike(members: Sequence[ParameterInfo]) -> None:
    """Raise ``ValueError`` where only some are DTensors: plain ones would not be averaged over the shards."""
    spread = [member.name for member in members if is_dtensor(member.parameter)]
    plain = [member.name for member in members if not is_dtensor(member.parameter) and not member.is_figure]
    if spread and plain:
        raise ValueError(
            f"parameter {spread[0]!r} is a DTensor but {plain[0]!r} is not (ignored_params= of fully_shard?), so FSDP "
            "does not average its gradient. Use a separate DistributedOptimizer over all ranks for plain parameters."
        )


class ParameterTable:
    """Names of the parameters of an optimizer, and which of them need a gradient."""

    def __init__(self, owner: Grouped, named_parameters: Iterable[Any] | None) -> None:
        """Read the names. Raises ``ValueError`` with Horovod's texts.

        ``owner``: the optimizer, or another object with groups of parameters; its groups are read again at each call.
        ``named_parameters`` may name more parameters than it has, not fewer; None: names are made from the position.
        """
        self._owner = owner
        self._names: MutableMapping[torch.Tensor, str] = WeakTensorKeyDictionary()  # of parameters that still exist
        # All names ever given: what is kept of a parameter that was replaced must not become its successor's. Not those
        # of living parameters alone, since ranks let go of tensors at different times, and have to name them alike.
        self._taken: set[str] = set()
        if named_parameters is not None:
            self._take_names(list(named_parameters))
            self._check_all_named()
        for parameter in self.name_all():
            if problem := why_not_usable(parameter):
                raise ValueError(f"parameter {self.name_of(parameter)!r} {problem}")

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the owner as the optimizer that it is wherever a step is made."""
        assert isinstance(self._owner, torch.optim.Optimizer)
        return self._owner

    def _take_names(self, named: list[Any]) -> None:
        """Read names as given; ``ValueError`` for an element that is no pair, or a name that is repeated."""
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
            raise ValueError(
                "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                "model.named_parameters()."
            )
        for name, parameter in named:
            if not isinstance(name, str) or not isinstance(parameter, torch.Tensor):
                raise ValueError(
                    f"named_parameters: ({name!r}, a {type(parameter).__name__}) is not a pair of a name (a string) "
                    "and a parameter"
                )
        names = Counter(name for name, _ in named)
        repeated = sorted(name for name, times in names.items() if times > 1)
        if repeated:
            raise ValueError(
                f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(repeated)}"
            )
        for name, parameter in named:
            self._names.setdefault(parameter, name)
            self._taken.add(name)

    def _check_all_named(self) -> None:
        """Raise ``ValueError`` unless every parameter of the optimizer has a name."""
        unnamed = [
            f"parameter {i} of group {g}, {p.dtype} {list(p.shape)}"
            for g, group in enumerate(self._owner.param_groups)
            for i, p in enumerate(group["params"])
            if p not in self._names
        ]
        if unnamed:
            raise ValueError(
                "named_parameters was specified, but one or more model parameters were not named. Not named: "
                f"{'; '.join(unnamed)}. Pass named_parameters() of the full model."
            )

    def name_all(self) -> list[torch.Tensor]:
        """Give a name to every parameter without one; return all parameters, in the order of the groups."""
        parameters = []
        for g, group in enumerate(self._owner.param_groups):
            given = group.get("param_names", [])
            for i, parameter in enumerate(group["params"]):
                parameters.append(parameter)
                if parameter not in self._names:
                    self._names[parameter] = self._new_name(given[i] if i < len(given) else f"noname.{g}.{i}", g, i)
        return parameters

    def _new_name(self, wish: str, group: int, position: int) -> str:
        """Return a name that no parameter has ever had: ``wish``, or one that begins with it."""
        name, again = wish, 1
        while name in self._taken:
            name = f"{wish}.{group}.{position}" if again == 1 else f"{wish}.{group}.{position}.{again}"
            again += 1
        self._taken.add(name)
        return name

    def names(self) -> set[str]:
        """Return the names of all parameters of the groups, also of those that need no gradient now."""
        return {self._names[parameter] for parameter in self.name_all()}

    def by_optimizer(self) -> list[list[torch.Tensor]]:
        """Return the parameters of each optimizer that steps, in the order in which its state numbers them."""
        return [
            [parameter for group in each.param_groups for parameter in group["params"]]
            for each in optimizers_of(self._owner)
        ]

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name under which ``parameter`` travels."""
        return self._names[parameter]

    def make_dense(self, parameter: torch.Tensor, allowed: bool) -> torch.Tensor:
        """Replace a gradient of sparse layout by a dense one, and return it.

        Raises ``ValueError`` where that is not ``allowed``.
        """
        assert parameter.grad is not None
        if not allowed:
            raise ValueError(
                f"parameter {self.name_of(parameter)!r} has a gradient of layout {parameter.grad.layout}. Pass "
                "sparse_as_dense=True, create the embedding with sparse=False, or use SparseAdam, whose gradients are "
                "gathered."
            )
        parameter.grad = parameter.grad.to_dense()
        return parameter.grad

    def active(self, also: Container[str] = ()) -> list[ParameterInfo]:
        """Return the parameters that need a gradient now, and those named ``also``, in the order of the groups."""
        return [
            ParameterInfo(self._names[p], p, gradient_dtype(p), p.device, tuple(local_of(p).shape))
            for p in self.name_all()
            if p.requires_grad or self._names[p] in also
        ]

    def snapshot(self) -> list[tuple[Any, ...]]:
        """Return membership, dtypes, devices and shapes, to be compared by ``==``: ranks agree anew if they differ."""
        return [
            (id(p), gradient_dtype(p), p.device, p.shape)
            for group in self._owner.param_groups
            for p in group["params"]
            if p.requires_grad
        ]
