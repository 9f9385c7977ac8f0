"""The worker process: `python -P -m advisor.tuners.measure.worker FD`."""

import gc
import sys

gc.disable()  # until it has imported what it will: all of it stays

from advisor.tuners.measure.worker.child import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
