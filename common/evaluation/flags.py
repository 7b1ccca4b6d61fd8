"""Values of flags that commands share, as argparse reads them: what makes no sense is refused before any work."""

import argparse

import torch

__all__ = ["count", "present_device"]


def count(text: str) -> int:
    """A positive whole number."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def present_device(text: str) -> str:
    """A device that this machine has."""
    try:
        torch.empty(1, device=text)
    except (AssertionError, RuntimeError) as error:  # torch without CUDA, no driver, no such card, no such word
        raise argparse.ArgumentTypeError(f"{text} is not available here: {str(error).splitlines()[0]}") from error
    return text
