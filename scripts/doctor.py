"""Say what runs on this machine: its card and limits, versions, and every kernel at the shapes of a model beside its
torch form, forward and backward. This is what a report of a problem should contain.

python scripts/doctor.py --model a_swin_tiny --batch 8

Kernels were tuned on one kind of card. Elsewhere one may not fit, or fail, or be wrong without failing: the first two
are met by torch forms, the third is what this looks for. It ends with 1 if a kernel is wrong.
"""

import argparse
import contextlib
import os
import platform
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import shiftvit
from common import create_model
from common.evaluation.flags import add_device, count
from common.evaluation.tables import format_table
from common.kernels import base, cards
from common.ops.dispatch import failed, gradients, reference, watched

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-3}
"""Of the largest number of a result: a few roundings in this type. A product in float32 may be taken in TF32."""
CHOICES = 0.25  # of a call's offsets may differ: scores of noise are nearly equal, and told apart by the last bits
LARGEST = 4096  # no image has a side so long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="a_swin_tiny", help="its shapes are tried")
    parser.add_argument("--batch", type=count, default=8, help="images at once (%(default)s)")
    parser.add_argument("--precision", choices=TYPES, help="default: bf16 where the card has it, else fp16")
    add_device(parser)
    args = parser.parse_args()

    device = torch.device(args.device)
    with torch.device("meta"):
        create_model(args.model)  # now: where no kernel runs, nothing else looks at the name
    print(format_table(machine(device)))
    if not runs(device):
        print("\nNo kernel runs here: every operation runs in its torch form.")
        return
    dtype = TYPES[args.precision] if args.precision else torch.bfloat16 if card(device).bf16 else torch.float16
    print(f"\n{args.model}, batch {args.batch}, {dtype}: operations by kernels beside their torch forms")
    rows = check(args.model, args.batch, device, dtype)
    print(format_table(rows) if rows else "none: no kernel fits")
    known = kernel_rows(device)
    print("\nKernels, the largest of each\n" + format_table(known) if known else "\nNo kernel was compiled.")
    wrong = [f"{row['operation']} ({row['pass']})" for row in rows if row["verdict"] == "WRONG"]
    if wrong:
        raise SystemExit(f"\nWrong: {', '.join(wrong)}. Set SHIFT_VITS_KERNELS=0 and report this output.")
    print("\nAll kernels that run agree with their torch forms.")


def card(device: torch.device) -> cards.Card:
    return cards.card_of(device)


def runs(device: torch.device) -> bool:
    return base.AVAILABLE and base.ENABLED and (base.INTERPRETED or device.type == "cuda")


def machine(device: torch.device) -> list[dict[str, str]]:
    """Card, limits, versions and what the environment asks for."""
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "not installed"
    about: dict[str, Any] = {"torch": torch.__version__, "triton": version, "python": platform.python_version(),
                             "CUDA of torch": torch.version.cuda, "HIP of torch": torch.version.hip}  # fmt: skip
    if device.type == "cuda":
        found, here = torch.cuda.get_device_properties(device), card(device)
        about |= {"card": here.name, "compute capability": f"{here.capability / 10:.1f}",
                  "shared memory of a program": f"{here.memory:,} bytes", "threads of a warp": here.warp,
                  "bfloat16": "native" if here.bf16 else "not native",
                  "memory": f"{found.total_memory / 2**30:.1f} GiB", "driver": driver(),
                  "kernels were tuned for its size": "yes" if here.memory >= cards.TUNED else "no"}  # fmt: skip
    else:
        about["card"] = "no GPU is visible" if not torch.cuda.is_available() else "not asked for"
    for name in ("SHIFT_VITS_KERNELS", "SHIFT_VITS_STRICT", "TRITON_INTERPRET"):
        about[name] = os.environ.get(name, "not set")
    return [{"what": what, "value": str(value)} for what, value in about.items() if value is not None]


def driver() -> str:
    """The version of the driver, where it can be asked without a tool."""
    with contextlib.suppress(OSError, IndexError), open("/proc/driver/nvidia/version") as file:
        return re.findall(r"\d+(?:\.\d+)+", file.readline())[0]
    return "unknown"


def check(name: str, batch: int, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Every operation of a model's inference and of its training for which a kernel fits, beside its torch form: a row
    for each operation and pass, with the largest error of all its calls."""
    torch.manual_seed(0)
    model = create_model(name).to(device)
    lively(model)
    x = torch.randn(batch, 3, *model.img_size, device=device)
    seen = Comparisons(dtype)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    with watched(seen.forward), autocast, torch.no_grad():
        model.eval()(x)
    with watched(seen.both), autocast:
        loss = model.train()(x).float().square().mean()
    with contextlib.suppress(base.KernelError):  # it has a row of its own
        loss.backward()
    return [row for _, row in sorted(seen.rows.items())]


def lively(model: nn.Module) -> None:
    """Weights that hide nothing: no zero bias, no unit gain."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))


class Comparisons:
    """What kernels and torch forms gave."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}
        self.dtype = dtype

    def forward(self, name: str, kernel: Callable[..., Any] | None, plain: Callable[..., Any], args: tuple[Any, ...],
                kwargs: dict[str, Any]) -> Any:  # fmt: skip
        """A watcher of ``ops.dispatch``: what the kernel gives, which goes on, beside what torch does."""
        if kernel is None:
            return self.without(name, plain, args, kwargs)
        result = self.tried(name, "forward", lambda: kernel(*args, **kwargs))
        with reference():
            self.note(name, "forward", result, plain(*args, **kwargs))
        return result

    def both(self, name: str, kernel: Callable[..., Any] | None, plain: Callable[..., Any], args: tuple[Any, ...],
             kwargs: dict[str, Any]) -> Any:  # fmt: skip
        """The same in training, with the gradients of the arguments. Anchors choose without."""
        if kernel is None or not torch.is_grad_enabled():
            return self.forward(name, kernel, plain, args, kwargs)
        with watched(None):
            ours = self.tried(name, "backward", lambda: gradients(kernel, args, kwargs))
            with reference():
                theirs = gradients(plain, args, kwargs)
        self.note(name, "forward", ours[0], theirs[0])
        if ours[1]:
            self.note(name, "backward", ours[1], theirs[1])
        return kernel(*args, **kwargs)

    def without(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reason = "a kernel of it failed" if name in failed() else "no kernel for this shape, type, mode or card"
        row = self.rows.setdefault((name, "torch"), {"operation": name, "pass": "torch form", "calls": 0, "apart": "",
                                                     "allowed": "", "verdict": reason})  # fmt: skip
        row["calls"] += 1
        return plain(*args, **kwargs)

    def tried(self, name: str, which: str, f: Callable[[], Any]) -> Any:
        try:
            return f()
        except base.KernelError as error:
            reason = str(error).split(". With")[0]
            self.rows[name, which] = {"operation": name, "pass": which, "calls": 0, "apart": "", "allowed": "",
                                      "verdict": f"torch form: {reason}"}  # fmt: skip
            raise

    def note(self, name: str, which: str, result: Any, expected: Any) -> None:
        row = self.rows.setdefault((name, which), {"operation": name, "pass": which, "calls": 0, "apart": "",
                                                   "allowed": "", "verdict": "not compared"})  # fmt: skip
        row["calls"] += 1
        for ours, theirs in zip(tensors(result), tensors(expected), strict=False):
            apart, allowed = difference(ours, theirs, 0.0 if name == "canonical_place" else CHOICES, self.dtype)
            if row["verdict"] == "not compared":
                row |= {"apart": "0", "verdict": "right"}
            if apart >= float(row["apart"]):
                row |= {"apart": f"{apart:.1e}", "allowed": f"{allowed:.1e}"}
            if not apart <= allowed:
                row["verdict"] = "WRONG"


def tensors(value: Any) -> Iterator[Tensor]:
    """Tensors of a result, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)


def difference(ours: Tensor, theirs: Tensor, choices: float, dtype: torch.dtype) -> tuple[float, float]:
    """How far two results are apart, and how far they may be: of offsets the part that differs, or all if one is
    nowhere; of others the largest difference, by the largest number. Not a number at all counts as far apart."""
    if ours.shape != theirs.shape:
        return float("inf"), 0.0
    if not ours.numel():
        return 0.0, 0.0
    if not ours.is_floating_point():
        nowhere = bool((ours < 0).any() or (ours > LARGEST).any())
        return float("inf") if nowhere else (ours != theirs).double().mean().item(), choices
    a, b = ours.detach().double(), theirs.detach().double()
    error = ((a - b).abs().amax() / b.abs().amax().clamp_min(1e-30)).item()
    return error if error == error else float("inf"), TOLERANCES[dtype]


def kernel_rows(device: torch.device) -> list[dict[str, Any]]:
    """Each kernel that was compiled, at its largest and with the smallest tile, and each that does not fit."""
    limit, rows = card(device).memory, {}
    for name, compiled in base.compiled_kernels():
        shared = int(getattr(compiled.metadata, "shared", 0))
        spills, before = int(getattr(compiled, "n_spills", 0) or 0), rows.get(name, {"bytes": 0, "spills": 0})
        rows[name] = {"kernel": name, "form": "kernel", "bytes": max(shared, before["bytes"]), "limit": limit,
                      "spills": max(spills, before["spills"])}  # fmt: skip
    for name in set(cards.smaller()) & set(rows):
        rows[name]["form"] = "kernel, small tile"
    for name, (need, limit) in cards.refused().items():
        rows[f"{name} (large)"] = {"kernel": name, "form": "another form: too large", "bytes": need,
                                   "limit": limit, "spills": 0}  # fmt: skip
    for name in failed():
        rows[f"{name} (failed)"] = {"kernel": f"of {name}", "form": "torch form: failed", "bytes": 0, "limit": limit,
                                    "spills": 0}  # fmt: skip
    return [row for _, row in sorted(rows.items())]


if __name__ == "__main__":
    shiftvit.run(main)
