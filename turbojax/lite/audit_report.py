"""What an audit found: rows as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from turbojax.figure import new_figure, write_png
from turbojax.lite.audit import Measured
from turbojax.lite.audit_policy import Proposal


@dataclass(frozen=True)
class Row:
    """One candidate.

    Attributes:
        name: of it.
        layer: the only layer that has these bits; None is all of them.
        k_bits, v_bits, w_bits: of keys, values and weights; None are the loaded ones.
        kv_hadamard: keys of 4 bits are turned.
        kv_bytes_per_token, weight_bytes: of the KV cache and of the layers' linears.
        measured: see `Measured`.
    """

    name: str
    layer: int | None
    k_bits: int
    v_bits: int
    w_bits: int | None
    kv_hadamard: bool
    kv_bytes_per_token: int
    weight_bytes: int
    measured: Measured


@dataclass
class AuditReport:
    """All rows, the float32 model's first.

    Attributes:
        settings: model, text and windows.
        rows: candidates.
        proposal: what a budget led to.
        k_scale: of turned keys, see `rotation.k_scale_of`.
    """

    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    proposal: Proposal | None = None
    k_scale: np.ndarray | None = None

    @property
    def reference(self) -> Measured:
        return self.rows[0].measured

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        rows = [asdict(row) | asdict(row.measured) | {"perplexity": row.measured.perplexity} for row in self.rows]
        for row in rows:
            del row["measured"]
        found: dict[str, Any] = {"settings": self.settings, "rows": rows}
        if self.proposal is not None:
            measured = asdict(self.proposal.measured) | {"perplexity": self.proposal.measured.perplexity}
            found["proposal"] = self.proposal.policy.entry() | {"budget": self.proposal.budget} | measured
        return found

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")

    def proposal_text(self) -> str:
        """What a budget led to, in one line; empty without one."""
        if self.proposal is None:
            return ""
        policy, m = self.proposal.policy, self.proposal.measured
        layers = ", ".join(f"{i}: K{k} V{v}" for i, (k, v) in enumerate(policy.layers))
        turned = " with Hadamard where K has 4 bits" if policy.hadamard else ""
        ratio = m.perplexity / self.reference.perplexity
        return f"KL {m.kl:.5f} of {self.proposal.budget:g} nats, perplexity x {ratio:.4f}{turned}; {layers}"

    def tables(self) -> list[Table]:
        """What holds for all layers, then the KL of each layer alone."""
        whole = Table("candidate", title="Against the same model in float32")
        for column in ("perplexity", "x float32", "KL, nats", "same top token", "first other token"):
            whole.add_column(column, justify="right")
        whole.add_column("KV bytes/token", justify="right")
        whole.add_column("weights, MB", justify="right")
        for row in self.rows:
            if row.layer is None:
                whole.add_row(*self.cells(row))
        return [whole, self.layer_table()] if any(row.layer is not None for row in self.rows) else [whole]

    def cells(self, row: Row) -> list[str]:
        """Of a row of the first table."""
        m = row.measured
        first = f"none of {m.num_greedy}" if m.first_divergence is None else str(m.first_divergence)
        return [
            row.name, f"{m.perplexity:.3f}", f"{m.perplexity / self.reference.perplexity:.4f}", f"{m.kl:.5f}",
            f"{m.top1:.1%}", first if m.num_greedy else "",
            str(row.kv_bytes_per_token), f"{row.weight_bytes / 1e6:.1f}",
        ]  # fmt: skip

    def layer_table(self) -> Table:
        """KL by layer and candidate."""
        by_layer = self.by_layer()
        names = list(next(iter(by_layer.values())))
        table = Table("layer", title="KL of one layer alone, millinats")
        for name in names:
            table.add_column(name, justify="right")
        for layer, kls in by_layer.items():
            table.add_row(str(layer), *(f"{1000 * kls[name]:.3f}" for name in names))
        return table

    def by_layer(self) -> dict[int, dict[str, float]]:
        """KL by layer and candidate, of those that are for one layer."""
        found: dict[int, dict[str, float]] = {}
        for row in self.rows:
            if row.layer is not None:
                found.setdefault(row.layer, {})[row.name] = row.measured.kl
        return found


def plot_audit(path: Path, report: AuditReport) -> None:
    """Writes a PNG: KL against bytes of the KV cache, and KL of each layer alone.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    layers = report.by_layer()
    figure = new_figure(12 if layers else 6, 5)
    whole = [row for row in report.rows if row.layer is None and row.w_bits is None and row.measured.kl > 0]
    axes: Sequence[Any] = figure.subplots(1, 2 if layers else 1, squeeze=False)[0]
    axes[0].set(xlabel="KV bytes a token", ylabel="KL from float32, nats", yscale="log", title="All layers")
    for row in whole:
        axes[0].plot(row.kv_bytes_per_token, row.measured.kl, "o", label=row.name)
    if report.proposal is not None:
        axes[0].axhline(report.proposal.budget, color="black", linewidth=0.8, label="budget")
    axes[0].legend(fontsize=8)
    for name in next(iter(layers.values()), {}):
        kls = [of_layer[name] for of_layer in layers.values()]
        axes[1].plot(list(layers), kls, marker="o", markersize=3, label=name)
    if layers:
        axes[1].set(xlabel="layer", ylabel="KL, nats", yscale="log", title="One layer alone")
        axes[1].legend(fontsize=8)
    write_png(figure, path)
