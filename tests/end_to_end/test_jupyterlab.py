"""Every notebook in a real JupyterLab, in headless Chromium: all cells run, and none ends in an error.

The notebooks are copies, so that the committed ones stay as they are. A screenshot of each goes to build/screenshots.
"""

import os
import secrets
import shutil
import socket
import subprocess
import time
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from browser import NOTEBOOKS, ROOT, SHOTS, chromium, needs_chromium

LAB = ROOT / ".venv" / "bin" / "jupyter-lab"
SECONDS = 900  # for one notebook: 00 trains a small model, on a busy machine too
no_lab = pytest.mark.skipif(not LAB.exists(), reason="there is no JupyterLab in .venv: make run")
pytestmark = [needs_chromium, no_lab]

RUN_ALL = """
const done = arguments[0], pause = (milliseconds) => new Promise((wake) => setTimeout(wake, milliseconds));
const current = () => window.jupyterapp && window.jupyterapp.shell.currentWidget;
const idle = () => current()?.sessionContext?.session?.kernel?.status === "idle" && current().content.widgets.length;
(async () => {
    while (!idle()) await pause(500);
    await window.jupyterapp.commands.execute("notebook:run-all-cells");
    while (!idle()) await pause(200);
    const panel = current(), code = panel.content.widgets.filter((cell) => cell.model.type === "code");
    const live = code.find((cell) => JSON.stringify(cell.model.outputs.toJSON()).includes("document.currentScript"));
    if (live) await panel.content.scrollToCell(live, "start");
    await pause(2000);
    const answers = !live || Boolean(live.node.querySelector("figure .controls"));
    done(code.map((cell) => ({
        answers,
        id: cell.model.id,
        ran: cell.model.executionCount !== null,
        errors: cell.model.outputs.toJSON().filter((output) => output.output_type === "error"),
    })));
})().catch((error) => done(String(error)));
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab on copies of the notebooks, with what opens it."""
    folder = tmp_path_factory.mktemp("lab")
    for path in NOTEBOOKS:
        shutil.copy(path, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token, state = secrets.token_hex(16), tmp_path_factory.mktemp("jupyter")
    options = ("--no-browser", "--allow-root", f"--port={port}")
    command = [str(LAB), *options, f"--IdentityProvider.token={token}"]
    command += [f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True"]
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_WORKSPACES_DIR")
    environment = os.environ | dict.fromkeys(folders, str(state))
    with open(state / "log", "wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _second in range(120):
            try:
                urlopen(f"http://127.0.0.1:{port}/api?token={token}", timeout=5)
                break
            except URLError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/lab/tree/{{}}?reset&token={token}"
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_all_cells_run_in_jupyterlab(path, lab):
    before = path.read_bytes()
    with chromium(1400, 1000) as driver:
        driver.set_script_timeout(SECONDS)
        driver.command_executor.client_config.timeout = (
            SECONDS  # else 120: selenium gives up before the script does
        )
        driver.get(lab.format(path.name))
        cells = driver.execute_async_script(RUN_ALL)
        SHOTS.mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(str(SHOTS / f"lab_{path.stem}.png"))
    assert isinstance(cells, list), cells
    assert [cell for cell in cells if cell["errors"] or not (cell["ran"] and cell["answers"])] == []
    assert path.read_bytes() == before
