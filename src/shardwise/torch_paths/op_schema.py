"""The records with which torch's programs say how an op may be split: one `OpSpec` a way, an `OpStrategy` of all.

They are values only. `shardwise.register_sharding` is told by placements, not by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.errors import DimError
from shardwise.layout import Placement
from shardwise.mesh import DeviceMesh, Mesh
from shardwise.spec import Spec

PlacementList = list[Placement | None]
OutputSpecs = Spec | tuple[Spec | None, ...] | None


@dataclass
class OpSpec:
    """One way to split an op: the layouts of its results and of its tensors."""

    output_specs: OutputSpecs
    input_specs: Sequence[Spec] | None = None
    redistribute_cost: list[list[float]] | None = None

    @property
    def output_spec(self) -> Spec:
        """The layout of the one result."""
        if isinstance(self.output_specs, Spec):
            return self.output_specs
        raise ValueError(f"output_spec: the op has no single result, its output_specs are {self.output_specs!r}")

    @property
    def mesh(self) -> DeviceMesh | Mesh:
        outs = (self.output_specs,) if isinstance(self.output_specs, Spec) else self.output_specs or ()
        for spec in (*outs, *(self.input_specs or ())):
            if spec is not None:
                return spec.mesh
        raise ValueError("mesh: neither output_specs nor input_specs has a layout")

    def input_spec(self, index: int = 0) -> Spec:
        if self.input_specs is None:
            raise ValueError("input_spec: this OpSpec was made without input_specs")
        if not -len(self.input_specs) <= index < len(self.input_specs):
            raise DimError(f"input_spec: index {index} of {len(self.input_specs)} tensors")
        return self.input_specs[index]


@dataclass
class OpStrategy:
    """All ways to split an op."""

    strategies: list[OpSpec]

    def max_num_shards(self) -> int:
        """Into how many parts its result is cut at most."""
        return max(strategy.output_spec.num_shards for strategy in self.strategies)

    @property
    def mesh(self) -> DeviceMesh | Mesh:
        return self.strategies[0].mesh

    @property
    def ndim(self) -> int:
        return self.strategies[0].output_spec.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return self.strategies[0].output_spec.shape


@dataclass(frozen=True)
class RuntimeSchemaInfo:
    """Which arguments of an op that are no tensors its strategies depend on. Plans here depend on all of them."""

    static_argnum: int = 100
    static_kwargkey: list[str] | None = field(default=None)
    needs_pytree: bool = False
