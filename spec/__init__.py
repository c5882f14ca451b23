"""What a Qwen-Image is: number formats, the sizes and layers of its parts, its families."""
