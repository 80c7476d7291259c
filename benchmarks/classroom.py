"""What a class of Jupyter kernels needs on one machine, all alive at once: memory, and CPU seconds a student.

    python benchmarks/classroom.py [STUDENTS] [--seconds S]   # Linux; 20 students, each trains S = 2 CPU seconds

Each kernel runs lesson 2 up to its first training and is interrupted there after S CPU seconds (0: never), as a student
does who has seen enough. They compute in turn, so that a small machine measures the same as a large one, and stay alive.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

ROOT = Path(__file__).resolve().parent.parent
cells = json.loads((ROOT / "nbs/course/lesson_02.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = ["".join(c["source"]) for c in cells if c["cell_type"] == "code" and "#| hide" not in "".join(c["source"])]


def cpu(pid: int) -> float:
    """CPU seconds of a process and all its threads."""
    spent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, spent)) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> dict[str, float]:
    """MB: resident, at its highest, and the share of what is in use that is this process's (PSS)."""
    lines = (Path(f"/proc/{pid}/{name}").read_text() for name in ("status", "smaps_rollup"))
    kb = {line.split(":")[0]: int(line.split()[1]) for text in lines for line in text.splitlines() if "kB" in line}
    return {"resident": kb["VmRSS"] / 1024, "highest": kb["VmHWM"] / 1024, "share": kb["Pss"] / 1024}


def student(seconds: float) -> tuple[KernelManager, dict[str, float]]:
    """A kernel that has begun to train, and its CPU seconds: to be ready, with set-up cell, with all."""
    kernel = KernelManager(kernel_name="python3")
    kernel.start_kernel(cwd=str(ROOT), env=os.environ | {"PYTHONPATH": str(ROOT), "RLHF_NB_LEARN": os.devnull})
    client, pid, spent = kernel.client(), kernel.provisioner.pid, dict[str, float]()  # type: ignore[union-attr]
    client.start_channels()
    client.wait_for_ready(timeout=300)
    spent["kernel"] = cpu(pid)
    for source in CODE:
        trains, begun = "imitate(seed) for" in source, cpu(pid)
        asked, stopped = client.execute(source), False
        while True:
            if trains and seconds and not stopped and cpu(pid) > begun + seconds:
                kernel.interrupt_kernel()
                stopped = True
            try:
                said: Any = client.get_iopub_msg(timeout=0.2)
            except Exception:  # queue.Empty: it computes
                continue
            if said["parent_header"].get("msg_id") == asked and said["msg_type"] == "error" and not stopped:
                raise RuntimeError("\n".join(said["content"]["traceback"]))
            if said["parent_header"].get("msg_id") == asked and said["content"].get("execution_state") == "idle":
                break
        spent.setdefault("start", cpu(pid))
        if trains:
            break
    client.stop_channels()
    return kernel, spent | {"all": cpu(pid)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("students", type=int, nargs="?", default=20)
    parser.add_argument("--seconds", type=float, default=2.0)
    asked, alive = parser.parse_args(), list[tuple[KernelManager, dict[str, float]]]()
    try:
        for _ in range(asked.students):
            alive.append(student(asked.seconds))
        held = [memory(k.provisioner.pid) | spent for k, spent in alive]  # type: ignore[union-attr]
    finally:
        for kernel, _ in alive:
            kernel.shutdown_kernel(now=True)
    for name in held[0]:
        each = [one[name] for one in held]
        print(f"{len(held)} kernels, {name}: {min(each):.1f} to {max(each):.1f}, together {sum(each):.0f}")
