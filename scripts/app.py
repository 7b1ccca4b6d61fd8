"""A page to see it on: move an image, and watch what a default and an adaptive model make of it, side by side.

Choose a digit or upload an image; drag it with the sliders or the arrow keys. For each model the page shows the
probabilities, whether the logits are bit-identical to those in place, and how far every token has strayed from what it
was in place. It needs gradio (``pip install 'shift-equivariant-vits[app]'``) and no network: the models are embedded,
and the page asks nobody but its own server. On ``--host 0.0.0.0`` strangers are held to quotas: bytes of a file, pixels
of an image, jobs in the queue (413 and 429 otherwise).
"""

import argparse
import base64
import html
import io
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

import shiftvit
import swin
from common import from_pretrained
from common.data.preprocess import PREPROCESSOR_NAME, Preprocess
from common.data.sources import decode_image
from common.data.splits import load_digits_data
from common.models.classifier import Classifier
from common.models.hub import resolve_file
from common.publishing.quotas import Quotas
from common.shifts import circular_shift, roll

CHECKPOINTS = Path(swin.__file__).parent / "checkpoints"
SCALE = 1.5  # the error that is drawn brightest: two unrelated tokens of typical size lie 1.4 apart
BARS = 10

# what one stranger, or all of them, may ask of the page
MAX_BYTES = 2**24  # of a file
MAX_PIXELS = 25_000_000  # of an image, by its header: a small file may unfold to gigabytes
JOBS_PER_CLIENT, JOBS = 8, 64  # that wait or run


@dataclass(frozen=True)
class Side:
    """One of the two models, its name on the page, and how its images are normalised."""

    title: str
    model: Classifier
    preprocess: Preprocess


@dataclass(frozen=True)
class Outcome:
    """What a model makes of a moved image: probabilities in place and moved (classes,), a map of token errors per
    stage, on the pixels of the moved image (H, W), and whether both logits agree in every bit."""

    still: Tensor
    moved: Tensor
    errors: list[Tensor]
    identical: bool


def load_sides(default: str, adaptive: str) -> tuple[Side, Side]:
    """Both models, from directories or Hub repositories, without and with anchors whatever their config says."""
    sides = []
    for title, source in (("default", default), ("adaptive", adaptive)):
        model = from_pretrained(source, adaptive=title == "adaptive")
        if not isinstance(model, Classifier):
            raise ValueError(f"{source} holds a {type(model).__name__}: give a classifier")
        sides.append(Side(title, model, Preprocess.load(resolve_file(source, PREPROCESSOR_NAME))))
    left, right = ((side.preprocess.size, side.model.num_classes) for side in sides)
    if left != right:
        raise ValueError(f"the default model has (size, classes) {left}, the adaptive one {right}: give two models of "
                         "one size for the same classes")  # fmt: skip
    return sides[0], sides[1]


def fit(pixels: np.ndarray, preprocess: Preprocess) -> Tensor:
    """An image (h, w, 3) of any size -> (1, 3, H, W) uint8, resized and cropped as the model takes it."""
    height, width = preprocess.canvas_size
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    return preprocess.crop(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None])


def load_examples(preprocess: Preprocess) -> list[Tensor]:
    """A held-out digit of each class."""
    _, test = load_digits_data()
    first = [int((test.labels == label).nonzero()[0]) for label in range(len(test.classes))]
    return [fit(test.images[i].permute(1, 2, 0).numpy(), preprocess) for i in first]


def read_upload(content: bytes, preprocess: Preprocess) -> Tensor:
    """A stranger's file -> (1, 3, H, W) uint8, or a ValueError that says what is wrong with it."""
    try:
        return fit(decode_image(content, MAX_PIXELS), preprocess)
    except Exception as error:  # decoders fail in many ways
        reason = "unknown format" if isinstance(error, UnidentifiedImageError) else str(error).rstrip(".")
        raise ValueError(f"This file cannot be shown ({reason}). Choose a whole PNG, JPEG, WebP or BMP image of at "
                         f"most {MAX_PIXELS // 10**6} million pixels.") from None  # fmt: skip


@torch.no_grad()
def examine(side: Side, image: Tensor, dx: int, dy: int) -> Outcome:
    """Compare a model on ``image`` (1, 3, H, W), uint8, in place and moved right by ``dx`` and down by ``dy`` pixels.

    The error of a token is the norm of its change, over the root mean square of the token norms of its stage in place.
    """
    model, shift = side.model, torch.tensor([[dy, dx]])
    x = replace(side.preprocess, resize=None).evaluate(image)
    final, still = model.forward_intermediates(x, return_offsets=True)
    final_moved, moved = model.forward_intermediates(circular_shift(x, shift), return_offsets=True)
    logits, logits_moved = model.forward_head(final), model.forward_head(final_moved)
    errors = []
    for (before, origin), (after, origin_moved), info in zip(still, moved, model.feature_info, strict=True):
        stride = info["reduction"]
        # Token h lies at origin + stride h. The grid of a default model stays where it is: take the nearest token.
        aligned = roll(after, torch.round((origin + shift - origin_moved) / stride).long())
        error = (aligned - before).norm(dim=1) / before.norm(dim=1).square().mean().sqrt()  # 1, H/s, W/s
        error = error.repeat_interleave(stride, 1).repeat_interleave(stride, 2)
        errors.append(roll(error, -(origin + shift))[0])  # from the grid in place to the pixels of the moved image
    return Outcome(logits.softmax(1)[0], logits_moved.softmax(1)[0], errors, torch.equal(logits, logits_moved))


def draw(sides: Sequence[Side], image: Tensor, dx: int, dy: int) -> tuple[str, str]:
    """The two parts of the page that follow the image: the image itself, and a card for each model."""
    moved = circular_shift(image, torch.tensor([[dy, dx]]))
    cards = "".join(draw_card(side.title, examine(side, image, dx, dy), side.model.class_names) for side in sides)
    return draw_pixels(moved, "the moved image"), f'<div class="cards" data-shift="{dx},{dy}">{cards}</div>'


def draw_card(title: str, outcome: Outcome, names: Sequence[str] = ()) -> str:
    """Label, bit-identical or not, probabilities as bars with marks where they were in place, errors as maps."""
    shown = [html.escape(name) for name in names] or [str(i) for i in range(len(outcome.moved))]
    label, before = int(outcome.moved.argmax()), int(outcome.still.argmax())
    each = BARS if len(outcome.moved) <= BARS else BARS // 2  # of many classes: the likeliest in place and moved
    likely = {i for p in (outcome.still, outcome.moved) for i in p.argsort(descending=True)[:each].tolist()}
    bars = ""
    for i in sorted(likely):
        moved, still = 100 * float(outcome.moved[i]), 100 * float(outcome.still[i])
        bars += (f'<span>{shown[i]}</span><div class="bar{" top" if i == label else ""}">'
                 f'<i style="width:{moved:.1f}%"></i><b style="left:{still:.1f}%"></b></div>'
                 f"<span>{moved:.1f}</span>")  # fmt: skip
    maps = ""
    for i, error in enumerate(outcome.errors, 1):
        heat = matplotlib.colormaps["inferno"]((error / SCALE).clamp(0, 1).numpy(), bytes=True)[..., :3]
        picture = draw_pixels(torch.from_numpy(heat).permute(2, 0, 1)[None], f"token errors of stage {i}")
        maps += f"<figure>{picture}<figcaption>stage {i}<br>largest {float(error.max()):.3g}</figcaption></figure>"
    kept, bits = ("yes", "kept") if label == before else ("no", "changed"), "yes" if outcome.identical else "no"
    return (f'<section class="card" data-model="{title}" data-label="{label}"><header><h3>{title}</h3>'
            f'<em class="{kept[0]}">label {kept[1]}</em><em class="bits {bits}">bit-identical: {bits}</em></header>'
            f'<div class="label">{shown[label]}</div><div class="bars">{bars}</div>'
            f'<h4>token errors</h4><div class="maps">{maps}</div></section>')  # fmt: skip


def draw_pixels(image: Tensor, alt: str) -> str:
    """(1, 3, H, W) uint8 as an image inside the page itself: no file on the server, no further request."""
    buffer = io.BytesIO()
    Image.fromarray(image[0].permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return f'<img alt="{alt}" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


CHOOSE = """element.addEventListener("click", (event) => {
  const chosen = event.target.closest("button");
  if (chosen) trigger("select", {index: Number(chosen.dataset.index), value: null});
});"""
KEYS = """() => {
  const buttons = {ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down"};
  const move = (event) => {
    const typing = event.target.closest?.("input:not([type=range]), textarea, select, [contenteditable=true]");
    if (!(event.key in buttons) || typing || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();  // neither does the page scroll, nor the slider that has the focus move by itself
    event.stopPropagation();
    document.getElementById(buttons[event.key]).click();
  };
  window.addEventListener("keydown", move, true);
  document.body.dataset.keys = "ready";
}"""
CSS = """
#view img, #examples img, .maps img { width: 100%; image-rendering: pixelated; border-radius: 6px; display: block; }
#examples button { width: min(56px, 9%); margin: 0 1% 8px 0; padding: 2px; border: 2px solid transparent;
  border-radius: 8px; background: none; cursor: pointer; }
#examples button:is(:hover, :focus) { border-color: #2563eb; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(290px, 1fr)); gap: 16px; }
.card { border: 1px solid var(--border-color-primary); border-radius: 10px; padding: 14px 18px;
  background: var(--block-background-fill); }
.card header { display: flex; gap: 8px; align-items: center; flex-wrap: wrap; }
.card h3 { margin: 0 auto 0 0; font-size: 1.15em; }
.card h4 { margin: 14px 0 6px; opacity: 0.75; font-weight: 500; }
.card em { font-style: normal; font-size: 0.85em; padding: 2px 10px; border-radius: 99px; color: white; }
.card em.yes { background: #15803d; } .card em.no { background: #b91c1c; }
.card .label { font-size: 3em; line-height: 1.25; text-align: center; font-weight: 600; overflow-wrap: anywhere; }
.bars { display: grid; grid-template-columns: auto 1fr 3.2em; gap: 3px 8px; align-items: center; font-size: 0.85em; }
.bars > span:nth-child(3n) { text-align: right; font-variant-numeric: tabular-nums; }
.bar { position: relative; height: 14px; border-radius: 3px; background: var(--background-fill-secondary); }
.bar i { position: absolute; inset: 0 auto 0 0; border-radius: 3px; background: #94a3b8; }
.bar.top i { background: #2563eb; }
.bar b { position: absolute; inset: -1px auto -1px 0; width: 2px; margin-left: -1px; background: #f59e0b; }
.maps { display: grid; grid-template-columns: repeat(auto-fit, minmax(90px, 1fr)); gap: 12px; }
.maps figure { margin: 0; } .maps figcaption { font-size: 0.85em; opacity: 0.75; margin-top: 4px; }
"""
INTRO = """# Move the image
Use the sliders or the **arrow keys**: what leaves the image on one side comes back on the other. Both models have
the same architecture; the adaptive one anchors its tokens."""
LEGEND = f"""Bars: probabilities in percent; an orange mark is where the bar ends before the image moves. Token errors:
how far each token has gone from what it was in place, in units of a typical token; black is 0, the brightest {SCALE} or
more. The embedded models know light digits on dark ground."""


def build_page(sides: tuple[Side, Side]) -> Any:
    """The page as gradio blocks: all that is shown comes from ``draw``; the buttons that the arrow keys press move the
    sliders in the browser, and whatever moves a slider redraws."""
    import gradio as gr

    preprocess = sides[0].preprocess
    height, width = preprocess.size
    examples = load_examples(preprocess)
    quiet: dict[str, Any] = dict(show_progress="hidden", api_visibility="private")

    def redraw(image: Tensor, dx: float, dy: float) -> tuple[str, str]:
        return draw(sides, image, int(dx), int(dy))

    def choose(event: gr.SelectData) -> Tensor:
        return examples[event.index]

    def upload(content: bytes, image: Tensor) -> Tensor:
        try:
            return read_upload(content, preprocess)
        except ValueError as error:
            gr.Warning(html.escape(str(error)), duration=30)
            return image

    with gr.Blocks(title="Shift-equivariant vision transformers", fill_width=True, analytics_enabled=False,
                   delete_cache=(600, 600)) as page:  # fmt: skip
        gr.Markdown(INTRO)
        image = gr.State(examples[0])
        picture, cards = draw(sides, examples[0], 0, 0)
        with gr.Row():
            with gr.Column(scale=2, min_width=280):
                view = gr.HTML(picture, elem_id="view")
                dx, dy = (
                    gr.Slider(-(side // 2), side - side // 2 - 1, 0, step=1, label=label, elem_id=name, buttons=[])
                    for name, label, side in (("dx", "dx: right", width), ("dy", "dy: down", height))
                )
                with gr.Row():
                    for name, sign, right, down in (("left", "◀", -1, 0), ("up", "▲", 0, -1), ("reset", "reset", 0, 0),
                                                    ("down", "▼", 0, 1), ("right", "▶", 1, 0)):  # fmt: skip
                        to = f"{step('dx', right, width)}, {step('dy', down, height)}" if right or down else "0, 0"
                        button = gr.Button(sign, elem_id=name, min_width=20, size="sm")
                        button.click(None, [dx, dy], [dx, dy], js=f"(dx, dy) => [{to}]", **quiet)
                own = gr.UploadButton("Upload an image", type="binary", file_types=["image"], size="sm")
            with gr.Column(scale=5, min_width=320):
                buttons = (f'<button data-index="{i}">{draw_pixels(example, f"example {i}")}</button>'
                           for i, example in enumerate(examples))  # fmt: skip
                strip = gr.HTML("".join(buttons), js_on_load=CHOOSE, elem_id="examples")
                panels = gr.HTML(cards, elem_id="panels")
                gr.Markdown(LEGEND)
        checked = f"(image, dx, dy) => [image, {step('dx', 0, width)}, {step('dy', 0, height)}]"
        follow: dict[str, Any] = dict(fn=redraw, inputs=[image, dx, dy], outputs=[view, panels], js=checked, **quiet)
        gr.on([dx.change, dy.change], trigger_mode="always_last", **follow)
        every: dict[str, Any] = dict(trigger_mode="multiple")  # else what comes while one is drawn is dropped
        strip.select(choose, None, image, **every, **quiet).then(**every, **follow)
        own.upload(upload, [own, image], image, **every, **quiet).then(**every, **follow)
        page.load(None, js=KEYS)
    return page


def count_jobs(page: Any) -> Counter[str]:
    """What waits in the page's queue and what runs, by client."""
    queue = page._queue
    events = [event for each in queue.event_queue_per_concurrency_id.values() for event in each.queue]
    events += [event for job in queue.active_jobs if job is not None for event in job]
    return Counter(event.request.client.host if event.request.client else "" for event in events)


def serve(page: Any, host: str, port: int) -> None:
    """Start the page's server, in a thread, within the quotas."""
    import gradio as gr
    from starlette.middleware import Middleware

    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    quotas = Middleware(Quotas, jobs=lambda: count_jobs(page), max_bytes=MAX_BYTES + 2**16, per_client=JOBS_PER_CLIENT,
                        in_all=JOBS)  # fmt: skip
    page.launch(server_name=host, server_port=port, share=False, ssr_mode=False, max_file_size=MAX_BYTES,
                footer_links=[], theme=theme, css=CSS, quiet=True, prevent_thread_lock=True,
                app_kwargs={"middleware": [quotas]})  # fmt: skip


def step(name: str, by: int, side: int) -> str:
    """JavaScript: a slider's value moved by ``by``, back on the other side as the image is. Whatever was typed beside
    the slider (nothing, a fraction, too much) becomes a shift."""
    half = side // 2
    return f"((Math.round({name}) || 0) % {side} + {by + half + side}) % {side} - {half}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--default", default=str(CHECKPOINTS / "swin_micro"), help="directory or Hub id")
    parser.add_argument("--adaptive", default=str(CHECKPOINTS / "a_swin_micro"),
                        help="directory or Hub id; the default model's own serves too")  # fmt: skip
    parser.add_argument("--port", type=int, default=7860)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 shows the page to the network")
    args = parser.parse_args()

    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_RUN_HISTORY": "False"}  # before gradio is imported
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise SystemExit(f"the page needs gradio ({error}): pip install 'shift-equivariant-vits[app]'") from None
    page = build_page(load_sides(args.default, args.adaptive))
    serve(page, args.host, args.port)
    print(f"http://{args.host}:{args.port} (stop with Ctrl-C)", flush=True)
    page.block_thread()


if __name__ == "__main__":
    shiftvit.run(main)
