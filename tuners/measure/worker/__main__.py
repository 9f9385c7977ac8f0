"""The worker process: `python -P -m advisor.tuners.measure.worker FD`."""

import gc
import sys

gc.disable()  # until all modules are imported, which stay anyway

from advisor.tuners.measure.worker.child import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
