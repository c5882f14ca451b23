"""What ComfyUI's page asks its server for to show the help of a node."""

import re

from browser_page import PACK
from comfyui_server import ROOT

DOCS = ROOT / "web" / "docs"
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))}
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)]*)\)")


def test_the_server_gives_pages_and_pictures_where_the_page_looks(server):
    entry = server.client.get("/object_info/QwenL40S_Optimize").json()["QwenL40S_Optimize"]
    folder = entry["python_module"].split(".")[1]  # as the page's extractCustomNodeName
    for name, text in PAGES.items():
        answer = server.client.get(f"/extensions/{folder}/docs/{name}.md")
        assert answer.status_code == 200 and answer.text == text
        assert "text/html" not in answer.headers["content-type"]  # which the page takes for none
        for _, target in PICTURE.findall(text):
            assert server.client.get(f"/extensions/{folder}/docs/{target}").status_code == 200


def test_the_page_loads_our_scripts(server):
    scripts = [path for path in server.client.get("/extensions").json() if PACK in path]
    ours = sorted((ROOT / "web").glob("*.js"))
    assert sorted(scripts) == [f"/extensions/{PACK}/{script.name}" for script in ours]
