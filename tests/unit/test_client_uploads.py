"""Images that a workflow names: the server's, those here, and what is neither."""

import struct
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_nodes import stored

from qwen_l40s.client.submit import (
    IMAGE_FORMATS,
    check_image,
    local_images,
    plan_jobs,
)
from qwen_l40s.errors import SettingError

Image = pytest.importorskip("PIL.Image")


def loading(*names, kind="LoadImage", **meta):
    return {
        str(number): {"class_type": kind, "inputs": {"image": name}, **meta}
        for number, name in enumerate(names, start=1)
    }


def server_with(*names):
    info = stored()
    info["LoadImage"]["input"]["required"]["image"][0] = list(names)
    return info


def painted(path, size=(8, 8), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size).save(path, **options)
    return path.resolve()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory; the workflow lies in its folder `flows`."""
    (tmp_path / "flows").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(graph, here, info=None):
    return local_images(graph, info or stored(), here / "flows")


def refused(graph, here, info=None):
    with pytest.raises(SettingError) as caught:
        found(graph, here, info)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("My cat (1).jpg", "My cat (1).jpg"),
        ("./sub/Käfer 水壶.png", "sub/Käfer 水壶.png"),
        ("~/cat.png", "home/cat.png"),
        ("cat.png", "flows/cat.png"),
    ],
)
def test_a_file_here_at_home_or_beside_the_workflow_is_found(here, monkeypatch, name, file):
    monkeypatch.setenv("HOME", str(here / "home"))
    path = painted(here / file)
    for named in (name, str(path)):
        assert found(loading(named), here) == {("1", "image"): path}


def test_the_working_directory_comes_before_the_workflows(here):
    painted(here / "flows" / "cat.png")
    path = painted(here / "cat.png")
    assert list(found(loading("cat.png"), here).values()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="a backslash is a separator there")
def test_a_path_that_windows_wrote_is_found(here):
    path = painted(here / "photos" / "cat.png")
    assert list(found(loading("photos\\cat.png"), here).values()) == [path]


def test_a_name_that_the_server_lists_is_the_servers(here):
    path = painted(here / "cat.png")
    info = server_with("cat.png")
    assert found(loading("cat.png"), here, info) == {}
    assert list(found(loading("./cat.png"), here, info).values()) == [path]


@pytest.mark.parametrize(
    "name", ["cat.png [input]", "sub/cat.png [output]", "sub\\cat.png [temp]", "cat.png[output]"]
)
def test_a_marked_name_is_the_servers(here, name):
    assert found(loading(name), here) == {}


def test_an_image_named_twice_has_one_path(here):
    path = painted(here / "cat.png")
    graph = loading("cat.png", "./cat.png")
    text = {"3": {"class_type": "CLIPTextEncode", "inputs": {"text": "cat.png"}}}
    expected = {(node, "image"): path for node in graph}
    assert found({**graph, **text}, here) == expected


def test_a_wired_image_an_empty_mask_and_unknown_classes_are_left(here):
    graph = loading(["9", 0])
    graph["2"] = {"class_type": "Painter", "inputs": {"mask": ""}}
    graph["3"] = {"class_type": "SomeoneElses", "inputs": {"image": "none.png"}}
    graph["4"] = {"class_type": "LoadImage", "inputs": {}}
    assert found(graph, here) == {}


def test_an_image_that_is_nowhere_says_what_to_write(here):
    graph = loading("sub/cat.png", _meta={"title": "Image 1"})
    assert refused(graph, here) == (
        "Image 1.image is 'sub/cat.png', an image that neither the server nor this machine has: "
        'give one with --set "Image 1.image=photo.png". For an image in a subfolder of the server, '
        "write 'subfolder/photo.png [input]'."
    )
    assert "/photo.png [output]'" in refused(loading("x.png", kind="LoadImageOutput"), here)


@pytest.mark.parametrize("name", ["", ".", "flows", "zero\0byte", "x" * 5000, "~nobody-here/x.png"])
def test_a_name_of_no_file_is_refused(here, name):
    assert "neither the server nor this machine has" in refused(loading(name), here)


@given(name=st.text(max_size=30))
def test_any_name_is_found_or_refused(tmp_path_factory, name):
    folder = tmp_path_factory.getbasetemp() / "nothing"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # Hypothesis knows names of files here, such as __init__.py
        try:
            assert local_images(loading(name), stored(), folder) == {}
        except SettingError as error:
            assert str(error).startswith("LoadImage.image is ")


# What the files hold


@pytest.mark.parametrize("kind", IMAGE_FORMATS)
def test_what_comfyui_opens_is_taken(here, kind):
    path = here / f"cat.{kind.lower()}"
    try:
        painted(path, format=kind)
    except KeyError:
        pytest.skip(f"this Pillow writes no {kind}")
    assert len(found(loading(path.name), here)) == 1


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "1", "I;16"])
def test_any_kind_of_pixel_is_taken(here, mode):
    painted(here / "cat.png", mode=mode)
    assert len(found(loading("cat.png"), here)) == 1


def test_a_photo_that_lies_on_its_side_is_taken(here):
    exif = Image.Exif()
    exif[0x0112] = 6
    painted(here / "cat.jpg", exif=exif)
    assert len(found(loading("cat.jpg"), here)) == 1


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_cut_off_file_is_refused(here, kind, share):
    path = here / "cat.bin"
    noise = Image.effect_noise((64, 64), 90).convert("RGB")
    noise.save(path, format=kind)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    says = refused(loading("cat.bin"), here)
    assert says.startswith("the image for LoadImage (id 1) ") and says.endswith(f"({path}).")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"not an image", "not a readable image: give a PNG, JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a readable image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a readable image"),
        (b"\x89PNG\r\n\x1a\n", "the image for "),
    ],
)
def test_what_is_no_image_is_refused(here, data, says):
    (here / "cat.png").write_bytes(data)
    assert says in refused(loading("cat.png"), here)


@pytest.mark.parametrize(("side", "taken"), [(9600, True), (20_000, False)])
def test_a_camera_may_be_large_and_a_bomb_may_not(here, side, taken):
    """One-bit images, so that the 92 megapixels take 12 MB here."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = zlib.compress(bytes((1 + side // 8) * side), 1)
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    (here / "big.png").write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )
    if taken:
        assert len(found(loading("big.png"), here)) == 1
    else:
        assert "is too large" in refused(loading("big.png"), here)


@given(data=st.binary(max_size=300), kind=st.sampled_from(IMAGE_FORMATS), cut=st.integers(0, 80))
def test_any_file_is_taken_or_refused(tmp_path_factory, data, kind, cut):
    path = tmp_path_factory.getbasetemp() / "any.bin"
    try:
        Image.new("RGB", (4, 4)).save(path, format=kind)
    except KeyError:
        return
    path.write_bytes(path.read_bytes()[:cut] + data)
    try:
        check_image(path, "LoadImage (id 1)")
    except SettingError as error:
        assert str(path) in str(error)


def test_a_file_outside_the_workflows_folder_that_the_workflow_names_is_said(tmp_path):
    (tmp_path / "work").mkdir()
    painted(tmp_path / "outside.png"), painted(tmp_path / "work" / "inside.png")
    graph, lines = loading("../outside.png", "inside.png"), []
    plan_jobs(graph, {}, server_with(), tmp_path / "work", lines.append)
    assert len(lines) == 1 and lines[0].endswith(f"will be uploaded: {tmp_path / 'outside.png'}")
    lines.clear()
    graph["1"]["inputs"]["seed"] = 1
    plan_jobs(graph, {"1.seed": ["7"]}, server_with(), tmp_path / "work", lines.append)
    assert len(lines) == 1  # it is still the workflow that names it
    lines.clear()
    chosen = {"1.image": [str(tmp_path / "outside.png")]}
    plan_jobs(loading("inside.png"), chosen, server_with(), tmp_path / "work", lines.append)
    assert lines == []


def test_the_jobs_that_are_left_when_equal_ones_are_not_are_numbered_without_them(tmp_path):
    graph = {"1": {"class_type": "PrimitiveInt", "inputs": {"value": 0}}}
    jobs, equal = plan_jobs(graph, {"value": ["1", "1", "2"]}, stored(), tmp_path)
    labels = [(job.number, job.label) for job in jobs]
    assert labels == [(1, "job 1 (value=1)"), (2, "job 2 (value=2)")]
    assert equal == 1
