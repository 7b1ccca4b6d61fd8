"""Make a Hugging Face Space of the page, from a wheel.

``pip wheel --no-deps --wheel-dir dist .``, then ``python scripts/space.py dist/NAME.whl FOLDER``, then
``hf upload OWNER/NAME FOLDER . --repo-type space``.

The folder holds what a Space reads: metadata (README.md), requirements.txt and an entry file (app.py). A Space installs
its requirements before it has its other files, so our packages, with their checkpoints, lie beside the entry.
"""

import argparse
import re
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import shiftvit

CPU = "https://download.pytorch.org/whl/cpu"  # torch without CUDA, which a free Space has no use for
PROXIES = "127.0.0.1,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16"
CARD = """---
title: Shift-equivariant vision transformers
emoji: 🔁
colorFrom: blue
colorTo: green
sdk: gradio
sdk_version: {sdk}
python_version: "{python}"
app_file: app.py
license: mit
short_description: A shift changes one transformer, not its twin
tags:
- vision-transformer
- shift-equivariance
---

Move an image, and compare a default vision transformer with its shift-equivariant twin. After
[Making Vision Transformers Truly Shift-Equivariant](https://arxiv.org/abs/2305.16316).
"""
ENTRY = '''"""The page, as a Space starts it."""

import os

from shiftvit.command import main

# Visitors come through the proxy of the Space. The quotas count them by the address that it reports.
os.environ["FORWARDED_ALLOW_IPS"] = "{proxies}"
main({arguments})
'''


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="of this repository")
    parser.add_argument("folder", type=Path, help="what to make; must be new or empty")
    parser.add_argument("--code_url", help="where the code can be read: a link on the page")
    args = parser.parse_args(arguments)
    if args.code_url and not args.code_url.startswith("https://"):
        parser.error(f"--code_url {args.code_url} is not an address that begins with https://: the page refuses it")
    if args.folder.exists() and any(args.folder.iterdir()):
        parser.error(f"{args.folder} is not empty: give a new folder")
    try:
        with zipfile.ZipFile(args.wheel) as wheel:
            metadata = read_metadata(wheel)
            wheel.extractall(args.folder)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        parser.error(f"{args.wheel} is no wheel of ours ({error})")
    needs = metadata.get_all("Requires-Dist", [])
    (gradio,) = (need for need in needs if need.startswith("gradio") and 'extra == "app"' in need)
    card = CARD.format(sdk=least(gradio) + ".0", python=least(metadata["Requires-Python"]))
    words = ["app", "--host", "0.0.0.0", *(["--code_url", args.code_url] if args.code_url else [])]
    (args.folder / "README.md").write_text(card, encoding="utf-8")
    (args.folder / "requirements.txt").write_text(
        "\n".join([f"--extra-index-url {CPU}", *(need for need in needs if "extra ==" not in need)]) + "\n"
    )
    (args.folder / "app.py").write_text(ENTRY.format(proxies=PROXIES, arguments=words))
    print(f"{args.folder}: hf upload OWNER/NAME {args.folder} . --repo-type space")


def read_metadata(wheel: zipfile.ZipFile) -> Message:
    names = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    if not names or "shiftvit/page/build.py" not in wheel.namelist():
        raise KeyError("no page in it")
    return message_from_bytes(wheel.read(names[0]))


def least(requirement: str) -> str:
    """The version from which on a requirement is met."""
    found = re.search(r">=\s*([\d.]+)", requirement)
    if found is None:
        raise ValueError(f"{requirement!r} has no minimum version: write it with >=")
    return found[1]


if __name__ == "__main__":
    shiftvit.run(main)
