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
pytestmark = [needs_chromium, pytest.mark.skipif(not LAB.exists(), reason="there is no JupyterLab in .venv: make run")]

OPENED = """
const panel = window.jupyterapp && window.jupyterapp.shell.currentWidget;
const kernel = panel && panel.sessionContext && panel.sessionContext.session && panel.sessionContext.session.kernel;
return Boolean(kernel && kernel.status === "idle" && panel.content.widgets.length);
"""
# Where nothing has been run, a notebook is not trusted, and scripts are left out: pictures stand still, but they stand.
STILL = """
const done = arguments[0], cells = window.jupyterapp.shell.currentWidget.content;
const html = (cell) => cell.model.type === "code" ? JSON.stringify(cell.model.outputs.toJSON()) : "";
const shown = cells.widgets.find((cell) => html(cell).includes("document.currentScript"));
if (!shown) done([]);
else cells.scrollToCell(shown, "start").then(() => new Promise((wake) => setTimeout(wake, 2000))).then(() => {
    const image = shown.node.querySelector("figure img");
    done([image && image.naturalWidth > 0 && image.alt.length > 0, !shown.node.querySelector("figure .controls")]);
});
"""
RUN_ALL = """
const done = arguments[0], app = window.jupyterapp;
app.commands.execute("notebook:run-all-cells").then(async () => {
    const panel = app.shell.currentWidget;
    while (panel.sessionContext.session.kernel.status !== "idle") await new Promise((wake) => setTimeout(wake, 200));
    const cells = panel.content.widgets, code = cells.filter((cell) => cell.model.type === "code");
    const shows = (kind) => code.filter((cell) => cell.model.outputs.toJSON().some((out) => (out.data || {})[kind]));
    const live = code.filter((cell) => JSON.stringify(cell.model.outputs.toJSON()).includes("document.currentScript"));
    const seen = live[0] || shows("text/html").pop();
    panel.content.activeCellIndex = cells.indexOf(seen);  // what the screenshot shows
    await panel.content.scrollToCell(seen, "start");
    await new Promise((wake) => setTimeout(wake, 2000));
    const answers = !live.length || Boolean(seen.node.querySelector("figure .controls"));
    done(code.map((cell) => ({
        answers,
        id: cell.model.id,
        ran: cell.model.executionCount !== null,
        outputs: cell.model.outputs.toJSON().map((output) => ({
            type: output.output_type, kinds: Object.keys(output.data || {}), error: output.evalue || null})),
    })));
}, (error) => done(String(error)));
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
    command = [str(LAB), "--no-browser", "--allow-root", f"--port={port}", f"--IdentityProvider.token={token}"]
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
        driver.get(lab.format(path.name))
        deadline = time.monotonic() + SECONDS
        while not driver.execute_script(OPENED):
            assert time.monotonic() < deadline, "JupyterLab did not open the notebook with a kernel"
            time.sleep(0.5)
        assert all(driver.execute_async_script(STILL))
        cells = driver.execute_async_script(RUN_ALL)
        SHOTS.mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(str(SHOTS / f"lab_{path.stem}.png"))
    assert isinstance(cells, list), cells
    errors = {cell["id"]: out["error"] for cell in cells for out in cell["outputs"] if out["type"] == "error"}
    assert errors == {} and all(cell["ran"] and cell["answers"] for cell in cells)
    assert any("text/html" in out["kinds"] for cell in cells for out in cell["outputs"])
    assert path.read_bytes() == before
