"""Tables people can read, and the same numbers as JSON."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["format_table", "precision_name", "write_json"]


def precision_name(name: str) -> str:
    """What Accelerate's ``mixed_precision`` computes in: "no" is float32."""
    return "float32" if name == "no" else name


def format_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Rows of cells as an aligned Markdown table; floats with two digits, missing cells as "not run"."""
    columns = columns or list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(c), *(len(row[i]) for row in cells)) if cells else len(c) for i, c in enumerate(columns)]

    def line(values: Sequence[str], fill: str = " ") -> str:
        padded = (
            v.ljust(w, fill) if i == 0 else v.rjust(w, fill)
            for i, (v, w) in enumerate(zip(values, widths, strict=True))
        )
        return f"|{fill}" + f"{fill}|{fill}".join(padded) + f"{fill}|"

    return "\n".join([line(columns), line([""] * len(columns), "-"), *(line(row) for row in cells)])


def _cell(value: Any) -> str:
    if value is None:
        return "not run"
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    """Write ``value``; the file appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=2, default=str) + "\n")
    os.replace(temporary, path)
    return path
