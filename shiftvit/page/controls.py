"""What moves an image: sliders, buttons that the arrow keys press, the pointer, and the kind of shift."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .sides import draw_pixels

__all__ = ["EVERY", "QUIET", "Mover", "build_mover", "build_strip"]

QUIET: dict[str, Any] = dict(show_progress="hidden", api_visibility="private")
EVERY: dict[str, Any] = dict(trigger_mode="multiple")  # else what comes while one is drawn is dropped
STEPS = {"left": ("◀", -1, 0), "up": ("▲", 0, -1), "reset": ("reset", 0, 0), "down": ("▼", 0, 1), "right": ("▶", 1, 0)}
KINDS = "circular: what leaves comes back on the other side; standard: it is lost"
CHOOSE = """element.addEventListener("click", (event) => {
  const chosen = event.target.closest("button");
  if (chosen) trigger("select", {index: Number(chosen.dataset.index), value: null});
});"""


@dataclass(frozen=True)
class Mover:
    """The components of a tab in which an image moves; ``size`` is (width, height)."""

    view: Any
    dx: Any
    dy: Any
    kind: Any
    size: list[int]

    def follow(self, redraw: Callable[..., Any], image: Any, outputs: Sequence[Any]) -> dict[str, Any]:
        """Redraw whatever moves the image, and never less than the last move; returns the event for other causes."""
        import gradio as gr

        js = f"(image, dx, dy, kind) => [image, ...shifted(dx, dy, kind, {self.size}, [0, 0]), kind]"
        event: dict[str, Any] = dict(fn=redraw, inputs=[image, self.dx, self.dy, self.kind], outputs=[*outputs], js=js)
        causes = [self.dx.change, self.dy.change, self.kind.change]
        gr.on(causes, trigger_mode="always_last", **event, **QUIET)
        return {**event, **EVERY, **QUIET}


def build_mover(name: str, picture: str, size: tuple[int, int], dx: int = 0, dy: int = 0) -> Mover:
    """A view with its controls, by ids ``name-...``; ``size`` is (height, width). All of it happens in the browser:
    buttons and pointer move the sliders, and whatever moves a slider redraws."""
    import gradio as gr

    view = gr.HTML(picture, elem_id=f"{name}-view")
    right, down = (
        gr.Slider(-(side // 2), side - side // 2 - 1, start, step=1, label=label, elem_id=f"{name}-{axis}", buttons=[])
        for axis, label, side, start in (("dx", "right (px)", size[1], dx), ("dy", "down (px)", size[0], dy))
    )
    kind = gr.Radio(["circular", "standard"], value="circular", label="shift", info=KINDS, elem_id=f"{name}-kind")
    mover = Mover(view, right, down, kind, [size[1], size[0]])
    with gr.Row():
        for step, (sign, x, y) in STEPS.items():
            to = "[0, 0]" if step == "reset" else f"shifted(dx, dy, kind, {mover.size}, [{x}, {y}])"
            button = gr.Button(sign, elem_id=f"{name}-{step}", min_width=20, size="sm")
            button.click(None, [right, down, kind], [right, down], js=f"(dx, dy, kind) => {to}", **QUIET)
        drag = gr.Button(visible="hidden", elem_id=f"{name}-drag")
        to = f"shifted(...window.dragged, kind, {mover.size}, [0, 0])"
        drag.click(None, [right, down, kind], [right, down], js=f"(dx, dy, kind) => {to}", **QUIET)
    return mover


def build_strip(name: str, images: Sequence[Tensor]) -> tuple[Any, Callable[[Any], int]]:
    """Small images to choose from, and what reads the choice."""
    import gradio as gr

    buttons = (f'<button data-index="{i}">{draw_pixels(image, f"example {i}")}</button>'
               for i, image in enumerate(images))  # fmt: skip

    def chosen(event: Any) -> int:
        if not isinstance(event.index, int) or not 0 <= event.index < len(images):
            raise gr.Error(f"There are {len(images)} images here: choose one of them.")
        return event.index

    return gr.HTML("".join(buttons), js_on_load=CHOOSE, elem_id=f"{name}-examples", elem_classes="examples"), chosen
