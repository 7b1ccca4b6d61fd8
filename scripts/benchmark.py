"""Race models side by side, or reproduce the paper's tables of speed and memory.

python scripts/benchmark.py swin_tiny a_swin_tiny timm:swin_tiny_patch4_window7_224 --precision bf16 --compile
python scripts/benchmark.py --preset speed --families swin --sections inference train --budget 500 --json speed.json
python scripts/benchmark.py --preset modules --models swin_micro a_swin_micro --batch_size 4

Presets: ``throughput``, ``modules`` and ``memory`` are the paper's tables throughput_inference, runtime_modules and
supp_memory; ``scaling`` is the time per pixel at one, two and four times the side, images per batch fewer accordingly;
``speed`` is adaptive against default and against the best of timm and transformers. Flags override a preset's setting,
``--models`` its models. Options of a contender follow its name: see ``common.evaluation.contenders``.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

import shiftvit
from common.evaluation.benchmark import benchmark
from common.evaluation.benchmark_modules import benchmark_modules
from common.evaluation.contenders import COMPILE_MODES, MODES, PRECISIONS, Setting, build
from common.evaluation.flags import add_device, count
from common.evaluation.profiling import environment
from common.evaluation.tables import format_table, write_json

FAMILIES = {  # default, adaptive, peers
    "swin": ("swin_tiny", "a_swin_tiny", "timm:swin_tiny_patch4_window7_224",
             "timm:swin_tiny_patch4_window7_224@fused_attn=2"),
    "swinv2": ("swinv2_tiny", "a_swinv2_tiny", "timm:swinv2_tiny_window8_256"),
    "cvt": ("cvt_13", "a_cvt_13", "transformers:cvt-13"),
    "mvitv2": ("mvitv2_tiny", "a_mvitv2_tiny", "timm:mvitv2_tiny"),
}  # fmt: skip
PRESETS: dict[str, dict[str, dict[str, Any]]] = {  # preset -> section -> setting
    "throughput": {"inference": {}},
    "modules": {"modules": {}},
    "memory": {"train": {"mode": "train", "batch_size": 64}, "inference": {"batch_size": 64}},
    "scaling": {f"x{k}": {"precision": "bf16", "compile": True} for k in (1, 2, 4)},
    "speed": {
        "inference": {"precision": "bf16", "compile": True, "compile_mode": "reduce-overhead"},
        "compiled": {"precision": "bf16", "compile": True},
        "train": {"precision": "bf16", "compile": True, "mode": "train", "batch_size": 256},
        "eager": {"precision": "bf16"},
        "latency": {"precision": "bf16", "compile": True, "compile_mode": "reduce-overhead", "batch_size": 1},
    },
}
THROUGHPUT = {"swin_tiny": 704.07, "a_swin_tiny": 633.35, "swinv2_tiny": 470.81, "a_swinv2_tiny": 405.01,
              "cvt_13": 535.5, "a_cvt_13": 492.12, "mvitv2_tiny": 439.5, "a_mvitv2_tiny": 352.06}  # fmt: skip
MEMORY = {  # allocated and reserved MiB, training and inference
    "swin_tiny": {"train": (4935, 5380), "inference": (1012, 1352)},
    "a_swin_tiny": {"train": (5178, 5678), "inference": (1012, 1382)},
    "swinv2_tiny": {"train": (7712, 8016), "inference": (1275, 1544)},
    "a_swinv2_tiny": {"train": (8113, 8710), "inference": (1275, 1534)},
    "cvt_13": {"train": (5794, 6044), "inference": (1587, 1850)},
    "a_cvt_13": {"train": (6257, 6528), "inference": (1587, 1780)},
    "mvitv2_tiny": {"train": (6335, 7352), "inference": (1944, 3356)},
    "a_mvitv2_tiny": {"train": (7364, 8456), "inference": (2164, 3378)},
}
MODULES = {  # ms, default and adaptive; the paper names no stage for window selection and relative positions
    ("swin", "tokenization"): (8.37, 35.89),
    ("swin", "patch merging 1"): (0.47, 7.68),
    ("swin", "patch merging 2"): (0.45, 4.47),
    ("swin", "patch merging 3"): (0.45, 3.09),
    ("swin", "window selection 1"): (None, 7.63),
    ("mvitv2", "relative positions 1"): (2.84, 9.91),
}
TARGETS = {"swin": (0.97, 1.10), "swinv2": (0.97, 1.10), "cvt": (0.97, 1.10), "mvitv2": (0.95, 1.10)}
COLUMNS = {
    "model": "model", "img_size": "size", "parameters": "parameters", "gflops": "GFLOPs",
    "images_per_s": "images/s", "spread": "quartiles", "ms": "ms", "vs_first": "vs first", "vs_default": "vs default",
    "target_vs_default": "target", "vs_peer": "vs peer", "target_vs_peer": "target peer",
    "paper_images_per_s": "paper images/s", "ns_per_pixel": "ns/pixel", "vs_smallest": "vs smallest",
    "allocated_mib": "allocated MiB", "paper_allocated_mib": "paper allocated", "allocated_ratio": "allocated ratio",
    "reserved_mib": "reserved MiB", "paper_reserved_mib": "paper reserved", "reserved_ratio": "reserved ratio",
    "kernels": "kernels", "kernel_ms": "kernel ms", "rounds": "rounds", "error": "error",
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    args = read_arguments(arguments)
    deadline = time.monotonic() + (args.budget or math.inf)
    report: dict[str, Any] = {"preset": args.preset, "environment": environment(args.device), "sections": []}
    print("  ".join(f"{key} {value}" for key, value in report["environment"].items() if value))
    for name, family, models, setting in tqdm(list(sections(args)), desc=args.preset or "sections", disable=None):
        how: dict[str, Any] = {"rounds": args.rounds, "deadline": deadline}
        how |= {"block_seconds": args.block_seconds} if args.block_seconds else {}
        if args.preset == "modules":
            section = benchmark_modules(models, setting, **how)
        else:
            how["rounds"] = 0 if args.preset == "memory" else args.rounds
            section = benchmark(models, setting, **how, kernels=args.count_kernels or bool(args.profile))
        section = {"name": name, "family": family, **section}
        annotate(args.preset, section, report["sections"])
        report["sections"].append(section)
        show(section, args.profile)
        if args.json:
            write_json(args.json, report)
    for name in dict.fromkeys(section["name"] for section in report["sections"]):
        together = [section for section in report["sections"] if section["name"] == name]
        if len(together) > 1 and args.preset != "modules":
            print(f"\n{name}, all families\n\n{table([row for section in together for row in section['rows']])}")
    return report


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="*", help="models to compare; swin_tiny a_swin_tiny if none is named")
    parser.add_argument("--models", nargs="+", default=[], help="the same, as a flag")
    parser.add_argument("--preset", choices=PRESETS, help="see above; sets models and settings")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="of a preset")
    parser.add_argument("--sections", nargs="+", help="of a preset: speed has inference (with CUDA graphs), compiled "
                        "(without), train, eager and latency")  # fmt: skip
    parser.add_argument("--mode", choices=MODES, help="what a contender runs (inference)")
    parser.add_argument("--batch_size", type=count, help="128 where a preset does not say otherwise")
    parser.add_argument("--img_size", type=count, help="each model's own by default")
    parser.add_argument("--precision", choices=PRECISIONS, help="float32 where a preset does not say otherwise")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="compile the models first")
    parser.add_argument("--compile_mode", choices=COMPILE_MODES, help="mode of torch.compile")
    add_device(parser)
    parser.add_argument("--rounds", type=count, default=20, help="turns of each contender (%(default)s)")
    parser.add_argument("--block_seconds", type=float, help="how long a contender runs per round: 0.2, a module 0.05")
    parser.add_argument("--budget", type=float, help="seconds after which no round is added")
    parser.add_argument("--count_kernels", action="store_true", help="of one step; on a CPU, operators")
    parser.add_argument("--profile", metavar="DIR", help="write the largest kernels of each contender there, as text")
    parser.add_argument("--json", metavar="FILE", help="written anew after every section")
    args = parser.parse_args(arguments)
    if args.compile_mode and not (args.compile or args.preset):
        parser.error("argument --compile_mode: nothing is compiled without --compile")
    args.models = [*args.contenders, *args.models]
    return args


def sections(args: argparse.Namespace) -> Iterator[tuple[str, str, Sequence[str], Setting]]:
    """Name, family, models and setting of all comparisons, one family after the other."""
    plan = PRESETS.get(args.preset, {"comparison": {}})
    if unknown := sorted(set(args.sections or []) - set(plan)):
        raise SystemExit(f"no section {unknown}: {args.preset or 'a plain comparison'} has {list(plan)}")
    families: dict[str, Sequence[str]] = {name: FAMILIES[name] for name in args.families}
    if args.preset != "speed":
        families = {name: models[:2] for name, models in families.items()}
    if args.models or not args.preset:
        families = {"": args.models or ["swin_tiny", "a_swin_tiny"]}
    flags = ("mode", "batch_size", "img_size", "precision", "compile", "compile_mode", "device")
    given = {key: getattr(args, key) for key in flags if getattr(args, key) is not None}
    for family, models in families.items():
        for name, base in plan.items():
            if args.sections and name not in args.sections:
                continue
            setting = Setting(**(base | given))
            if args.preset == "scaling":
                k = int(name[1:])
                side = args.img_size or build(models[0], Setting(batch_size=1))[1].shape[-1]
                setting = replace(setting, img_size=k * side, batch_size=max(1, setting.batch_size // k**2))
            yield name, family, models, setting


def annotate(preset: str | None, section: dict[str, Any], before: list[dict[str, Any]]) -> None:
    """Put the paper's numbers, the targets and the time per pixel beside what was measured."""
    name, family = section["name"], section["family"]
    for row in section["rows"]:
        model = row.get("model", "")
        if preset == "throughput" and model in THROUGHPUT:
            row["paper_images_per_s"] = THROUGHPUT[model]
        elif preset == "memory" and model in MEMORY:
            row["paper_allocated_mib"], row["paper_reserved_mib"] = MEMORY[model][name]
        elif preset == "modules":
            ours = [value for key, value in row.items() if key != "module"]
            row["delta"] = ours[-1] - ours[0] if all(isinstance(value, float) for value in ours) else None
            row["paper default"], row["paper adaptive"] = MODULES.get((family, row["module"]), (None, None))
        elif preset == "speed" and name == "inference" and family and model.startswith("a_"):
            row["target_vs_default"], row["target_vs_peer"] = TARGETS[family]
        elif preset == "scaling" and "ms" in row:
            row["ns_per_pixel"] = 1e9 / (row["images_per_s"] * math.prod(row["img_size"]))
            rows = [r for s in before if s["family"] == family for r in s["rows"]]
            first = next((r for r in rows if r["model"] == model and "ns_per_pixel" in r), row)
            row["vs_smallest"] = row["ns_per_pixel"] / first["ns_per_pixel"]


def show(section: dict[str, Any], profile: str | None) -> None:
    setting = section["setting"]
    how = f"compiled ({setting['compile_mode']})" if setting["compile"] else "eager"
    title = f"{section['family']} {section['name']}".strip()
    print(f"\n{title}: {setting['mode']}, {setting['precision']}, {how}, batch {setting['batch_size']}\n")
    print(table(section["rows"]))
    if section["note"]:
        print(f"\n{section['note']}")
    for row in section["rows"]:
        if "top_kernels" in row:
            text = f"{row['model']}: {row['kernels']} launches, {row['kernel_ms']:.3f} ms in one step\n\n"
            text += format_table(row["top_kernels"])
            print(f"\n{text}")
            if profile:
                Path(profile).mkdir(parents=True, exist_ok=True)
                name = "".join(c if c.isalnum() or c in "-=" else "_" for c in f"{title} {row['model']}")
                (Path(profile) / f"{name}.txt").write_text(text + "\n")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of models under readable heads, or rows of modules in ms."""
    if rows and "module" in rows[0]:
        return format_table([{key: "" if value is None else f"{value:.3f}" if isinstance(value, float) else value
                              for key, value in row.items()} for row in rows])  # fmt: skip
    cells = []
    for row in rows:
        row = {**row, "img_size": "x".join(map(str, row.get("img_size", [])))}
        if "images_per_s" in row:
            digits = 0 if row["images_per_s"] > 100 else 2
            row["spread"] = "-".join(f"{row[f'images_per_s_{side}']:.{digits}f}" for side in ("low", "high"))
        cells.append(row)
    present = {key: head for key, head in COLUMNS.items() if any(row.get(key) for row in cells)}
    return format_table([{head: row.get(key, "") for key, head in present.items()} for row in cells])


if __name__ == "__main__":
    shiftvit.run(main)
