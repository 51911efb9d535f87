from .client import Client as Client, FlowRun as FlowRun
from .python_api import (
    cost as cost,
    distribute as distribute,
    estimate as estimate,
    evaluate as evaluate,
    forecast as forecast,
    load as load,
    publish as publish,
    simulate as simulate,
    train as train,
)

__version__: str
