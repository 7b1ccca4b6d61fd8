"""The paper's metrics by the name that people type: see ``common.evaluation.metrics``."""

from .evaluation.metrics import c_cons, mascc, massc, miou, s_cons, top1

__all__ = ["c_cons", "mascc", "massc", "miou", "s_cons", "top1"]
