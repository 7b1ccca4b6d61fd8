"""Flags that commands share, and values as argparse reads them: what makes no sense is refused before any work."""

import argparse

import torch
from accelerate import Accelerator

__all__ = ["add_device", "add_precision", "add_split", "check_precision", "count", "whole"]


def count(text: str) -> int:
    """A positive whole number."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def whole(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 up")
    return int(text)


def check_precision(accelerator: Accelerator) -> Accelerator:
    """``accelerator``, or a ValueError if its precision is not the requested one: on a CPU Accelerate ignores fp16."""
    if accelerator.mixed_precision == "fp16" and not accelerator.native_amp:
        raise ValueError(f"--mixed_precision fp16 is not available on {accelerator.device}: use bf16 or no")
    return accelerator


def add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mixed_precision", choices=("no", "fp16", "bf16"),
                        help="precision to compute in; if not given, as `accelerate config` says")  # fmt: skip


def add_split(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--split", help="split of the data to measure on, such as test; if not given, the one that "
                        "training measures on: validation before test")  # fmt: skip


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=_present, default="cuda" if torch.cuda.is_available() else "cpu",
                        help="where to compute (%(default)s)")  # fmt: skip


def _present(text: str) -> str:
    """A device that this machine has."""
    try:
        torch.empty(1, device=text)
    except (AssertionError, RuntimeError) as error:  # torch without CUDA, no driver, no such card, no such word
        raise argparse.ArgumentTypeError(f"{text} is not available here: {str(error).splitlines()[0]}") from error
    return text
