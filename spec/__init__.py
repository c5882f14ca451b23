"""Describes Qwen-Image: number formats, the sizes and layers of its parts, its families."""
