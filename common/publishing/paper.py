"""Numbers of the paper that are shown beside ours. Those of a row of its tables are targets of the row's recipe."""

__all__ = ["ERASED", "FLIPPED", "PRETRAINED", "SENSITIVITY"]

SENSITIVITY = {"swin_tiny": (92.00, 89.65, 88.93, 88.13), "swinv2_tiny": (92.13, 90.43, 89.67, 88.75),
               "cvt_13": (88.99, 87.42, 86.96, 86.84), "mvitv2_tiny": (91.49, 90.57, 90.46, 90.22)}  # fmt: skip
SENSITIVITY |= {f"a_{name}": (100.0,) * 4 for name in SENSITIVITY}
"""The paper's C-Cons for shifts up to a quarter, a half, three quarters and all of the side."""
FLIPPED = {"swin_tiny": (50.41, 82.24), "a_swin_tiny": (52.07, 100.0), "cifar10_augmented": (51.74, 94.67)}
"""The paper's top-1 and C-Cons of vertically flipped images."""
ERASED = {"swin_tiny": (90.16, 81.75, 89.71, 81.42, 89.02, 80.40, 87.83, 79.58),
          "a_swin_tiny": (93.27, 100.0, 92.71, 100.0, 91.57, 100.0, 90.30, 100.0),
          "cifar10_augmented": (91.81, 94.19, 91.60, 94.16, 90.42, 93.01, 89.23, 92.73)}  # fmt: skip
"""The same of images with an erased patch of up to 28, 42, 56 and 70 of 224 px."""
PRETRAINED = {"CvT-13": (90.12, 76.54), "+ adapt": (57.40, 100.0), "+ adapt, 10 epochs": (91.72, 100.0),
              "+ adapt, 20 epochs": (92.35, 100.0), "A-CvT-13": (93.87, 100.0)}  # fmt: skip
"""The paper's top-1 and C-Cons of a trained model that is made adaptive."""
