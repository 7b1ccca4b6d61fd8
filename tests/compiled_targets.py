"""Kernels compiled for cards that are not here: Triton needs no GPU for that, and says how much memory each takes.

Models are traced on stand-ins for tensors, as if on a card, and what they would launch is compiled for it. The table of
docs/gpus.md is made by ``python tests/compiled_targets.py --json results/targets.json``.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from tqdm.auto import tqdm

from common import create_model
from common.evaluation.tables import format_table, write_json
from common.kernels import base, cards
from common.kernels.ahead import Launch, compile_for, recorded
from common.kernels.cards import Card
from common.ops import ahead

CARDS = {card.name: card for card in (
    Card("T4", 75, 65_536), Card("A100", 80, 166_912), Card("RTX 30", 86, 101_376), Card("RTX 40", 89, 101_376),
    Card("H200", 90, 232_448), Card("B200", 100, 232_448), Card("RTX 50", 120, 101_376),
)}  # fmt: skip
MODELS = "a_swin_tiny", "a_swinv2_tiny", "a_cvt_13", "a_mvitv2_tiny"


@contextmanager
def anywhere() -> Iterator[None]:
    """Kernels count as usable, whatever the tensors."""
    ours = [module for name, module in sys.modules.items() if name.startswith("common.") and hasattr(module, "usable")]
    before = [(module, module.usable) for module in ours]
    try:
        for module in ours:
            module.usable = lambda x: base.ENABLED  # type: ignore[attr-defined]
        yield
    finally:
        for module, usable in before:
            module.usable = usable  # type: ignore[attr-defined]


def launches(name: str, card: Card, training: bool, *, compiled: bool = False, batch: int = 128) -> dict[Launch, int]:
    """What a model launches on a card, in bfloat16 or, where that is not native, in float16; outside of graphs or in
    one."""
    model = create_model(name).train(training)
    shape = batch, 3, *model.img_size
    half = torch.bfloat16 if card.bf16 else torch.float16
    with anywhere(), cards.assumed(card), torch.autocast("cpu", half):
        if not compiled:
            return ahead.launches(model, shape, training)
        torch.compiler.reset()
        with recorded() as found, torch.set_grad_enabled(training):
            graph = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=_zeros, bw_compiler=_zeros))
            y = graph(torch.zeros(shape))
            y.sum().backward() if training else None
    return found


def _zeros(graph: Any, inputs: Sequence[Tensor]) -> Any:
    """A compiler whose graphs give zeros."""
    values = [getattr(node, "meta", {}).get("val") for node in graph.graph.output_node().args[0]]
    like = [(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else None for v in values]
    return make_boxed_func(lambda *_: [None if t is None else torch.zeros(t[0], dtype=t[1]) for t in like])


def row(name: str, card: Card, training: bool, compiled: bool) -> dict[str, Any]:
    """A cell of the table: kernels, those with a smaller tile than was tuned, those that do not fit; and those that
    take more memory than there is or do not compile: of these there must be none."""
    for known in (cards._REFUSED, cards._SMALLER):
        known.clear()
    found, memory, broken = launches(name, card, training, compiled=compiled), 0, []
    for launch in found:
        try:
            needs = compile_for(launch, card.capability)
        except Exception as error:
            broken.append(f"{launch.kernel}: {type(error).__name__}")
            continue
        memory = max(memory, needs)
        if needs > card.memory:
            broken.append(f"{launch.kernel}: {needs} bytes")
    return {"model": name, "card": card.name, "mode": "training" if training else "inference", "compiled": compiled,
            "kernels": len({launch.kernel for launch in found}), "variants": len(found),
            "largest": memory, "limit": card.memory,
            "small tiles": sorted(cards.smaller()), "other forms": sorted(cards.refused()),
            "broken": sorted(set(broken))}  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For each card and model, in inference / training: kernels, of these with small tiles, and operations in another
    form since their kernels do not fit."""

    def cell(card: str, name: str) -> str:
        found = {row["mode"]: f"{row['kernels']}, {len(row['small tiles'])}, {len(row['other forms'])}"
                 + (", BROKEN" if row["broken"] else "")
                 for row in rows if (row["card"], row["model"], row["compiled"]) == (card, name, False)}  # fmt: skip
        return " / ".join(found.get(mode, "not run") for mode in ("inference", "training")) if found else "not run"

    return format_table([{"card": f"{card} (sm_{known.capability})", **{name: cell(card, name) for name in MODELS}}
                         for card, known in CARDS.items()])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--cards", nargs="+", default=list(CARDS), choices=CARDS)
    parser.add_argument("--eager", action="store_true", help="leave out graphs, which take longer to trace")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, metavar="JSON", help="only print the table of a JSON written before")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())["rows"]))
        return
    import triton

    cells = [(name, CARDS[card], training, compiled) for card in args.cards for name in args.models
             for training in (False, True) for compiled in ((False,) if args.eager else (False, True))]  # fmt: skip
    rows = []
    for cell in tqdm(cells):
        rows.append(row(*cell))
        if args.json:
            write_json(
                args.json, {"torch": torch.__version__, "triton": triton.__version__, "batch": 128, "rows": rows}
            )
    print(table(rows))
    if any(row["broken"] for row in rows):
        raise SystemExit("a kernel that fits by our count does not run there")


if __name__ == "__main__":
    main()
