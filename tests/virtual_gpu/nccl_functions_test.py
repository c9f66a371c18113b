"""The page names each function of NCCL that LibTorch and the plugin refer to, and that isn't written for virtual GPUs.

usage: nccl_functions_test.py PAGE VIRTUAL_NCCL USER...
"""

import pathlib
import re
import subprocess
import sys


def functions(library, letters):
    """Weak ones (W) are stubs."""
    listing = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
    return set(re.findall(rf" [{letters}] (nccl\w+)", listing))


page, virtual, *users = sys.argv[1:]
wanted = set().union(*(functions(user, "U") for user in users))
missing = wanted - functions(virtual, "T")
(said,) = re.findall(r"Of the (\d+) functions that LibTorch and the plugin refer to, (\d+) are written; .*? with their names \((.*?)\)", pathlib.Path(page).read_text())
found = (str(len(wanted)), str(len(wanted - missing)), ", ".join(f"`{name}`" for name in sorted(missing)))
said = (*said[:2], ", ".join(sorted(said[2].split(", "))))
if not missing or said != found:
    sys.exit(f"{page} should say: {found}\nand not: {said}")
