"""Goes into the custom_nodes of a test server, where it runs in ComfyUI's own Python.

It spares a processor what only a card does quickly: in ComfyUI, edits look at pictures with 32
blocks and paint beside references of a megapixel each.
"""

import functools
import sys
import time

import comfy.model_management
import comfy.text_encoders.qwen_vl as qwen_vl
import comfy.utils

SCALE = 4  # sides of pictures are a quarter of what a node asks for

qwen_vl.Qwen2VLVisionTransformer = functools.partial(
    qwen_vl.Qwen2VLVisionTransformer, num_layers=2, intermediate_size=64
)
whole_upscale = comfy.utils.common_upscale


def smaller_upscale(samples, width, height, upscale_method, crop):
    """As ComfyUI's own, to sides that stay multiples of 16, as its nodes' are; what a ControlNet
    sees has the size of the latent.
    """
    if sys._getframe(1).f_globals["__name__"] == "comfy.controlnet":
        return whole_upscale(samples, width, height, upscale_method, crop)
    width, height = (max(1, round(side / SCALE / 16)) * 16 for side in (width, height))
    return whole_upscale(samples, width, height, upscale_method, crop)


comfy.utils.common_upscale = smaller_upscale


class Wait:
    """Keeps the queue waiting until it is interrupted."""

    RETURN_TYPES = ()
    FUNCTION = "wait"
    OUTPUT_NODE = True
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    def wait(self):
        while True:
            comfy.model_management.throw_exception_if_processing_interrupted()
            time.sleep(0.02)


NODE_CLASS_MAPPINGS = {"TestsWait": Wait}
