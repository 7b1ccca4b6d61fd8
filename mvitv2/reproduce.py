"""MViTv2's rows of the paper: ``python mvitv2/reproduce.py [--scale full|short|smoke] ...``"""

from common.training.reproduce import main
from mvitv2.recipes import RECIPES

if __name__ == "__main__":
    main(RECIPES, __doc__ or "")
