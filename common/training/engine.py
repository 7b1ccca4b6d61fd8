"""The training loop: one for every architecture and task, from a laptop to several nodes. Accelerate does what is
distributed.

A run writes into its output directory: ``config.json`` and ``model.safetensors`` (the last model; the best one under
``best/``), ``log.jsonl``, ``results.json``, ``curves.png``, ``tracking/`` and ``checkpoints/``.
"""

import itertools
import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    ProjectConfiguration,
    TorchDynamoPlugin,
    broadcast,
    send_to_device,
    set_seed,
)
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from timm.utils import ModelEmaV3
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from ..data.splits import Arrays, EpochSampler
from ..data.streaming import Stream, endless
from ..data.workers import outlive_sigterm
from ..evaluation.flags import check_precision
from ..evaluation.plots import plot_curves
from ..evaluation.tables import format_table, write_json
from ..models.hub import HubModel, is_hub_id
from ..seeding import derive_seed
from .checkpoints import Progress, latest_checkpoint, load_checkpoint, on_main, save_checkpoint
from .directory import LOGS, TRAINED, check_directory, locked, set_aside, set_later_aside
from .guard import FiniteGuard
from .log import Clock, RunLog, check_trackers
from .recipe import BaseRecipe, RunOptions, parse_command_line
from .signals import StopSignal
from .task import Classification, Task

__all__ = ["main", "train"]


def main(recipes: Mapping[str, Any], default: str, description: str | None = None,
         arguments: Sequence[str] | None = None, task: type[Task] = Classification) -> dict[str, Any]:  # fmt: skip
    """A folder's ``train.py``: read the command line, train, print the results."""
    return train(*parse_command_line(recipes, default, arguments, description), task)


def train(name: str, recipe: BaseRecipe, options: RunOptions, task: type[Task] = Classification) -> dict[str, Any]:
    """Train, evaluate and save; returns the results that ``results.json`` holds."""
    output = Path(options.output_dir)
    accelerator = _accelerator(options)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with locked(accelerator, output):
            return _train(name, recipe, options, task, accelerator, output)
    finally:
        for number, handler in handlers.items():  # else what follows in this process could not be stopped
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _accelerator(options: RunOptions) -> Accelerator:
    output = Path(options.output_dir)
    settings: dict[str, Any] = dict(
        mixed_precision=options.mixed_precision,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        step_scheduler_with_optimizer=False,  # one scheduler step per optimizer step, whatever the processes
        log_with=None if options.report_to == "none" else options.report_to.split(","),
        project_config=ProjectConfiguration(project_dir=str(output), logging_dir=str(output / "tracking")),
        dataloader_config=DataLoaderConfiguration(non_blocking=True),  # else every batch waits for the last step
        dynamo_plugin=TorchDynamoPlugin(backend="inductor", mode=options.compile_mode) if options.compile else None,
    )
    try:
        return check_trackers(check_precision(Accelerator(**settings)), options.report_to)
    except ValueError as error:  # a precision, a tracker or a set of processes that is not available here
        raise ValueError(f"Accelerate cannot be set up: {error}") from error


def _train(name: str, recipe: BaseRecipe, options: RunOptions, task: type[Task], accelerator: Accelerator,
           output: Path) -> dict[str, Any]:  # fmt: skip
    if accelerator.device.type == "cpu" and options.cpu_threads:
        torch.set_num_threads(options.cpu_threads)
    resume, overwrite = options.resume_from_checkpoint, options.overwrite_output_dir
    own = on_main(accelerator, lambda: check_directory(output, resume, overwrite))
    set_seed(recipe.seed)
    job = task(recipe, options, accelerator)
    plain = job.model
    if accelerator.process_index:  # the same weights, but other random numbers (drop path) for other images
        set_seed(derive_seed(recipe.seed, accelerator.process_index))
    if options.channels_last:
        plain.to(memory_format=torch.channels_last)
    images = len(job.train_split)
    loader, steps_per_epoch = _loader(job, recipe, options, accelerator)
    total = recipe.steps or recipe.epochs * steps_per_epoch
    epochs = math.ceil(total / steps_per_epoch)
    optimizer = torch.optim.AdamW(_parameters(plain, recipe), betas=recipe.betas,
                                  fused=accelerator.device.type == "cuda")  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule(recipe, steps_per_epoch, total))
    model, optimizer, scheduler = accelerator.prepare(plain, optimizer, scheduler)
    loader = loader if isinstance(loader.dataset, Stream) else accelerator.prepare(loader)
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if sharded and recipe.ema_decay:
        raise ValueError("an average of sharded weights is not kept: train with --ema_decay 0, or without FSDP")
    ema = ModelEmaV3(plain, decay=recipe.ema_decay, use_warmup=True, warmup_power=3 / 4) if recipe.ema_decay else None
    if ema is not None:
        accelerator.register_for_checkpointing(ema)

    identity = {"recipe": recipe.settings(), "model": plain.config, "images": images, "order": job.order()}
    progress = _resume(accelerator, resume, output, identity) if resume else Progress()
    earlier = 0  # the number under which an earlier run is set aside; its model not before this one has its own
    if not (own and progress.step):  # only now: model and data are what they should be
        earlier = on_main(accelerator, lambda: set_aside(output, LOGS + TRAINED if overwrite else LOGS))
    progress.check(recipe.batch_size, steps_per_epoch)
    on_main(accelerator, lambda: set_later_aside(output, progress.step) if resume else None)
    if options.report_to != "none":
        accelerator.init_trackers(name, config={key: str(value) for key, value in recipe.settings().items()})
    log = RunLog(accelerator, output / "log.jsonl", progress, job.best)
    parameters = sum(p.numel() for p in plain.parameters())
    lr = f"lr {recipe.scaled(recipe.lr):.3g}"
    lr += f" = {recipe.lr:g} x {recipe.batch_size}/{recipe.lr_batch}" if recipe.lr_batch else ""
    accelerator.print(f"{name}: {recipe.model}, {parameters:,} parameters; {images:,} images of {recipe.data}")
    accelerator.print(f"{total:,} steps of {recipe.batch_size} images, {steps_per_epoch:,} an epoch; {lr}")
    if (warmup := _warmup(recipe, steps_per_epoch)) >= total > 1:
        accelerator.print(f"the learning rate only rises: its warm-up takes {warmup:,} steps, the training {total:,}; "
                          f"shorten it with --warmup_{'steps' if recipe.warmup_steps else 'epochs'}")  # fmt: skip
    for flag, other in (("min_lr", recipe.min_lr), ("warmup_lr", recipe.warmup_lr if warmup else 0.0)):
        if other > recipe.lr:  # of the recipe, where --lr alone was lowered
            accelerator.print(f"--{flag} {other:g} is above --lr {recipe.lr:g}, which is no peak then: lower it, too")

    def save() -> Path:
        guard.check(progress, written)
        path = save_checkpoint(accelerator, output / "checkpoints", progress, identity, options.checkpoints_total_limit)
        saved.restart()
        return path

    def measure() -> dict[str, Any]:
        """The last weights or their average; sharded ones only work as they were prepared."""
        whole = model if sharded else accelerator.unwrap_model(model, keep_torch_compile=False)
        subject = ema.module if ema is not None else whole
        subject.eval()
        for norm in (module for module in subject.modules() if isinstance(module, _NormBase)):
            broadcast(list(norm.buffers()))  # of the main process, which saves them: each process has its own
        return job.evaluate(subject)

    def weights() -> dict[str, Tensor]:
        state = ema.module.state_dict() if ema is not None else accelerator.get_state_dict(model)
        return {name.removeprefix("_orig_mod."): tensor for name, tensor in state.items()}  # which a compiler adds

    def finish_epoch() -> dict[str, Any]:
        nonlocal earlier
        guard.check(progress, written)
        results = measure()
        best = log.evaluation(bar, results, progress)
        state = weights()
        if accelerator.is_main_process:
            if earlier:
                set_aside(output, TRAINED, earlier)
                earlier = 0
            for directory in (output, output / "best") if best else (output,):
                job.save(directory, state)
        return results

    guard, written = FiniteGuard(accelerator, output, options.max_skipped), [model, *([ema.module] if ema else [])]
    stop, saved, epoch_clock = StopSignal(), Clock(), Clock()
    eval_every = options.eval_every or math.ceil(epochs / 10)
    images_per_batch = recipe.batch_size // accelerator.gradient_accumulation_steps  # over all processes
    every = max(1, min(50, total // 200))
    bar = tqdm(total=total, initial=progress.step, unit="step", disable=not accelerator.is_main_process)
    results: dict[str, Any] = {}
    while progress.step < total:
        model.train()
        epoch_clock.restart()
        started = progress.step
        done, whole_epoch = (n // images_per_batch for n in (progress.images, steps_per_epoch * recipe.batch_size))
        for number, batch in enumerate(_batches(loader, progress.epoch, done, whole_epoch, accelerator), done):
            with accelerator.accumulate(model):
                pictures, targets = job.inputs(batch, progress.epoch, number)
                if options.channels_last:
                    pictures = pictures.contiguous(memory_format=torch.channels_last)
                loss = job.loss(model, pictures, targets)
                guard.batch(loss, job.index(batch), progress)
                accelerator.backward(loss)
                norm = None
                if accelerator.sync_gradients and recipe.clip_grad:
                    norm = accelerator.clip_grad_norm_(model.parameters(), recipe.clip_grad)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            progress.images += images_per_batch
            if not accelerator.sync_gradients:
                continue
            progress.step += 1
            loss = guard.step(norm, progress)
            if progress.step % every == 0:
                guard.check(progress)
            if ema is not None:
                ema.update(plain, progress.step)
            log.step(bar, loss, scheduler.get_last_lr()[-1], progress, recipe.batch_size, every)
            overdue = bool(options.checkpointing_minutes) and saved.seconds() > 60 * options.checkpointing_minutes
            if accelerator.num_processes == 1 or progress.step % every == 0:  # the processes must agree
                stopping, overdue = _any(accelerator, stop.requested, overdue)
            else:
                stopping = overdue = False
            if stopping:
                accelerator.print(f"stopped by signal; go on with --resume_from_checkpoint {save()}")
                accelerator.end_training()
                return {"stopped_at": progress.step}
            if overdue or (options.checkpointing_steps and progress.step % options.checkpointing_steps == 0):
                save()
            if progress.step == total:
                break
        if progress.step > started:  # not where a run is resumed at the very end of an epoch
            log.epoch(progress, (progress.step - started) * recipe.batch_size, loss, epoch_clock)
        progress.epoch, progress.images = progress.epoch + 1, 0
        if progress.epoch % eval_every == 0 or progress.step == total:
            results = finish_epoch()
    progress.epoch += progress.images > 0  # of a run that was resumed at its end
    results = results or finish_epoch()
    bar.close()
    job.confirm(output, results)
    met = getattr(job.train_split, "broken", torch.zeros(1)).to(accelerator.device, torch.float32)  # by this process
    if broken := accelerator.reduce(met).count_nonzero().item():
        accelerator.print(f"{broken:,} training images could not be read and were left out")
    results = {"model": recipe.model, **results, "parameters": parameters, "recipe": name, "epochs": epochs,
               "precision": accelerator.mixed_precision, "processes": accelerator.num_processes,
               "device": _device_name(accelerator.device), "train_seconds": round(log.seconds, 1)}  # fmt: skip
    if accelerator.is_main_process:
        used = {"training_images": len(job.train_split)} | ({"limit": options.limit} if options.limit else {})
        settings = recipe.settings()
        from_hub = [key for key in ("data", "pretrained", "backbone") if is_hub_id(settings.get(key) or "")]
        write_json(output / "results.json", results | used | {"from_hub": from_hub, "settings": settings})
        plot_curves(output / "log.jsonl", output / "curves.png")
        accelerator.print(format_table([results], ["model", *recipe.metrics, "parameters", "train_seconds"]))
        accelerator.print(f"model, log and results: {output}")
    accelerator.end_training()
    return results


def _loader(job: Task, recipe: BaseRecipe, options: RunOptions, accelerator: Accelerator) -> tuple[DataLoader, int]:
    """The loader of one process (to be prepared, unless it streams) and the optimizer steps of an epoch."""
    ways = accelerator.num_processes * accelerator.gradient_accumulation_steps
    if recipe.batch_size % ways:
        raise ValueError(f"batch_size {recipe.batch_size} does not divide into {ways} parts (processes x accumulation "
                         f"steps): use a multiple of {ways}")  # fmt: skip
    split = job.train_split
    steps_per_epoch = len(split) // recipe.batch_size
    if not steps_per_epoch:
        raise ValueError(f"{len(split)} training images are fewer than one batch of {recipe.batch_size}: "
                         "choose a smaller --batch_size")  # fmt: skip
    workers = 0 if isinstance(split, Arrays) else options.dataloader_num_workers
    settings: dict[str, Any] = {"batch_size": recipe.batch_size // ways, "drop_last": True, "num_workers": workers,
                                "pin_memory": workers > 0 and accelerator.device.type == "cuda",
                                "worker_init_fn": outlive_sigterm, "generator": torch.Generator()}  # fmt: skip
    # a generator of its own: a loader draws a number whenever it begins, and a resumed one begins once more
    if isinstance(split, Stream):
        split.shard(accelerator.process_index, accelerator.num_processes)
        return DataLoader(split, **settings), steps_per_epoch
    sampler = EpochSampler(len(split), recipe.seed, recipe.batch_size)
    return DataLoader(split, sampler=sampler, persistent_workers=workers > 0, **settings), steps_per_epoch


def _batches(loader: Any, epoch: int, done: int, count: int, accelerator: Accelerator) -> Iterator[Any]:
    """What is left of an epoch of ``count`` batches."""
    if not isinstance(loader.dataset, Stream):
        loader.set_epoch(epoch)  # first: what skips batches does not find the sampler of several processes
        yield from accelerator.skip_first_batches(loader, done) if done else loader
        return
    # a stream: the shards of processes differ in length, so a short one begins anew
    loader.dataset.set_epoch(epoch)
    for batch in itertools.islice(endless(loader), done, count):
        yield send_to_device(batch, accelerator.device, non_blocking=True)


def _parameters(model: HubModel, recipe: BaseRecipe) -> list[dict[str, Any]]:
    """Parameter groups with their weight decay and learning rate."""
    skip, lr = model.no_weight_decay(), recipe.scaled(recipe.lr)  # type: ignore[operator]
    if recipe.layer_decay == 1:
        groups = param_groups_weight_decay(model, recipe.weight_decay, no_weight_decay_list=skip)
    else:
        groups = param_groups_layer_decay(model, recipe.weight_decay, skip, layer_decay=recipe.layer_decay)
    return [{**group, "lr": lr * group.get("lr_scale", 1.0)} for group in groups if group["params"]]


def _warmup(recipe: BaseRecipe, steps_per_epoch: int) -> int:
    """Steps in which the learning rate rises."""
    return recipe.warmup_steps or round(recipe.warmup_epochs * steps_per_epoch)


def _schedule(recipe: BaseRecipe, steps_per_epoch: int, total: int) -> Any:
    """Linear warm-up, then a half cosine or a straight line down to ``min_lr``; as factors of the peak."""
    warmup = _warmup(recipe, steps_per_epoch)
    start, end = recipe.warmup_lr / recipe.lr, recipe.min_lr / recipe.lr

    def factor(step: int) -> float:
        if step < warmup:
            return start + (1 - start) * step / warmup
        if recipe.schedule == "poly":  # of the whole run, warm-up included, as MMSegmentation has it
            return end + (1 - end) * (1 - min(1.0, step / total))
        phase = min(1.0, (step - warmup) / max(1, total - warmup))
        return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * phase))

    return factor


def _resume(accelerator: Accelerator, source: str, output: Path, identity: dict[str, Any]) -> Progress:
    root = output / "checkpoints"
    path = on_main(accelerator, lambda: latest_checkpoint(root)) if source == "latest" else Path(source)
    if path is None:
        accelerator.print(f"no checkpoint under {root}: starting from the beginning")
        return Progress()
    progress = load_checkpoint(accelerator, path, identity)
    accelerator.print(f"resumed from {path}: epoch {progress.epoch}, step {progress.step}")
    return progress


def _any(accelerator: Accelerator, *flags: bool) -> list[bool]:
    """For each flag, whether it is raised on any process."""
    if accelerator.num_processes == 1:
        return list(flags)
    raised = torch.tensor(flags, dtype=torch.float32, device=accelerator.device)
    return [bool(count) for count in accelerator.reduce(raised, "sum").tolist()]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
