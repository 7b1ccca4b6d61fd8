"""The training loop: one for every architecture, from a laptop to several nodes. Accelerate does what is distributed.

A run writes into its output directory: ``config.json`` and ``model.safetensors`` (the last model; the best one under
``best/``), ``log.jsonl``, ``results.json``, ``curves.png`` and ``checkpoints/``.
"""

import json
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, TorchDynamoPlugin, set_seed
from timm.optim import param_groups_weight_decay
from timm.utils import ModelEmaV3
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from tqdm.auto import tqdm

from .checkpoints import Progress, latest_checkpoint, load_checkpoint, save_checkpoint
from .classifier import Classifier
from .data import Preprocess, load_data
from .evaluation import evaluate
from .plots import plot_curves
from .recipe import Recipe, RunOptions, parse_command_line
from .registry import create_model
from .seeding import derive_seed
from .tables import format_table, write_json

__all__ = ["main", "train"]


class EpochSampler(Sampler[int]):
    """A permutation of the data by (seed, epoch), the same on all processes; Accelerate shards it, sets the epoch."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed, self.epoch = count, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        return iter(torch.randperm(self.count, generator=generator).tolist())


def main(recipes: Mapping[str, Recipe], default: str, description: str | None = None,
         arguments: Sequence[str] | None = None) -> dict[str, Any]:  # fmt: skip
    """A folder's ``train.py``: read the command line, train, print the results."""
    return train(*parse_command_line(recipes, default, arguments, description))


def train(name: str, recipe: Recipe, options: RunOptions) -> dict[str, Any]:
    """Train, evaluate and save; returns the results that ``results.json`` holds."""
    output = Path(options.output_dir)
    accelerator = Accelerator(
        mixed_precision=options.mixed_precision,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        step_scheduler_with_optimizer=False,  # one scheduler step per optimizer step, whatever the processes
        log_with=options.report_to,
        project_config=ProjectConfiguration(project_dir=str(output), logging_dir=str(output / "tracking")),
        dynamo_plugin=TorchDynamoPlugin(backend="inductor") if options.compile else None,
    )
    if accelerator.device.type == "cpu" and options.cpu_threads:
        torch.set_num_threads(options.cpu_threads)
    set_seed(recipe.seed)
    train_split, test_split = (split.head(options.limit) for split in load_data(recipe.data))
    model = _build(recipe, options, len(train_split.classes))
    preprocess = Preprocess(size=model.img_size, **{k: getattr(recipe, k) for k in _PREPROCESS})

    ways = accelerator.num_processes * options.gradient_accumulation_steps
    if recipe.batch_size % ways:
        raise ValueError(f"batch_size {recipe.batch_size} does not divide into {ways} parts (processes x accumulation "
                         f"steps): use a multiple of {ways}")  # fmt: skip
    sampler = EpochSampler(len(train_split), recipe.seed)
    loader = DataLoader(train_split, batch_size=recipe.batch_size // ways, sampler=sampler, drop_last=True)
    steps_per_epoch = len(train_split) // recipe.batch_size
    if not steps_per_epoch:
        raise ValueError(f"{len(train_split)} training images are fewer than one batch of {recipe.batch_size}: "
                         "choose a smaller --batch_size")  # fmt: skip
    groups = param_groups_weight_decay(model, recipe.weight_decay, no_weight_decay_list=model.no_weight_decay())
    optimizer = torch.optim.AdamW(groups, lr=recipe.scaled(recipe.lr), betas=recipe.betas)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule(recipe, steps_per_epoch))
    plain = model
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    ema = ModelEmaV3(plain, decay=recipe.ema_decay) if recipe.ema_decay else None
    if ema is not None:
        accelerator.register_for_checkpointing(ema)
    train_split, test_split = train_split.to(accelerator.device), test_split.to(accelerator.device)

    identity = {"recipe": recipe.settings(), "model": plain.config, "images": len(train_split)}
    progress = Progress()
    if options.resume_from_checkpoint:
        progress = _resume(accelerator, options.resume_from_checkpoint, output, identity)
    if options.report_to:
        accelerator.init_trackers(name)
    log = _Log(accelerator, output / "log.jsonl", progress)
    parameters = sum(p.numel() for p in plain.parameters())
    lr = f"lr {recipe.scaled(recipe.lr):.3g} = {recipe.lr:g} x {recipe.batch_size}/{recipe.lr_batch}"
    accelerator.print(
        f"{name}: {recipe.model}, {parameters:,} parameters; {len(train_split):,} images of {recipe.data}"
    )
    accelerator.print(f"{recipe.epochs} epochs x {steps_per_epoch} steps of {recipe.batch_size} images, {lr}")

    def measure() -> dict[str, Any]:
        subject = ema.module if ema is not None else accelerator.unwrap_model(model, keep_torch_compile=False)
        subject.eval()
        return evaluate(subject, test_split, preprocess, recipe.metrics, accelerator=accelerator, seed=recipe.seed,
                        batch_size=options.eval_batch_size)  # fmt: skip

    def weights() -> dict[str, Tensor]:
        return ema.module.state_dict() if ema is not None else accelerator.get_state_dict(model)

    stop = _StopSignal()
    eval_every = options.eval_every or math.ceil(recipe.epochs / 10)
    total = recipe.epochs * steps_per_epoch
    bar = tqdm(total=total, initial=progress.step, unit="step", disable=not accelerator.is_main_process)
    results: dict[str, Any] = {}
    while progress.epoch < recipe.epochs:
        model.train()
        batches = accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader
        batches.set_epoch(progress.epoch)
        for index in batches:
            with accelerator.accumulate(model):
                images = preprocess.train(train_split.images[index], index, recipe.seed, progress.epoch)
                loss = F.cross_entropy(model(images), train_split.labels[index], label_smoothing=recipe.label_smoothing)
                accelerator.backward(loss)
                if accelerator.sync_gradients and recipe.clip_grad:
                    accelerator.clip_grad_norm_(model.parameters(), recipe.clip_grad)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            progress.batch += 1
            if not accelerator.sync_gradients:
                continue
            progress.step += 1
            if ema is not None:
                ema.update(plain)
            log.step(bar, loss, scheduler.get_last_lr()[0], progress, recipe.batch_size, every=max(1, total // 200))
            if options.checkpointing_steps and progress.step % options.checkpointing_steps == 0:
                save_checkpoint(
                    accelerator, output / "checkpoints", progress, identity, options.checkpoints_total_limit
                )
            if stop.requested:
                path = save_checkpoint(
                    accelerator, output / "checkpoints", progress, identity, options.checkpoints_total_limit
                )
                accelerator.print(f"stopped by signal; go on with --resume_from_checkpoint {path}")
                accelerator.end_training()
                return {"stopped_at": progress.step}
        progress.epoch, progress.batch = progress.epoch + 1, 0
        if progress.epoch % eval_every == 0 or progress.epoch == recipe.epochs:
            results = measure()
            best = log.evaluation(bar, results, progress)
            state = weights()
            if accelerator.is_main_process:
                for directory in (output, output / "best") if best else (output,):
                    preprocess.save(plain.save_pretrained(directory, state))
    bar.close()
    results = {"model": recipe.model, **results, "parameters": parameters, "recipe": name, "epochs": recipe.epochs,
               "precision": accelerator.mixed_precision, "processes": accelerator.num_processes,
               "device": _device_name(accelerator.device), "train_seconds": round(log.seconds, 1)}  # fmt: skip
    if accelerator.is_main_process:
        write_json(output / "results.json", results | {"settings": recipe.settings()})
        plot_curves(output / "log.jsonl", output / "curves.png")
        accelerator.print(format_table([results], ["model", *recipe.metrics, "parameters", "train_seconds"]))
        accelerator.print(f"model, log and results: {output}")
    accelerator.end_training()
    return results


_PREPROCESS = ("resize", "mean", "std", "flip", "rotate", "scale", "circular")


def _build(recipe: Recipe, options: RunOptions, num_classes: int) -> Classifier:
    arguments = {"num_classes": num_classes, **recipe.model_args}
    if recipe.drop_path is not None:
        arguments["drop_path_rate"] = recipe.drop_path
    model = create_model(recipe.model, **arguments)
    assert isinstance(model, Classifier)
    model.set_grad_checkpointing(options.gradient_checkpointing)
    return model


def _schedule(recipe: Recipe, steps_per_epoch: int) -> Any:
    """Linear warm-up, then a half cosine down to ``min_lr``; as factors of the peak learning rate."""
    warmup = round(recipe.warmup_epochs * steps_per_epoch)
    total = recipe.epochs * steps_per_epoch
    start, end = recipe.warmup_lr / recipe.lr, recipe.min_lr / recipe.lr

    def factor(step: int) -> float:
        if step < warmup:
            return start + (1 - start) * step / warmup
        phase = min(1.0, (step - warmup) / max(1, total - warmup))
        return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * phase))

    return factor


def _resume(accelerator: Accelerator, source: str, output: Path, identity: dict[str, Any]) -> Progress:
    path = latest_checkpoint(output / "checkpoints") if source == "latest" else Path(source)
    if path is None:
        accelerator.print(f"no checkpoint under {output / 'checkpoints'}: starting from the beginning")
        return Progress()
    progress = load_checkpoint(accelerator, path, identity)
    accelerator.print(f"resumed from {path}: epoch {progress.epoch}, step {progress.step}")
    return progress


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class _StopSignal:
    """SIGTERM asks for a checkpoint and a clean exit after the current step."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, *_: Any) -> None:
        self.requested = True


class _Log:
    """log.jsonl, the trackers and the progress bar, from the main process; a resumed run drops what it will redo."""

    def __init__(self, accelerator: Accelerator, path: Path, progress: Progress) -> None:
        self.accelerator, self.path, self.best = accelerator, path, -math.inf
        self.seconds, self.last, self.images = 0.0, time.perf_counter(), 0
        if accelerator.is_main_process:
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            rows = [row for row in rows if row["step"] <= progress.step] if progress.step else []
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            self.best = max((row["top1"] for row in rows if "top1" in row), default=-math.inf)

    def step(self, bar: tqdm, loss: Tensor, lr: float, progress: Progress, images: int, every: int) -> None:
        bar.update()
        self.images += images
        if progress.step % every:
            return
        value = self.accelerator.reduce(loss.detach(), "mean").item()  # the one place that waits for the device
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss is {value} at step {progress.step}: lower --lr, or use bf16 or float32 "
                                     "instead of fp16; the last checkpoint is untouched")  # fmt: skip
        now = time.perf_counter()
        rate, self.images = self.images / (now - self.last), 0
        self.seconds, self.last = self.seconds + now - self.last, now
        bar.set_postfix(loss=f"{value:.3f}", lr=f"{lr:.2g}", images_per_s=f"{rate:,.0f}")
        self._write({"step": progress.step, "epoch": progress.epoch, "loss": value, "lr": lr,
                     "images_per_s": round(rate, 1)})  # fmt: skip

    def evaluation(self, bar: tqdm, results: dict[str, Any], progress: Progress) -> bool:
        """Write an evaluation; True where its top-1 is the best so far."""
        self.seconds, self.last = self.seconds + time.perf_counter() - self.last, time.perf_counter()
        self._write({"step": progress.step, "epoch": progress.epoch, **results})
        shown = "  ".join(f"{key} {value:.2f}" for key, value in results.items() if isinstance(value, float))
        bar.write(f"epoch {progress.epoch}: {shown}") if not bar.disable else None
        best, self.best = results.get("top1", 0.0) > self.best, max(self.best, results.get("top1", 0.0))
        return best

    def _write(self, row: dict[str, Any]) -> None:
        self.accelerator.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
