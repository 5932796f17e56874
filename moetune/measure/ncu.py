"""Find Nsight Compute, say what forbids it, and run a Python module under it, as long as this process lives."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import moetune_kernels
from moetune.outcome import Failed, FailureKind

_PLACES = ("/usr/local/cuda/bin/ncu", "/usr/local/cuda-*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
_DRIVER_PARAMS = Path("/proc/driver/nvidia/params")
_STATUS = Path("/proc/self/status")
LEASH = "moetune.measure.leash"
_END_S = 5.0  # from a closed pipe to the end of all processes
_CAPABILITIES = (21, 38)  # SYS_ADMIN and PERFMON; the driver takes either

UNLOCK = (
    "run as root: sudo -E env PATH=$PATH python -m moetune profile …",
    "in a container: docker run --cap-add=SYS_ADMIN … (or --privileged)",
    (
        "for all users of the host: echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | "
        "sudo tee /etc/modprobe.d/nvidia-counters.conf && sudo update-initramfs -u && sudo reboot"
    ),
)
INSTALL = (
    "sudo apt-get install nsight-compute (from NVIDIA's repository, https://developer.nvidia.com/nsight-compute)",
    "then put the folder that holds ncu on PATH",
)


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why counters cannot be read, in one sentence, and the lines that would change it."""

    reason: str
    fixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NcuRun:
    """What one run left behind: ncu's log, and everything that ncu and the program printed."""

    log: str
    printed: str
    exit_code: int


def find_ncu() -> str | None:
    """Return the path of ncu: on PATH, else the newest in the places where NVIDIA installs it."""
    on_path = shutil.which("ncu")
    if on_path is not None:
        return on_path
    for pattern in _PLACES:
        found = [path for path in Path("/").glob(pattern.lstrip("/")) if os.access(path, os.X_OK)]
        if found:
            return str(max(found, key=_version_in))
    return None


def blocked() -> Blocked | None:
    """Say what keeps this process from reading hardware counters, or None when nothing known does. Runs no ncu."""
    if sys.platform != "linux":
        return Blocked("hardware counters are read by Nsight Compute, which moetune drives on Linux only")
    if not _has_nvidia_gpu():
        return Blocked("this machine has no NVIDIA GPU that its driver can see", ("moetune doctor",))
    if find_ncu() is None:
        return Blocked("Nsight Compute's ncu is neither on PATH nor under /usr/local/cuda or /opt/nvidia", INSTALL)
    if _admin_only() and not _is_admin():
        return Blocked("the NVIDIA driver lets only administrators read counters (RmProfilingAdminOnly is 1)", UNLOCK)
    return None


def ncu_version() -> str | None:
    """Return ncu's version, e.g. ``2025.3.1.0``, or None where it does not say."""
    ncu = find_ncu()
    if ncu is None:
        return None
    try:
        done = subprocess.run([ncu, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^Version (\S+)", done.stdout, re.MULTILINE)
    return found.group(1) if found else None


class NcuProcess:
    """ncu with a Python module under it, started; ends with this process, however that ends, and all of it at once.

    It collects ``metrics`` between cudaProfilerStart and -Stop. Caches are flushed before each profiled launch; clocks
    are left alone.

    Args:
        metrics: full metric names; must fit one pass, or kernels are replayed.
        module: what to run.
        arguments: its command line.
        folder: a folder for logs; removed with the processes when this one is killed.
        limit_s: seconds from now after which all of it is killed, whatever it does.

    Raises:
        OSError: there is no ncu, or no process can be started.
    """

    def __init__(
        self, metrics: Sequence[str], module: str, arguments: Sequence[str], folder: Path, limit_s: float
    ) -> None:
        ncu = find_ncu()
        if ncu is None:
            raise FileNotFoundError(None, "Nsight Compute's ncu was not found")
        self._log, self._printed = folder / "ncu.log", folder / "printed.txt"
        program = [sys.executable, "-P", "-m", module, *arguments]
        command = [ncu, *_options(metrics, self._log), *program]
        with self._printed.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", LEASH, str(limit_s), str(folder), *command],
                stdin=subprocess.PIPE,  # nothing is ever written: that it is open tells that we live
                stdout=sink,
                stderr=sink,
                env=_environment(),
                start_new_session=True,
            )

    def finish(self, time_limit_s: float) -> NcuRun | Failed:
        """Wait until the module and ncu have ended, and end what is left of them; at the time limit all of it."""
        try:
            code = self._process.wait(timeout=time_limit_s)
        except subprocess.TimeoutExpired:
            return Failed(FailureKind.TIMEOUT, f"ncu did not finish within {time_limit_s:.0f} s and was stopped")
        finally:
            self.end()  # also on Ctrl-C
        return NcuRun(log=_text(self._log), printed=_text(self._printed), exit_code=code)

    def end(self) -> None:
        """End all of it, at once; safe to call twice."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # the driver does not let go of one of them
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def explain(run: NcuRun) -> Failed:
    """Turn a run without results into one sentence."""
    text = f"{run.log}\n{run.printed}"
    if "ERR_NVGPUCTRPERM" in text:
        return Failed(FailureKind.RESOURCES, "the NVIDIA driver forbids reading counters (ERR_NVGPUCTRPERM)")
    if "driver resource was unavailable" in text:
        return Failed(
            FailureKind.RESOURCES, "another program holds the counters (DCGM? `dcgmi profile --pause` frees them)"
        )
    errors = [line.removeprefix("==ERROR==").strip() for line in text.splitlines() if line.startswith("==ERROR==")]
    told = [error for error in errors if "application returned an error code" not in error]
    last = next((line.strip() for line in reversed(run.printed.splitlines()) if line.strip()), "")
    said = told[0] if told else last or "no output"
    return Failed(FailureKind.LAUNCH, f"ncu ended with exit code {run.exit_code} and no counters: {said[:300]}")


def _options(metrics: Sequence[str], log: Path) -> list[str]:
    return [
        *("--profile-from-start", "off"),
        *("--target-processes", "all"),
        *("--replay-mode", "kernel"),
        *("--cache-control", "all"),  # cold, as the timer is
        *("--clock-control", "none"),  # never touch a shared card's clocks
        *("--metrics", ",".join(metrics)),
        "--csv",
        *("--page", "raw"),
        *("--print-units", "base"),  # --csv alone prints Mbyte and usecond, whatever its manual says
        *("--log-file", str(log)),
    ]


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    roots = [Path(__file__).resolve().parents[2], Path(str(moetune_kernels.__file__)).resolve().parents[1]]
    inherited = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, roots), *inherited])
    # Otherwise ncu copies its section files into the user's Documents.
    environment["NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT"] = "1"
    return environment


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _version_in(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]


def _has_nvidia_gpu() -> bool:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    try:
        return pynvml.nvmlDeviceGetCount() > 0
    except pynvml.NVMLError:
        return False
    finally:
        pynvml.nvmlShutdown()


def _admin_only() -> bool:
    """Whether the driver says so; a container that hides the file is given the benefit of the doubt."""
    return re.search(r"^RmProfilingAdminOnly:\s*1", _text(_DRIVER_PARAMS), re.MULTILINE) is not None


def _is_admin() -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", _text(_STATUS), re.MULTILINE)
    if found is None:
        return os.geteuid() == 0
    held = int(found.group(1), 16)
    return any(held >> bit & 1 for bit in _CAPABILITIES)
