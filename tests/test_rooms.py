"""The three packages depend on one another in one direction only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What a package may import besides the standard library and itself; what is named under a file or folder adds to it.
ALLOWED = {
    "jaxattn": {"jax", "numpy", "jaxtyping", "ml_dtypes"},
    "jaxattn/nn.py": {"flax"},
    "jaxattn/testing": {"hypothesis", "pytest"},
    "npu": {"torch", "numpy"},
    "interop": {
        "flax", "jax", "jaxattn", "jaxtyping", "matplotlib", "npu", "numpy", "rich", "safetensors", "tokenizers", "torch", "typer",
    },
}  # fmt: skip


def foreign_imports(path: Path) -> set[str]:
    """The top-level packages that a file imports anywhere, without the standard library."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(str(node.module).split(".")[0])
    return found - set(sys.stdlib_module_names)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", ["jaxattn", "npu", "interop"])
def test_imports_go_one_way(package: str) -> None:
    assert sources(package)
    for path in sources(package):
        name = path.relative_to(ROOT).as_posix()
        allowed = {package}.union(*(names for prefix, names in ALLOWED.items() if f"{name}/".startswith(f"{prefix}/")))
        assert foreign_imports(path) <= allowed, name


def test_a_wrong_arrow_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "inside.py").write_text("def f():\n    from torch.nn import functional\n")
    assert foreign_imports(tmp_path / "inside.py") == {"torch"}


def test_nobody_imports_pytest_or_hypothesis_by_importing_testing() -> None:
    run_blocked("import jaxattn.testing", "hypothesis", "pytest")


@pytest.mark.parametrize(
    ("package", "blocked"),
    [("jaxattn", ("torch", "npu", "interop", "flax")), ("npu", ("jax", "jaxattn", "interop", "torch_npu"))],
)
def test_imports_with_the_foreign_framework_blocked(package: str, blocked: tuple[str, ...]) -> None:
    run_blocked(f"import {package}", *blocked)


def run_blocked(statement: str, *blocked: str) -> None:
    """Run a statement in a fresh process in which the named packages cannot be imported."""
    code = f"import sys\nfor name in {blocked}: sys.modules[name] = None\n{statement}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_starts_no_simulation() -> None:
    code = "import interop, npu, torch, sys; sys.exit(hasattr(torch, 'npu'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
