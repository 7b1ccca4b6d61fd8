"""``python -m shiftvit``: the command ``shiftvit``."""

from shiftvit.command import main

main()
