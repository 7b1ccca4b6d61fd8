"""torch.hub: ``torch.hub.load(REPOSITORY, "a_swin_tiny", num_classes=10)`` builds a model with fresh weights,
``torch.hub.load(REPOSITORY, "from_pretrained", "a_swin_micro")`` loads one of this repository, a directory or a Hub id.
"""

from functools import partial, update_wrapper

from common import create_model, from_pretrained, list_models

__all__ = ["from_pretrained", *list_models()]

dependencies = ["huggingface_hub", "safetensors", "timm", "torch"]

for _name in list_models():
    globals()[_name] = update_wrapper(partial(create_model, _name), create_model)
del create_model, list_models, partial, update_wrapper
