"""A page that compares a default and an adaptive model: move an image, and see both answers.

In the tab *move* an image follows mouse, finger, arrow keys and sliders. For each model the page shows the label, the
probabilities, whether the logits are bit-identical to those in place, and how far every token is from its value in
place. In *pan* a window glides over a larger picture, and the probabilities are curves over time. In
*segmentation* a scene moves, and pixels whose label changed are marked. Visitors can upload images.

The page needs gradio (``pip install 'shift-equivariant-vits[app]'``) and no network: the models are embedded, and the
page contacts only its own server. On ``--host 0.0.0.0`` visitors have limits: bytes of a file, pixels of an image, jobs
in the queue (413 and 429 otherwise).
"""

import argparse
import os
import socket

import shiftvit
from common.models.hub import is_hub_id
from shiftvit.page.build import build_page, serve
from shiftvit.page.masks import load_segmenters
from shiftvit.page.sides import Side, load_sides

EMBEDDED = {"photographs": ("swin_mini", "a_swin_mini"), "digits": ("swin_micro", "a_swin_micro")}


def find_sources(args: argparse.Namespace) -> dict[str, tuple[Side, Side]]:
    """Pairs of models by kind of image, the first shown first. A pair that is given replaces the embedded one of its
    kind."""
    sources = {kind: load_sides(*names) for kind, names in EMBEDDED.items()}
    if given := args.default or args.adaptive:
        sides = load_sides(given, args.adaptive or given)
        kind = "digits" if sides[0].knows_digits else "photographs"
        sources = {kind: sides, **{other: pair for other, pair in sources.items() if other != kind}}
    return sources


def find_links(args: argparse.Namespace) -> dict[str, str]:
    """Addresses that are known: of the code, and the cards of models that come from the Hub."""
    links = {"code": args.code_url} if args.code_url else {}
    for title in ("default", "adaptive"):
        source = getattr(args, title) or ""
        if is_hub_id(source):
            links[f"card of the {title} model"] = f"https://huggingface.co/{source}"
    if wrong := [url for url in links.values() if not url.startswith("https://")]:
        raise ValueError(f"{wrong[0]} is not an address that begins with https://")
    return links


def port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text} is not a port: give a number from 1 to {2**16 - 1}")
    return int(text)


def check_address(host: str, port: int) -> None:
    """Raise an OSError where no server can begin: now, not after the models are loaded."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise OSError(f"the page cannot be served at {host}:{port} ({error.strerror}): choose another --port, or "
                      "--host, or end what is using it") from None  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--default", help="your own default model, directory or Hub id, in place of the embedded one")
    parser.add_argument("--adaptive", help="its adaptive twin; without it, the default model's weights serve")
    parser.add_argument("--segmenter", default="upernet_a_swin_micro", help="adaptive UperNet for digit scenes")
    parser.add_argument("--default_segmenter", help="default UperNet; without it, the adaptive one's weights serve")
    parser.add_argument("--code_url", help="where the code can be read: a link below the title")
    parser.add_argument(
        "--port", type=port, default=os.environ.get("GRADIO_SERVER_PORT", "7860"), help="port of the server"
    )
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 shows the page to the network")
    args = parser.parse_args()

    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_RUN_HISTORY": "False"}  # before gradio is imported
    check_address(args.host, args.port)
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise SystemExit(f"the page needs gradio ({error}): pip install 'shift-equivariant-vits[app]'") from None
    segmenters = load_segmenters(args.default_segmenter or args.segmenter, args.segmenter)
    page = build_page(find_sources(args), segmenters, find_links(args))
    serve(page, args.host, args.port)
    print(f"http://{args.host}:{args.port} (stop with Ctrl-C)", flush=True)
    page.block_thread()


if __name__ == "__main__":
    shiftvit.run(main)
