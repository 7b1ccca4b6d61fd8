"""Swin's rows of the paper: ``python swin/reproduce.py [--scale full|short|smoke] ...``"""

from common.training.reproduce import main
from swin.recipes import RECIPES

if __name__ == "__main__":
    main(RECIPES, __doc__ or "")
