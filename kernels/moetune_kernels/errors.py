"""Every error that the runtime raises on purpose.

MoetuneError
├── ShapeError              tensors or sizes that do not fit together (also a ValueError)
├── UnsupportedConfigError  a config that the device or the shape cannot run (also a ValueError)
├── UnsupportedDeviceError  tensors on a device that the kernels cannot run on
└── TableError              a tuned table that cannot be read or trusted (also a ValueError)
"""


class MoetuneError(Exception):
    """Base of all errors that moetune raises on purpose: the message says what, got, and the fix."""


class ShapeError(MoetuneError, ValueError):
    """Tensors or sizes that do not fit together."""


class UnsupportedConfigError(MoetuneError, ValueError):
    """A kernel config or plan that the device or the shape cannot run."""


class UnsupportedDeviceError(MoetuneError):
    """Tensors live on a device that the kernels cannot run on."""


class TableError(MoetuneError, ValueError):
    """A tuned table that cannot be read or trusted."""


def shown(value: object, limit: int = 80) -> str:
    """Show a value in an error, however large or odd it is."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no number of more than 4,300 digits
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 1] + "…"
