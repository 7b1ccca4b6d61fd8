"""Values of flags that commands share, as argparse reads them: what makes no sense is refused before any work."""

import argparse

import torch

__all__ = ["count", "present_device"]


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")
    return int(text)


def present_device(text: str) -> str:
    """A device that this machine has."""
    try:
        torch.empty(1, device=text)
    except (AssertionError, RuntimeError) as error:  # torch without CUDA, no driver, no such card, no such word
        raise argparse.ArgumentTypeError(f"{text} is not to be had here: {str(error).splitlines()[0]}") from error
    return text
