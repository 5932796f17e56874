"""Look at this machine: can it run a sweep, live or from recorded trials, and what keeps it from more?

Every check returns a :class:`Finding`; a check that itself fails is a finding too, never a traceback.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from moetune_kernels import __version__
from moetune_kernels.device import TARGETS, DeviceInfo, device_info

OLDEST_SM = 80
COMPILE_LIMIT_S = 60.0  # a C compiler that needs longer for an empty file hangs, on a dead network mount for one
LOW_MEMORY_BYTES = 2 << 30


class State(Enum):
    """How a finding bears on a sweep."""

    FINE = "ok"
    NOTE = "note"  # works, with less than the whole
    PROBLEM = "problem"  # no sweep on this GPU until it is fixed


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what it is, how it stands, and the exact fix where there is one."""

    name: str
    state: State
    text: str
    fixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, and what can be done here."""

    findings: tuple[Finding, ...]
    live: bool
    replays: tuple[str, ...]  # the commands that replay a recording; none where torch has a GPU

    @property
    def can_sweep(self) -> bool:
        """Whether ``moetune sweep`` could run: on the GPU, or on recorded trials."""
        return self.live or bool(self.replays)


def examine() -> Diagnosis:
    """Look at everything; takes a few seconds because torch is loaded."""
    needed = [
        _guarded("Python", check_python),
        _guarded("torch", lambda: check_package("torch", "torch")),
        _guarded("Triton", lambda: check_package("triton", "Triton")),
        _guarded("driver", check_driver),
        _guarded("GPU", check_gpu),
        _guarded("C compiler", check_compiler),
        _guarded("Triton cache", check_cache),
    ]
    recordings = _guarded("recordings", check_recordings)
    others = [_guarded("counters", check_counters), _guarded("tables", check_tables), recordings]
    gpu = torch_has_gpu()
    live = gpu and all(finding.state is not State.PROBLEM for finding in needed)
    # Where torch has a GPU a sweep runs live or not at all; recorded trials stand in only where it has none.
    replays = replays_here() if not gpu and recordings.state is State.FINE else ()
    return Diagnosis((*needed, *others), live=live, replays=replays)


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - a broken install breaks in any way, and that is the finding
        return Finding(name, State.PROBLEM, f"could not be looked at: {type(error).__name__}: {error}"[:300])


def torch_has_gpu() -> bool:
    """Return whether torch can use a GPU, which is what decides between a live sweep and recorded trials."""
    try:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.cuda.is_available()
    except (ImportError, OSError):
        return False


def check_python() -> Finding:
    """Name the versions that a report of a fault needs."""
    return Finding("Python", State.FINE, f"{platform.python_version()}, moetune {__version__}, {platform.platform()}")


def check_package(name: str, title: str) -> Finding:
    """Say which version of a package loads."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return Finding(title, State.PROBLEM, "is not installed", (f"pip install {name}",))
    except (ImportError, OSError) as error:
        return Finding(
            title, State.PROBLEM, f"does not load: {error}"[:300], (f"pip install --force-reinstall {name}",)
        )
    return Finding(title, State.FINE, importlib.metadata.version(name))


def check_driver() -> Finding:
    """Ask NVML for the driver; where there is none, live sweeps are out and that may be intended."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Finding(
            "driver", State.NOTE, f"no NVIDIA driver answers ({error})", ("on a GPU machine: install NVIDIA's driver",)
        )
    try:
        version, count = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()
    text = version if isinstance(version, str) else version.decode()
    return Finding("driver", State.FINE, f"{text}, {count} GPU{'s' * (count != 1)}")


def check_gpu() -> Finding:
    """Say which GPU torch can use, or why it can use none."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        return usable_gpu(device_info(0), free_bytes=torch.cuda.mem_get_info(0)[0])
    if not driver_sees_a_gpu():
        commands = " and ".join(f"`{command}`" for command in replays_here())
        instead = f"; replay recorded trials with {commands}" if commands else ", and no recorded trials to replay"
        return Finding("GPU", State.NOTE, f"none here{instead}")
    if torch.version.cuda is None and torch.version.hip is None:
        fix = ("pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130",)
        return Finding("GPU", State.PROBLEM, f"torch {torch.__version__} is built without CUDA", fix)
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"):
        return Finding("GPU", State.NOTE, "hidden by CUDA_VISIBLE_DEVICES", ("unset CUDA_VISIBLE_DEVICES",))
    said = str(caught[-1].message).splitlines()[0] if caught else "torch does not say why"
    fix = (f"install a driver for CUDA {torch.version.cuda} or newer, or a torch built for the older CUDA",)
    return Finding(
        "GPU", State.PROBLEM, f"the driver sees one, torch {torch.__version__} cannot use it: {said}"[:300], fix
    )


def usable_gpu(device: DeviceInfo, free_bytes: int) -> Finding:
    """Judge a GPU that torch can use: its age, and the memory that other programs leave."""
    text = (
        f"{device.name}{f' (MIG {device.mig})' if device.mig else ''}, sm_{device.sm}, {device.sm_count} SMs, "
        f"{free_bytes / 2**30:.1f} of {device.memory_bytes / 2**30:.1f} GiB free"
    )
    if device.sm < OLDEST_SM:
        return Finding(
            "GPU", State.PROBLEM, f"{text}: the kernels need sm_{OLDEST_SM} or newer", ("use an Ampere or newer GPU",)
        )
    if free_bytes < LOW_MEMORY_BYTES:
        fix = ("end the programs that `nvidia-smi` lists on this GPU, or choose another one with --device",)
        return Finding("GPU", State.PROBLEM, text, fix)
    return Finding("GPU", State.FINE, text)


def driver_sees_a_gpu() -> bool:
    """Return whether NVML lists a GPU, whatever torch says."""
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return False
    return count > 0


def check_compiler() -> Finding:
    """Compile an empty file that includes Python.h, as Triton does for its launcher, with the compiler it would take."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return Finding(
            "C compiler", State.PROBLEM, "none found; Triton builds its launcher with one", ("apt-get install gcc",)
        )
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").is_file():
        fix = (f"apt-get install python{platform.python_version().rpartition('.')[0]}-dev",)
        return Finding("C compiler", State.PROBLEM, f"{compiler} is there, Python.h is not in {include}", fix)
    said = _try_compile(compiler, include)
    if said is not None:
        fix = ("apt-get install --reinstall gcc libc6-dev, or name a working one with CC=/path/to/gcc",)
        return Finding("C compiler", State.PROBLEM, f"{compiler} cannot compile: {said}"[:300], fix)
    return Finding("C compiler", State.FINE, f"{compiler}, Python.h in {include}")


def _try_compile(compiler: str, include: str) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.c"
        source.write_text("#include <Python.h>\nint probe;\n", encoding="ascii")
        command = [compiler, str(source), "-shared", "-fPIC", f"-I{include}", "-o", str(Path(folder) / "probe.so")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return next((line for line in lines if "error" in line), lines[0])


def check_cache() -> Finding:
    """Write a file where Triton keeps compiled kernels, and see that programs may run from there."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    fix = ("export TRITON_CACHE_DIR=/a/writable/folder",)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as probe:
            probe.write(b"0" * 4096)
            probe.flush()
        mount = os.statvfs(folder)
    except OSError as error:
        return Finding("Triton cache", State.PROBLEM, f"{folder} cannot be written: {error.strerror}", fix)
    if mount.f_flag & os.ST_NOEXEC:
        return Finding("Triton cache", State.PROBLEM, f"{folder} is mounted noexec; Triton loads programs from it", fix)
    return Finding("Triton cache", State.FINE, f"{folder}, {mount.f_bavail * mount.f_frsize / 2**30:.1f} GiB free")


def check_counters() -> Finding:
    """Say whether ncu can read hardware counters; without it `profile` shows labelled estimates."""
    from moetune.measure.ncu import blocked, find_ncu, ncu_version

    why = blocked()
    if why is not None:
        fixes = tuple(fix for fix in why.fixes if fix != "moetune doctor")
        return Finding("counters", State.NOTE, f"{why.reason}; estimates are shown instead", fixes)
    return Finding("counters", State.FINE, f"ncu {ncu_version() or 'of unknown version'} at {find_ncu()}")


def check_tables() -> Finding:
    """Count the tables on each folder of the runtime's search path."""
    from moetune_kernels.errors import TableError
    from moetune_kernels.paths import search_dirs
    from moetune_kernels.table_file import json_files

    found: list[str] = []
    for folder in search_dirs():
        try:
            count = len(json_files(folder))
        except TableError as error:
            return Finding("tables", State.NOTE, str(error), (f"chmod -R u+rX {shlex.quote(str(folder))}",))
        found += [f"{count} in {folder}"] if count else []
    if not found:
        return Finding("tables", State.NOTE, "none; plans come from the heuristic", ("moetune sweep",))
    return Finding("tables", State.FINE, ", ".join(found))


def check_recordings() -> Finding:
    """Name the shapes whose recorded sweeps ship with the project and stand in for a GPU."""
    from moetune.store import shipped_shapes

    shapes = shipped_shapes()
    if not shapes:
        return Finding(
            "recordings", State.NOTE, "none ship with this installation", ("pip install --force-reinstall moetune",)
        )
    return Finding("recordings", State.FINE, ", ".join(shapes))


def replays_here() -> tuple[str, ...]:
    """Return the commands that replay the recordings of this installation."""
    from moetune.store import replay_commands

    return replay_commands()


def what_works_without_a_gpu(replays: Sequence[str]) -> tuple[str, ...]:
    """Return the commands that need no GPU, one line each, those of ``replays`` first."""
    works = dict.fromkeys(replays, "replays recorded trials (backend replay) into ./moetune-replay/") | {
        "moetune sweep --target sm_90": f"compiles for real, also for {', '.join(name for name in TARGETS if name != 'sm_90')}",
        "moetune profile --target sm_90": "the analytical page",
        "moetune report": "plots and a page from tables and trials",
        "moetune check": "validates tables",
    }
    width = max(map(len, works))
    return tuple(f"{command:<{width}}  {what}" for command, what in works.items())
