"""Evaluate UperNet: ``python segmentation/evaluate.py --model DIR_OR_REPO_OR_NAME --data NAME_OR_DIR ...``"""

import shiftvit  # first: it says so where another 'common' hides ours
from segmentation.evaluation import main

if __name__ == "__main__":
    shiftvit.run(main, __doc__ or "")
