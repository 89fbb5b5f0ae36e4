"""dpsim: a discrete-event simulator of data-parallel training.

The public names, in the order of the flow. Each is imported when it is first used, so that
`import dpsim` costs nothing.

>>> import dpsim
>>> dpsim.find(dpsim.Workload, "resnet50").sample
'image'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpsim.answer import predict as predict
    from dpsim.chrome_trace import trace_events as trace_events
    from dpsim.chrome_trace import write as write_trace
    from dpsim.errors import DpsimError as DpsimError
    from dpsim.files import find as find
    from dpsim.files import load as load
    from dpsim.files import names as names
    from dpsim.files import save as save
    from dpsim.hardware import HardwareProfile as HardwareProfile
    from dpsim.hardware import Network as Network
    from dpsim.prediction import Prediction as Prediction
    from dpsim.report import as_dict as as_dict
    from dpsim.report import as_json as as_json
    from dpsim.report import as_text as as_text
    from dpsim.scenario import DataParallelOptions as DataParallelOptions
    from dpsim.scenario import RingOptions as RingOptions
    from dpsim.scenario import Scenario as Scenario
    from dpsim.scenario import ServerOptions as ServerOptions
    from dpsim.timeline import Phase as Phase
    from dpsim.timeline import Timeline as Timeline
    from dpsim.workload import Workload as Workload

_HOMES = {
    "Workload": "workload",
    "HardwareProfile": "hardware",
    "Network": "hardware",
    "names": "files",
    "find": "files",
    "load": "files",
    "save": "files",
    "Scenario": "scenario",
    "DataParallelOptions": "scenario",
    "RingOptions": "scenario",
    "ServerOptions": "scenario",
    "predict": "answer",
    "Prediction": "prediction",
    "Timeline": "timeline",
    "Phase": "timeline",
    "as_text": "report",
    "as_dict": "report",
    "as_json": "report",
    "trace_events": "chrome_trace",
    "write_trace": "chrome_trace",
    "DpsimError": "errors",
}
"""The module of each public name."""
_OTHER_NAMES = {"write_trace": "write"}
"""Public names that their module knows by another."""

__all__ = [  # noqa: RUF022 - the order of the flow
    "Workload",
    "HardwareProfile",
    "Network",
    "names",
    "find",
    "load",
    "save",
    "Scenario",
    "DataParallelOptions",
    "RingOptions",
    "ServerOptions",
    "predict",
    "Prediction",
    "Timeline",
    "Phase",
    "as_text",
    "as_dict",
    "as_json",
    "trace_events",
    "write_trace",
    "DpsimError",
    "__version__",
]

__version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _HOMES:
        module = importlib.import_module(f"dpsim.{_HOMES[name]}")
        value = getattr(module, _OTHER_NAMES.get(name, name))
    else:
        raise AttributeError(f"module 'dpsim' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    """Return the version that is installed, or that of this checkout."""
    import tomllib  # noqa: PLC0415 - rarely asked for, and importing all takes 40 ms
    from importlib import metadata  # noqa: PLC0415 - the same
    from pathlib import Path  # noqa: PLC0415 - the same

    try:
        return metadata.version("dpsim-train")
    except metadata.PackageNotFoundError:
        project = Path(__file__).parents[1] / "pyproject.toml"
        if not project.is_file():
            return "unknown"
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
