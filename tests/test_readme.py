"""The README keeps up with the repository."""

import os
import re
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)[1]


def files():
    """All files but those that .gitignore names; a copy that is no git checkout has the same."""
    patterns = [".git", *(line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines())]
    found = []
    for folder, folders, names in os.walk(ROOT):
        inside = Path(folder).relative_to(ROOT)
        for kept in (folders, names):
            kept[:] = [name for name in kept if not ignored(inside / name, patterns)]
        found += [inside / name for name in names]
    return found


def ignored(path, patterns):
    return any(fnmatch(path.name, pattern) or str(path) == pattern for pattern in patterns)


def test_the_map_shows_every_folder_and_every_package_and_nothing_else():
    mapped = re.findall(r"^\| `([^`]+)` \|", section("Map"), re.MULTILINE)
    folders = {f"{path.parts[0]}/" for path in files() if len(path.parts) > 1}
    code = [path for path in files() if path.parts[0] == "shoal" and path.suffix == ".py"]
    packages = {f"shoal/{path.parts[1]}/" for path in code if len(path.parts) > 2}
    modules = {str(path) for path in code if len(path.parts) == 2 and path.name != "__init__.py"}
    assert len(mapped) == len(set(mapped))
    assert set(mapped) == folders | packages | modules


def test_the_two_commands_are_targets_of_make():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\S+)", section("Two commands"), re.MULTILINE)
    assert targets == ["train", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_exit_codes_are_those_of_the_code():
    from shoal.cli import train
    from shoal.errors import ShoalError, UserError
    from shoal.launch.submit import EXIT_STOPPED

    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", section("Exit codes"), re.MULTILINE)]
    assert codes == [0, ShoalError.exit_code, UserError.exit_code, EXIT_STOPPED, 130]
    in_help = train.__doc__.partition("Exit codes:")[2]
    assert [int(code) for code in re.findall(r"(?:^|; )\s*(\d+) ", in_help)] == codes


def test_ten_lines_are_ten():
    example = (ROOT / "examples" / "01_ten_lines.py").read_text()
    body = example.partition("import shoal\n")[2].partition("\n\nprint")[0]
    assert len([line for line in body.splitlines() if line.strip()]) == 10
