"""A front end without a browser: runs a cell in a real kernel and clicks a widget while the cell is busy.

python tests/fake_front_end.py [python-of-the-kernel]   prints what came of it, as JSON
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from html import unescape
from pathlib import Path
from queue import Empty
from typing import Any

CELL = """
import sys, time, warnings
sys.path.insert(0, {root!r})
warnings.filterwarnings("ignore")
from pathlib import Path
from rlhf_nb.run.log import ControlRequests, EventLog, RunDir
from rlhf_nb.run.callbacks import Callbacks
from rlhf_nb.widgets.dashboard import Dashboard
from rlhf_nb.widgets.kernel import pump_kind, front_end

class Loop:  # what a trainer looks like from here
    def __init__(self, path):
        self.run_dir, self.observers = RunDir(path), Callbacks([])
    def fit(self, seconds=100):
        self.run_dir.open({{"steps": 1000}})
        log, asked = EventLog(self.run_dir.metrics_path), ControlRequests(self.run_dir.control_path)
        log.append("start", 0, method="toy", total_steps=1000, controls={{"kl_coef": {{"value": 0.05, "low": 0.0, "high": 10.0}}}})
        begin, step, got = time.time(), 0, []
        while time.time() - begin < seconds and not any(r["request"] == "stop" for r in got):
            step += 1
            time.sleep(0.05)
            event = log.append("step", step, loss=1 / step, **{{"objective/kl": 0.01 * step}})
            self.observers.call("on_step", self, event)
            got += asked.new()
        log.append("end", step, reason="stopped" if got else "nobody stopped it")
        return got
    def event(self, kind, **fields):
        print(kind, fields)

loop = Loop({run!r})
board = Dashboard(loop)
begin = time.time()
print("KIND", pump_kind(), front_end())
with board.live():
    got = loop.fit()
print("GOT", [r["request"] for r in got], board.failure)
"""


def click_stop(
    python: str = sys.executable, subshell: bool = False, patience: float = 120.0, reload: bool = False
) -> dict[str, Any]:
    """Run the cell in a kernel, move the KL slider and click Stop as a browser would; what the run heard, and what stayed.

    Args:
        python: interpreter of the kernel.
        subshell: send widget messages to a subshell of the front end's, as JupyterLab >= 4.4 does.
        patience: seconds.
        reload: the page was reloaded and its buttons are gone: run the line that the output names in a second kernel, and click Stop there.
    """
    from jupyter_client.manager import KernelManager

    folder = Path(tempfile.mkdtemp())
    manager = KernelManager(kernel_name="python3")
    manager.kernel_spec.argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager.start_kernel(cwd=str(folder))
    client = manager.client()
    client.start_channels()
    found: dict[str, Any] = {"out": "", "models": {}, "displayed": {}, "updated": {}}
    try:
        client.wait_for_ready(timeout=patience)
        root = str(Path(__file__).resolve().parent.parent)
        request = client.execute(CELL.format(root=root, run=str(folder / "run")), allow_stdin=True)
        clicked, end = False, time.monotonic() + patience
        while time.monotonic() < end:
            try:
                message = client.get_iopub_msg(timeout=1)
            except Empty:
                continue
            _note(found, message)
            updates = found.get("curves", 0)
            if updates >= 3 and reload and not clicked:
                clicked = True
                found["second"] = _in_second_kernel(_way_back(found["shown"]), python, folder, root)
                client.execute("print('NEXT', len(got))")
            if updates >= 3 and not clicked:
                clicked, shell = True, _subshell(client) if subshell else None
                moved = {"method": "update", "state": {"value": 0.2}, "buffer_paths": []}
                _send(client, _model(found, "kl_coef"), moved, shell)
                client.execute("print('NEXT', len(got))")  # a person is impatient
                time.sleep(1.0)
                _send(client, _model(found, "Stop"), {"method": "custom", "content": {"event": "click"}}, shell)
            if "NEXT" in found["out"] or "Traceback" in found["out"]:
                break
            mine = message["parent_header"].get("msg_id") == request
            if (
                mine
                and not clicked
                and message["msg_type"] == "status"
                and message["content"]["execution_state"] == "idle"
            ):
                break
        found["clicked"] = clicked
        control = folder / "run" / "control.jsonl"
        found["picture"] = (folder / "run" / "figures" / "dashboard.png").exists()
        found["control"] = [json.loads(x) for x in control.read_text().splitlines()] if control.exists() else []
        return found
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _way_back(html: str) -> str:
    """The line that a cell's output names for a page that was reloaded."""
    return unescape(re.search(r"<code>(from rlhf_nb .*?)</code>", html)[1])  # type: ignore[index]


def _in_second_kernel(line: str, python: str, folder: Path, root: str) -> str:
    """Run the line as the last one of a cell of another notebook, and click its Stop; what was printed."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.kernel_spec.argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager.start_kernel(cwd=str(folder.parent))
    client = manager.client()
    client.start_channels()
    seen: dict[str, Any] = {"out": "", "models": {}, "displayed": {}, "updated": {}}
    control = folder / "run" / "control.jsonl"
    try:
        client.wait_for_ready(timeout=60)
        client.execute(f"import sys; sys.path.insert(0, {root!r})\n{line}", allow_stdin=True)
        end, clicked = time.monotonic() + 60, False
        while time.monotonic() < end and "Traceback" not in seen["out"]:
            try:
                _note(seen, client.get_iopub_msg(timeout=1))
            except Empty:
                if clicked and control.exists():
                    break
            if seen.get("curves", 0) and not clicked:
                clicked = True
                _send(client, _model(seen, "Stop"), {"method": "custom", "content": {"event": "click"}}, None)
                end = time.monotonic() + 20  # the kernel may still be drawing
        return str(seen["out"])
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _send(client: Any, comm: str, data: dict[str, Any], subshell: str | None) -> None:
    """A message to a widget, on the shell channel, while the kernel is busy there."""
    message = client.session.msg("comm_msg", {"comm_id": comm, "data": data})
    if subshell is not None:
        message["header"]["subshell_id"] = subshell
    client.shell_channel.send(message)


def _subshell(client: Any) -> str:
    """A subshell made by the front end."""
    client.control_channel.send(client.session.msg("create_subshell_request", {}))
    return str(client.get_control_msg(timeout=10)["content"]["subshell_id"])


def _model(found: dict[str, Any], description: str) -> str:
    """The widget with a description."""
    return next(k for k, state in found["models"].items() if state.get("description") == description)


def _note(found: dict[str, Any], message: dict[str, Any]) -> None:
    """Remember what a front end would show."""
    kind, content = message["msg_type"], message["content"]
    if kind == "stream":
        found["out"] += content["text"]
    elif kind == "error":
        found["out"] += "\n".join(content["traceback"])
    elif kind == "comm_open":
        found["models"][content["comm_id"]] = content["data"].get("state", {})
    elif kind == "comm_msg" and content["data"].get("method") == "update":
        state = content["data"]["state"]
        found["models"].setdefault(content["comm_id"], {}).update(state)
        if "<pre hidden data-for" in str(state.get("value", "")):
            found["curves"] = found.get("curves", 0) + 1
    elif kind in ("display_data", "update_display_data"):
        place = found["displayed" if kind == "display_data" else "updated"]
        place[content.get("transient", {}).get("display_id", "")] = sorted(content["data"])
        found["shown"] = found.get("shown", "") + str(content["data"].get("text/html", ""))


if __name__ == "__main__":
    result = click_stop(*sys.argv[1:2], subshell="--subshell" in sys.argv)
    keep = {k: result[k] for k in ("out", "clicked", "control", "displayed", "updated", "curves") if k in result}
    print(json.dumps(keep, indent=1))
