"""Goes into the custom_nodes of a test server: nodes that save a text as packs do, each naming its
file another way.
"""

import os
import time

import folder_paths


def _counted(prefix):
    place = folder_paths.get_save_image_path(prefix, folder_paths.get_output_directory())
    _, name, counter, subfolder, _ = place
    return subfolder, f"{name}_{counter:05}_.txt"


# Of each input, what subfolder and file it names; "" for a node that asks for no name.
NAMED = {
    "prefix": _counted,
    "save_file_prefix": _counted,
    "file_name": lambda name: ("", name),
    "output_path": lambda path: (path, "text.txt"),
    "output_file": lambda path: os.path.split(path),
    "": lambda name: ("", "text.txt"),
}


class _Saver:
    RETURN_TYPES = ()
    FUNCTION = "save"
    OUTPUT_NODE = True
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        names = {cls.named: ("STRING", {"default": "text"})} if cls.named else {}
        return {"required": {"text": ("STRING", {"forceInput": True}), **names}}

    def save(self, text, **names):
        subfolder, file = NAMED[self.named](names.get(self.named))
        folder = os.path.join(folder_paths.get_output_directory(), subfolder)
        os.makedirs(folder, exist_ok=True)
        time.sleep(0.05)  # in which another server may take the same name
        with open(os.path.join(folder, file), "w", encoding="utf-8") as saved:
            saved.write(text)
        result = {"filename": file, "subfolder": subfolder, "type": "output"}
        return {"ui": {"files": [result]}, "result": ()}


NODE_CLASS_MAPPINGS = {
    f"TestsSaver_{named or 'fixed'}": type("Saver", (_Saver,), {"named": named}) for named in NAMED
}
