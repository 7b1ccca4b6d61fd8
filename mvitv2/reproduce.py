"""MViTv2's rows of the paper: ``python mvitv2/reproduce.py [--scale full|short|smoke] ...``"""

import shiftvit  # first: it says so where another 'common' hides ours
from common.training.reproduce import main
from mvitv2.recipes import RECIPES

if __name__ == "__main__":
    shiftvit.run(main, RECIPES, __doc__ or "")
