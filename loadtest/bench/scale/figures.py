"""The figures of `scripts/bench scale`, and the table that they are shown in. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from loadtest.bench.scale.subjects import BUILDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much to measure. `quick` shows that all parts run; its figures are not worth keeping."""

    rounds: int = 3
    quick: bool = False
    builds: tuple[str, ...] = BUILDS  # of ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One thing that was measured of a build and perhaps of nginx, and what it must not exceed."""

    name: str
    build: str
    unit: str
    value: float
    beside: float | None = None  # the same of nginx in the same run
    value_max: float | None = None
    ratio_max: float | None = None  # of value / beside
    value_min: float | None = None

    @property
    def ratio(self) -> float | None:
        """Ours over nginx's; None where there is nothing to compare."""
        return self.value / self.beside if self.beside else None

    @property
    def met(self) -> bool | None:
        """Whether every limit holds; None where there is none, or it can't be told."""
        held = []
        if self.value_max is not None:
            held.append(self.value <= self.value_max)
        if self.value_min is not None:
            held.append(self.value >= self.value_min)
        if self.ratio_max is not None and self.ratio is not None:
            held.append(self.ratio <= self.ratio_max)
        return all(held) if held else None


_HEADER: Final = ("part", "figure", "build", "ours", "nginx", "ratio", "must", "met")
_RULE: Final = ("---", "---", "---", "---:", "---:", "---:", "---:", "---")


def table(rows: Iterable[tuple[str, Figure]]) -> str:
    """The figures, each with the name of its part, in Markdown."""
    cells = [_cells(part, figure) for part, figure in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (_HEADER, _RULE, *cells))


def figure_line(part: str, figure: Figure) -> str:
    """One figure for the terminal, as soon as it is known."""
    _, name, build, value, beside, ratio, must, met = _cells(part, figure)
    compared = f", nginx {beside}, ratio {ratio}" if beside else ""
    return f"{part}: {name}: {build} {value}{compared}" + (f" (must {must}: {met})" if must else "")


def _cells(part: str, figure: Figure) -> tuple[str, ...]:
    unit = f" {figure.unit}" if figure.unit else ""
    limits = []
    if figure.value_max is not None:
        limits.append(f"<= {figure.value_max:g}{unit}")
    if figure.value_min is not None:
        limits.append(f">= {figure.value_min:g}{unit}")
    if figure.ratio_max is not None:
        limits.append(f"<= {figure.ratio_max:g} x nginx")
    return (
        part,
        figure.name,
        figure.build,
        f"{_number(figure.value)}{unit}",
        "" if figure.beside is None else f"{_number(figure.beside)}{unit}",
        "" if figure.ratio is None else f"{figure.ratio:.2f}",
        ", ".join(limits),
        {True: "yes", False: "NO", None: ""}[figure.met],
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
