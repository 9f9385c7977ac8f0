"""A callback with which a framework's run is advised, and writes the figures to its trackers."""

from __future__ import annotations

from typing import Any

import advisor
from advisor.resolve import tracking


def advisor_callback(base: type) -> Any:
    """A callback of class `base`, Lightning's Callback or transformers' TrainerCallback. The fit
    begins with `advisor.apply()`, and all open trackers get the figures, as by `run --log`."""

    def begin(*_args: object, **_named: object) -> None:
        tracking.SINKS.append(lambda found: tracking.write(found, "wandb", "mlflow", "tensorboard"))
        advisor.apply()

    # Lightning calls the first one, transformers the second.
    return type("AdvisorCallback", (base,), {"on_fit_start": begin, "on_train_begin": begin})()
